"""One transformer block, GPT's, llama's or Qwen's by configuration: attention, then feedforward, on a normed residual.

Shapes: b samples, s tokens, h = hidden, a heads of size d in g groups that share a key and value head (g = a: plain
multi-head attention), f = feedforward. Every parameter has logical axis names as metadata, and every activation passes
`constrain` with its own; megajax.sharding.rules maps the names to mesh axes.
With "groups", "heads" and "feedforward" on the tensor axis this is Megatron's column- then row-parallel pair
(1909.08053 section 3), and with the residual's "sequence" there too its sequence parallelism (2205.05198 section 4.2):

    x [sequence split] -> norm -> (all-gather) -> qkv, attention -> output -> (reduce-scatter) -> + x
                       -> norm -> (all-gather) -> up, activation -> down   -> (reduce-scatter) -> + x

`megajax.models.gpt` builds a `PipelineModel` from the modules.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.models.feedforward import ACTIVATIONS, FeedForward, Linear
from megajax.models.interface import Microbatch, ModelContext
from megajax.models.lora import adapters
from megajax.models.moe import Experts
from megajax.models.nnx_model import named_key, parameter
from megajax.models.rotary import rotary_table, rotate
from megajax.ops.attention import SCORES, plain_attention
from megajax.ops.cached_attention import Cache, CachedArray, cached_attention
from megajax.ops.linear import RESIDUAL
from megajax.ops.norm import norm

__all__ = ["ACTIVATIONS", "Block", "Dropout", "Linear", "Norm", "cache_arrays", "with_rotary_table"]

QKV = ("batch", "whole_sequence", "groups", None, None)


class Dropout:
    """Dropout whose masks depend on the sample, the layer and the site alone: the same on any mesh, in any microbatch.

    Attributes:
      rate: probability of dropping an element; 0 outside training.
      constrain: the context's.
      keys: one key for each sample, [b], already folded with the layer; None where the rate is 0.
    """

    def __init__(self, rate: float, context: ModelContext, microbatch: Microbatch, layer: jax.Array | int):
        """Reads the microbatch's "sample", the samples' index in the run [b], only if the rate is not 0."""
        self.rate, self.constrain, self.keys = rate if context.training else 0.0, context.constrain, None
        if self.rate > 0:
            key = jax.random.key(context.dropout_seed)
            fold = lambda index: jax.random.fold_in(jax.random.fold_in(key, index), layer)  # noqa: E731
            self.keys = jax.vmap(fold)(microbatch["sample"])

    def __call__(self, x: jax.Array, site: str, *axes: str | None) -> jax.Array:
        """Drops elements of x [b, ...], which has these logical axes, and scales up the rest; `site` names the mask."""
        if self.keys is None:
            return x

        def draw(key):  # threefry counts elements of the whole array: the bits do not depend on the sharding
            return jax.random.bernoulli(named_key(key, site), 1 - self.rate, x.shape[1:])

        mask = checkpoint_name(self.constrain(jax.vmap(draw)(self.keys), *axes), f"{site}_mask")
        return jnp.where(mask, x / (1 - self.rate), 0).astype(x.dtype)


class Norm(nnx.Module):
    """Layer norm (1607.06450) or RMS norm (1910.07467) over the last axis, in fp32."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.scale = parameter(jnp.ones(config.hidden), "hidden", decay=False)
        if config.norm == "layernorm" and config.biases:
            self.bias = parameter(jnp.zeros(config.hidden), "hidden", decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norms x [..., h]; the result has x's type."""
        bias = self.bias[...] if hasattr(self, "bias") else None
        return norm(x, self.scale[...], bias, self.config.norm == "layernorm", self.config.norm_epsilon)


class HeadNorm(nnx.Module):
    """RMS norm over the elements of each head, in fp32; one scale for all heads (Qwen3)."""

    def __init__(self, config: ModelConfig):
        self.epsilon = config.norm_epsilon
        self.scale = parameter(jnp.ones(config.head_dimension), None, decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norms x [..., d]; the result has x's type."""
        return norm(x, self.scale[...], None, False, self.epsilon)


class ProjectionNorm(nnx.Module):
    """RMS norm over the elements of all heads of a token, in fp32; a scale for each of them (OLMoE).

    The groups of heads are split over tensor: the mean of the squares is an all-reduce of one number for each token.
    """

    def __init__(self, config: ModelConfig, *heads: int):
        """`heads`: the axes of a token's heads, groups first."""
        self.epsilon, self.axes = config.norm_epsilon, len(heads) + 1
        self.scale = parameter(jnp.ones((*heads, config.head_dimension)), "groups", *[None] * len(heads), decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norms x [..., *heads, d]; the result has x's type."""
        wide = x.astype(jnp.float32)
        mean = jnp.square(wide).mean(tuple(range(-self.axes, 0)), keepdims=True)
        return (wide * lax.rsqrt(mean + self.epsilon) * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention, causal or not (`config.causal`); queries, keys, values from one matmul, groups split over tensor."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        self.config, self.constrain, self.operations = config, context.constrain, context.operations
        groups, size, hidden = config.key_value_heads, config.head_dimension, {"hidden": config.hidden}
        fused = {"groups": groups, "_queries_key_value": config.heads // groups + 2, "_head_size": size}
        small = config.init_deviation / (2 * config.layers) ** 0.5  # 2L of these add up in the residual (GPT-2, 2.3)
        lora = lambda name: adapters(config, context, name)  # noqa: E731
        biases = config.has_qkv_biases
        self.qkv = Linear(named_key(key, "qkv"), hidden, fused, config.init_deviation, biases, lora("qkv"))
        joined = {"heads": config.heads, "_head_size": size}
        self.output = Linear(named_key(key, "output"), joined, hidden, small, config.biases, lora("output"))
        if config.query_key_norm:
            if config.query_key_norm_over == "head":
                self.query_norm, self.key_norm = HeadNorm(config), HeadNorm(config)
            else:
                self.query_norm = ProjectionNorm(config, groups, config.heads // groups)
                self.key_norm = ProjectionNorm(config, groups)

    def project(
        self, y: jax.Array, microbatch: Microbatch, lora_drop: Dropout | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [b, whole s, g, a/g, d], keys and values [b, whole s, g, d] of y [b, split s, h], rotated.

        `lora_drop`: of adapters.
        """
        qkv = checkpoint_name(
            self.qkv(y, self.operations.column, QKV, drop=lora_drop), "qkv"
        )  # [b, whole s, g, a/g + 2, d]
        query, key, value = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        if self.config.query_key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.config.positions == "rotary":
            table = with_rotary_table(self.config, microbatch, y.shape[1])["rotary"]
            query, key = (rotate(x, table) for x in (query, key))
        return query, key, value

    def __call__(
        self,
        y: jax.Array,
        microbatch: Microbatch,
        dropout: Dropout,
        cache: Cache | None = None,
        lora_drop: Dropout | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Attention of y [b, split s, h] to itself, and to the tokens of `cache` if there is one.

        The microbatch may have "positions" [b, s], of tokens that are not at 0 to s - 1, and "document" [b, s], the number
        of each token's document, for samples whose tokens attend to their own document only. Attention that is not causal
        reads "padding" [b], the number of tokens at the end of a sample that nothing attends to.

        Returns:
          The result, of y's shape; and with a cache y's entries in it (`cache_arrays`).
        """
        positions, document = microbatch.get("positions"), microbatch.get("document")
        query, key, value = self.project(y, microbatch, lora_drop)
        window = self.config.attention_window
        both_ways = {} if self.config.causal else {"causal": False, "padding": microbatch.get("padding")}
        if cache is not None:
            context = cached_attention(query, key, value, positions, cache, self.constrain, window)
        elif self.operations.attend is None:
            drop = lambda p: dropout(p, "probabilities", *SCORES)  # noqa: E731
            context = plain_attention(query, key, value, drop, self.constrain, document, window, **both_ways)
        else:
            context = self.operations.attend(query, key, value, document, **both_ways)
        context = self.constrain(context.reshape(*y.shape[:2], self.config.heads, -1), *QKV[:2], "heads", None)
        if self.operations.attend is None:
            context = checkpoint_name(context, "context")
        entries = {"key": key, "value": value} if cache is not None else {}
        entries = {name: jnp.swapaxes(entry, 1, 2) for name, entry in entries.items()}
        return self.output(context, self.operations.row, 2, drop=lora_drop), entries


def with_rotary_table(config: ModelConfig, microbatch: Microbatch, length: int) -> Microbatch:
    """The microbatch with "rotary", the table of its "positions" or of 0 to length - 1, if the model has one.

    Inside the loop over blocks XLA would compute it again for each block, in separate kernels.
    """
    if config.positions != "rotary" or "rotary" in microbatch:
        return microbatch
    positions = microbatch.get("positions", jnp.arange(length)[None])
    return {**microbatch, "rotary": rotary_table(config, positions)}


def cache_arrays(config: ModelConfig, dtype: Any, samples: int, slots: int) -> dict[str, CachedArray]:
    """The keys and values that a block caches. Slots come after heads: the matmuls over them need no transposed copy."""
    shape = (samples, config.key_value_heads, slots, config.head_dimension)
    array = CachedArray(shape, dtype, ("batch", "groups", None, None), slot_axis=2)
    return {"key": array, "value": array}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)); with `config.post_norm`, norm(x + attention(x)) and so on."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        """Draws the weights of one layer from its key."""
        self.config, self.context, self.constrain = config, context, context.constrain
        self.attention_norm, self.feedforward_norm = Norm(config), Norm(config)
        self.attention = Attention(config, named_key(key, "attention"), context)
        inner = Experts if config.experts else FeedForward
        self.feedforward = inner(config, named_key(key, "feedforward"), context)

    def _split(self, y: jax.Array, name: str) -> jax.Array:
        """The normed residual, sharded by sequence before it is gathered, so that its gradient is reduce-scattered."""
        return checkpoint_name(self.constrain(y, *RESIDUAL), name)

    def __call__(self, x: jax.Array, microbatch: Microbatch, layer: jax.Array) -> jax.Array:
        """From x [b, split s, h] to the same shape, type and sharding."""
        return self.cached(x, None, microbatch, layer)[0]

    def cached(
        self, x: jax.Array, cache: Cache | None, microbatch: Microbatch, layer: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As a call, for tokens that follow those of `cache`; also returns their entries in it (`cache_arrays`)."""
        dropout = Dropout(self.config.dropout, self.context, microbatch, layer)
        lora_drop = (
            Dropout(self.config.lora_dropout, self.context, microbatch, layer) if self.config.lora_dropout else None
        )
        post_norm = self.config.post_norm
        y = x if post_norm else self._split(self.attention_norm(x), "attention_input")
        attended, entries = self.attention(y, microbatch, dropout, cache, lora_drop)
        x = x + dropout(attended, "attention", *RESIDUAL)
        x = checkpoint_name(self.constrain(x, *RESIDUAL), "residual")
        y = self._split((self.attention_norm if post_norm else self.feedforward_norm)(x), "feedforward_input")
        fed = self.feedforward(y, microbatch) if self.config.experts else self.feedforward(y, lora_drop)
        x = (y if post_norm else x) + dropout(fed, "feedforward", *RESIDUAL)
        if post_norm:
            x = self.feedforward_norm(checkpoint_name(self.constrain(x, *RESIDUAL), "output_residual"))
        return self.constrain(x, *RESIDUAL), entries
