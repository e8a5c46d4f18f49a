"""The planner's output, printed and drawn: the best layouts, with their memory and time part by part."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megajax.estimate import model_costs
from megajax.estimate.error_bars import bar_of, comparison_bar
from megajax.plan.search import MEMORY_MARGIN, Candidate, Question, best_by, fitting, usable_bytes
from megajax.plan.ties import is_tie
from megajax.schedules.pictures import picture

# The memory bar's letter for each part of `estimate.memory.bytes_per_device`.
PARTS = {
    "weights": "w",
    "optimizer": "o",
    "gradients": "g",
    "16-bit weights": "h",
    "stash": "s",
    "copies": "c",
    "input to weight gradients": "k",
    "inboxes": "i",
    "workspace": "x",
}
LEGEND = (
    "memory: w weights, o optimizer, g gradients, h 16-bit weights, s stash, c copies, k kept for W, i inboxes, x work"
)
EXPERTS = (
    "experts: FLOPs and times are those of balanced routing; memory has room for all rows that can be on a GPU. A layout's "
    "degree of expert parallelism, if above 1, is at the end of its line, with all_to_all where that is the faster dispatch"
)
SHORT = {
    "interleaved_1f1b": "interleaved",
    "zb_1p_interleaved": "zb_1p",
    "eager_1f1b": "eager",
}


def memory_bar(memory: dict[str, int], limit: float, width: int = 32) -> str:
    """Bytes by part as letters, `limit` being `width` of them; "." is free memory, and | marks the limit if exceeded."""
    text, reached = "", 0.0
    for part, letter in PARTS.items():
        reached += memory.get(part, 0)
        text += letter * (round(reached / limit * width) - len(text))
    return text.ljust(width, ".") if len(text) <= width else f"{text[:width]}|{text[width:][:width]}"


def table(candidates: Sequence[Candidate], tokens: float, fastest: Candidate) -> str:
    """The candidates as rows, with `_marks`; all must have been timed."""
    head = (
        f"{'':>3} {'t':>3} {'p':>3} {'d':>4} {'v':>2} {'b':>2} {'m':>4}  {'schedule':<12}{'recompute':<10}{'zero':>4}"
        f"{'step s':>9}{'TFLOP/s':>8}{'MFU':>7}{'days':>7}{'bubble':>8}{'comm':>6}{'GB':>7}  memory"
    )
    return "\n".join(
        [head, *(_row(number, one, tokens) + _marks(one, fastest) for number, one in enumerate(candidates, 1))]
    )


def _marks(one: Candidate, fastest: Candidate) -> str:
    """The marks behind a row: = for a tie of the fastest, ! for memory that may not suffice."""
    return "  =" * is_tie(one, fastest) + "  !" * one.is_tight


def _row(number: int, one: Candidate, tokens: float) -> str:
    parallel, time = one.run.parallel, one.time
    bar = memory_bar(one.memory, usable_bytes(one.question.gpu))
    return (
        f"{number:>2}. {parallel.tensor:>3} {parallel.pipe:>3} {parallel.data:>4} {parallel.chunks:>2} "
        f"{parallel.microbatch_size:>2} {one.run.microbatches:>4}  "
        f"{SHORT.get(parallel.schedule, parallel.schedule):<12}{parallel.recompute:<10}{parallel.zero:>4}"
        f"{time.total:>9.2f}{one.teraflops:>8.0f}{one.utilisation:>7.1%}{one.days(tokens):>7.1f}"
        f"{time.bubble / time.total:>8.1%}{time.communication / time.total:>6.0%}{one.peak / 1e9:>7.1f}  {bar}"
        + (f"  expert {parallel.expert}" if parallel.expert > 1 else "")
        + (", all_to_all" if parallel.expert > 1 and parallel.expert_dispatch == "all_to_all" else "")
    )


def shown_parameters(model: Any) -> str:
    """The number of a model's parameters, and of those that a token passes if it has experts."""
    total = model_costs(model).parameters
    active = getattr(model, "active_parameters", total)
    return f"{total / 1e9:.1f}B parameters" + (f" ({active / 1e9:.1f}B for a token)" if active != total else "")


def accuracy(best: Candidate) -> str:
    """How far comparisons and predictions are off, by compiled programs and by published runs."""
    bar = bar_of(best.run.parallel)
    tight = f"!: less than {MEMORY_MARGIN:.0%} of the usable memory is free, and predictions were off by as much.\n"
    return (tight if best.question.memory_margin < MEMORY_MARGIN else "") + (
        f"=: within {comparison_bar(best.run.parallel):.1%} of the fastest, which is what comparisons of compiled programs "
        "were off by (megajax bench standing-questions); such ties are sorted by simplicity.\n"
        f"Predicted times of published runs were off by {bar.total:.0%} (megajax.estimate.validate)."
    )


def heading(question: Question, tokens: float, counted: int, fitting: int, seconds: float) -> str:
    """The question, and the size of the search."""
    gpu = question.gpu
    experts = f"\n{EXPERTS}" if getattr(question.model, "experts", 0) else ""
    return (
        f"{question.model.name}: {shown_parameters(question.model)} on {question.gpus} {gpu.name} "
        f"({usable_bytes(gpu) / 1e9:.0f} of {gpu.memory / 1e9:.0f} GB usable, "
        f"{question.memory_margin:.0%} of it left free), global batch {question.global_batch}, "
        f"{question.precision}, attention {question.resolved_attention}, {tokens / 1e9:.0f}B tokens\n"
        f"{counted} legal layouts, {fitting} fit; {seconds:.1f} s. Times are of {question.software.name}'s program, "
        f"predicted; each mesh with its fastest schedule, of ties the simplest:{experts}"
    )


def smallest(candidates: Sequence[Candidate], count: int = 3) -> str:
    """For a search in which no layout fits: the smallest ones, and what to pass for one that fits."""
    lines = ["nothing fits; the smallest:"]
    for one in candidates[:count]:
        parallel = one.run.parallel
        limit = one.question.memory_limit
        lines.append(
            f"  tensor {parallel.tensor} pipe {parallel.pipe} data {parallel.data}, {parallel.schedule}, recompute "
            f"{parallel.recompute}: {one.peak / 1e9:.1f} GB of {limit / 1e9:.1f}  {memory_bar(one.memory, limit)}"
        )
    return "\n".join([*lines, _what_fits(candidates[0].question, candidates[0].peak)])


def _what_fits(question: Question, least: int) -> str:
    """The options to change: no margin for `least` bytes, more of ZeRO, or more GPUs, for which lean layouts are tried."""
    if least <= usable_bytes(question.gpu):
        return "pass --memory-margin 0, if the prediction's error may be ignored"
    schedule = "1f1b" if "1f1b" in question.schedules else question.schedules[0]
    lean = {"microbatches": question.microbatches[:1], "recomputes": question.recomputes[-1:], "schedules": (schedule,)}
    for growth in (1, 2, 4, 8, 16, 32, 64):
        for zero in ((0,), (1, 3)):
            wider = dataclasses.replace(question, gpus=question.gpus * growth, zero=zero, **lean)
            fits = next(fitting(wider), None)
            if fits is not None:
                more = [f"--gpus {wider.gpus}"] if growth > 1 else []
                more += [f"--zero {fits.parallel.zero}"] if fits.parallel.zero not in question.zero else []
                return f"pass {' '.join(more)}"
    return "no layout fits on up to 64 times the GPUs either: pass a smaller --model, or a --gpu with more memory"


def plot(candidates: Sequence[Candidate], path: str) -> None:
    """Draws predicted throughput over mesh shapes, as figures 13 to 15 of 2104.04473, to `path` (.png, .svg or .pdf).

    Each panel shows the fastest layout that fits of each pair of degrees: pipeline by tensor (figure 13), pipeline by data
    (figure 14) and tensor by data (figure 15). The remaining GPUs give the third degree.

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    fitting = [one for one in candidates if one.fits]
    question = candidates[0].question
    shapes = (("pipe", "data"), ("pipe", "tensor"), ("tensor", "data"))
    with picture(path, 470, 660) as figure:
        axes = figure.subplots(3, 1, sharey=True)
        for axis, (x, line) in zip(axes, shapes, strict=True):
            groups = best_by(fitting, lambda one: (getattr(one.run.parallel, line), getattr(one.run.parallel, x)))  # noqa: B023
            for value in sorted({key[0] for key in groups}):
                points = sorted((key[1], one.teraflops) for key, one in groups.items() if key[0] == value)
                axis.plot(*zip(*points, strict=True), marker="o", label=f"{line} {value}")
            sizes = sorted({key[1] for key in groups})
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_xlabel(f"{x} size; {({'pipe', 'data', 'tensor'} - {x, line}).pop()} size is what remains")
            axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        axes[1].set_ylabel("predicted model TFLOP/s per GPU, fastest layout of each shape")
        title = f"{question.model.name} on {question.gpus} {question.gpu.name}, global batch {question.global_batch}"
        axes[0].set_title(title)
