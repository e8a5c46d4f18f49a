"""Eight questions to the planner, and what its answers compile to: time by the roofline, and memory.

python -m benchmarks.standing_questions                 compiles the winner of each question (about half an hour on two
                                                        cores) and writes benchmarks/results/standing_questions.json
python -m benchmarks.standing_questions --question NAME    asks this one only (repeatable), and replaces its rows
python -m benchmarks.standing_questions --best 10          compiles the ten best instead of the winner alone
python -m benchmarks.standing_questions --missing          compiles the layouts that the file does not have yet
python -m benchmarks.standing_questions --show             compares the models with the file; compiles nothing

A question is a command line of `python -m megajax.plan`; its best are the rows which that command prints, each the fastest
layout of its mesh, ties of the fastest in order of simplicity. A layout is compiled for all of the question's GPUs, as by
the dry run. The compiled program has no bubble: both times include the schedule's, as a share of the step, with the
model's times of operations. The last line is the error bar of comparisons. Needs pip install "megajax[dryrun]" and
nvidia-cudnn-cu12. Nothing is run.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from benchmarks import roofline
from megajax.config import RunConfig
from megajax.config.options import Parser
from megajax.estimate.error_bars import comparison_bar
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.step_time import step_time
from megajax.plan.compiler import CompilerError, compiler_versions, run_from_json
from megajax.plan.options import clusters_of, plan_parser, question_of
from megajax.plan.search import Candidate, Question, best_by, layouts_that_fit, usable_bytes
from megajax.plan.ties import simplest_first
from megajax.schedules.arguments import number, whole
from megajax.schedules.errors import exit_code

RESULTS = pathlib.Path(__file__).parent / "results" / "standing_questions.json"
NEAR = 0.1  # comparisons are made of layouts whose predicted times exceed the fastest by no more

# Batches: 2104.04473 section 5.1 for 175B and 1T; 2005.14165 table 2.1 for 13B (1M tokens) and 6.7B (2M); 4M tokens for
# Llama 2 (2307.09288 table 1), also at 32k, and for Llama 3 as at its start (2407.21783 section 3.4.1); 16M tokens for 405B
# (2407.21783 table 4), which shards its optimizer state too.
QUESTIONS = {
    "175b": "--model gpt3-175b --gpus 1024 --gpu a100-80gb --global-batch-size 1536",
    "1t": "--model gpt3-1t --gpus 3072 --gpu h100-80gb --global-batch-size 3072",
    "llama2-7b": "--model llama2-7b --gpus 8 --gpu h100-80gb --global-batch-size 1024",
    "llama3-8b": "--model llama3-8b --gpus 8 --gpu h100-80gb --global-batch-size 512",
    "13b": "--model gpt3-13b --gpus 64 --gpu a100-80gb --global-batch-size 512",
    "6.7b": "--model gpt3-6.7b --gpus 8 --gpu a100-80gb --global-batch-size 1024",
    "32k": "--model llama2-7b --sequence-length 32768 --gpus 64 --gpu h100-80gb --global-batch-size 128",
    "405b": "--model llama3.1-405b --gpus 8192 --gpu h100-80gb --global-batch-size 2048 --zero 0 1",
    "13b-40gb": "--model gpt3-13b --gpus 8 --gpu a100-40gb --global-batch-size 512",
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of the file with the present models' figures: seconds of a step with its bubble, bytes at the peak.

    `step` and `peak` are (compiled, predicted).
    """

    run: RunConfig
    step: tuple[float, float]
    peak: tuple[int, int]
    fits: bool

    @property
    def error(self) -> float:
        """Of the predicted time, relative to the compiled program's."""
        return self.step[1] / self.step[0] - 1


def question(name: str) -> Question:
    """The search that a standing question asks for."""
    args = plan_parser(Parser(add_help=False, allow_abbrev=False), "").parse_args(QUESTIONS[name].split())
    return question_of(args, clusters_of(args)[0])


def best(asked: Question, count: int) -> list[Candidate]:
    """The first rows that the planner prints; none if nothing fits."""
    fitting = simplest_first(layouts_that_fit(asked))
    return list(best_by(fitting, lambda one: one.mesh).values())[:count]


def measure(name: str, one: Candidate, timeout: float) -> dict[str, Any]:
    """Compiles a layout; a row of the results, except its place.

    It has "failed" instead of figures if the compiler refuses the program.

    Raises:
      ConfigError: the compiler is not installed.
    """
    row = {"question": name, "gpu": one.question.gpu.name, "run": dataclasses.asdict(one.run)}
    try:
        result, found = roofline.compile_and_account(one.run, one.question.gpu, timeout=timeout)
    except CompilerError as error:
        return row | {"failed": str(error)}
    return row | {
        "seconds": {kind: round(value, 6) for kind, value in found.account.seconds.items()},
        "bubble": found.bubble,
        "peak": result["memory"]["peak"],
        "compilation": round(result["seconds"]),
    }


def compare(row: Mapping[str, Any]) -> Comparison:
    """A compiled row beside the models' figures."""
    run, gpu = run_from_json(row["run"]), find_gpu(row["gpu"])
    predicted = step_time(run, gpu)
    working = predicted.total - predicted.bubble
    compiled = sum(row["seconds"].values()) * predicted.total / working
    return Comparison(
        run,
        (compiled, predicted.total),
        (row["peak"], sum(bytes_per_device(run).values())),
        row["peak"] <= usable_bytes(gpu),
    )


def is_of(row: Mapping[str, Any], run: RunConfig) -> bool:
    """Whether a row is of this run, by the options that there were when it was compiled."""
    fields = json.loads(json.dumps(dataclasses.asdict(run)))
    return all(row["run"][name].items() <= fields[name].items() for name in ("model", "parallel", "train"))


def show(rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints a line for each row, time and memory as compiled/predicted; where there are several of a question, whether
    another is faster than its winner; and what comparisons of a question's layouts are off by.
    """
    print(
        f"{'question':<10}{'':>3}{'GPUs':>6}{'t':>4}{'p':>4}{'d':>4}{'v':>3}{'b':>3}{'m':>5}  {'schedule':<18}"
        f"{'recompute':<10}{'z':>1}{'s':>14}{'error':>7}{'GB':>13}{'error':>7}"
    )
    errors = []
    for name, some in itertools.groupby(rows, key=lambda row: row["question"]):
        found = [_line(row) for row in some]
        if len(compiled := [one for one in found if one]) > 1:
            print(_others(name, compiled))
            errors.append(errors_of_the_best(compiled))
    if errors:
        pairs = sum(math.comb(len(some), 2) for some in errors)
        print(
            f"comparisons: {pairs} pairs predicted within {NEAR:.0%} of a question's fastest are off by "
            f"{comparison_error(errors):.2%} (rms, one standard deviation)"
        )


def errors_of_the_best(found: Sequence[Comparison]) -> list[float]:
    """The errors of those layouts of a question that are predicted within NEAR of its fastest, which it may choose among."""
    fastest = min(one.step[1] for one in found)
    return [one.error for one in found if one.step[1] <= (1 + NEAR) * fastest]


def comparison_error(errors: Iterable[Sequence[float]]) -> float:
    """The root mean square, over all pairs of layouts of one question, of what their predicted ratio is off by.

    Args:
      errors: of the predicted times of each question's layouts, relative to the compiled programs'.
    """
    off = [math.log1p(a) - math.log1p(b) for some in errors for a, b in itertools.combinations(some, 2)]
    return math.sqrt(sum(one**2 for one in off) / len(off))


def _line(row: Mapping[str, Any]) -> Comparison | None:
    """Prints a row, and returns its figures; None for one that did not compile."""
    run = run_from_json(row["run"])
    parallel = run.parallel
    layout = (
        f"{row['question']:<10}{row['place']:>2}.{parallel.devices:>6}{parallel.tensor:>4}{parallel.pipe:>4}"
        f"{parallel.data:>4}{parallel.chunks:>3}{parallel.microbatch_size:>3}{run.microbatches:>5}  "
        f"{parallel.schedule:<18}{parallel.recompute:<10}{parallel.zero:>1}"
    )
    if "failed" in row:
        print(f"{layout}  not compiled: {row['failed']}")
        return None
    one = compare(row)
    step, peak = (f"{a * scale:.2f}/{b * scale:.2f}" for (a, b), scale in ((one.step, 1), (one.peak, 1e-9)))
    error = one.peak[1] / one.peak[0] - 1
    print(f"{layout}{step:>14}{one.error:>+7.1%}{peak:>13}{error:>+7.1%}{'' if one.fits else '  does not fit'}")
    return one


def _others(name: str, found: Sequence[Comparison]) -> str:
    """Whether another compiled layout is faster than the winner by more than the error bar of comparisons."""
    winner, *others = found
    fastest = min(others, key=lambda one: one.step[0])
    gain, bar = winner.step[0] / fastest.step[0] - 1, comparison_bar(winner.run.parallel, fastest.run.parallel)
    compared = "faster" if gain > 0 else "slower"
    return (
        f"{name}: the fastest of the {len(others)} others is {compared} than the winner by {abs(gain):.1%}; "
        f"the error bar is {bar:.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a layout does not compile, or 2 for invalid options."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--question", action="append", choices=list(QUESTIONS), help="one of the questions (default: all)"
    )
    parser.add_argument(
        "--best", type=whole(), default=1, metavar="COUNT", help="layouts to compile (default: the winner)"
    )
    parser.add_argument(
        "--missing", action="store_true", help="compile only the layouts that the results do not have yet"
    )
    parser.add_argument("--show", action="store_true", help="compare the models with the existing results")
    parser.add_argument(
        "--timeout", type=number(below=10**8), default=900, metavar="COUNT", help="seconds for each (default: 900)"
    )
    return exit_code(lambda: _command(parser.parse_args(arguments)))


def _command(options: argparse.Namespace) -> int:
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    asked = options.question or list(QUESTIONS)
    for name in () if options.show else asked:
        before = [row for row in known if row["question"] == name and options.missing]
        known = [row for row in known if row["question"] != name]
        for place, one in enumerate(best(question(name), options.best), 1):
            row = next((row for row in before if is_of(row, one.run)), None) or measure(name, one, options.timeout)
            known.append(row | {"place": place})
            write(known)
    rows = [row for row in known if row["question"] in asked]
    show(sorted(rows, key=_order))
    return int(any("failed" in row for row in rows))


def write(rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the results, each row with a line, and the versions that compiled them."""
    results = {"command": "python -m benchmarks.standing_questions", "versions": compiler_versions()}
    lines = ",\n".join(f" {json.dumps(one)}" for one in sorted(rows, key=_order))
    RESULTS.write_text(json.dumps(results)[:-1] + f', "rows": [\n{lines}\n]}}\n')


def _order(row: Mapping[str, Any]) -> tuple[int, int]:
    return list(QUESTIONS).index(row["question"]), row["place"]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # no GPU is used
    sys.exit(main())
