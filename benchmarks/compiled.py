"""Programs compiled for GPUs without any, beside the models of time and memory. Nothing is run.

python -m benchmarks.compiled time         layouts of nine models on H100s: time by class of kernel, and memory
python -m benchmarks.compiled held-out     programs that neither model was read from, of several GPUs: as for time
python -m benchmarks.compiled memory       a grid of runs on H100s: memory
python -m benchmarks.compiled questions    what the planner answers to nine questions, and whether another of its layouts
                                           is faster than the winner (--best 10 compiles the ten best)
python -m benchmarks.compiled account      prints the dry run's account of a few runs, of the largest models with experts
                                           (--timeout 5400), and of a step of one GPU that is written by hand in plain
                                           JAX (`benchmarks.plain_step`)

The first four compile the cases of benchmarks/compiled_cases.txt (each set half an hour or more on one core), replace
their rows in benchmarks/results/compiled.json, and compare them with the models. The compiled program has no bubble: a step
is of a rank that computes all of its microbatches; the bubble is that of its schedule with its operations' times. Needs
pip install "megajax[dryrun]" and nvidia-cudnn-cu12.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from megajax.config import BertConfig, ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.cli import parse
from megajax.config.options import Parser
from megajax.estimate.auto import resolved
from megajax.estimate.error_bars import PAIRS, comparison_bar, pair_kinds
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import Gpu, find_gpu
from megajax.estimate.measured import Measured
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.program_account import StepAccount, account_of
from megajax.estimate.program_time import Program
from megajax.estimate.roofline import EXPOSED, GAPS, SYNCS
from megajax.estimate.step_time import step_time
from megajax.pipeline.program import StepProgram
from megajax.plan.account import account_table
from megajax.plan.best import best_layouts
from megajax.plan.compiler import CompilerError, compile_for, compiler_versions
from megajax.plan.options import clusters_of, plan_parser, question_of
from megajax.plan.search import Candidate, Question, best_by, usable_bytes
from megajax.schedules.arguments import number, plain_text, whole
from megajax.schedules.errors import command

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "results" / "compiled.json"
RANKINGS = RESULTS.with_name("rankings.json")
GPU = find_gpu("h100-80gb")
PLAIN_STEP = "benchmarks.plain_step.PlainStep"
# Shares of the peak of products and attention of any size, of accounts without "rates".
FLAT = {"a100": (0.784, 0.6), "h100": (0.71, 0.455)}
NEAR = 0.1  # comparisons are made of layouts whose predicted times exceed the fastest by no more
Row = Mapping[str, Any]


def _sets() -> dict[str, dict[str, str]]:
    """The command lines of compiled_cases.txt, by set and name."""
    found: dict[str, dict[str, str]] = {}
    for line in (FOLDER / "compiled_cases.txt").read_text().splitlines():
        if line[0] == "[":
            name, _, more = line[1:].partition("]")
            table = found.setdefault(name, {})
        elif line[0] != "#":
            name, model, batch, own = line.split(maxsplit=3)
            table[name] = f"--model {model} --global-batch-size {batch}{more} {own}"
    return found


SETS = _sets()
SETS["account"] |= {name: SETS["time"][name] for name in ("175b", "175b-1f1b", "175b-zb_v", "llama2-7b", "one-gpu")}


def read() -> dict[tuple[str, str], list[Row]]:
    """The rows on file by set and name of the case, in the order of the cases; a question has several."""
    rows: dict[tuple[str, str], list[Row]] = {(kind, name): [] for kind, table in SETS.items() for name in table}
    for row in json.loads(RESULTS.read_text())["rows"]:
        rows.get((row["set"], row["name"]), []).append(row)
    return rows


def run_from_json(fields: dict[str, Any]) -> RunConfig:
    """A transformer's RunConfig from the JSON of its `dataclasses.asdict`, as files of results have it; without data."""
    model = BertConfig if "post_norm" in fields["model"] else ModelConfig
    tuples = lambda section: {key: tuple(x) if isinstance(x, list) else x for key, x in fields[section].items()}  # noqa: E731
    sections = {"model": model, "parallel": ParallelConfig, "train": TrainConfig}
    return RunConfig(**{name: kind(**tuples(name)) for name, kind in sections.items()})


def write(rows: Mapping[tuple[str, str], Iterable[Row]]) -> None:
    """Writes the rows."""
    write_rows(rows, RESULTS, "python -m benchmarks.compiled")


def write_rows(rows: Mapping[Any, Iterable[Row]], file: pathlib.Path, command: str) -> None:
    """Writes the rows to a file of results of this command, one a line."""
    lines = ",\n".join(f" {json.dumps(row)}" for some in rows.values() for row in some)
    file.write_text(f'{{"command": "{command}", "rows": [\n{lines}\n]}}\n')


def run_of(words: str, gpu: Gpu = GPU) -> RunConfig:
    """The run of a command line, on the devices that it needs; raises ConfigError if it is not legal."""
    request = parse(words.split(), "", {})
    run = resolved(request.run(request.devices_needed or 1, "bf16"), gpu)
    run.validate()
    return run


def question(name: str) -> Question:
    """The search that a question asks for."""
    args = plan_parser(Parser(add_help=False), "").parse_args(SETS["questions"][name].split())
    return question_of(args, clusters_of(args)[0])


def best(asked: Question, count: int) -> list[Candidate]:
    """The first rows that the planner prints, each the fastest layout of its mesh; none if nothing fits."""
    fitting = (one for one in best_layouts(asked, count).candidates if one.fits)
    return list(best_by(fitting, lambda one: one.mesh).values())[:count]


def compiled(run: RunConfig, gpu: Gpu, **options) -> tuple[dict[str, Any], StepAccount]:
    """(what `compile_for` returns for a run's step, the step's account); `options` and errors as of `compile_for`."""
    result = compile_for(run, gpu, **options)
    return result, account_of(run, gpu, result["hlo"])


def measure(run: RunConfig, gpu: Gpu, timeout: float = 900) -> Row:
    """Compiles a run; its row without the case, with "failed" instead of figures if the compiler refuses the program."""
    figures: dict[str, Any] = {"gpu": gpu.name, "versions": compiler_versions()}
    try:
        result, found = compiled(run, gpu, timeout=timeout)
    except CompilerError as error:
        figures["failed"] = str(error)
    else:
        one, total = found.account, lambda part: round(sum(part.values()), 6)
        figures["seconds"] = {kind: round(value, 6) for kind, value in one.seconds.items()}
        figures["rates"] = "by size"
        figures["bubble"], figures["operations"] = found.bubble, "own"
        figures["collectives"] = {"hidden": total(one.hidden), "exposed": total(one.exposed)}
        figures |= {name: result[name] for name in ("memory", "arguments")} | {"compilation": round(result["seconds"])}
    return figures | {"run": {name: dataclasses.asdict(getattr(run, name)) for name in ("model", "parallel", "train")}}


def compile_cases(keys: Iterable[tuple[str, str]], missing: bool, count: int, timeout: float) -> None:
    """Compiles the cases and replaces their rows; `missing`: only what has none. Of a question its `count` best layouts."""
    rows = read()
    for kind, name in keys:
        if kind == "questions":
            runs = [(one.run, one.question.gpu) for one in best(question(name), count)]
        else:
            gpu = find_gpu(name.partition("@")[2] or GPU.name)
            runs = [(run_of(SETS[kind][name], gpu), gpu)]
        known = {run_from_json(row["run"]): row for row in rows[kind, name] if missing}
        rows[kind, name] = []
        for place, (run, gpu) in enumerate(runs, 1):
            case = {"set": kind, "name": name, "place": place}
            rows[kind, name].append(case | (known.get(run) or measure(run, gpu, timeout)) | case)
        write(rows)


def accounted_gpu(row: Row) -> Gpu:
    """The GPU of a row with the rates that its account has: before "rates" was in rows, the same for all sizes."""
    gpu = find_gpu(row["gpu"])
    if "rates" in row:
        return gpu
    peak, chip = gpu.peak(row["run"]["train"]["precision"]), "a100" if gpu.family == "a100" else "h100"
    products, attention = FLAT[chip]
    measured = Measured(
        row["run"]["train"]["precision"],
        matmuls=((1.0, products * peak),),
        memory=0.75 * gpu.memory_bandwidth,
        attention=(attention * peak, attention * peak),
    )
    return dataclasses.replace(gpu, measured=measured)


class Comparison:
    """A row beside the models' figures. Pairs are (compiled, modelled), errors those of the model.

    Attributes:
      bytes: the memory model's; programs compiled with jax before 0.12 merge no ticks.
      peak, peak_error, fits: of the memory, in bytes.
      classes: seconds of matmuls, attention, other kernels, exposed communication, gaps, and waits for the host.
      work, error: seconds of the step without the bubble.
      bubble: relative to that; before "operations" was in rows of a backward of twice the forward's time.
      step: seconds with the bubble; of those rows with the model's, both.
    """

    def __init__(self, row: Row):
        self.row, self.run, gpu = row, run_from_json(row["run"]), accounted_gpu(row)
        merged = row["versions"]["jax"] >= "0.12"
        self.bytes = bytes_per_device(self.run, slots=None if merged else StepProgram.of(self.run).schedule_slots)
        self.peak = row["memory"]["peak"], sum(self.bytes.values())
        self.peak_error = self.peak[1] / self.peak[0] - 1
        self.fits = self.peak[0] <= usable_bytes(gpu)
        if "seconds" not in row:
            return
        of = lambda *kinds: sum(row["seconds"].get(kind, 0.0) for kind in kinds)  # noqa: E731
        whole, parts = step_time(self.run, gpu), Program(self.run, gpu).parts
        self.classes = {
            "matmul": (of("matmul", "experts"), parts.matmul),
            "attention": (of("attention"), parts.attention),
            "others": (of("elementwise", "copy", "stash", "accumulation"), parts.traffic),
            "exposed": (of(EXPOSED), parts.exposed),
            "gaps": (of(GAPS), parts.gaps),
            "waits": (of(SYNCS), parts.waits),
        }
        bubble = 0.0 if StepProgram.of(self.run).computes_bubbles else whole.bubble  # which the account has in it
        self.work = sum(row["seconds"].values()), whole.total - whole.slowest - bubble
        self.error = self.work[1] / self.work[0] - 1
        self.bubble = row["bubble"] * (bubble > 0), bubble / self.work[1]
        own = self.bubble if "operations" in row else (self.bubble[1], self.bubble[1])
        self.step = tuple(seconds * (1 + share) for seconds, share in zip(self.work, own, strict=True))


def pair(values: tuple[float, float], scale: float, digits: int = 1) -> str:
    """Compiled/modelled."""
    return "/".join(f"{scale * value:.{digits}f}" for value in values)


def summary(name: str, errors: Iterable[float]) -> str:
    """A line with the mean and the largest of some relative errors."""
    sizes = [abs(error) for error in errors]
    within, mean = sum(size <= 0.05 for size in sizes), sum(sizes) / len(sizes)
    return f"{name}: {within} of {len(sizes)} within 5%; mean {mean:.1%}, worst {max(sizes):.1%}"


def time_table(rows: Sequence[Comparison]) -> None:
    """Prints milliseconds by class and in all, without the bubble, and the peak of the memory."""
    names = "".join(f"{name:>16}" for name in rows[0].classes)
    print(f"{'ms, compiled/modelled':<23}{names}{'step':>18}{'error':>7}{'bubble':>12}{'GB':>11}{'error':>7}")
    for one in rows:
        classes = "".join(f"{pair(values, 1e3):>16}" for values in one.classes.values())
        bubble, peak = "/".join(f"{share:.1%}" for share in one.bubble), pair(one.peak, 1e-9)
        step = f"{pair(one.work, 1e3):>18}{one.error:>+7.1%}{bubble:>12}"
        print(f"{one.row['name']:<23}{classes}{step}{peak:>11}{one.peak_error:>+7.1%}")
    print(summary("time", (one.error for one in rows)))
    print(summary("memory", (one.peak_error for one in rows)))


def memory_table(rows: Sequence[Comparison]) -> None:
    """Prints the peaks of the memory."""
    held_out = [one for one in rows if one.row["set"] != "memory"]
    for one in rows:
        mesh, (xla, model) = one.run.parallel, (f"{peak / 1e9:6.2f}" for peak in one.peak)
        print(
            f"{one.row['name']:<16} d{mesh.data:<3}p{mesh.pipe:<3}t{mesh.tensor} v{mesh.chunks} b{mesh.microbatch_size} "
            f"m{one.run.microbatches:<4}{mesh.schedule:<18}{mesh.recompute:<10}{mesh.attention:<6}"
            f"XLA {xla}  model {model} GB {one.peak_error:+6.1%}{' held out' if one in held_out else ''}"
        )
    for name, some in (("all", rows), ("held out", held_out)):
        if some:
            print(summary(name, (one.peak_error for one in some)))


def question_table(rows: Sequence[Comparison]) -> None:
    """Prints seconds with the bubble and GB; where a question has several layouts, whether another is faster than its
    winner by more than the error bar; and what comparisons of a question's layouts are off by.
    """
    print(
        f"{'question':<10}{'':>3}{'GPUs':>6}{'t':>4}{'p':>4}{'d':>4}{'v':>3}{'b':>3}{'m':>5}  {'schedule':<18}"
        f"{'recompute':<10}{'z':>1}{'s':>14}{'error':>7}{'GB':>13}{'error':>7}"
    )
    errors = []
    for name, some in itertools.groupby(rows, key=lambda one: one.row["name"]):
        winner, *others = found = list(some)
        for one in found:
            mesh = one.run.parallel
            print(
                f"{name:<10}{one.row['place']:>2}.{mesh.devices:>6}{mesh.tensor:>4}{mesh.pipe:>4}{mesh.data:>4}"
                f"{mesh.chunks:>3}{mesh.microbatch_size:>3}{one.run.microbatches:>5}  {mesh.schedule:<18}"
                f"{mesh.recompute:<10}{mesh.zero:>1}{pair(one.step, 1, 2):>14}{one.error:>+7.1%}"
                f"{pair(one.peak, 1e-9, 2):>13}{one.peak_error:>+7.1%}{'' if one.fits else '  does not fit'}"
            )
        if others:
            fastest = min(others, key=lambda one: one.step[0])
            gain, bar = winner.step[0] / fastest.step[0] - 1, comparison_bar(winner.run.parallel, fastest.run.parallel)
            compared = f"{'faster' if gain > 0 else 'slower'} than the winner by {abs(gain):.1%}"
            print(f"{name}: the fastest of the {len(others)} others is {compared}; the error bar is {bar:.1%}")
            errors.append(errors_of_the_best(found))
    if errors:
        pairs, off = sum(math.comb(len(some), 2) for some in errors), comparison_error(errors)
        near = f"comparisons: {pairs} pairs predicted within {NEAR:.0%} of a question's fastest"
        for kind, count, error in errors_of_pairs():
            print(f"pairs of all programs of a model that differ in {kind}: {count}, off by {error:.2%}")
        print(f"{near} are off by {off:.2%} (rms, one standard deviation)")


def errors_of_the_best(found: Sequence[Comparison]) -> list[float]:
    """The errors of those layouts of a question that are predicted within NEAR of its fastest, which it may choose among."""
    fastest = min(one.step[1] for one in found)
    return [one.error for one in found if one.step[1] <= (1 + NEAR) * fastest]


def comparison_error(errors: Iterable[Sequence[float]]) -> float:
    """The root mean square, over all pairs of layouts of one question, of what their predicted ratio is off by.

    `errors`: of the predicted times of each question's layouts, relative to the compiled programs'.
    """
    off = [math.log1p(a) - math.log1p(b) for some in errors for a, b in itertools.combinations(some, 2)]
    return math.sqrt(sum(one**2 for one in off) / len(off))


def errors_of_pairs() -> Iterable[tuple[str, int, float]]:
    """For each kind of `error_bars.PAIRS`: how many pairs of a model's rows differ in it, what their ratio is off by (rms).

    Of all rows with a time, those of `benchmarks.rankings` too, near or not, whatever else they differ in.
    """
    rows = [*itertools.chain.from_iterable(read().values()), *json.loads(RANKINGS.read_text())["rows"]]
    rows = [row for row in rows if "seconds" in row]
    models: dict[tuple, list[Comparison]] = {}
    for one in map(Comparison, rows):
        models.setdefault((one.run.model.name, one.run.model.hidden), []).append(one)
    pairs = [pair for some in models.values() for pair in itertools.combinations(some, 2)]
    for kind in PAIRS:
        of_kind = [pair for pair in pairs if kind in pair_kinds(*(one.run.parallel for one in pair))]
        yield kind, len(of_kind), comparison_error([one.error for one in pair] for pair in of_kind)


def show(table: str, rows: Iterable[Row]) -> None:
    """Prints a table of TABLES, after the rows that did not compile."""
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:<10}{row['place']:>2}.  not compiled: {row['failed']}")
    if found := [Comparison(row) for row in rows if "failed" not in row]:
        TABLES[table](found)


TABLES = {"time": time_table, "held-out": time_table, "memory": memory_table, "questions": question_table}


def account(name: str, words: str, gpu: Gpu, timeout: float) -> str:
    """The account of a case, seconds of compilation and peak; of one-gpu also the plain step's.

    That one is compiled with XLA's default flags, as one that is written by hand is, and with those that megajax sets.
    """
    run, lines, seconds = run_of(words, gpu), [f"{name}: {words}"], []
    steps: dict[str, dict[str, Any]] = {f"attention {run.parallel.attention}": {}}
    for flags, text in ((False, "defaults of XLA"), (True, "XLA flags of megajax")) if name == "one-gpu" else ():
        steps[f"{PLAIN_STEP} with the {text}"] = {"training": PLAIN_STEP, "training_flags": flags}
    for step, options in steps.items():
        try:
            result, found = compiled(run, gpu, timeout=timeout, **options)
        except CompilerError as error:
            raise ConfigError(str(error)) from error
        rate = flops_per_step(run) / found.seconds / run.parallel.devices
        peak = f"{result['memory']['peak'] / 1e9:.2f} GB at the peak, {rate / 1e12:.0f} TFLOP/s of the model's FLOPs"
        lines += [f"{step}: compiled in {result['seconds']:.0f} s; {peak}", account_table(found)]
        seconds.append(found.seconds)
        if options:
            lines.append(f"megajax's step takes {seconds[0] / seconds[-1]:.3f} of the time of {step}")
    return "\n".join(lines)


@command
def main(arguments: Sequence[str] | None) -> int:
    """Returns 1 if a program of a row does not compile."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("table", choices=(*TABLES, "account"), help="what to compile and compare")
    add("--case", "--question", action="append", type=plain_text, metavar="NAME", help="one case (default: all)")
    add("--missing", action="store_true", help="compile only what has no row yet")
    add("--show", action="store_true", help="compile nothing: compare the models with the rows on file")
    add("--best", type=whole(), default=1, metavar="COUNT", help="layouts of a question (default: the winner)")
    add("--timeout", type=number(below=10**8), default=900, metavar="COUNT", help="seconds for each (default: 900)")
    add("--gpu", default=GPU.name, help="of the accounts (default: %(default)s)")
    options = parser.parse_args(arguments)
    sets = {kind: table for kind, table in SETS.items() if kind.startswith(options.table)}
    names = [name for table in sets.values() for name in table]
    if unknown := set(options.case or ()) - set(names):
        raise ConfigError(f"case = {unknown.pop()} is none of {options.table}: pass one of {', '.join(names)}.")
    keys = [(kind, name) for kind, table in sets.items() for name in table if name in (options.case or names)]
    if options.table == "account":
        for kind, name in keys:
            print(account(name, SETS[kind][name], find_gpu(options.gpu), options.timeout), end="\n\n", flush=True)
        return 0
    if not options.show:
        compile_cases(keys, options.missing, options.best, options.timeout)
    found = read()
    rows = [row for key in keys for row in found[key]]
    show(options.table, rows)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # no GPU is used
    sys.exit(main())
