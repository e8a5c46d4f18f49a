"""Bytes that a block keeps from a forward to its backward.

The values are those of `models/costs.py`. What is kept twice was read off programs compiled for H100s.
"""

import dataclasses
from collections.abc import Iterable

from megajax.config import ModelConfig, ParallelConfig, RunConfig
from megajax.estimate import model_costs
from megajax.estimate.gpus import is_fused
from megajax.models.costs import KeptValue, ModelCosts

__all__ = [
    "is_gated",
    "kept_by_experts",
    "kept_by_matmuls",
    "kept_for_weights",
    "kept_of_block",
    "kept_twice",
    "routed_tokens",
    "rows_of",
]


def rows_of(model: ModelCosts, parallel: ParallelConfig) -> int:
    """Tokens of a microbatch on a device: context parallelism splits the sequence."""
    return parallel.microbatch_size * (model.sequence_length // parallel.context)


def routed_tokens(model: ModelCosts, parallel: ParallelConfig) -> int:
    """Tokens of a microbatch for each of which a device has the rows of k experts, with balanced routing: its replica's.

    Where tensor ranks have experts of their own, as many as its part of the sequence has.
    """
    return rows_of(model, parallel) * parallel.expert_shares // parallel.tensor


def _costs(run: RunConfig) -> ModelCosts:
    """Of the run's model; of fewer heads of keys and values than ranks of tensor, each rank keeps a copy of one."""
    model, tensor = run.model, run.parallel.tensor
    attention = model_costs(model).attention
    if isinstance(model, ModelConfig) and attention and attention.groups % tensor:
        model = dataclasses.replace(model, kv_heads=tensor)
    return model_costs(model)


def _over_tensor(values: Iterable[KeptValue], parallel: ParallelConfig) -> tuple[KeptValue, ...]:
    """The values, of which tensor ranks with experts of their own each have rows of their own, of the hidden size too."""
    split = parallel.experts_over_tensor
    return tuple(dataclasses.replace(one, split="tensor") if split and one.routed else one for one in values)


def is_gated(model: ModelCosts) -> bool:
    """Whether the MLP's activation multiplies two halves of what its first matmul computes."""
    widths = {value.name: value.per_token for value in model.kept}
    return widths.get("up", 0) > widths.get("activation", 0)


def kept_by_matmuls(run: RunConfig, item: int) -> int:
    """Of the bytes of `kept_of_block` those of the results of column-parallel matmuls."""
    model, parallel = _costs(run), run.parallel
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
    model, parallel = _costs(run), run.parallel
    if parallel.experts_over_tensor:
        model = dataclasses.replace(model, kept=_over_tensor(model.kept, parallel))
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
    values = _costs(run).kept_values("none", is_fused(run.parallel))
    exchanged, heads = run.parallel.context > run.parallel.ring_ranks, _costs(run).attention
    if not is_fused(run.parallel) or heads is None:
        return 0
    twice = _bytes_of((value for value in values if value.name == "context"), run, item) if exchanged else 0
    if getattr(run.model, "query_key_norm", False):
        qkv = _bytes_of((value for value in values if value.name == "qkv"), run, item)
        twice += qkv - exchanged * qkv * heads.groups // (heads.heads + 2 * heads.groups)
    return twice


def kept_for_weights(run: RunConfig, item: int) -> int:
    """Bytes that I keeps for W of one block."""
    kept = _over_tensor(model_costs(run.model).kept_for_weights, run.parallel)
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
