"""Attention of new tokens to a cache of the keys and values of earlier ones, for text generation.

A model declares its cache as `CachedArray`s. Whoever runs the model allocates them, hands a block those of its layer as a
`Cache`, and stores what the block returns for the new tokens. So a block reads its cache and never copies it.

Shapes: b samples, n new tokens, t slots of the cache, g groups of heads with r heads of size d each.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.ops.attention import SCORES, Scoring, softmax_with_sinks
from megajax.ops.flash_attention import HIDDEN_SCORE
from megajax.ops.linear import Constrain, identity

__all__ = ["PADDING_POSITION", "Cache", "CachedArray", "cached_attention"]

PADDING_POSITION = -1  # of a padding token, and of a slot that holds none


@dataclasses.dataclass(frozen=True)
class CachedArray:
    """One array that a block caches.

    Attributes:
      shape: of the cache of one layer, [samples, ...], with `slots` on one axis if it has any.
      dtype: its type.
      axes: logical axes, as `megajax.sharding.rules` maps them to mesh axes; the first is "batch".
      slot_axis: the axis with one slot for each token; None: the array is a state, which new tokens replace.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    slot_axis: int | None


class Cache(NamedTuple):
    """The cache of one block for b samples, as a block reads it.

    Attributes:
      arrays: by name, with the shapes of the block's `CachedArray`s.
      positions: int32 [b, t], the position in its sample of each slot's token; PADDING_POSITION: the slot is hidden.
    """

    arrays: Mapping[str, jax.Array]
    positions: jax.Array


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    cache: Cache,
    constrain: Constrain = identity,
    window: jax.Array | int | None = None,
    scoring: Scoring | None = None,
) -> jax.Array:
    """softmax(query key^T / sqrt(d)) value over the cached keys and the new ones, up to each query's position.

    The scores of cached and new keys are concatenated, not the keys: the cache is only read.

    Args:
      query: [b, n, g, r, d], rotated.
      key: [b, n, g, d], rotated.
      value: [b, n, g, d].
      positions: of the new tokens, int32 [b, n]. The output of a padding token has no meaning, and nothing attends to it.
      cache: "key" and "value" [b, g, t, d].
      constrain: (x, *logical axes) -> x, a sharding constraint.
      window: latest tokens that a token attends to, itself included, a scalar or [b, n, 1]; None: all before it.
      scoring: as of `plain_attention`.

    Returns:
      [b, n, g, r, d].
    """
    query = query * query.shape[-1] ** -0.5
    before = jnp.einsum("bngrd,bgtd->bgrnt", query, cache.arrays["key"])
    among = jnp.einsum("bngrd,bmgd->bgrnm", query, key)
    scores = constrain(jnp.concatenate([before, among], axis=-1), *SCORES).astype(jnp.float32)
    scoring = scoring or Scoring()
    scores = scoring.capped(scores)
    of_keys = jnp.concatenate([cache.positions, positions], axis=-1)[:, None, :]
    seen = (of_keys != PADDING_POSITION) & (of_keys <= positions[:, :, None])
    if window is not None:
        seen = seen & (of_keys > positions[:, :, None] - window)
    scores = jnp.where(seen[:, None, None], scores, HIDDEN_SCORE)
    probabilities = softmax_with_sinks(scores, scoring.sinks).astype(value.dtype)
    slots = cache.positions.shape[1]
    return jnp.einsum("bgrnt,bgtd->bngrd", probabilities[..., :slots], cache.arrays["value"]) + jnp.einsum(
        "bgrnm,bmgd->bngrd", probabilities[..., slots:], value
    )
