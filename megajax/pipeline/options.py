"""The executor's options besides the model, the schedule and the mesh; and which ticks it merges."""

import dataclasses
import functools
from collections.abc import Callable

from jax.sharding import Mesh

from megajax.config import RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.ops.attention_choice import FUSED
from megajax.pipeline.layout import DEFAULT_SPECS, Specs
from megajax.pipeline.loops import serializes
from megajax.schedules.registry import ScheduleSpec, find, make_schedule
from megajax.schedules.schedule import BACKWARD, FORWARD, Schedule, Segment
from megajax.schedules.stages import StageLayers

UNROLLED_BLOCKS = 64  # at most; on two CPU cores each takes 1.3 s to compile
MERGED = FORWARD + BACKWARD  # the named scope of a merged tick's blocks
SEND = "send"  # and of the sends between stages


@dataclasses.dataclass(frozen=True)
class ExecutorOptions:
    """How the executor shards arrays and runs blocks.

    Attributes:
      constrain: `x -> x`, applies the sharding constraint of an activation [samples, sequence, hidden] over the mesh
        axes that are not manual.
      specs: shardings of params and gradients. A block's weight that is sharded over `data` is all-gathered each time
        its block runs, and its gradient is reduce-scattered there (ZeRO-3).
      share_ends: all ranks run embed and head_loss together, each with its part of the vocabulary.
      offload: the stash is in host memory.
      in_place: weights are read, and gradients accumulated, where they are; for GPUs with jax 0.12 (`stage.Stack`). Not with
        `compute_bubbles`: ranks that run different chunks would not participate in the same collective.
      merged: the forward and the backward of a tick run as one loop over blocks, in the ticks in which every rank has both
        (`Stack.forward_and_backward`); backwards run one tick later than in the schedule. Needs `in_place`, and has no
        effect on schedules of mixed ticks, where that loop runs the operations that overlap (`schedule.OVERLAP_PARTS`).
      unrolled: a tick's blocks are traced one after the other, without a loop, and what a forward saves is not copied to a
        stash. For schedules of which `stashes_nothing` holds; needs `in_place`.
      compute_bubbles: in paired ticks, ranks without work run their blocks too and discard the results. Required where
        a block contains a `ppermute`, which all ranks must reach (ring attention, collective matmul).
      serial_collectives: a collective and a loop with other collectives run one after the other; `on_devices` sets it.
      poison_bubbles: replaces the input of every bubble by NaN, to test that bubbles do not affect any result.
      block_counts: blocks of each stage, if these are not equal (`uneven.StageBlocks`). None: they are.
      stage_kinds: the layers of each stage, of a model that has several kinds of them (`mixed.py`); not with `merged` and
        `unrolled`, and with `compute_bubbles` only if `same_stages`. None: there is one kind.
      statistics: `statistics(x, microbatch) -> fp32 [samples, k]`, recorded for the arrays between blocks; see `records`.
        None: nothing is recorded.
    """

    constrain: Callable = lambda x: x
    specs: Specs = DEFAULT_SPECS
    share_ends: bool = False
    offload: bool = False
    in_place: bool = False
    merged: bool = False
    unrolled: bool = False
    compute_bubbles: bool = False
    serial_collectives: bool = False
    poison_bubbles: bool = False
    block_counts: tuple[int, ...] | None = None
    stage_kinds: StageLayers | None = None
    statistics: Callable | None = None


DEFAULT_OPTIONS = ExecutorOptions()


def on_devices(options: ExecutorOptions, mesh: Mesh) -> ExecutorOptions:
    """The options with those that follow from the mesh's devices."""
    return dataclasses.replace(options, serial_collectives=serializes(mesh))


def merges(run: RunConfig) -> bool:
    """Whether a program that works in place merges ticks: if blocks have collectives to hide, and run in no bubble.

    A merged tick's loop runs a block of a forward beside one of a backward, which must be of one kind. PipeDream-2BW
    does not merge ticks.
    """
    parallel = run.parallel
    one_kind = not layer_kinds(run.model)
    collectives = parallel.tensor > 1 or parallel.expert > 1
    return collectives and not parallel.rings and one_kind and find(parallel.schedule).drains


def stashes_nothing(schedule: Schedule) -> bool:
    """Whether every backward runs in the tick of its own forward, as one stage's may: no tick leaves activations."""
    return schedule.paired and all(
        [work.op for work in works] == [FORWARD, BACKWARD] and len({(w.chunk, w.microbatch) for w in works}) == 1
        for ranks in schedule.ticks
        for works in ranks
    )


def unrolls(run: RunConfig, attention: str) -> bool:
    """Whether a program that works in place traces a rank's blocks one after the other.

    A loop over blocks copies what they save to a stash. Without a loop it stays where it was computed, and XLA does not
    compute again what a forward already has: memory is that of `--recompute none`. So not where recomputing saves more:
    attention scores, whole blocks, or weights that ZeRO-3 gathers again. And compiling takes longer with each block.

    Args:
      run: a valid one.
      attention: the implementation that runs, as `--attention` names it.
    """
    parallel = run.parallel
    saves_all = parallel.recompute == "none" or (parallel.recompute == "selective" and attention in FUSED)
    return (
        parallel.pipe == parallel.chunks == parallel.tensor == 1
        and not (parallel.rings or parallel.offload_activations or parallel.zero == 3 or layer_kinds(run.model))
        and saves_all
        and run.model.layers <= UNROLLED_BLOCKS
        and _stashes_nothing(find(parallel.schedule), run.microbatches)
    )


@functools.lru_cache(maxsize=64)  # a search repeats the call
def _stashes_nothing(spec: ScheduleSpec, microbatches: int) -> bool:
    if not spec.drains:  # PipeDream-2BW has a program of its own
        return False
    return stashes_nothing(make_schedule(spec.name, stages=1, microbatches=microbatches, chunks=1))


def is_merged(schedule: Schedule, segment: Segment) -> bool:
    """Whether `ExecutorOptions.merged` applies to a segment: paired ticks in which every rank has both."""
    return schedule.paired and segment.full and segment.ops == (FORWARD, BACKWARD)


def embeds_ahead(schedule: Schedule, segment: Segment, merged: bool) -> bool:
    """Whether a segment's ticks embed for the next tick, beside the head: merged ones, and mixed ones."""
    return not schedule.paired or (merged and is_merged(schedule, segment))


def merged_schedule(schedule: Schedule) -> Schedule:
    """What the executor runs for `schedule` with `ExecutorOptions.merged`: the schedule itself if no tick can be merged."""
    if not schedule.paired or not schedule.has_backward:
        return schedule
    later = schedule.with_later_backwards()
    return later if any(is_merged(later, segment) for segment in later.segments) else schedule
