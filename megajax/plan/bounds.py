"""Lower bounds of the time and the memory of layouts that are known in part, by which `best.py` leaves layouts unpriced.

A bound is the model of `estimate` without what cannot be known yet, or costs more to find out:

    time      blocks of all microbatches, as one forward and one backward of a chunk or as both merged, whichever is shorter;
              embedding and head; the collectives and the update at the end of the step; with a schedule also its bubble.
              Without ticks. At first of the blocks only the products, attention, experts' rows and where these are sent,
              which are the same for most layouts (`least_seconds`)
    memory    weights, optimizer, gradients and 16-bit weights, of the fewest layers that a rank can hold; and then what they
              keep of one microbatch and a block's workspace, with a schedule the stash

Both are at most what `step_time` and `bytes_per_device` say of every layout that has the known fields
(`tests/plan/test_best.py`). Parts that several layouts share are computed once.
"""

import functools
import math
import operator
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from megajax.config import RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.estimate import model_costs
from megajax.estimate.attention_kernels import CONTEXT_MERGED
from megajax.estimate.auto import placements
from megajax.estimate.communication import step_sends
from megajax.estimate.expert_dispatch import ExposedSeconds, expert_seconds, with_expert_dispatch
from megajax.estimate.gpus import Gpu
from megajax.estimate.kept import kept_of_block
from megajax.estimate.kinds import layers_of_kinds
from megajax.estimate.least_blocks import LeastBlocks
from megajax.estimate.memory import ITEMSIZE, bytes_per_device, workspace
from megajax.estimate.parameters import (
    Sharding,
    block_parameters,
    rank_parameters,
    sharded_parameters,
    trained_rank_parameters,
)
from megajax.estimate.program_blocks import Blocks
from megajax.estimate.program_kernels import Kernels, Work
from megajax.estimate.program_time import CAST, NORM, Program
from megajax.estimate.rates import spread, waiting
from megajax.estimate.trained import trained_parameters
from megajax.estimate.update_time import update_bytes
from megajax.pipeline.program import StepProgram
from megajax.schedules.registry import Slots, check_sizes
from megajax.schedules.simulate import Costs

__all__ = ["Bounds"]

EXACT = 1 - 1e-9  # sums in another order differ by less
UNSCHEDULED: dict[str, Any] = {"chunks": 1, "group_size": None, "live_chunks": None, "pipeline_layout": None}
STATE = ("weights", "optimizer", "gradients", "16-bit weights")


class BlockTimes(NamedTuple):
    """Seconds of a block, and the bytes that it keeps."""

    forward: float
    backward: float
    part: float  # of the backward: the gradient of the input
    merged: float  # a forward and a backward
    kept: float


class Bounds:
    """Bounds for the runs of one question that differ in their layout only."""

    def __init__(self, gpu: Gpu, gpus: int):
        self.gpu, self.gpus = gpu, gpus
        self._step = EXACT * (1 + waiting(gpu, gpus))
        self._known: dict[Hashable, Any] = {}

    def least_seconds(self, run: RunConfig, *, kernels: bool = False) -> float:
        """Of a step of the run as for `seconds`, of less and sooner found; `kernels`: of more, if it has several stages."""
        blocks = sum(map(operator.mul, self._layers(run, 1), self._least(run, kernels and run.parallel.pipe > 1)))
        return self._step * (run.microbatches * (blocks + self._ends(run)) + self._once(run))

    def seconds(self, run: RunConfig) -> float:
        """Of a step of the run, whatever its schedule and chunks are; its other fields are known.

        Blocks are those of whole backwards: with split ones, what is kept between their parts is written and read besides.
        """
        if run.parallel.pipe == 1:  # of one schedule, which decides whether there are loops over blocks
            return self.least_seconds(run)
        each = (min(one.forward + one.backward, one.merged) for one in self._blocks(run, splits=False))
        passes = sum(map(operator.mul, self._layers(run, 1), each))
        return self._step * (run.microbatches * (passes + self._ends(run)) + self._once(run))

    def scheduled_seconds(self, run: RunConfig) -> float | None:
        """Of a step of the run, whose layout is known but for the placement of its vocabulary; None: it is not legal."""
        parallel = run.parallel
        problem = _sizes(parallel.schedule, parallel.pipe, run.microbatches, parallel.chunks, parallel.group_size)
        if problem or parallel.pipe * parallel.chunks > run.model.layers:
            return None
        program = StepProgram.of(run)
        spec, layers = program.spec, self._layers(run, parallel.chunks)
        if spec.split is None:
            return self.seconds(run)
        kinds = self._blocks(run, spec.split)
        alone = spec.paired is False or not program.merges
        each = [one.forward + one.backward if alone else min(one.forward + one.backward, one.merged) for one in kinds]
        blocks = program.passes * sum(count * one for count, one in zip(layers, each, strict=True))
        bubble = 0.0
        if parallel.pipe > 1 and spec.bubble and len(kinds) == 1:
            forward, whole, part = (layers[0] * value for value in kinds[0][:3])
            bubble = program.bubble(Costs(forward, whole, part, whole - part), lockstep=True)
        return self._step * (blocks + bubble + run.microbatches * self._ends(run) + self._once(run))

    def memory(self, run: RunConfig) -> float:
        """Bytes of the fullest GPU, whatever the schedule and the chunks are."""
        parallel = run.parallel
        own = (parallel.tensor, parallel.pipe, parallel.replicas, parallel.zero, parallel.expert)
        key = ("memory", own, parallel.vocab_parallel)
        return self._shared(key, lambda: self._state(run))

    def memory_of_a_microbatch(self, run: RunConfig) -> float:
        """As `memory`, with a workspace, and what a rank keeps of a microbatch that the last stage has."""
        return self.memory(run) + EXACT * (self._kept(run) + self._workspace(run))

    def scheduled_memory(self, run: RunConfig) -> float:
        """Bytes of the fullest GPU of a run as for `scheduled_seconds`, where its schedule has a closed form."""
        parallel, program = run.parallel, StepProgram.of(run)
        spec = program.spec
        if not spec.slots or spec.split is None or parallel.offload_activations or "costs" in spec.options:
            return self.memory_of_a_microbatch(run)
        layers, kinds = self._layers(run, parallel.chunks), self._blocks_alone(run, spec.split)
        kept = sum(count * one.kept for count, one in zip(layers, kinds, strict=True))
        closed = spec.slots(**program.schedule_arguments)
        stash = max(closed.stash * kept, self._kept(run)) if closed else self._kept(run)
        return self.memory(run) + EXACT * (stash + self._workspace(run))

    def _state(self, run: RunConfig) -> float:
        one = placements(_unscheduled(run))[0]
        found = bytes_per_device(one, slots=Slots(0, 0, 0))
        of_state, of_sums = self._shares(one) if self._differ(run) else (1.0, 1.0)
        shares = (of_state, of_state, of_sums, of_sums)
        return EXACT * sum(share * found[part] for share, part in zip(shares, STATE, strict=True))

    def _shares(self, run: RunConfig) -> tuple[float, float]:
        """Of weights and optimizer, and of sums and 16-bit weights, of a rank's slots the part of its layers, at least.

        With more chunks a rank may have fewer slots, but not less than its share of the layers of each kind.
        """
        counts, kinds, train = self._layers(run, 1), layers_of_kinds(run), run.train
        slots = [kind.rank_slots for kind in kinds]
        if trained_parameters(run) is not None or train.matmul_dtype == "fp8" or train.optimizer != "adamw":
            # a part is not sharded, or parameters differ in their bytes
            share = min(map(operator.truediv, counts, slots))
            return share, share
        sharding, blocks = Sharding.from_config(run), [block_parameters(kind.run) for kind in kinds]
        held = rank_parameters(run, sharding)
        missing = [
            sum((slot - count) * block[of] for slot, count, block in zip(slots, counts, blocks, strict=True))
            for of in (0, 1)
        ]
        least = math.ceil(held[0] - missing[0]), math.ceil(held[1] - missing[1])
        on_device = lambda of_rank, level: sharded_parameters(run, of_rank, run.parallel.zero >= level)  # noqa: E731
        return on_device(least, 1) / on_device(held, 1), on_device(least, 3) / on_device(held, 3)

    # Parts.

    def _kept(self, run: RunConfig) -> float:
        """Bytes that the layers of a stage keep of a microbatch."""
        parallel = run.parallel
        if parallel.pipe == 1 or parallel.offload_activations:
            return 0.0
        return sum(map(operator.mul, self._layers(run, 1), (kept for kept, _ in self._activations(run))))

    def _workspace(self, run: RunConfig) -> float:
        """Bytes of a block's workspace, at least; none of one microbatch, which may have it before the sums of gradients."""
        if run.microbatches == run.parallel.pipe == 1:
            return 0.0
        return max(workspace for _, workspace in self._activations(run))

    def _activations(self, run: RunConfig) -> tuple[tuple[int, int], ...]:
        """Of a block of each kind the bytes that it keeps, and of its workspace where ticks do not merge."""
        parallel = run.parallel
        own = (parallel.tensor, parallel.context, parallel.expert, parallel.microbatch_size, parallel.recompute)
        own += (parallel.recompute_blocks, parallel.zero == 3, parallel.sequence_parallel, parallel.attention)
        own += (parallel.tensor_overlap, parallel.context_exchange, parallel.expert_dispatch == "bucketed")
        own += (parallel.pipe, parallel.vocab_parallel)

        def make() -> tuple[tuple[int, int], ...]:
            same = {"recompute": parallel.recompute, "recompute_blocks": parallel.recompute_blocks}
            one, item = placements(_unscheduled(run, **same))[0], ITEMSIZE[run.train.precision]
            sharding = Sharding.from_config(one)
            kinds = layers_of_kinds(one)
            return tuple((kept_of_block(kind.run, item), workspace(kind.run, item, sharding)) for kind in kinds)

        return self._shared(("activations", own), make)

    def _shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _layers(self, run: RunConfig, chunks: int) -> list[float]:
        """Layers of each kind in a chunk, at least; of the stage that has most."""
        stages = run.parallel.pipe * chunks
        return self._shared(("layers", stages), lambda: self._of_stages(run, stages))

    def _of_stages(self, run: RunConfig, stages: int) -> list[float]:
        kinds = layer_kinds(run.model)
        if not kinds:
            return [-(-run.model.layers // stages)]
        return [kinds.count(kind) / stages for kind in sorted(set(kinds))]

    def _differ(self, run: RunConfig) -> bool:
        """Whether the model has layers of several kinds."""
        return self._shared("differ", lambda: bool(layer_kinds(run.model)))

    def _dispatch(self, run: RunConfig) -> tuple[str, tuple[ExposedSeconds, ...]]:
        """How tokens get to their experts, and what of that is exposed at least, of a block of each kind."""
        parallel = run.parallel
        if parallel.expert == 1:
            return "gather", (ExposedSeconds(0.0, 0.0, 0.0),) * len(self._layers(run, 1))
        own = (parallel.tensor, parallel.context, parallel.expert, parallel.microbatch_size, parallel.sequence_parallel)
        own += (parallel.recompute, parallel.expert_dispatch)
        own += (min(spread(parallel, "data"), self.gpu.host_size),)  # with which the devices in a host are the same

        def make() -> tuple[str, tuple[ExposedSeconds, ...]]:
            one = with_expert_dispatch(_unscheduled(run, recompute=parallel.recompute), self.gpu)
            kinds = (Kernels(kind.run, self.gpu) for kind in layers_of_kinds(one))
            sent = (expert_seconds(kind.model, one.parallel, kind.rates, kind.item) for kind in kinds)
            return one.parallel.expert_dispatch, tuple(each.exposed for each in sent)

        return self._shared(("dispatch", own), make)

    def _least(self, run: RunConfig, kernels: bool = False) -> tuple[float, ...]:
        """Seconds of what is the same of a block of each kind in all schedules, and quickly found; `kernels`: of all."""
        parallel, (dispatch, sent) = run.parallel, self._dispatch(run)
        same: dict[str, Any] = {"zero": 0, "recompute": parallel.recompute, "expert_dispatch": dispatch}
        own = (parallel.tensor, parallel.microbatch_size / parallel.context, parallel.ring_ranks, parallel.attention)
        own += (parallel.sequence_parallel, parallel.tensor_overlap, parallel.pipe > 1, parallel.recompute == "full")
        if kernels:
            same["recompute_blocks"] = parallel.recompute_blocks
            own += (parallel.context, parallel.recompute, parallel.recompute_blocks, parallel.context_exchange)

        def least(kind: RunConfig) -> tuple[float, float]:
            block = LeastBlocks(kind, self.gpu)
            return (block.kernels_alone, block.least[1]) if kernels else block.least

        make = lambda: self._of_kinds(("least", own), _unscheduled(run, **same), least)  # noqa: E731
        # What ticks hide that merge, which those of several kinds of layers on one stage do not.
        merges = parallel.pipe > 1 or not self._differ(run)
        around = (CONTEXT_MERGED if merges else 1.0) * self._around(run)
        return tuple(
            max(kernels + around, gathered - once) + (each.merged if merges else each.forward + each.backward)
            for (kernels, once), gathered, each in zip(
                self._shared(("least", own, parallel.expert, dispatch), make), self._gathered(run), sent, strict=True
            )
        )

    def _gathered(self, run: RunConfig) -> tuple[float, ...]:
        """Seconds of ZeRO-3's collectives of a block of each kind, which takes no less: see `_least`."""
        parallel = run.parallel
        if parallel.zero < 3:
            return (0.0,) * len(self._layers(run, 1))
        own = (parallel.tensor, parallel.replicas, parallel.expert, parallel.axis_order)
        own += (min(spread(parallel, "data"), self.gpu.host_size),)

        def make() -> tuple[float, ...]:
            return tuple(LeastBlocks(kind.run, self.gpu).gathered for kind in layers_of_kinds(_unscheduled(run)))

        return self._shared(("gathered", own), make)

    def _around(self, run: RunConfig) -> float:
        """Seconds of exposed sends of attention's arrays of a block, of the kind that has fewest."""
        parallel = run.parallel
        own = (parallel.tensor, parallel.context, parallel.microbatch_size)
        own += (parallel.attention, parallel.context_exchange, parallel.recompute)
        own += (min(spread(parallel, "data"), self.gpu.host_size), parallel.axis_order)

        def make() -> float:
            blocks = (Blocks(kind.run, self.gpu) for kind in layers_of_kinds(_unscheduled(run)))
            return min(one.around(0) + one.around(1) for one in blocks)

        return self._shared(("around", own), make) if parallel.context > 1 else 0.0

    def _blocks(self, run: RunConfig, splits: bool) -> tuple[BlockTimes, ...]:
        """A block of each kind, in a schedule that splits its backwards or not. Of one stage for the run's schedule only."""
        return tuple(
            one._replace(
                forward=one.forward + sent.forward,
                backward=one.backward + sent.backward,
                part=one.part + sent.backward,
                merged=one.merged + sent.merged,
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
        key = ("blocks", own, parallel.expert, dispatch)
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
            own += (parallel.expert, parallel.expert_dispatch, parallel.attention)

        def make() -> float:
            same: dict[str, Any] = {} if has_modules else {"expert": 1, "expert_dispatch": "gather"}
            one = _unscheduled(run, **same, zero=0, tensor_overlap="none", data=near if apart else 1)
            return min(_bounded(Program(placed, self.gpu).ends) / placed.microbatches for placed in placements(one))

        return self._shared(("ends", own), make)

    def _once(self, run: RunConfig) -> float:
        """Seconds at the end of a step."""
        parallel = run.parallel
        if not self._shared("alike", lambda: self._is_plain(run)):
            return 0.0
        own = (parallel.tensor, parallel.pipe, parallel.context, parallel.data, parallel.zero, parallel.expert)
        own += (parallel.vocab_parallel, parallel.axis_order)
        return self._shared(("once", own), lambda: min(map(self._end_of_step, placements(_unscheduled(run)))))

    def _is_plain(self, run: RunConfig) -> bool:
        """Whether all parameters are trained alike, in layers of one kind."""
        return not (self._differ(run) or run.train.optimizer == "muon" or trained_parameters(run) is not None)

    def _end_of_step(self, run: RunConfig) -> float:
        program = Program(run, self.gpu)
        state = sharded_parameters(run, trained_rank_parameters(run, program.sharding), run.parallel.zero > 0)
        moved = program.traffic(state * (CAST + NORM + update_bytes(run.train))).total
        return moved + sum(program.seconds_of(one) for one in step_sends(run))


def _unscheduled(run: RunConfig, **fields: Any) -> RunConfig:
    """The run with the fewest chunks, and so the fewest slots for layers; and with other values of these fields."""
    same = UNSCHEDULED | {"schedule": "1f1b", "recompute": "selective", "recompute_blocks": 1}
    return run.with_layout(**same | fields)


def _bounded(work: Work) -> float:
    """Seconds without sending tokens to their experts."""
    return work.total - work.expert


_sizes = functools.lru_cache(maxsize=1 << 16)(
    lambda name, stages, microbatches, chunks, group: check_sizes(
        name, stages=stages, microbatches=microbatches, chunks=chunks, group_size=group
    )
)
