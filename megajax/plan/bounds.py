"""Lower bounds of the time and the memory of layouts that are known in part, by which `best.py` leaves layouts unpriced.

A bound is the model of `estimate` without what cannot be known yet, or costs more to find out:

    time      blocks of all microbatches, as one forward and one backward of a chunk or as both merged, whichever is shorter;
              embedding and head; the collectives and the update at the end of the step; with a schedule also its bubble.
              Without communication within groups of experts, and without ticks
    memory    weights, optimizer, gradients and 16-bit weights, of the fewest layers that a rank can hold. Without the stash

Both are at most what `step_time` and `bytes_per_device` say of every layout that has the known fields
(`tests/plan/test_best.py`). Parts that several layouts share are computed once.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from megajax.config import RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.estimate import model_costs
from megajax.estimate.auto import placements
from megajax.estimate.communication import step_sends
from megajax.estimate.gpus import Gpu
from megajax.estimate.kinds import layers_of_kinds
from megajax.estimate.memory import ITEMSIZE, bytes_per_device, kept_of_block
from megajax.estimate.parameters import sharded_parameters, trained_rank_parameters
from megajax.estimate.program_blocks import Blocks
from megajax.estimate.program_kernels import Work
from megajax.estimate.program_time import CAST, NORM, Program
from megajax.estimate.rates import waiting
from megajax.estimate.trained import trained_parameters
from megajax.estimate.update_time import update_bytes
from megajax.pipeline.program import StepProgram
from megajax.schedules.registry import Slots, check_sizes
from megajax.schedules.simulate import Costs

__all__ = ["Bounds"]

EXACT = 1 - 1e-9  # sums in another order differ by less
STATE = ("weights", "optimizer", "gradients", "16-bit weights")


class BlockTimes(NamedTuple):
    """Seconds of a block, without the communication that `_bounded` leaves out, and the bytes that it keeps."""

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

    def seconds(self, run: RunConfig) -> float:
        """Of a step of the run, whatever its schedule and chunks are; its other fields are known."""
        if run.parallel.pipe == 1:  # of one schedule, which decides whether there are loops over blocks
            return 0.0
        layers = self._layers(run, 1)
        passes = min(
            sum(count * min(one.forward + one.backward, one.merged) for count, one in zip(layers, kinds, strict=True))
            for kinds in (self._blocks(run, splits) for splits in (False, True))
        )
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

    def scheduled_memory(self, run: RunConfig) -> float:
        """Bytes of the fullest GPU of a run as for `scheduled_seconds`, where its schedule has a closed form."""
        parallel, program = run.parallel, StepProgram.of(run)
        memory, spec = self.memory(run), program.spec
        if not spec.slots or spec.split is None or parallel.offload_activations or "costs" in spec.options:
            return memory
        layers, kinds = self._layers(run, parallel.chunks), self._blocks(run, spec.split)
        kept = sum(count * one.kept for count, one in zip(layers, kinds, strict=True))
        closed = spec.slots(**program.schedule_arguments)
        return memory + EXACT * (closed.stash * kept if closed else 0)

    def _state(self, run: RunConfig) -> float:
        one = placements(_unscheduled(run))[0]
        found = bytes_per_device(one, slots=Slots(0, 0, 0))
        # Of layers of several kinds a rank may hold fewer with more chunks, but not fewer than its share.
        share = 1.0
        if layer_kinds(run.model):
            share = min(
                count / kind.rank_slots for count, kind in zip(self._layers(run, 1), layers_of_kinds(one), strict=True)
            )
        return EXACT * share * sum(found[part] for part in STATE)

    # Parts.

    def _shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _layers(self, run: RunConfig, chunks: int) -> list[float]:
        """Layers of each kind in a chunk, at least; of the stage that has most."""
        stages = run.parallel.pipe * chunks
        kinds = layer_kinds(run.model)
        if not kinds:
            return [-(-run.model.layers // stages)]
        return [kinds.count(kind) / stages for kind in sorted(set(kinds))]

    def _blocks(self, run: RunConfig, splits: bool) -> tuple[BlockTimes, ...]:
        """A block of each kind, in a schedule that splits its backwards or not. Of one stage for the run's schedule only."""
        parallel = run.parallel
        apart, inside = parallel.pipe > 1, parallel.axis_order[-1] == "tensor"
        own = (parallel.tensor, parallel.context, parallel.expert, parallel.microbatch_size, parallel.recompute)
        own += (parallel.recompute_blocks, parallel.zero == 3, parallel.sequence_parallel, parallel.attention)
        own += (parallel.offload_activations, parallel.tensor_overlap, parallel.axis_order, splits, apart)
        own += (parallel.context_exchange, parallel.expert_dispatch == "bucketed")
        if not apart:
            own += (parallel.schedule, parallel.data)
        elif not inside:  # neighbours on other axes decide how many of a tensor group are in a host
            own += (parallel.pipe, parallel.data)
        elif parallel.zero == 3:
            own += (parallel.data,)
        return self._shared(("blocks", own), lambda: tuple(self._times(run, splits, inside)))

    def _times(self, run: RunConfig, splits: bool, inside: bool) -> Iterator[BlockTimes]:
        parallel = run.parallel
        dispatch = "bucketed" if parallel.expert_dispatch == "bucketed" else "gather"
        same: dict[str, Any] = {"zero": 3 if parallel.zero == 3 else 0, "expert_dispatch": dispatch}
        if parallel.pipe > 1:
            same |= {"schedule": "zb_h1" if splits else "1f1b", "chunks": 1, "group_size": None, "live_chunks": None}
            if inside:
                same |= {"pipe": 2}  # with more stages no more replicas, and ranks of a sample, are in a host
        one = run.with_layout(**same)
        program, item = StepProgram.of(one), ITEMSIZE[run.train.precision]
        for kind in layers_of_kinds(one):
            block = Blocks(kind.run, self.gpu, program)
            merged = _bounded(block.merged) if program.merges else math.inf
            times = (_bounded(block.forward), _bounded(block.backward), _bounded(block.input), merged)
            yield BlockTimes(*times, kept_of_block(kind.run, item))

    def _ends(self, run: RunConfig) -> float:
        """Seconds of embedding and head of a microbatch."""
        parallel = run.parallel
        own = (parallel.tensor, parallel.context, parallel.pipe, parallel.microbatch_size, parallel.sequence_parallel)
        own += (parallel.vocab_parallel, parallel.axis_order)
        has_modules = model_costs(run.model).further is not None
        if apart := parallel.axis_order[0] != "data" or has_modules:
            own += (parallel.data,)
        if has_modules:  # which have experts too
            own += (parallel.expert, parallel.expert_dispatch, parallel.attention)

        def make() -> float:
            one = _unscheduled(run).with_layout(zero=0, tensor_overlap="none")
            one = one if has_modules else one.with_layout(expert=1, expert_dispatch="gather")
            one = one if apart else one.with_layout(data=1)
            return min(_bounded(Program(placed, self.gpu).ends) / placed.microbatches for placed in placements(one))

        return self._shared(("ends", own), make)

    def _once(self, run: RunConfig) -> float:
        """Seconds at the end of a step."""
        parallel = run.parallel
        if layer_kinds(run.model) or run.train.optimizer == "muon" or trained_parameters(run) is not None:
            return 0.0
        own = (parallel.tensor, parallel.pipe, parallel.context, parallel.data, parallel.zero, parallel.expert)
        own += (parallel.vocab_parallel, parallel.axis_order)
        return self._shared(("once", own), lambda: min(map(self._end_of_step, placements(_unscheduled(run)))))

    def _end_of_step(self, run: RunConfig) -> float:
        program = Program(run, self.gpu)
        state = sharded_parameters(run, trained_rank_parameters(run, program.sharding), run.parallel.zero > 0)
        moved = program.traffic(state * (CAST + NORM + update_bytes(run.train))).total
        return moved + sum(program.seconds_of(one) for one in step_sends(run))


def _unscheduled(run: RunConfig) -> RunConfig:
    """The run with the fewest chunks, and so the fewest slots for layers."""
    return run.with_layout(
        schedule="1f1b", chunks=1, group_size=None, live_chunks=None, recompute="selective", recompute_blocks=1
    )


def _bounded(work: Work) -> float:
    """Seconds without the communication of experts, which depends on where the replicas of a group are."""
    return work.total - work.expert


_sizes = functools.lru_cache(maxsize=1 << 16)(
    lambda name, stages, microbatches, chunks, group: check_sizes(
        name, stages=stages, microbatches=microbatches, chunks=chunks, group_size=group
    )
)
