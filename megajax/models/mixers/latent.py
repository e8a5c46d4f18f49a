"""Latent attention (2405.04434 section 2.1): keys and values of all heads are computed from one small latent of a token.

    queries   y -> latent [q] -> norm -> [a, d], or y -> [a, d]; the last e elements of a head are rotated
    keys      y -> latent [r], and e elements, rotated, that all heads share; latent -> norm -> [a, d - e] before these
    values    the same normed latent -> [a, v]

Down projections have whole weights on every rank of a tensor group, and are computed on its part of the sequence: what is
gathered is the latents, not y. Heads are split. The norms' epsilon is 1e-6 in all released models, whatever the others' is.

A cache has the normed latent and the shared part of the key, not split over tensor. For new tokens the up projections of
keys and values are applied to queries and to the result instead ("absorbed"): a query of r + e elements for each head, one
key for all heads, whose first r elements are the value.

Shapes: b samples, s tokens, h = hidden, a heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.config.latent import LatentSizes, latent_sizes
from megajax.models.dropout import Dropout
from megajax.models.feedforward import Linear
from megajax.models.interface import Microbatch, ModelContext
from megajax.models.mixers.attention import Attention, with_rotary_table
from megajax.models.nnx_model import named_key
from megajax.models.norms import ReplicatedNorm
from megajax.models.rotary import rotate, table_of_layer
from megajax.ops.attention import Scoring
from megajax.ops.cached_attention import Cache, CachedArray, cached_attention

__all__ = ["LatentAttention", "latent_cache"]

EPSILON = 1e-6
SPLIT, WHOLE = ("batch", "sequence", None), ("batch", "whole_sequence", None)
HEADS = ("batch", "whole_sequence", "heads", None)


class LatentAttention(Attention):
    """Attention whose queries, keys and values have latents; causal. Calls are those of `Attention`."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        """Draws the weights of one layer from its key."""
        self.config, self.constrain, self.operations = config, context.constrain, context.operations
        self.groups = config.heads
        one, hidden, heads = self.sizes, {"hidden": config.hidden}, config.heads
        small = config.init_deviation / (2 * config.layers) ** 0.5

        def linear(name: str, inputs: dict[str, int], outputs: dict[str, int]) -> Linear:
            return Linear(named_key(key, name), inputs, outputs, config.init_deviation, False)

        queries = {"heads": heads, "_head_size": one.plain + one.rotated}
        if one.query:
            self.query_down = linear("query_down", hidden, {"_latent": one.query})
            self.query_norm = ReplicatedNorm(config, one.query, EPSILON)
            self.query_up = linear("query_up", {"_latent": one.query}, queries)
        else:
            self.query = linear("query", hidden, queries)
        self.key_value_down = linear("key_value_down", hidden, {"_latent": one.key_value + one.rotated})
        self.key_value_norm = ReplicatedNorm(config, one.key_value, EPSILON)
        both = {"heads": heads, "_key_and_value": one.plain + one.value}
        self.key_value_up = linear("key_value_up", {"_latent": one.key_value}, both)
        joined = {"heads": heads, "_value_size": one.value}
        self.output = Linear(named_key(key, "output"), joined, hidden, small, config.has_output_biases)

    @property
    def sizes(self) -> LatentSizes:
        """Of its arrays."""
        return latent_sizes(self.config)

    def _down(self, y: jax.Array, linear: Linear) -> jax.Array:
        """y [b, split s, h] to a latent [b, split s, n]."""
        return checkpoint_name(self.constrain(linear(y, jnp.tensordot, 1), *SPLIT), "latents")

    def _projected(self, y: jax.Array, microbatch: Microbatch, layer: jax.Array) -> tuple[jax.Array, ...]:
        """Of y [b, split s, h] queries [b, whole s, a, d], the latent [b, split s, r], the shared key [b, whole s, e]."""
        one, column = self.sizes, self.operations.column
        if one.query:
            latent = self.query_norm(self._down(y, self.query_down))
            query = checkpoint_name(self.query_up(latent, column, HEADS), "expanded")
        else:
            query = checkpoint_name(self.query(y, column, HEADS), "qkv")
        down = self._down(y, self.key_value_down)
        latent, shared = self.key_value_norm(down[..., : one.key_value]), down[..., one.key_value :]
        shared = self.constrain(shared, *WHOLE)
        if self.config.positions == "rotary":
            tables = with_rotary_table(self.config, microbatch, query.shape[1])["rotary"]
            table, neighbours = table_of_layer(self.config, tables, layer), self.config.rotary_pairs == "neighbours"
            turned = rotate(query[..., one.plain :], table, neighbours)
            query = jnp.concatenate([query[..., : one.plain], turned], -1)
            shared = rotate(shared, table, neighbours)
        return query, latent, shared

    def project(
        self, y: jax.Array, microbatch: Microbatch, layer: jax.Array, lora_drop: Dropout | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        """Of y [b, split s, h] queries [b, s, a, 1, d], keys [b, s, a, d] and values [b, s, a, v] of the whole s; no gate.

        Scores have the scale 1 / sqrt(d).
        """
        one = self.sizes
        query, latent, shared = self._projected(y, microbatch, layer)
        both = checkpoint_name(self.key_value_up(latent, self.operations.column, HEADS), "expanded")
        spread = jnp.broadcast_to(shared[:, :, None], (*both.shape[:3], one.rotated))
        key, value = jnp.concatenate([both[..., : one.plain], spread], -1), both[..., one.plain :]
        query = self._scaled(query)
        query, key, value = (self.constrain(x, *HEADS) for x in (query, key, value))
        return query[:, :, :, None], key, value, None

    def _scaled(self, query: jax.Array) -> jax.Array:
        """The queries [..., d] times what makes a scale of 1 / sqrt(d) the model's."""
        scale = self.config.attention_scale or self.config.head_dimension**-0.5
        factor = scale * query.shape[-1] ** 0.5
        return query if abs(factor - 1) < 1e-9 else query * jnp.asarray(factor, query.dtype)

    def cached(
        self,
        y: jax.Array,
        microbatch: Microbatch,
        layer: jax.Array,
        cache: Cache,
        window: jax.Array | int | None,
        scoring: Scoring,
    ) -> tuple[jax.Array, None, dict[str, jax.Array]]:
        """Heads' results [b, n, a, v] of y's n tokens with those of the cache; no gate; their entries in it."""
        one = self.sizes
        query, latent, shared = self._projected(y, microbatch, layer)
        kernel = self.key_value_up.kernel[...].astype(y.dtype)
        absorbed = jnp.einsum("bnad,rad->bnar", query[..., : one.plain], kernel[..., : one.plain])
        query = self._scaled(jnp.concatenate([absorbed, query[..., one.plain :]], -1))
        entry = jnp.concatenate([self.constrain(latent, *WHOLE), shared], -1)
        old = cache.arrays["latent"][:, None]
        arrays = {"key": old, "value": old[..., : one.key_value]}
        context = cached_attention(
            query[:, :, None],
            entry[:, :, None],
            entry[:, :, None, : one.key_value],
            microbatch["positions"],
            Cache(arrays, cache.positions),
            lambda x, *_: self.constrain(x, "batch", None, "heads", None, None),
            window,
            scoring,
        )
        context = self.constrain(context[:, :, 0], *HEADS)
        return jnp.einsum("bnar,rav->bnav", context, kernel[..., one.plain :]), None, {"latent": entry}


def latent_cache(config: ModelConfig, dtype: Any, samples: int, slots: int) -> dict[str, CachedArray]:
    """What a block caches: the normed latent and the rotated, shared part of the key."""
    one = latent_sizes(config)
    shape = (samples, slots, one.key_value + one.rotated)
    return {"latent": CachedArray(shape, dtype, ("batch", None, None), slot_axis=1)}
