"""Lower bounds of the time and the memory of layouts that are known in part, by which `best.py` leaves layouts unpriced.

A bound is the model of `estimate` without what cannot be known yet, or costs more to find out:

    time      blocks of all microbatches, as one forward and one backward of a chunk or as both merged, whichever is shorter;
              embedding and head; the schedule's bubble; and what is done once in a step. Without the rest of the ticks. At
              first of the blocks only the products, attention, experts' rows and where these are sent (`Bounds.least`)
    memory    `memory_bounds.py`, and with a schedule the stash

Both are at most what `step_time` and `bytes_per_device` say of every layout that has the known fields
(`tests/plan/test_best.py`). Parts that several layouts share are computed once.
"""

import functools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from megajax.config import RunConfig
from megajax.estimate import model_costs
from megajax.estimate.attention_kernels import CONTEXT_MERGED
from megajax.estimate.auto import placements
from megajax.estimate.communication import step_sends
from megajax.estimate.expert_dispatch import (
    DispatchSeconds,
    ExposedSeconds,
    expert_seconds,
    sent_bytes,
    with_expert_dispatch,
)
from megajax.estimate.gpus import Gpu
from megajax.estimate.kept import kept_of_block
from megajax.estimate.kinds import layers_of_kinds, stage_layer_counts
from megajax.estimate.least_blocks import LeastBlocks, LeastTimes
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.parameters import sharded_parameters, trained_rank_parameters
from megajax.estimate.program_blocks import Blocks
from megajax.estimate.program_kernels import Kernels, Work
from megajax.estimate.program_time import CAST, NORM, Program
from megajax.estimate.rates import spread, waiting
from megajax.estimate.trained import trained_parameters
from megajax.estimate.update_time import update_bytes
from megajax.pipeline.program import StepProgram
from megajax.plan.memory_bounds import EXACT, UNSCHEDULED, MemoryBounds, split_of_experts, unscheduled
from megajax.schedules.registry import check_sizes
from megajax.schedules.simulate import Costs

__all__ = ["Bounds", "Least"]

WHOLE_EXPERTS: dict[str, Any] = {"expert": 1, "expert_tensor": None, "expert_dispatch": "gather"}
NOTHING_SENT = DispatchSeconds(0.0, 0.0, ExposedSeconds(0.0, 0.0, 0.0))


class BlockTimes(NamedTuple):
    """Seconds of a block, and the bytes that it keeps."""

    forward: float
    backward: float
    part: float  # of the backward: the gradient of the input
    merged: float  # a forward and a backward
    kept: float


class Least(NamedTuple):
    """What parts of a step take at least.

    Attributes:
      blocks: a block of each kind of layers.
      ends: seconds of embedding and head of a microbatch.
      once: seconds at the end of the step.
      by_operation: whether those of a block's forward and of the parts of its backward are bounds too, not just their sum.
    """

    blocks: tuple[BlockTimes, ...]
    ends: float
    once: float = 0.0
    by_operation: bool = False


class Bounds(MemoryBounds):
    """Bounds for the runs of one question that differ in their layout only."""

    def __init__(self, gpu: Gpu, gpus: int):
        super().__init__(gpu, gpus)
        self._step = EXACT * (1 + waiting(gpu, gpus))

    def least(self, run: RunConfig, *, kernels: bool = False, modes: Sequence[str] = (), once: bool = True) -> Least:
        """Of a run, whatever its schedule is.

        Blocks are those of whole backwards: with split ones, what is kept between their parts is written and read besides.

        Args:
          kernels: of all kernels, if the run has several stages, not of products, attention and experts' rows only.
          modes: recompute modes, of which the run may have any; none: the run's.
          once: with what is done once in a step, which takes longest to find out.
        """
        blocks = self._least(run, kernels, tuple(modes) or (run.parallel.recompute,))
        return Least(blocks, self._ends(run), self._once(run) if once else 0.0, run.parallel.zero < 3)

    def unscheduled_seconds(self, run: RunConfig, least: Least) -> float:
        """Of a step of the run, whatever its schedule and chunks are."""
        each = [min(one.forward + one.backward, one.merged) for one in least.blocks]
        passes = sum(map(operator.mul, self._layers(run, 1), each))
        passes = max(passes, -(-run.model.layers // run.parallel.pipe) * min(each))  # a rank has so many layers
        return self._step * (run.microbatches * (passes + least.ends) + least.once)

    def seconds(self, run: RunConfig, least: Least | None = None) -> float | None:
        """Of a step of the run, whose layout is known but for the placement of its vocabulary; None: it is not legal.

        Args:
          least: what is known of its parts; None: all.
        """
        parallel = run.parallel
        problem = _sizes(parallel.schedule, parallel.pipe, run.microbatches, parallel.chunks, parallel.group_size)
        if problem or parallel.pipe * parallel.chunks > run.model.layers:
            return None
        program = StepProgram.of(run)
        spec = program.spec
        if least is None:
            least = Least(self._blocks(run, bool(spec.split)), self._ends(run), self._once(run), by_operation=True)
        layers, merged = self._slowest(run, least), self._merged(program)
        alone = [one.forward + one.backward for one in least.blocks]
        together = [min(each, one.merged) for each, one in zip(alone, least.blocks, strict=True)]
        blocks = merged * sum(map(operator.mul, layers, together))
        blocks += (program.passes - merged) * sum(map(operator.mul, layers, alone))
        rest = self._bubble(program, layers, least) + run.microbatches * least.ends + least.once
        return self._step * (blocks + rest)

    def _slowest(self, run: RunConfig, least: Least) -> Sequence[float]:
        """Layers of each kind in a chunk of the stage that takes longest, for which the others wait."""
        parallel = run.parallel
        if not self._differ(run):
            return self._layers(run, parallel.chunks)
        own = parallel.pipe, parallel.chunks, parallel.schedule, parallel.pipeline_layout, parallel.recompute_blocks
        stages = self._shared(("stages", own), lambda: stage_layer_counts(run))
        seconds = [one.forward + one.backward for one in least.blocks]
        return max(stages, key=lambda counts: sum(map(operator.mul, counts, seconds)))

    def _merged(self, program: StepProgram) -> int:
        """How many of a rank's forwards run in one loop with a backward, at most."""
        spec = program.spec
        if spec.paired is False or not program.merges:
            return 0
        closed = spec.slots and spec.slots(**program.schedule_arguments)
        if not closed or program.passes == closed.stash:  # the table knows how many
            return program.passes
        return max(0, program.passes - closed.stash)

    def _bubble(self, program: StepProgram, layers: Sequence[float], least: Least) -> float:
        """Seconds of the bubble of a schedule with a closed form.

        Where only the sum of a chunk's operations is known (with several kinds of layers, that of the slowest stage), F, I
        and W are a third of it each. No others of the same sum have a shorter step: a longer one makes all ticks longer in
        which any rank has it. With fewer microbatches than ranks, schedules that split backwards have so many ticks with F
        only that a shorter F may win.
        """
        parallel, spec = program.run.parallel, program.spec
        if parallel.pipe == 1 or not spec.bubble:
            return 0.0
        forward, whole, part, *_ = (sum(map(operator.mul, layers, some)) for some in zip(*least.blocks, strict=True))
        if not least.by_operation or len(layers) > 1:
            if spec.split and program.run.microbatches < parallel.pipe:
                return 0.0
            part = forward = (forward + whole) / 3
            whole = 2 * part
        return program.bubble(Costs(forward, whole, part, whole - part), lockstep=True)

    def scheduled_memory(self, run: RunConfig) -> float:
        """Bytes of the fullest GPU of a run as for `seconds`, where its schedule has a closed form."""
        parallel, program = run.parallel, StepProgram.of(run)
        spec = program.spec
        if not spec.slots or spec.split is None or parallel.offload_activations or "costs" in spec.options:
            return self.memory_of_a_microbatch(run)
        layers, kinds = self._layers(run, parallel.chunks), self._blocks_alone(run, spec.split)
        kept = sum(count * one.kept for count, one in zip(layers, kinds, strict=True))
        closed = spec.slots(**program.schedule_arguments)
        stash = max(closed.stash * kept, self._kept(run)) if closed else self._kept(run)
        return self.memory(run) + EXACT * (stash + self._workspace(run))

    # Parts.

    def _dispatch(self, run: RunConfig) -> tuple[str, tuple[DispatchSeconds, ...]]:
        """How tokens get to their experts, and how long that takes, of a block of each kind."""
        parallel = run.parallel
        if parallel.expert == 1:
            return "gather", (NOTHING_SENT,) * len(self._layers(run, 1))
        own = (parallel.tensor, parallel.context, split_of_experts(parallel), parallel.microbatch_size)
        own += (parallel.recompute, parallel.expert_dispatch, parallel.sequence_parallel)
        # with which the devices in a host are the same
        own += (*(min(spread(parallel, axis), self.gpu.host_size) for axis in ("data", "tensor")),)

        def make() -> tuple[str, tuple[DispatchSeconds, ...]]:
            one = with_expert_dispatch(unscheduled(run, recompute=parallel.recompute), self.gpu)
            kinds = (Kernels(kind.run, self.gpu) for kind in layers_of_kinds(one))
            times = (expert_seconds(kind.model, one.parallel, kind.rates, kind.item, sent_bytes(run)) for kind in kinds)
            return one.parallel.expert_dispatch, tuple(times)

        return self._shared(("dispatch", own), make)

    def _least(self, run: RunConfig, kernels: bool, modes: tuple[str, ...]) -> tuple[BlockTimes, ...]:
        """Seconds of what is the same of a block of each kind in all schedules, in any of these recompute modes."""
        parallel, (dispatch, sent) = run.parallel, self._dispatch(run)
        kernels = kernels and parallel.pipe > 1
        same: dict[str, Any] = {"zero": 0, "expert_dispatch": dispatch}
        own = (parallel.tensor, parallel.microbatch_size / parallel.context, parallel.ring_ranks, parallel.attention)
        own += (parallel.sequence_parallel, parallel.tensor_overlap, parallel.pipe > 1, parallel.recompute == "full")
        if kernels:
            same["recompute_blocks"] = parallel.recompute_blocks
            own += (parallel.context, modes, parallel.recompute_blocks, parallel.context_exchange)

        def of_kind(kind: RunConfig) -> tuple[LeastTimes, float]:
            blocks = [LeastBlocks(kind.with_layout(recompute=mode), self.gpu) for mode in modes]
            each = (block.kernels_alone if kernels else block.least for block in blocks)
            return LeastTimes(*map(min, zip(*each, strict=True))), blocks[0].once

        make = lambda: self._of_kinds(("least", own), unscheduled(run, **same), of_kind)  # noqa: E731
        around = self._around(run)
        hidden = CONTEXT_MERGED * sum(around)
        found = []
        for (least, once), gathered, each in zip(
            self._shared(("least", own, split_of_experts(parallel), dispatch), make),
            self._gathered(run),
            sent,
            strict=True,
        ):
            exposed = each.exposed
            forward, part = least.forward + around[0] + exposed.forward, least.input + around[1] + exposed.backward
            both = max(forward + part + least.weight, gathered - once + exposed.forward + exposed.backward)
            merged = max(least.merged + hidden, gathered - once) + exposed.merged
            found.append(BlockTimes(forward, both - forward, part, max(merged, each.forward + each.backward), 0.0))
        return tuple(found)

    def _gathered(self, run: RunConfig) -> tuple[float, ...]:
        """Seconds of ZeRO-3's collectives of a block of each kind, which takes no less: see `_least`."""
        parallel = run.parallel
        if parallel.zero < 3:
            return (0.0,) * len(self._layers(run, 1))
        own = (parallel.tensor, parallel.replicas, split_of_experts(parallel), parallel.axis_order)
        own += (min(spread(parallel, "data"), self.gpu.host_size),)

        def make() -> tuple[float, ...]:
            return tuple(LeastBlocks(kind.run, self.gpu).gathered for kind in layers_of_kinds(unscheduled(run)))

        return self._shared(("gathered", own), make)

    def _around(self, run: RunConfig) -> tuple[float, float]:
        """Seconds of exposed sends of attention's arrays of a block's forward and backward, of the kind that has fewest."""
        parallel = run.parallel
        own = (parallel.tensor, parallel.context, parallel.microbatch_size)
        own += (parallel.attention, parallel.context_exchange, parallel.recompute)
        own += (min(spread(parallel, "data"), self.gpu.host_size), parallel.axis_order)

        def make() -> tuple[float, float]:
            blocks = (Blocks(kind.run, self.gpu) for kind in layers_of_kinds(unscheduled(run)))
            return min(((one.around(0), one.around(1)) for one in blocks), key=sum)

        return self._shared(("around", own), make) if parallel.context > 1 else (0.0, 0.0)

    def _blocks(self, run: RunConfig, splits: bool) -> tuple[BlockTimes, ...]:
        """A block of each kind, in a schedule that splits its backwards or not. Of one stage for the run's schedule only."""
        return tuple(
            one._replace(
                forward=one.forward + sent.exposed.forward,
                backward=one.backward + sent.exposed.backward,
                part=one.part + sent.exposed.backward,
                merged=max(one.merged + sent.exposed.merged, sent.forward + sent.backward),
            )
            for one, sent in zip(self._blocks_alone(run, splits), self._dispatch(run)[1], strict=True)
        )

    def _blocks_alone(self, run: RunConfig, splits: bool) -> tuple[BlockTimes, ...]:
        """As `_blocks` without sending tokens to their experts, which depends on where the replicas of a group are."""
        parallel = run.parallel
        apart, inside = parallel.pipe > 1, parallel.axis_order[-1] == "tensor"
        near = parallel.zero == 3 or parallel.context > 1 or not inside  # whether neighbouring replicas matter
        own = (parallel.tensor, parallel.context, parallel.microbatch_size, parallel.recompute)
        own += (parallel.recompute_blocks, parallel.zero == 3, parallel.sequence_parallel, parallel.attention)
        own += (parallel.offload_activations, parallel.tensor_overlap, near and parallel.axis_order, splits, apart)
        own += (parallel.context_exchange,)
        if not apart:
            own += (parallel.schedule, parallel.data)
        elif not inside:  # neighbours on other axes decide how many of a tensor group are in a host
            own += (parallel.pipe, parallel.data)
        elif parallel.zero == 3:
            own += (parallel.data,)
        dispatch = self._dispatch(run)[0]
        key = ("blocks", own, split_of_experts(parallel), dispatch)
        return self._shared(key, lambda: self._times(run, splits, inside, dispatch, own))

    def _times(
        self, run: RunConfig, splits: bool, inside: bool, dispatch: str, own: Hashable
    ) -> tuple[BlockTimes, ...]:
        parallel = run.parallel
        same: dict[str, Any] = {"zero": 3 if parallel.zero == 3 else 0, "expert_dispatch": dispatch}
        if parallel.pipe > 1:
            same |= UNSCHEDULED | {"schedule": "zb_h1" if splits else "1f1b"}
            if inside:
                same |= {"pipe": 2}  # with more stages no more replicas, and ranks of a sample, are in a host
        one = run.with_layout(**same)
        program, item = StepProgram.of(one), ITEMSIZE[run.train.precision]

        def times(kind: RunConfig) -> BlockTimes:
            block = Blocks(kind, self.gpu, program)
            # A schedule whose ticks can merge has forwards and whole backwards only (`Schedule.validate`).
            merged = _bounded(block.merged) if program.merges and not splits else math.inf
            seconds = (_bounded(block.forward), _bounded(block.backward), _bounded(block.input), merged)
            return BlockTimes(*seconds, kept_of_block(kind, item))

        return self._of_kinds(("block", own), one, times)

    def _of_kinds(self, key: Hashable, run: RunConfig, of: Callable[[RunConfig], Any]) -> tuple[Any, ...]:
        """`of` the layers of each kind; `key` says what it depends on besides experts, which not all kinds have."""

        def one(number: int, kind: RunConfig) -> Any:
            if model_costs(kind.model).experts is None:
                return self._shared((key, number), lambda: of(kind))
            return of(kind)

        return tuple(one(number, kind.run) for number, kind in enumerate(layers_of_kinds(run)))

    def _ends(self, run: RunConfig) -> float:
        """Seconds of embedding and head of a microbatch."""
        parallel = run.parallel
        own = (parallel.tensor, parallel.context, parallel.pipe, parallel.microbatch_size, parallel.sequence_parallel)
        own += (parallel.vocab_parallel, parallel.axis_order)
        has_modules = model_costs(run.model).further is not None
        data, host = parallel.data, self.gpu.host_size  # of replicas inside of pipelines, so many are as far as more
        near = host if data % host == 0 and not has_modules else data
        if apart := parallel.axis_order[0] != "data" or has_modules:
            own += (near,)
        if has_modules:  # which have experts too
            own += (split_of_experts(parallel), parallel.expert_dispatch, parallel.attention)

        def make() -> float:
            same: dict[str, Any] = {} if has_modules else WHOLE_EXPERTS
            one = unscheduled(run, **same, zero=0, tensor_overlap="none", data=near if apart else 1)
            return min(_bounded(Program(placed, self.gpu).ends) / placed.microbatches for placed in placements(one))

        return self._shared(("ends", own), make)

    def _once(self, run: RunConfig) -> float:
        """Seconds at the end of a step."""
        parallel, train = run.parallel, run.train
        if train.optimizer == "muon" or trained_parameters(run) is not None:  # parameters are not updated alike
            return 0.0
        own = (parallel.tensor, parallel.pipe, parallel.context, parallel.data, parallel.zero)
        own += (split_of_experts(parallel), parallel.vocab_parallel, parallel.axis_order)
        return self._shared(("once", own), lambda: min(map(self._end_of_step, placements(unscheduled(run)))))

    def _end_of_step(self, run: RunConfig) -> float:
        program = Program(run, self.gpu)
        state = sharded_parameters(run, trained_rank_parameters(run, program.sharding), run.parallel.zero > 0)
        moved = program.traffic(state * (CAST + NORM + update_bytes(run.train))).total
        share = min(self._shares(run)) if self._differ(run) else 1.0
        return share * (moved + sum(program.seconds_of(one) for one in step_sends(run)))


def _bounded(work: Work) -> float:
    """Seconds without sending tokens to their experts."""
    return work.total - work.expert


_sizes = functools.lru_cache(maxsize=1 << 16)(
    lambda name, stages, microbatches, chunks, group: check_sizes(
        name, stages=stages, microbatches=microbatches, chunks=chunks, group_size=group
    )
)
