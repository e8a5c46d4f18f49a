"""Twelve questions for the planner, their three best layouts compiled: does the predicted order hold?

python -m benchmarks.rankings              compiles what has no row yet, and prints the table
python -m benchmarks.rankings --show       compiles nothing

The questions, and layouts that were chosen by hand to beat the planner's, are in benchmarks/rankings_cases.txt. Each program
is compiled in a process of its own for GPUs that are not there, one after the other; a row is written to
benchmarks/results/rankings.json as soon as it is compiled, so an interrupted run can be repeated. Times are accounts of the
compiled kernels with the schedule's bubble, as of `benchmarks.compiled`. Needs pip install "megajax[dryrun]" and
nvidia-cudnn-cu12.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence

import jax

from benchmarks import compiled
from benchmarks.compiled import (
    Comparison,
    Row,
    comparison_error,
    errors_of_the_best,
    measure,
    pair,
    run_from_json,
    run_of,
    write_rows,
)
from megajax.config import ConfigError, RunConfig
from megajax.config.options import Parser
from megajax.estimate.error_bars import comparison_bar
from megajax.plan.best import best_layouts
from megajax.plan.options import clusters_of, plan_parser, question_of
from megajax.plan.search import Candidate, Question, best_by, search
from megajax.schedules.arguments import number, plain_text
from megajax.schedules.errors import command

FOLDER = pathlib.Path(__file__).parent
RESULTS = compiled.RANKINGS
COUNT = 3  # rows of the planner that are compiled
HAND = "by hand"
NAMED = 0.02  # a layout found by hand that is faster by more than this is one that the planner should have found


def _sets() -> dict[str, dict[str, list[str]]]:
    """The lines of rankings_cases.txt without their names, by set ("questions" or HAND) and name of the question."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in (FOLDER / "rankings_cases.txt").read_text().splitlines():
        if line[0] == "[":
            table = found.setdefault(line.strip("[]"), {})
        elif line[0] != "#":
            name, words = line.split(maxsplit=1)
            table.setdefault(name, []).append(words)
    return found


SETS = _sets()
QUESTIONS = {name: words for name, (words,) in SETS["questions"].items()}


def question(name: str) -> Question:
    """The search that a question asks for."""
    model, batch, options = QUESTIONS[name].split(maxsplit=2)
    words = f"--model {model} --global-batch-size {batch} {options}"
    args = plan_parser(Parser(add_help=False), "").parse_args(words.split())
    return question_of(args, clusters_of(args)[0])


def best(asked: Question) -> list[RunConfig]:
    """The planner's first rows: the fastest layouts of the COUNT best meshes.

    Where there are fewer meshes, as on one GPU, the fastest layouts of each microbatch size, and of recomputing all.
    """
    fitting = (one for one in best_layouts(asked, COUNT).candidates if one.fits)
    found = list(best_by(fitting, lambda one: one.mesh).values())[:COUNT]
    if len(found) < COUNT:
        all_fitting = [one for one in search(asked) if one.fits]
        found = list(best_by(all_fitting, _shape).values())[:COUNT]
    return [one.run for one in found]


def _shape(one: Candidate) -> tuple:
    parallel = one.run.parallel
    return one.mesh, parallel.microbatch_size, parallel.recompute == "full"


def by_hand(name: str, asked: Question) -> list[RunConfig]:
    """The layouts of a question that were chosen by hand; raises ConfigError if one is not legal."""
    model, batch, _ = QUESTIONS[name].split(maxsplit=2)
    known = f"--model {model} --global-batch-size {batch} --sequence-length {asked.model.sequence_length}"
    runs = [run_of(f"{known} {words}", asked.gpu) for words in SETS.get(HAND, {}).get(name, ())]
    return [dataclasses.replace(asked.base, parallel=run.parallel) for run in runs]


def read() -> dict[str, list[Row]]:
    """The rows on file by question, in the order of the questions; the planner's first."""
    rows: dict[str, list[Row]] = {name: [] for name in QUESTIONS}
    for row in json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else ():
        rows.get(row["name"], []).append(row)
    return rows


def write(rows: dict[str, list[Row]]) -> None:
    """Writes the rows."""
    write_rows(rows, RESULTS, "python -m benchmarks.rankings")


def compile_question(name: str, timeout: float) -> None:
    """Compiles those of a question's layouts that have no row, and writes each when it is compiled.

    Rows of layouts that are no longer among them are left out.
    """
    asked = question(name)
    runs = [(place, run) for place, run in enumerate(best(asked), 1)] + [(HAND, run) for run in by_hand(name, asked)]
    rows = read()
    known = {run_from_json(row["run"]): row for row in rows[name] if "failed" not in row}
    rows[name], done = [], set()
    for place, run in runs:
        row = known.get(run)
        if row is None:
            print(f"{name}: compiling {place}", file=sys.stderr, flush=True)
            row = measure(run, asked.gpu, timeout)
        rows[name].append({"name": name} | row | {"place": place})
        done.add(run)
        write({**rows, name: [*rows[name], *(left for other, left in known.items() if other not in done)]})
    write(rows)


def pairs(found: Sequence[Comparison]) -> Iterator[tuple[Comparison, Comparison, float, float]]:
    """All pairs (faster by the prediction, slower, by how much the latter is faster compiled, the bar of comparing them)."""
    for one, other in itertools.combinations(sorted(found, key=lambda some: some.step[1]), 2):
        gain = one.step[0] / other.step[0] - 1
        yield one, other, gain, comparison_bar(one.run.parallel, other.run.parallel)


def comparisons() -> tuple[int, float]:
    """(pairs, what their predicted ratio is off by): `error_bars.COMPARISON`, one standard deviation.

    Of the planner's layouts of one question, of these and of `benchmarks.compiled questions`, predicted within a tenth of
    its fastest.
    """
    asked = [[row for row in rows if row["place"] != HAND] for rows in read().values()]
    asked += [rows for (kind, _), rows in compiled.read().items() if kind == "questions"]
    found = [[Comparison(row) for row in rows if "failed" not in row] for rows in asked]
    errors = [errors_of_the_best(some) for some in found if len(some) > 1]
    return sum(math.comb(len(some), 2) for some in errors), comparison_error(errors)


def layout(run: RunConfig) -> str:
    """A layout in a line, without the options that are as usual."""
    mesh = run.parallel
    sizes = {"t": mesh.tensor, "p": mesh.pipe, "d": mesh.data, "c": mesh.context, "e": mesh.expert, "v": mesh.chunks}
    parts = [f"{letter}{size}" for letter, size in sizes.items() if size > 1] or ["one GPU"]
    parts += [f"b{mesh.microbatch_size}", f"m{run.microbatches}", f"z{mesh.zero}", mesh.recompute]
    parts += [mesh.schedule] if mesh.pipe > 1 else []
    parts += [mesh.context_exchange] if mesh.context > 1 else []
    parts += [mesh.expert_dispatch] if mesh.expert > 1 else []
    parts += ["expert-tensor 1"] if mesh.experts_over_tensor else []
    return " ".join(parts)


def show(rows: dict[str, list[Row]]) -> None:
    """Prints each question with its layouts, and what came out."""
    print(f"{'compiled/predicted':<71}{'s':>15}{'error':>7}{'GB':>14}{'error':>7}")
    held, beyond, better = 0, [], []
    for name, some in rows.items():
        print(f"{name}: {QUESTIONS[name]}{'' if some else '  not compiled yet'}")
        found = []
        for row in some:
            run = run_from_json(row["run"])
            place = HAND if row["place"] == HAND else f"{row['place']}."
            if "failed" in row:
                print(f"  {place:<9}{layout(run)}: not compiled: {row['failed']}")
                continue
            one = Comparison(row)
            found.append(one)
            times = f"{pair(one.step, 1, 3):>15}{one.step[1] / one.step[0] - 1:>+7.1%}"
            sizes = f"{pair(one.peak, 1e-9, 2):>14}{one.peak_error:>+7.1%}"
            print(f"  {place:<9}{layout(run):<60}{times}{sizes}{'' if one.fits else '  does not fit'}")
        planned = [one for one in found if one.row["place"] != HAND]
        wrong = [(first, then, gain, bar) for first, then, gain, bar in pairs(planned) if gain > bar]
        held += bool(planned) and not wrong
        for first, then, gain, bar in wrong:
            print(f"  row {then.row['place']} is {gain:.1%} faster than row {first.row['place']}; the bar is {bar:.1%}")
            beyond.append(name)
        hand = [one for one in found if one.row["place"] == HAND and one.fits]
        if planned and hand:
            gain = planned[0].step[0] / min(one.step[0] for one in hand) - 1
            print(f"  by hand: {abs(gain):.1%} {'faster' if gain > 0 else 'slower'} than row 1")
            better += [name] if gain > NAMED else []
    asked = sum(bool(some) for some in rows.values())
    print(f"the order holds beyond the bar in {held} of {asked} questions{_named('not in ', beyond)}")
    tried = sum(any(row["place"] == HAND for row in some) for some in rows.values())
    print(
        f"a layout by hand is more than {NAMED:.0%} faster than row 1 in {len(better)} of {tried}{_named('', better)}"
    )


def _named(how: str, names: Sequence[str]) -> str:
    return f": {how}{', '.join(dict.fromkeys(names))}" if names else ""


@command
def main(arguments: Sequence[str] | None) -> int:
    """Returns 1 if a program of a row does not compile."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--question", action="append", type=plain_text, metavar="NAME", help="one question (default: all)")
    add("--show", action="store_true", help="compile nothing: compare the planner with the rows on file")
    add("--timeout", type=number(below=10**8), default=1800, metavar="COUNT", help="seconds for each (default: 1800)")
    options = parser.parse_args(arguments)
    if unknown := set(options.question or ()) - set(QUESTIONS):
        raise ConfigError(f"question = {unknown.pop()} is not known: pass one of {', '.join(QUESTIONS)}.")
    names = options.question or list(QUESTIONS)
    for name in () if options.show else names:
        compile_question(name, options.timeout)
    rows = {name: some for name, some in read().items() if name in names}
    show(rows)
    count, off = comparisons()
    print(f"comparisons: {count} pairs of these and of the standing questions' layouts are off by {off:.2%} (rms)")
    return int(any("failed" in row for some in rows.values() for row in some))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # no GPU is used
    sys.exit(main())
