"""Lower bounds of the memory of layouts that are known in part: see `bounds.py`."""

import math
import operator
from collections.abc import Callable, Hashable
from typing import Any

from megajax.config import ParallelConfig, RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.estimate.auto import placements
from megajax.estimate.gpus import Gpu
from megajax.estimate.kept import kept_of_block
from megajax.estimate.kinds import layers_of_kinds
from megajax.estimate.memory import ITEMSIZE, bytes_per_device, workspace
from megajax.estimate.parameters import Sharding, block_parameters, rank_parameters, sharded_parameters
from megajax.estimate.trained import trained_parameters
from megajax.schedules.registry import Slots

__all__ = ["EXACT", "UNSCHEDULED", "MemoryBounds", "split_of_experts", "unscheduled"]

EXACT = 1 - 1e-9  # sums in another order differ by less
UNSCHEDULED: dict[str, Any] = {"chunks": 1, "group_size": None, "live_chunks": None, "pipeline_layout": None}
STATE = ("weights", "optimizer", "gradients", "16-bit weights")


class MemoryBounds:
    """Bounds for the runs of one question that differ in their layout only."""

    def __init__(self, gpu: Gpu, gpus: int):
        self.gpu, self.gpus = gpu, gpus
        self._known: dict[Hashable, Any] = {}

    def memory(self, run: RunConfig) -> float:
        """Bytes of the fullest GPU, whatever the schedule and the chunks are."""
        parallel = run.parallel
        own = (parallel.tensor, parallel.pipe, parallel.replicas, parallel.zero, split_of_experts(parallel))
        key = ("memory", own, parallel.vocab_parallel)
        return self._shared(key, lambda: self._state(run))

    def memory_of_a_microbatch(self, run: RunConfig) -> float:
        """As `memory`, with a workspace, and what a rank keeps of a microbatch that the last stage has."""
        return self.memory(run) + EXACT * (self._kept(run) + self._workspace(run))

    def _state(self, run: RunConfig) -> float:
        one = placements(unscheduled(run))[0]
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
        own = (parallel.tensor, parallel.context, split_of_experts(parallel), parallel.microbatch_size)
        own += (parallel.recompute, parallel.recompute_blocks, parallel.zero == 3, parallel.sequence_parallel)
        own += (parallel.attention, parallel.tensor_overlap, parallel.context_exchange)
        own += (parallel.expert_dispatch == "bucketed",)
        own += (parallel.pipe, parallel.vocab_parallel)

        def make() -> tuple[tuple[int, int], ...]:
            same = {"recompute": parallel.recompute, "recompute_blocks": parallel.recompute_blocks}
            one, item = placements(unscheduled(run, **same))[0], ITEMSIZE[run.train.precision]
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


def split_of_experts(parallel: ParallelConfig) -> tuple[int, int]:
    """In how many parts a layer's experts are, and each of them."""
    return parallel.expert, parallel.expert_shares


def unscheduled(run: RunConfig, **fields: Any) -> RunConfig:
    """The run with the fewest chunks, and so the fewest slots for layers; and with other values of these fields."""
    same = UNSCHEDULED | {"schedule": "1f1b", "recompute": "selective", "recompute_blocks": 1}
    return run.with_layout(**same | fields)
