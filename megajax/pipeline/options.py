"""The executor's options besides the model, the schedule and the mesh; and which ticks it merges."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from megajax.pipeline.layout import DEFAULT_SPECS, Specs
from megajax.pipeline.loops import serializes
from megajax.schedules.schedule import BACKWARD, FORWARD, Schedule, Segment
from megajax.schedules.stages import StageLayers

MERGED = FORWARD + BACKWARD  # the named scope of a merged tick's blocks
SEND = "send"  # and of the sends between stages
KIND = "kind"  # and, with its number, of a loop that runs a block if it is of that kind


@dataclasses.dataclass(frozen=True)
class ExecutorOptions:
    """How the executor shards arrays and runs blocks.

    Attributes:
      constrain: `x -> x`, applies the sharding constraint of what blocks pass on, an array or a pytree [samples, ...], over
        the mesh axes that are not manual.
      specs: shardings of params and gradients. A block's weight that is sharded over `data` is all-gathered each time
        its block runs, and its gradient is reduce-scattered there (ZeRO-3).
      share_ends: all ranks run embed and head_loss together, each with its part of the vocabulary.
      offload: the stash is in host memory.
      in_place: weights are read, and gradients accumulated, where they are; for GPUs with jax 0.12 (`stage.Stack`). Not with
        `compute_bubbles`: ranks that run different chunks would not participate in the same collective.
      merged: the forward and the backward of a tick run as one loop over blocks, in the ticks in which every rank has both
        (`Stack.forward_and_backward`); backwards run one tick later than in the schedule. With one stage the stash then has
        an array for each of two slots, and matmuls write into it (`Tables.slots_apart`). Needs `in_place`, and has no
        effect on schedules of mixed ticks, where that loop runs the operations that overlap (`schedule.OVERLAP_PARTS`).
      timed: XLA's scheduler knows how long matmuls in place take (`train.latency_estimates`). In merged ticks a block's
        result then waits for writes to the stash (`early_stash`), and one stage gathers a gradient an iteration ahead; both
        spare memory traffic. A scheduler that takes matmuls to be short would put the whole forward behind the backward.
      unrolled: a tick's blocks are traced one after the other, without a loop, and what a forward saves is not copied to a
        stash. For schedules of which `stashes_nothing` holds; needs `in_place`.
      compute_bubbles: in paired ticks, ranks without work run their blocks too and discard the results. Required where
        a block contains a `ppermute`, which all ranks must reach (ring attention, collective matmul).
      serial_collectives: a collective and a loop with other collectives run one after the other; `on_devices` sets it.
      poison_bubbles: replaces the input of every bubble by NaN, to test that bubbles do not affect any result.
      block_counts: blocks of each stage, if these are not equal (`uneven.StageBlocks`). None: they are.
      stage_kinds: the layers of each stage, of a model that has several kinds of them (`stage.py`); not with `unrolled`, nor
        with `merged` on one stage, and with `compute_bubbles` only if `same_stages`. None: there is one kind.
      has_aux: `head_loss` returns (loss, pytree of [samples, ...]), as the functions of `jax.value_and_grad(has_aux=True)`.
      trained: mask like params of those that have gradients (`trained.py`). None: all.
      statistics: `statistics(x, microbatch) -> fp32 [samples, k]`, recorded for the arrays between blocks; see `records`.
        None: nothing is recorded.
    """

    constrain: Callable = lambda x: x
    specs: Specs = DEFAULT_SPECS
    share_ends: bool = False
    offload: bool = False
    in_place: bool = False
    merged: bool = False
    timed: bool = True
    unrolled: bool = False
    compute_bubbles: bool = False
    serial_collectives: bool = False
    poison_bubbles: bool = False
    block_counts: tuple[int, ...] | None = None
    stage_kinds: StageLayers | None = None
    has_aux: bool = False
    trained: Any = None
    statistics: Callable | None = None


DEFAULT_OPTIONS = ExecutorOptions()


def on_devices(options: ExecutorOptions, mesh: Mesh) -> ExecutorOptions:
    """The options with those that follow from the mesh's devices."""
    return dataclasses.replace(options, serial_collectives=serializes(mesh))


def stashes_nothing(schedule: Schedule) -> bool:
    """Whether every backward runs in the tick of its own forward, as one stage's may: no tick leaves activations."""
    return schedule.paired and all(
        [work.op for work in works] == [FORWARD, BACKWARD] and len({(w.chunk, w.microbatch) for w in works}) == 1
        for ranks in schedule.ticks
        for works in ranks
    )


def is_merged(schedule: Schedule, segment: Segment) -> bool:
    """Whether `ExecutorOptions.merged` applies to a segment: paired ticks in which every rank has both.

    And none has the backward of its own forward, which the last stage may have (`Schedule.with_later_backwards`).
    """
    if not (schedule.paired and segment.full and segment.ops == (FORWARD, BACKWARD)):
        return False
    ticks = schedule.ticks[segment.start : segment.stop]
    return all(len({(work.chunk, work.microbatch) for work in works}) == 2 for ranks in ticks for works in ranks)


def merged_ticks(schedule: Schedule) -> int:
    """How many ticks of a schedule that runs (`merged_schedule`) are merged."""
    return sum(segment.stop - segment.start for segment in schedule.segments if is_merged(schedule, segment))


def embeds_ahead(schedule: Schedule, segment: Segment, merged: bool) -> bool:
    """Whether a segment's ticks embed for the next tick, beside the head: merged ones, and mixed ones."""
    return not schedule.paired or (merged and is_merged(schedule, segment))


def merged_schedule(schedule: Schedule) -> Schedule:
    """What the executor runs for `schedule` with `ExecutorOptions.merged`: the schedule itself if no tick can be merged."""
    if not schedule.paired or not schedule.has_backward:
        return schedule
    later = schedule.with_later_backwards()
    return later if any(is_merged(later, segment) for segment in later.segments) else schedule
