"""Why the best layout is the best: each choice and its alternatives, and 2104.04473's takeaways, by the estimates.

Every statement is computed: a takeaway is printed with the numbers that confirm it, or with those that contradict it.
The planner's output has the reasons as text, and its HTML page as a list.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from megajax.config import ParallelConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.estimate.step_time import StepTime
from megajax.plan.search import Candidate, best_by

PARTS = tuple(field.name for field in dataclasses.fields(StepTime))
WIDTH = 118
PAPER = "2104.04473"


class Reason(NamedTuple):
    """Sentences about one choice."""

    topic: str
    text: str


def explain(candidates: Sequence[Candidate], beyond: Collection[tuple[str, int]] = ()) -> str:
    """The `reasons` as text."""
    lines = ["why:"]
    for topic, text in reasons(candidates, beyond):
        lines += textwrap.wrap(
            f"{topic}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def reasons(candidates: Sequence[Candidate], beyond: Collection[tuple[str, int]] = ()) -> list[Reason]:
    """Why the first of `candidates` is the best of them; all are of one question, in the order of `search`.

    `beyond`: ("tensor", size) and ("model", tensor * pipe) of further layouts, as of `best.Found`.
    """
    best, fitting = candidates[0], [one for one in candidates if one.fits]
    found = _stages(best)
    found += [
        *_tensor(best, fitting, beyond),
        *_model_parallel(best, fitting, candidates, beyond),
        *_microbatch(best, fitting),
    ]
    for name, of in CHOICES.items():
        found += _alternatives(name, lambda one, of=of: of(one.run.parallel), best, fitting, candidates)
    return found


def slower(one: Candidate, best: Candidate) -> str:
    """How much slower or faster `one` is than `best`, and the part of the step that contributes most."""
    change = one.time.total - best.time.total
    lost = {part: getattr(one.time, part) - getattr(best.time, part) for part in PARTS}
    part = max(lost, key=lambda name: lost[name] * (1 if change >= 0 else -1))
    percent = f"{change / best.time.total:+.0%}".replace("-0%", "+0%")
    unit, scale, digits = ("s", 1, 2) if best.time.total >= 1 else ("ms", 1e3, 1)
    return f"{seconds(one.time.total)} ({percent}, most of it {part}: {scale * lost[part]:+.{digits}f} {unit})"


def seconds(time: float) -> str:
    """A time in seconds, or in milliseconds below one."""
    return f"{time:.2f} s" if time >= 1 else f"{1e3 * time:.1f} ms"


def several(texts: Iterable[str], last_word: str = "and") -> str:
    """a; a and b; a, b and c."""
    *first, last = texts
    return f"{', '.join(first)} {last_word} {last}" if first else last


def _chunked(parallel: ParallelConfig) -> str:
    """The schedule with its chunks, if a rank has several."""
    return parallel.schedule + (f" with {parallel.chunks} chunks" if parallel.chunks > 1 else "")


def folded(parallel: ParallelConfig) -> str:
    """Words after a degree of expert parallelism that counts tensor ranks too."""
    return ", expert-tensor 1" * parallel.experts_over_tensor


# What is explained by the best layouts with each value, on the best one's mesh.
CHOICES: dict[str, Callable[[ParallelConfig], str]] = {
    "schedule": _chunked,
    "recomputation": lambda parallel: f"recompute {parallel.recompute}",
    "expert parallelism": lambda parallel: f"expert size {parallel.expert}{folded(parallel)}",
}
COMPARED = (*CHOICES.values(), lambda parallel: parallel.microbatch_size)


def _stages(best: Candidate) -> list[Reason]:
    """Stages of different sizes."""
    stages = best.run.parallel.stage_layers(best.run.model.layers, kinds=layer_kinds(best.run.model))
    if stages.kinds:
        priced = "The memory includes the unused slots, and the time is that of the slowest stage."
        return [Reason("stages", f"{stages.describe_kinds()}. {priced}")]
    if stages.idle:
        priced = f"Each stage is priced, in time and memory, as one with {stages.slots} layers."
        return [Reason("stages", f"{stages.describe()}. {priced}")]
    return []


def _alternatives(
    name: str, of: Callable, best: Candidate, fitting: Sequence[Candidate], every: Sequence[Candidate]
) -> list[Reason]:
    """The best candidate for each value of one choice, on the same mesh."""
    on_mesh = [one for one in fitting if one.mesh == best.mesh]
    values = best_by(on_mesh, of)
    shown = [f"{value} takes {slower(one, best)}" for value, one in values.items() if one is not best]
    too_large = best_by((one for one in every if one.mesh == best.mesh and not one.fits), of)
    shown += [
        f"{value} does not fit, with {one.peak / 1e9:.0f} GB at least"
        for value, one in too_large.items()
        if value not in values
    ]
    return [Reason(name, f"The layout has {of(best)}. On the same mesh, {'; '.join(shown[:4])}.")] if shown else []


def _left_out(kind: str, beyond: Collection[tuple[str, int]], shown: Collection[int]) -> str:
    """A sentence about the sizes that were not looked at."""
    sizes = sorted(size for name, size in beyond if name == kind and size not in shown)
    return f" Those with {several(map(str, sizes), 'or')} take longer than these, or do not fit." if sizes else ""


def _tensor(best: Candidate, fitting: Sequence[Candidate], beyond: Collection[tuple[str, int]]) -> list[Reason]:
    """Takeaway 1: tensor parallelism up to the size of a host, pipeline beyond."""
    host = best.question.gpu.host_size
    by_size = dict(sorted(best_by(fitting, lambda one: one.run.parallel.tensor).items()))
    if len(by_size) == 1:
        return []
    times = several(f"t={size} {seconds(one.time.total)}" for size, one in by_size.items())
    text = f"The fastest layouts with each tensor size take {times}.{_left_out('tensor', beyond, by_size)}"
    takeaway = f"Takeaway 1 of {PAPER}, tensor parallelism within a host and pipeline parallelism beyond it, is"
    outside = [one for size, one in by_size.items() if size > host]
    if outside and best.run.parallel.tensor <= host:
        one = min(outside, key=lambda one: one.time.total)
        share = one.time.tensor / one.time.total
        text += (
            f" {takeaway} confirmed: t={one.run.parallel.tensor} exceeds the host of {host} GPUs, and its collectives take "
            f"{share:.0%} of the step, against {best.time.tensor / best.time.total:.0%} with t={best.run.parallel.tensor}."
        )
    elif best.run.parallel.tensor > host:
        text += (
            f" {takeaway} not confirmed here: t={best.run.parallel.tensor} exceeds the host of {host} GPUs, and is the "
            "fastest."
        )
    return [Reason("tensor parallelism", text)]


def _model_parallel(
    best: Candidate, fitting: Sequence[Candidate], every: Sequence[Candidate], beyond: Collection[tuple[str, int]]
) -> list[Reason]:
    """Takeaway 2: as much model parallelism as memory requires, and data parallelism for the remaining GPUs."""
    size = lambda one: one.run.parallel.tensor * one.run.parallel.pipe  # noqa: E731
    fits = dict(sorted(best_by(fitting, size).items()))
    sizes = sorted({size(one) for one in every})
    without = [n for n in sizes if n not in fits and ("model", n) not in beyond]
    if len(sizes) == 1:
        return []
    times = several(f"{n} {seconds(one.time.total)}" for n, one in fits.items())
    text = f"The fastest layouts with each tensor size times pipeline size take {times}"
    text += f"; no layout with {several(map(str, without), 'or')} fits." if without else "."
    text += _left_out("model", beyond, fits)
    least, used = min(fits), size(best)
    takeaway = "Takeaway 2, no more model parallelism than memory requires, is confirmed"
    if used == least:
        text += f" {takeaway}: {used} is the least that fits."
    else:
        text += (
            f" {takeaway} in part only: {least} fits too, but takes {slower(fits[least], best)}. More memory for each "
            "GPU allows less recomputation, or a smaller share of communication."
        )
    return [Reason("model parallelism", text)]


def _microbatch(best: Candidate, fitting: Sequence[Candidate]) -> list[Reason]:
    """Takeaway 3: the best microbatch size depends on the model, the layout and the batch."""
    on_mesh = [one for one in fitting if one.mesh == best.mesh]
    sizes = dict(sorted(best_by(on_mesh, lambda one: one.run.parallel.microbatch_size).items()))
    if len(sizes) == 1:
        return []
    bubbles = best.run.parallel.pipe > 1
    times = several(
        f"b={size} {seconds(one.time.total)}" + f" (bubble {one.time.bubble / one.time.total:.1%})" * bubbles
        for size, one in sizes.items()
    )
    spread = max(one.time.total for one in sizes.values()) / best.time.total - 1
    text = f"On the same mesh, microbatches of b samples take {times}. The slowest is {spread:.0%} slower."
    if bubbles:
        text += (
            " Takeaway 3: larger microbatches compute more efficiently, but fewer of them leave a larger bubble, so that "
            "the best size depends on the model and the layout."
        )
    return [Reason("microbatch size", text)]
