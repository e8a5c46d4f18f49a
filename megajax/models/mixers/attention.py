"""Self-attention with queries, keys and values of heads, and what it caches.

Shapes: b samples, s tokens, h = hidden, a heads of size d in g groups that share a key and value head (g = a: plain
multi-head attention).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.config.layer_pattern import variant_numbers, variants
from megajax.models.dropout import Dropout
from megajax.models.feedforward import Linear
from megajax.models.interface import Microbatch, ModelContext
from megajax.models.lora import adapters
from megajax.models.nnx_model import named_key, parameter
from megajax.models.norms import ProjectionNorm, ReplicatedNorm, unweighted_norm
from megajax.models.rotary import of_layer, rotary_tables, rotate, table_of_layer
from megajax.ops.attention import Scoring, plain_attention
from megajax.ops.cached_attention import Cache, CachedArray, cached_attention

__all__ = ["Attention", "cache_arrays", "with_rotary_table"]

QKV = ("batch", "whole_sequence", "groups", None, None)
ELEMENTS = (*QKV[:2], None, None, "head_elements")  # where there are fewer groups than ranks of a tensor group


class Attention(nnx.Module):
    """Self-attention, causal or not (`config.causal`); queries, keys, values from one matmul, groups split over tensor."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        self.config, self.constrain, self.operations = config, context.constrain, context.operations
        groups, size, hidden = config.key_value_heads, config.head_dimension, {"hidden": config.hidden}
        self.groups = tensor_groups(config, context.tensor)
        is_split = groups == self.groups
        fused = {"groups": groups, "_queries_key_value": config.heads // groups + 2, "_head_size": size}
        if not is_split:
            fused = {"_groups": groups, "_queries_key_value": config.heads // groups + 2, "head_elements": size}
        small = config.init_deviation / (2 * config.layers) ** 0.5  # 2L of these add up in the residual (GPT-2, 2.3)
        lora = lambda name: adapters(config, context, name)  # noqa: E731
        biases, deviation = config.has_qkv_biases, config.init_deviation
        if config.attention_gate:  # of each head's queries and gate, as Qwen3-Next stores them
            axes = {"groups": groups, "_queries": config.heads // groups, "_query_gate": 2, "_head_size": size}
            self.query_gate = Linear(named_key(key, "query_gate"), hidden, axes, deviation, biases)
            axes = {"groups": groups, "_key_value": 2, "_head_size": size}
            self.key_value = Linear(named_key(key, "key_value"), hidden, axes, deviation, biases)
        else:
            self.qkv = Linear(named_key(key, "qkv"), hidden, fused, deviation, biases, lora("qkv"))
        joined = {"heads": config.heads, "_head_size": size}
        self.output = Linear(named_key(key, "output"), joined, hidden, small, config.has_output_biases, lora("output"))
        if config.attention_sinks:
            sinks = jnp.zeros((groups, config.heads // groups))
            self.sinks = parameter(sinks, "groups" if is_split else None, None, decay=False)
        if config.query_key_norm:
            if config.query_key_norm_over == "head":
                self.query_norm = ReplicatedNorm(config, size, config.norm_epsilon)
                self.key_norm = ReplicatedNorm(config, size, config.norm_epsilon)
            else:
                self.query_norm = ProjectionNorm(config, groups, config.heads // groups, split=is_split)
                self.key_norm = ProjectionNorm(config, groups, split=is_split)

    def project(
        self, y: jax.Array, microbatch: Microbatch, layer: jax.Array, lora_drop: Dropout | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Queries [b, whole s, g, a/g, d], keys and values [b, whole s, g, d] of y [b, split s, h], rotated; and the gate.

        g = `groups`. `lora_drop`: of adapters.
        """
        gate = None
        if self.config.attention_gate:
            both = checkpoint_name(self.query_gate(y, self.operations.column, (*QKV, None)), "qkv")
            key_value = checkpoint_name(self.key_value(y, self.operations.column, QKV), "qkv")
            query, gate, key, value = both[..., 0, :], both[..., 1, :], key_value[..., 0, :], key_value[..., 1, :]
        else:
            is_split = self.groups == self.config.key_value_heads
            axes = QKV if is_split else ELEMENTS
            qkv = self.qkv(y, self.operations.column, axes, drop=lora_drop)  # [b, whole s, g, a/g + 2, d]
            qkv = checkpoint_name(qkv if is_split else self._of_each_rank(qkv), "qkv")
            query, key, value = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        if self.config.query_key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.config.positions == "rotary":
            tables = with_rotary_table(self.config, microbatch, y.shape[1])["rotary"]
            table = table_of_layer(self.config, tables, layer)
            neighbours = self.config.rotary_pairs == "neighbours"
            query, key = (rotate(x, table, neighbours) for x in (query, key))
        if self.config.rotated_norm:
            rotates = self._own([int(one.positions == "rotary") for one in variants(self.config)], layer) > 0
            normed = (unweighted_norm(x, self.config.norm_epsilon) for x in (query, key))
            query, key = (jnp.where(rotates, new, x) for new, x in zip(normed, (query, key), strict=True))
        rates = [one.query_growth for one in variants(self.config)]
        if any(rates):
            places = microbatch.get("positions", jnp.arange(query.shape[1])[None]) + self.config.query_growth_first
            steps = jnp.log1p((places // self.config.growth_length).astype(jnp.float32))
            growth = 1 + self._own(rates, layer) * steps
            query = query * growth[:, :, None, None, None].astype(query.dtype)
        if self.config.attention_scale is not None:  # of attention's own
            query = query * jnp.asarray(self.config.attention_scale * self.config.head_dimension**0.5, query.dtype)
        return query, key, value, gate

    def _of_each_rank(self, qkv: jax.Array) -> jax.Array:
        """[b, s, t, a/t + 2, d], split by groups, of qkv [b, s, g, a/g + 2, d], split by the elements of a head.

        A group for each of the t ranks of a tensor group, which has a part of the queries of one of the g groups, and a
        copy of its key and value. One all-to-all here, and one of the gradients, which are summed over copies after it.
        """
        copies = self.groups // qkv.shape[2]
        query = qkv[..., :-2, :].reshape(*qkv.shape[:2], self.groups, -1, qkv.shape[-1])
        key_value = jnp.repeat(qkv[..., -2:, :], copies, axis=2)
        return self.constrain(self.constrain(jnp.concatenate([query, key_value], 3), *ELEMENTS), *QKV)

    def _own(self, values: list, layer: jax.Array) -> Any:
        """Of the values of each kind of layers that of one layer: a number if all are the same, else a scalar."""
        return values[0] if len(set(values)) == 1 else of_layer(values, variant_numbers(self.config), layer)

    def window(self, layer: jax.Array, positions: jax.Array) -> jax.Array | int | None:
        """The latest tokens that a token of a layer attends to; None: all layers have all.

        Where layers differ an int32 scalar; with chunks, which begin at position 0 and of which a token sees what there is
        up to it, of the shape of `positions`.
        """
        each, length, windows = variants(self.config), self.config.sequence_length, self.config.attention_windows
        found = windows[0]
        if len(windows) > 1:
            found = self._own([one.attention_window or length for one in each], layer)
        if any(self.config.attention_chunks):
            inside = positions % self._own([one.attention_chunk or length for one in each], layer) + 1
            found = inside if found is None else jnp.minimum(found, inside)
        return found

    def __call__(
        self,
        y: jax.Array,
        microbatch: Microbatch,
        layer: jax.Array,
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
        document, entries, gate = microbatch.get("document"), {}, None
        places = jnp.arange(y.shape[1], dtype=jnp.int32)[None]
        positions = microbatch.get("positions", places)
        if cache is not None:  # as the masks have it, whose last axis is of keys
            positions = positions[..., None]
        elif self.operations.attend is None:
            positions = positions[:, None, None, :, None]
        window = self.window(layer, positions)
        sinks = self.sinks[...] if self.config.attention_sinks else None
        if sinks is not None and len(sinks) != self.groups:  # whole first, and so is its gradient: no permutes
            sinks = self.constrain(sinks.reshape(self.groups, -1), None, None)
        drop = dropout.of_scores(self.config.heads, y.shape[1])
        scoring = Scoring(drop, self.config.attention_softcap, sinks)
        both_ways = {} if self.config.causal else {"causal": False, "padding": microbatch.get("padding")}
        if cache is None:
            query, key, value, gate = self.project(y, microbatch, layer, lora_drop)
        if cache is not None:
            context, gate, entries = self.cached(y, microbatch, layer, cache, window, scoring)
        elif self.operations.attend is None:
            context = plain_attention(query, key, value, scoring, self.constrain, document, window, **both_ways)
        else:
            drops = {} if drop is None else {"drop": drop}
            if len(self.config.attention_windows) > 1 or any(self.config.attention_chunks):
                # as kernels take it: the first key of each query
                places = microbatch.get("places", places)
                reach = jnp.broadcast_to(jnp.maximum(places - (window - 1), 0), query.shape[:2])
                document = reach if document is None else jnp.maximum(document, reach)
            context = self.operations.attend(query, key, value, document, sinks=sinks, **drops, **both_ways)
        context = context.reshape(*y.shape[:2], self.config.heads, -1)
        context = self.constrain(context, *QKV[:2], "heads", None)
        if self.operations.attend is None:
            context = checkpoint_name(context, "context")
        if gate is not None:
            context = context * jax.nn.sigmoid(self.constrain(gate.reshape(context.shape), *QKV[:2], "heads", None))
        return self.output(context, self.operations.row, 2, drop=lora_drop), entries

    def cached(
        self,
        y: jax.Array,
        microbatch: Microbatch,
        layer: jax.Array,
        cache: Cache,
        window: jax.Array | int | None,
        scoring: Scoring,
    ) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
        """Heads' results [b, n, g, a/g, d] of y's n tokens with those of the cache; their gate; their entries in it."""
        query, key, value, gate = self.project(y, microbatch, layer)
        positions = microbatch["positions"]
        context = cached_attention(query, key, value, positions, cache, self.constrain, window, scoring)
        return context, gate, {"key": jnp.swapaxes(key, 1, 2), "value": jnp.swapaxes(value, 1, 2)}


def tensor_groups(config: ModelConfig, tensor: int) -> int:
    """Groups of heads that are split over tensor: of fewer than its ranks, each has a copy on several."""
    return config.key_value_heads if config.key_value_heads % tensor == 0 else tensor


def with_rotary_table(config: ModelConfig, microbatch: Microbatch, length: int) -> Microbatch:
    """The microbatch with "rotary", the tables of its "positions" or of 0 to length - 1, if the model has any.

    Inside the loop over blocks XLA would compute it again for each block, in separate kernels.
    """
    if config.positions != "rotary" or "rotary" in microbatch:
        return microbatch
    positions = microbatch.get("positions", jnp.arange(length)[None])
    return {**microbatch, "rotary": rotary_tables(config, positions)}


def cache_arrays(config: ModelConfig, dtype: Any, samples: int, slots: int, tensor: int = 1) -> dict[str, CachedArray]:
    """The keys and values that a block caches. Slots come after heads: the matmuls over them need no transposed copy."""
    shape = (samples, tensor_groups(config, tensor), slots, config.head_dimension)
    array = CachedArray(shape, dtype, ("batch", "groups", None, None), slot_axis=2)
    return {"key": array, "value": array}
