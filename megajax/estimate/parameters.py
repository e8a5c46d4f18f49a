"""Parameters that a device holds, as numbers, under tensor, expert and pipeline parallelism, ZeRO and frozen weights.

Those of the blocks of a rank, and those outside of them, which every stage holds: token tables, norms, and the modules of
multi-token prediction. `memory.py` and `communication.py` make bytes of them.
"""

import dataclasses

from megajax.config import RunConfig, padded_vocabulary
from megajax.estimate import model_costs
from megajax.estimate.kinds import layers_of_kinds
from megajax.estimate.trained import trained_parameters
from megajax.models.costs import ModelCosts


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What is sharded beyond the pipeline stages and tensor parallelism.

    Attributes:
      zero: 0, nothing; 1, fp32 weights and optimizer state over data-parallel replicas (ZeRO-1, 1910.02054); 3, gradients
        and 16-bit weights too, gathered block by block when needed.
      vocabulary_over_pipe: the token table and the head's matmul are split over pipe * tensor, not over tensor.
      shards: replicas that ZeRO-3 shards over, and keeps as many copies as there are such groups; None: all replicas.
    """

    zero: int = 0
    vocabulary_over_pipe: bool = False
    shards: int | None = None

    @classmethod
    def from_config(cls, run: RunConfig) -> "Sharding":
        """The sharding of a run; without token tables, no table is split over pipe."""
        tables = model_costs(run.model).vocabulary_width > 0
        return cls(run.parallel.zero, run.parallel.vocabulary_over_pipe and tables)


def shared_parameters(model: ModelCosts, tensor: int, pipe: int, sharding: Sharding) -> int:
    """Parameters outside the blocks on one device; every stage holds them."""
    return _table_rows(model, tensor, pipe, sharding) * model.vocabulary_width + parameters_of_ends(model, tensor)


def looked_up_parameters(run: RunConfig, sharding: Sharding) -> int:
    """Parameters on one device of token tables that are trained, only looked up, and gathered by no replica."""
    model, parallel = model_costs(run.model), run.parallel
    if sharding.zero and parallel.replicas > 1 or trained_parameters(run) is not None:
        return 0
    return model.looked_up_width * _table_rows(model, parallel.tensor, parallel.pipe, sharding)


def _table_rows(model: ModelCosts, tensor: int, pipe: int, sharding: Sharding) -> int:
    """Rows of a token table on one device."""
    split = tensor * (pipe if sharding.vocabulary_over_pipe else 1)
    return padded_vocabulary(model.vocabulary, split) // split


def parameters_of_ends(model: ModelCosts, tensor: int) -> int:
    """Those of `shared_parameters` that are in no token table: norms, positions, and modules without their experts."""
    found, further = model.shared.on_device(tensor), model.further
    if further:
        experts = further.experts.on_device(tensor, 1) if further.experts else 0
        found += further.shared.on_device(tensor) + further.layers * (further.block.on_device(tensor) - experts)
    return found


def experts_of_modules(run: RunConfig) -> int:
    """Parameters of the experts of multi-token prediction on one device, which has all modules."""
    further, parallel = model_costs(run.model).further, run.parallel
    if further is None or further.experts is None:
        return 0
    return further.layers * further.experts.on_device(parallel.expert_shares, parallel.expert)


def block_parameters(run: RunConfig) -> tuple[int, int]:
    """Parameters of one block on one device, before ZeRO: those outside its experts, and its experts'.

    Of a run whose layers are all of one kind (`kinds.layers_of_kinds`).
    """
    model, parallel = model_costs(run.model), run.parallel
    block = model.block.on_device(parallel.tensor)
    if model.experts is None:
        return block, 0
    own = model.experts.on_device(parallel.expert_shares, parallel.expert)
    return block - model.experts.on_device(parallel.tensor, 1), own


def block_arrays(run: RunConfig) -> tuple[int, int]:
    """How many arrays a block's parameters are: those outside its experts, and its experts'.

    Of a run whose layers are all of one kind (`kinds.layers_of_kinds`).
    """
    model, costs = run.model, model_costs(run.model)
    experts = sum(one.name.startswith("experts") for one in costs.matmuls)
    dense = len(costs.matmuls) - experts
    of_norm = {"layernorm": 2, "unweighted_rmsnorm": 0}.get(getattr(model, "norm", ""), 1)
    norms = getattr(model, "block_norms", 2) * of_norm
    vectors = norms + dense * getattr(model, "biases", False) + 2 * getattr(model, "query_key_norm", False)
    return dense + vectors, max(1, experts)


def rank_parameters(run: RunConfig, sharding: Sharding) -> tuple[int, int]:
    """Parameters of a rank on one device, before ZeRO: those outside the experts, and the experts'.

    The first have d C replicas, the others d C / N, or where tensor ranks have experts of their own d C t / N.
    """
    model, parallel = model_costs(run.model), run.parallel
    common, experts = rank_block_parameters(run)
    shared = shared_parameters(model, parallel.tensor, parallel.pipe, sharding)
    return common + shared, experts + experts_of_modules(run)


def rank_block_parameters(run: RunConfig) -> tuple[int, int]:
    """Parameters of all blocks of a rank on one device; a slot without a layer takes as much memory as another."""
    held = [(kind.rank_slots, block_parameters(kind.run)) for kind in layers_of_kinds(run)]
    return sum(slots * common for slots, (common, _) in held), sum(slots * experts for slots, (_, experts) in held)


def trained_rank_parameters(run: RunConfig, sharding: Sharding) -> tuple[int, int]:
    """Those of `rank_parameters` that are trained."""
    trained = trained_parameters(run)
    if trained is None:
        return rank_parameters(run, sharding)
    slots = [kind.rank_slots for kind in layers_of_kinds(run)]
    common, experts = (
        sum(n * block[which] for n, block in zip(slots, trained.blocks, strict=True)) for which in (0, 1)
    )
    return common + trained.shared, experts


def frozen_parameters(run: RunConfig, sharding: Sharding) -> int:
    """Parameters on one device that are not trained: stored as they are computed with, of blocks sharded by ZeRO-3."""
    trained = trained_parameters(run)
    if trained is None:
        return 0
    shared = shared_parameters(model_costs(run.model), run.parallel.tensor, run.parallel.pipe, sharding)
    own = trained_rank_parameters(run, sharding)
    common, experts = (max(0, a - b) for a, b in zip(rank_parameters(run, sharding), own, strict=True))
    outside = max(0, shared - trained.shared)
    return outside + sharded_parameters(run, (max(0, common - outside), experts), sharding.zero >= 3)


def sharded_parameters(run: RunConfig, of_rank: tuple[int, int], is_sharded: bool) -> int:
    """Parameters of a rank on one device (`rank_parameters`), sharded over their replicas or not."""
    (common, experts), replicas = of_rank, run.parallel.replicas
    if not is_sharded:
        return common + experts
    return common // replicas + experts // (replicas // run.parallel.expert_replicas)


def trained_shared_parameters(run: RunConfig, sharding: Sharding) -> int:
    """Those of `shared_parameters` that are trained."""
    trained = trained_parameters(run)
    if trained is not None:
        return trained.shared
    return shared_parameters(model_costs(run.model), run.parallel.tensor, run.parallel.pipe, sharding)
