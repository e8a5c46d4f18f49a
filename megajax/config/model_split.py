"""Whether a transformer's arrays can be split as a layout requires."""

import math
from typing import Any

from megajax.config.errors import ConfigError, divisors, either, multiples, one_of
from megajax.config.experts import check_expert_parallel
from megajax.config.layer_kinds import DENSE, check_kinds_parallel
from megajax.config.layer_pattern import variants
from megajax.config.mixers import check_mixer_parallel
from megajax.config.parallel import ParallelConfig

__all__ = ["can_exchange", "check_split", "heads_of_device"]


def check_split(model: Any, parallel: ParallelConfig) -> None:
    """Checks that a `ModelConfig`'s arrays can be split as `parallel` requires; both are already validated.

    Tensor parallelism splits heads, MLP columns and, with sequence parallelism, the sequence. A context group splits
    the sequence into two pieces a rank (see `megajax.ops.ring_attention`).

    Raises:
        ConfigError: for the first size that cannot be split.
    """
    check_expert_parallel(model, parallel)
    check_kinds_parallel(model, parallel)
    recurrent = check_mixer_parallel(model, parallel)
    if parallel.context > 1 and model.unfused_attention:
        value = next(filter(None, (getattr(one, model.unfused_attention) for one in variants(model))))
        raise ConfigError(
            f"{model.unfused_attention} = {value} is not computed by the kernels of "
            f"attention that context = {parallel.context} needs: pass --context 1."
        )
    tokens, pieces = model.sequence_length, 2 * parallel.context
    if parallel.context > 1 and tokens % pieces:
        legal = [1] + [n for n in divisors(tokens) if n > 1 and tokens % (2 * n) == 0]
        lengths = one_of("sequence_length", multiples(pieces, tokens), tokens)
        raise ConfigError(
            f"sequence_length = {tokens} cannot be cut into 2 * context = {pieces} pieces: pass "
            f"{either(one_of('context', legal, parallel.context), lengths)}."
        )
    split = {"heads": model.heads, "kv_heads": model.key_value_heads, "feedforward": model.feedforward_size}
    groups = model.key_value_heads
    if groups % parallel.tensor and parallel.tensor % groups == 0 and "tensor_overlap" not in parallel.rings:
        split["head_size"] = model.head_dimension  # each rank has a copy of a key and value head
        del split["kv_heads"]
    split |= recurrent
    if model.experts and model.shared_feedforward:
        split["shared_feedforward"] = model.shared_feedforward
    if model.layer_kinds:
        split["dense_feedforward"] = model.of_kind(DENSE).feedforward_size
    if parallel.sequence_parallel:
        split["sequence_length"] = model.sequence_length // parallel.context
    legal = divisors(math.gcd(*split.values()))
    for name, value in split.items():
        if value % parallel.tensor:
            size, step, instead, given = value, parallel.tensor, "", f"{name} = {value}"
            if name == "sequence_length":
                size, instead = model.sequence_length, "--no-sequence-parallel"
                if parallel.context > 1:
                    given = f"sequence_length / context = {size} / {parallel.context} = {value}"
                    step = parallel.context * math.lcm(2, parallel.tensor)
            raise ConfigError(
                f"{given} cannot be split over tensor = {parallel.tensor}: pass "
                + either(one_of("tensor", legal, parallel.tensor), one_of(name, multiples(step, size), size), instead)
                + "."
            )
    _check_exchange(model, parallel)


def _check_exchange(model: Any, parallel: ParallelConfig) -> None:
    """Raises ConfigError if heads cannot be split over the ranks of a sample as `context_exchange` requires."""
    if parallel.context == 1 or parallel.context_exchange != "all_to_all":
        return
    queries, keys = heads_of_device(model.heads, model.key_value_heads, parallel.tensor)
    if not can_exchange(queries, keys, parallel.context):
        legal = [n for n in divisors(queries) if can_exchange(queries, keys, n)]
        raise ConfigError(
            f"context_exchange = all_to_all splits the heads of a device, {queries} of queries and {keys} of keys, which "
            f"context = {parallel.context} cannot: pass {one_of('context', legal, parallel.context)}, or "
            "--context-exchange ring."
        )


def heads_of_device(heads: int, groups: int, tensor: int) -> tuple[int, int]:
    """(heads of queries, heads of keys) of a device; of fewer keys' than tensor ranks, each has a copy of one."""
    return heads // tensor, max(1, groups // tensor)


def can_exchange(queries: int, keys: int, ranks: int) -> bool:
    """Whether a device's heads of queries, and of keys, can be split over the ranks of a sample (`exchanged_attention`)."""
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)
