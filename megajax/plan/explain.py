"""Why the best layout is the best: each choice and its alternatives, and 2104.04473's takeaways, by the estimates.

Every statement is computed: a takeaway is printed with the numbers that confirm it, or with those that contradict it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from megajax.config.layer_kinds import layer_kinds
from megajax.estimate import model_costs
from megajax.estimate.gpus import is_fused
from megajax.estimate.kinds import layers_of_kinds
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.op_costs import FITTED, OpCosts
from megajax.estimate.step_time import StepTime, chunk_times
from megajax.plan.search import Candidate, best_by

PARTS = tuple(field.name for field in dataclasses.fields(StepTime))


def explain(candidates: Sequence[Candidate]) -> str:
    """Text about the first of `candidates`, all of one question, in the order of `search`."""
    best, fitting = candidates[0], [one for one in candidates if one.fits]
    lines = ["why:"]
    stages = best.run.parallel.stage_layers(best.run.model.layers, kinds=layer_kinds(best.run.model))
    if stages.kinds:
        lines.append(f"  {stages.describe_kinds()}: memory has all slots, and time is that of the slowest stage")
    elif stages.idle:
        lines.append(
            f"  {stages.describe()}: the time and memory of a stage are those of one with {stages.slots} layers"
        )
    for takeaway in (_tensor, _model_parallel, _microbatch):
        lines += [f"  {line}" for line in takeaway(best, fitting, candidates)]
    for name, of in (
        ("schedule", lambda one: f"{one.run.parallel.schedule} v{one.run.parallel.chunks}"),
        ("recompute", lambda one: one.run.parallel.recompute),
        ("expert", lambda one: f"expert {one.run.parallel.expert}"),
    ):
        lines += [f"  {line}" for line in _alternatives(name, of, best, fitting, candidates)]
    lines += [f"  {line}" for line in (*_equation_1(best), *_checkpoints(best))]
    return "\n".join(lines)


def slower(one: Candidate, best: Candidate) -> str:
    """How much slower `one` is than `best`, and the part of the step that contributes most."""
    lost = {part: getattr(one.time, part) - getattr(best.time, part) for part in PARTS}
    part = max(lost, key=lost.get)
    return (
        f"{one.time.total:.2f} s ({one.time.total / best.time.total - 1:+.0%}, most of it {part} {lost[part]:+.2f} s)"
    )


def _alternatives(
    name: str, of: Callable, best: Candidate, fitting: Sequence[Candidate], every: Sequence[Candidate]
) -> list[str]:
    """The best candidate for each value of one choice, on the same mesh."""
    on_mesh = [one for one in fitting if one.mesh == best.mesh]
    values = best_by(on_mesh, of)
    shown = [f"{value} {slower(one, best)}" for value, one in values.items() if one is not best]
    too_large = best_by((one for one in every if one.mesh == best.mesh and not one.fits), of)
    shown += [
        f"{value} does not fit ({one.peak / 1e9:.0f} GB at least)"
        for value, one in too_large.items()
        if value not in values
    ]
    return [f"{name}: {of(best)}; on the same mesh " + "; ".join(shown[:4])] if shown else []


def _tensor(best: Candidate, fitting: Sequence[Candidate], _) -> list[str]:
    """Takeaway 1: tensor parallelism up to the size of a host, pipeline beyond."""
    host = best.question.gpu.host_size
    by_size = dict(sorted(best_by(fitting, lambda one: one.run.parallel.tensor).items()))
    lines = [
        "tensor (takeaway 1: inside a host, then pipeline): "
        + ", ".join(f"t={size} {one.time.total:.2f} s" for size, one in by_size.items())
    ]
    beyond = [one for size, one in by_size.items() if size > host]
    if beyond and best.run.parallel.tensor <= host:
        one = min(beyond, key=lambda one: one.time.total)
        share = one.time.tensor / one.time.total
        lines.append(
            f"  confirmed: t={one.run.parallel.tensor} exceeds the host of {host}; its collectives take {share:.0%} of the "
            f"step, against {best.time.tensor / best.time.total:.0%} with t={best.run.parallel.tensor}"
        )
    elif best.run.parallel.tensor > host:
        lines.append(
            f"  not confirmed here: t={best.run.parallel.tensor} exceeds the host of {host} and is still fastest"
        )
    return lines


def _model_parallel(best: Candidate, fitting: Sequence[Candidate], every: Sequence[Candidate]) -> list[str]:
    """Takeaway 2: as much model parallelism as memory requires, and data parallelism for the remaining GPUs."""
    size = lambda one: one.run.parallel.tensor * one.run.parallel.pipe  # noqa: E731
    fits = dict(sorted(best_by(fitting, size).items()))
    sizes = sorted({size(one) for one in every})
    without = [n for n in sizes if n not in fits]
    lines = [
        "model parallelism (takeaway 2: as little as fits): "
        + ", ".join(f"t*p={n} {one.time.total:.2f} s" for n, one in fits.items())
        + (f"; does not fit: t*p={', '.join(map(str, without))}" if without else "")
    ]
    least, used = min(fits), size(best)
    if used == least:
        lines.append(f"  confirmed: {used} is the least that fits")
    else:
        lines.append(
            f"  in part: {least} fits too, but takes {slower(fits[least], best)}; more memory allows less recomputation "
            "or a smaller share of communication"
        )
    return lines


def _microbatch(best: Candidate, fitting: Sequence[Candidate], every: Sequence[Candidate]) -> list[str]:
    """Takeaway 3: the best microbatch size depends on the model, the layout and the batch."""
    on_mesh = [one for one in fitting if one.mesh == best.mesh]
    sizes = dict(sorted(best_by(on_mesh, lambda one: one.run.parallel.microbatch_size).items()))
    texts = [
        f"b={size} {one.time.total:.2f} s (bubble {one.time.bubble / one.time.total:.1%})"
        for size, one in sizes.items()
    ]
    spread = max(one.time.total for one in sizes.values()) / best.time.total - 1
    return [f"microbatch (takeaway 3: bubble against efficiency; best to worst {spread:+.0%}): " + ", ".join(texts)]


def _equation_1(best: Candidate) -> list[str]:
    """2104.04473 equation 1 with the winner's numbers."""
    run, parallel = best.run, best.run.parallel
    per_replica = run.train.global_batch_size // parallel.data
    ops = OpCosts(best.question.gpu, run.train.precision, best.question.software, FITTED)
    texts = []
    for samples in best.question.microbatches:
        if per_replica % samples:
            continue
        smaller = dataclasses.replace(run, parallel=dataclasses.replace(parallel, microbatch_size=samples))
        one = sum(way.total for way in chunk_times(smaller, ops)) * parallel.chunks
        total = (per_replica / samples + parallel.pipe - 1) * one
        texts.append(
            f"b={samples}: ({per_replica // samples} + {parallel.pipe - 1}) * {one * 1e3:.1f} ms = {total:.2f} s"
        )
    return [
        f"equation 1, (b'/b + p - 1)(t_f(b) + t_b(b)) with b' = B/d = {per_replica}, one chunk: " + "; ".join(texts)
    ]


def _checkpoints(best: Candidate) -> list[str]:
    """2104.04473 section 3.5: with c checkpoints of l layers c A_in + l/c A_int is least for c = sqrt(l A_int / A_in)."""
    run, parallel = best.run, best.run.parallel
    kinds = layers_of_kinds(run)
    sizes = {
        mode: sum(
            kind.slots
            * model_costs(kind.run.model).kept_bytes(
                mode,
                samples=parallel.microbatch_size,
                tensor=parallel.tensor,
                sequence_parallel=parallel.sequence_parallel,
                itemsize=ITEMSIZE[run.train.precision],
                fused_attention=is_fused(parallel),
            )
            for kind in kinds
        )
        / sum(kind.slots for kind in kinds)
        for mode in ("full", "none")
    }
    layers = parallel.stage_layers(run.model.layers).rank_slots
    optimum = math.sqrt(layers * sizes["none"] / sizes["full"])
    return [
        f"checkpoints: sqrt(l A_int / A_in) = sqrt({layers} * {sizes['none'] / 1e6:.0f} / {sizes['full'] / 1e6:.1f} MB) = "
        f"{optimum:.1f} for the {layers} layers of a stage: the program keeps one for each layer"
        + ("" if optimum >= layers else f"; one in {layers / optimum:.1f} layers would need less memory")
    ]
