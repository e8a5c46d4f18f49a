"""Distillation from a teacher's largest logits (1503.02531), from logits whose vocabulary is sharded.

For each position the teacher gives K tokens and their logits; K may be the whole vocabulary. With z the student's logits, T
the temperature and q = softmax(teacher / T) over the K tokens, the loss is

    T^2 KL(q || softmax(z / T)) = T^2 sum_k q_k (log q_k - z_k / T + logsumexp(z / T))

The K logits are picked, and their gradients scattered, by each rank among its own rows, as `vocabulary.lookup` does: a
gather from a sharded axis can abort XLA's partitioner.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError
from megajax.ops.vocabulary import AXIS, RowsOverRanks, VocabularySharding, mask_padding, normaliser, plain_lookup

__all__ = ["TEACHER_ARRAYS", "Teacher", "distillation"]

TEACHER_ARRAYS = ("teacher_ids", "teacher_logits")


class Teacher(NamedTuple):
    """What a loss takes of its teacher: `distill_weight`, `distill_temperature`, `distill_top` of the run's TrainConfig."""

    weight: float
    temperature: float
    top: int


def distillation(
    logits: jax.Array,
    ids: jax.Array,
    teacher: jax.Array,
    vocabulary: int,
    settings: Teacher,
    sharding: VocabularySharding,
) -> jax.Array:
    """T^2 KL(teacher || student) of each position, fp32 [b, s], on all ranks.

    Args:
      logits: the student's, [b, s, local rows] of any float type.
      ids: the teacher's tokens, [b, s, K] integers below `vocabulary`.
      teacher: their logits or log-probabilities, [b, s, K]; -inf: there is no such token.
      vocabulary: rows that count; those from there on are padding.
      settings: temperature, and K.
      sharding: of the rows.

    Raises:
      ConfigError: the teacher's arrays have other shapes.
    """
    expected = (*logits.shape[:2], settings.top)
    for name, array in zip(TEACHER_ARRAYS, (ids, teacher), strict=True):
        if array.shape != expected:
            raise ConfigError(
                f"{name} of a microbatch has shape {array.shape}; expected {expected}, samples, positions and distill_top: "
                f"pass --distill-top {array.shape[-1] if array.ndim else 1}, or such arrays."
            )
    temperature, split = settings.temperature, sharding.lookup is not plain_lookup
    scaled = teacher.astype(jnp.float32) / temperature
    share = jax.nn.softmax(scaled, axis=-1)
    negative_entropy = jnp.where(share > 0, share * jax.nn.log_softmax(scaled, axis=-1), 0).sum(-1)
    crossed = _crossed(logits, ids, share, vocabulary, temperature, sharding.ranks, split)
    return temperature**2 * (negative_entropy + crossed)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _crossed(logits, ids, share, vocabulary, temperature, ranks: RowsOverRanks, split: bool) -> jax.Array:
    """- sum_k share_k log softmax(logits / T)[id_k], fp32 [b, s]; its derivative is written out, as `cross_entropy`'s."""
    return _forward(logits, ids, share, vocabulary, temperature, ranks, split)[0]


def _forward(logits, ids, share, vocabulary, temperature, ranks, split):
    masked = mask_padding(logits, vocabulary, ranks) / temperature
    total = normaliser(masked, ranks)[0]
    picked = ranks.sum((share * _pick(masked, ids - ranks.first_row(logits.shape[-1]), split)).sum(-1))
    return total - picked, (logits, ids, share, total)


def _backward(vocabulary, temperature, ranks, split, residuals, gradient):
    """The incoming gradient may be zeros on all ranks but one, as of `cross_entropy`. None for the teacher's arrays."""
    logits, ids, share, total = residuals
    softmax = jnp.exp(mask_padding(logits, vocabulary, ranks) / temperature - total[..., None])
    rows = logits.shape[-1]
    targets = _scatter(share, ids - ranks.first_row(rows), rows, split)
    slope = ranks.sum(gradient)[..., None] / temperature
    return ((softmax - targets) * slope).astype(logits.dtype), None, jnp.zeros_like(share)


_crossed.defvjp(_forward, _backward)


def _local(ids: jax.Array, rows: int, split: bool) -> jax.Array:
    """The tokens as indices into the rows of this rank of the tensor group; those of other ranks are `rows`."""
    index = ids.astype(jnp.int32) - (lax.axis_index(AXIS) * rows if split else 0)
    return jnp.where((index >= 0) & (index < rows), index, rows)


def _pick(logits: jax.Array, ids: jax.Array, split: bool) -> jax.Array:
    """The logits of tokens, fp32 [b, s, K], of [b, s, local rows] and [b, s, K]; 0 for rows of other pipeline ranks."""

    def local(logits, ids):
        rows = logits.shape[-1]
        index = _local(ids, rows, split)
        found = jnp.take_along_axis(logits, jnp.minimum(index, rows - 1), axis=-1)
        found = jnp.where(index < rows, found, 0)
        return lax.psum(found, AXIS) if split else found

    if not split:
        return local(logits, ids)
    return jax.shard_map(local, axis_names={AXIS}, in_specs=(P(None, None, AXIS), P()), out_specs=P())(logits, ids)


def _scatter(values: jax.Array, ids: jax.Array, rows: int, split: bool) -> jax.Array:
    """The transpose of `_pick`: values [b, s, K] added up in fp32 [b, s, local rows]."""

    def local(values, ids, like):
        places = [lax.broadcasted_iota(jnp.int32, ids.shape, axis) for axis in (0, 1)]
        return like.at[(*places, _local(ids, like.shape[-1], split))].add(values, mode="drop")

    like = jnp.zeros((*ids.shape[:2], rows), jnp.float32)
    if not split:
        return local(values, ids, like)
    specs = {"in_specs": (P(), P(), P(None, None, AXIS)), "out_specs": P(None, None, AXIS)}
    return jax.shard_map(local, axis_names={AXIS}, **specs)(values, ids, like)
