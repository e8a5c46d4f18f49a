"""Bytes that a block keeps from a forward to its backward, and the copies of them that XLA makes.

The values are those of `models/costs.py`. What is kept twice, and which values are copied, was read off programs compiled
for H100s.
"""

from collections.abc import Iterable

from megajax.config import ParallelConfig, RunConfig
from megajax.estimate import model_costs
from megajax.estimate.gpus import is_fused
from megajax.models.costs import KeptValue, ModelCosts
from megajax.ops.attention_choice import FUSED

__all__ = [
    "exchanged_copies",
    "is_gated",
    "kept_by_experts",
    "kept_by_matmuls",
    "kept_for_weights",
    "kept_of_block",
    "kept_twice",
    "rows_of",
    "stash_copies",
]


def rows_of(model: ModelCosts, parallel: ParallelConfig) -> int:
    """Tokens of a microbatch on a device: context parallelism splits the sequence."""
    return parallel.microbatch_size * (model.sequence_length // parallel.context)


def is_gated(model: ModelCosts) -> bool:
    """Whether the MLP's activation multiplies two halves of what its first matmul computes."""
    widths = {value.name: value.per_token for value in model.kept}
    return widths.get("up", 0) > widths.get("activation", 0)


def kept_by_matmuls(run: RunConfig, item: int) -> int:
    """Of the bytes of `kept_of_block` those of the results of column-parallel matmuls."""
    model, parallel = model_costs(run.model), run.parallel
    values = [one for one in model.kept if one.name in ("qkv", "up") and parallel.recompute in one.modes]
    return _bytes_of(values, run, item)


def kept_by_experts(run: RunConfig, item: int) -> int:
    """Of the bytes of `kept_of_block` those of the results of experts' first matmul."""
    values = [one for one in model_costs(run.model).kept if one.name == "up" and one.routed]
    return _bytes_of((one for one in values if run.parallel.recompute in one.modes), run, item)


def kept_of_block(run: RunConfig, item: int, mode: str | None = None) -> int:
    """Bytes that one block keeps from the forward to the backward of one microbatch, on one device.

    Args:
      item: bytes of an activation.
      mode: recompute mode, if not the run's. Blocks that are recomputed together keep one input, a part of it each.
    """
    model, parallel = model_costs(run.model), run.parallel
    kept = model.kept_bytes(
        mode or parallel.recompute,
        samples=parallel.microbatch_size,
        sequence=model.sequence_length // parallel.context,
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel,
        itemsize=item,
        fused_attention=is_fused(parallel),
        rows=model.expert_rows(parallel.expert, parallel.expert_dispatch),
    )
    if (mode or parallel.recompute) == "none":
        # What the column-parallel matmuls read is stored gathered.
        values = [value for value in model.kept if value.name in ("attention_input", "feedforward_input")]
        kept += _bytes_of(values, run, item, gathered=True) - _bytes_of(values, run, item)
    return kept // parallel.recompute_blocks


def kept_twice(run: RunConfig, item: int) -> int:
    """Bytes that a block without a loop keeps besides `kept_of_block`, whose values XLA does not compute again.

    Queries, keys and values before a norm of queries and keys, and after it; where the sequence is exchanged for heads the
    values after it are the exchanged ones, and the context is kept in two layouts.
    """
    values = model_costs(run.model).kept_values("none", is_fused(run.parallel))
    exchanged, heads = run.parallel.context > run.parallel.ring_ranks, model_costs(run.model).attention
    if not is_fused(run.parallel) or heads is None:
        return 0
    twice = _bytes_of((value for value in values if value.name == "context"), run, item) if exchanged else 0
    if getattr(run.model, "query_key_norm", False):
        qkv = _bytes_of((value for value in values if value.name == "qkv"), run, item)
        twice += qkv - exchanged * qkv * heads.groups // (heads.heads + 2 * heads.groups)
    return twice


def kept_for_weights(run: RunConfig, item: int) -> int:
    """Bytes that I keeps for W of one block."""
    kept = model_costs(run.model).kept_for_weights
    return _bytes_of((value for value in kept if run.parallel.recompute in value.modes), run, item)


def _bytes_of(values: Iterable[KeptValue], run: RunConfig, item: int, gathered: bool = False) -> int:
    """Bytes of these values of one block, for one microbatch, on one device; or gathered over the tensor group."""
    model, parallel = model_costs(run.model), run.parallel
    sizes = {
        "samples": parallel.microbatch_size,
        "sequence": model.sequence_length // parallel.context,
        "itemsize": item,
        "tensor": parallel.tensor,
        "sequence_parallel": parallel.sequence_parallel and not gathered,
        "rows": model.expert_rows(parallel.expert, parallel.expert_dispatch),
    }
    return sum(value.bytes(**sizes) for value in values)


def stash_copies(run: RunConfig, item: int) -> int:
    """Second copies of stashed values, by block.

    The backward's matmuls need some values transposed. XLA's GPU compiler hoists the transposition out of the loop over
    blocks and so transposes the whole stash, once for each chunk.

    Which values was read off compiled programs and is `KeptValue.transposed_from`: unfused attention's scores, whenever they
    are kept; queries, keys and values where they are rotated and a microbatch has several samples. With a fused kernel there
    are none of these. With fp8, what a gated activation reads. Where a chunk is one block there is no loop: the workspace
    reuses the copy's memory.
    """
    parallel, model = run.parallel, model_costs(run.model)
    if parallel.pipe == 1 or parallel.recompute == "full":
        return 0
    kept = model.kept_values(parallel.recompute, is_fused(parallel))
    first = 1 if parallel.attention in FUSED else parallel.microbatch_size + 1
    copied = [value for value in kept if value.transposed_from is not None and value.transposed_from < first]
    if run.train.matmul_dtype == "fp8" and is_gated(model):
        copied += [value for value in kept if value.name == "up"]
    return _bytes_of(copied, run, item)


def exchanged_copies(run: RunConfig, item: int) -> int:
    """Second copies of what a block stashes, while ticks have backwards only.

    An all-to-all of a context takes several samples with the heads first. In loops without a forward XLA stores all that
    these backwards exchange in that order, and copies it before them.
    """
    parallel = run.parallel
    if parallel.pipe == 1 or parallel.microbatch_size == 1 or parallel.context == parallel.ring_ranks:
        return 0
    kept = model_costs(run.model).kept_values(parallel.recompute, is_fused(parallel))
    return _bytes_of((value for value in kept if value.name in ("qkv", "context")), run, item)
