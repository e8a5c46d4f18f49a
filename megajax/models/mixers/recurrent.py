"""Recurrent mixers: Mamba-2 (2405.21060) and the gated delta rule (2412.06464), computed in chunks of a sequence.

Shapes: b samples, s tokens, h = hidden; g groups of r heads, whose values have p elements; a group's heads share a query and
a key of n elements; c chunks of l tokens. Each head has a state S [p, n] in place of keys and values:

    Mamba-2        S_t = exp(a_t) S_{t-1} + d_t v_t k_t^T                            o_t = S_t q_t + D v_t
    gated delta    S_t = exp(a_t) S_{t-1} (1 - b_t k_t k_t^T) + b_t v_t k_t^T        o_t = S_t q_t

    y -> (all-gather) -> projections -> convolution and SiLU of q, k, v -> o -> gate, norm -> output -> (reduce-scatter)

Within a chunk, tokens read one another by matmuls like attention's; only states pass from chunk to chunk, in a loop. Groups
are split over tensor. With "document" in the microbatch, neither convolution nor state crosses the end of a document.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.models.dropout import Dropout
from megajax.models.feedforward import Linear
from megajax.models.interface import Microbatch, ModelContext
from megajax.models.nnx_model import named_key, parameter
from megajax.ops.cached_attention import PADDING_POSITION, Cache, CachedArray
from megajax.runtime.compat import vary_over, varying_axes

__all__ = ["GatedDelta", "Mamba2", "state_arrays"]

LEAD = ("batch", "whole_sequence", "groups")
STATE = ("batch", "groups", None, None, None)


class Decays(NamedTuple):
    """What is left of a token's contribution, fp32; 0 in another document.

    Attributes:
      within: [b, c, g, r, l, l], at a token of the chunk, by the second token's; 0 for later ones.
      from_start: [b, c, g, r, l], of the state before the chunk at a token.
      to_end: [b, c, g, r, l], of a token in the state after the chunk.
      whole: [b, c, g, r], of the state before in the state after.
    """

    within: jax.Array
    from_start: jax.Array
    to_end: jax.Array
    whole: jax.Array


class Convolution(nnx.Module):
    """A causal convolution of each element of queries, keys and values, then SiLU."""

    def __init__(self, config: ModelConfig, key: jax.Array, biases: bool):
        groups, taps = config.recurrent_groups, config.recurrent_convolution
        inner = config.state_heads // groups * config.state_head_size
        width = {"query": config.recurrent_state, "key": config.recurrent_state, "value": inner}
        for name, size in width.items():
            drawn = jax.random.uniform(named_key(key, name), (groups, size, 1, taps), minval=-1.0) * taps**-0.5
            setattr(self, name, parameter(drawn, "groups", None, None, None))
            if biases:
                setattr(self, f"{name}_bias", parameter(jnp.zeros((groups, size)), "groups", None, decay=False))

    def __call__(self, inputs: jax.Array, document: jax.Array | None) -> jax.Array:
        """q, k and v [b, s, g, 2n + rp], computed in fp32, of the s last `inputs` [b, taps - 1 + s, g, 2n + rp]."""
        parts, wide = ("query", "key", "value"), inputs.astype(jnp.float32)
        kernel = jnp.concatenate([getattr(self, name)[...].astype(jnp.float32)[:, :, 0] for name in parts], 1)
        taps, out = kernel.shape[-1], 0.0
        tokens = inputs.shape[1] - taps + 1
        for tap in range(taps):
            term = wide[:, tap : tap + tokens] * kernel[..., tap]
            if document is not None and tap < taps - 1:
                earlier = jnp.pad(document, ((0, 0), (taps - 1, 0)), mode="edge")[:, tap : tap + tokens]
                term = jnp.where((earlier == document)[..., None, None], term, 0)
            out = out + term
        if hasattr(self, "query_bias"):
            out += jnp.concatenate([getattr(self, f"{name}_bias")[...].astype(jnp.float32) for name in parts], 1)
        return jax.nn.silu(out).astype(inputs.dtype)


class Recurrent(nnx.Module):
    """What both mixers have; a subclass makes the projections, and has `project`, `weight`, `scan` and `gated`."""

    biases = False  # of the convolution

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        self.config, self.constrain, self.operations = config, context.constrain, context.operations
        self.heads = config.recurrent_groups, config.state_heads // config.recurrent_groups
        self.convolution = Convolution(config, named_key(key, "convolution"), self.biases)
        # Steps of 0.001 to 0.1, by their logarithms, through the inverse of softplus; rates of decay of 1 to 16.
        draw = lambda name, low, high: jax.random.uniform(named_key(key, name), self.heads, minval=low, maxval=high)  # noqa: E731
        steps, kept = jnp.exp(draw("step_bias", math.log(0.001), math.log(0.1))), {"decay": False, "fp32": True}
        self.step_bias = parameter(steps + jnp.log(-jnp.expm1(-steps)), "groups", None, **kept)
        self.log_rate = parameter(jnp.log(draw("log_rate", 1.0, 16.0)), "groups", None, **kept)
        small = config.init_deviation / (2 * config.layers) ** 0.5
        joined = {"heads": config.state_heads, "_head_size": config.state_head_size}
        self.output = Linear(named_key(key, "output"), joined, {"hidden": config.hidden}, small, biases=False)

    def projection(self, key: jax.Array, name: str, *sizes: int) -> Linear:
        """A matmul from the residual to [g, *sizes]."""
        outputs = {"groups": self.heads[0]} | {f"_{axis}": size for axis, size in enumerate(sizes)}
        hidden, deviation = {"hidden": self.config.hidden}, self.config.init_deviation
        return Linear(named_key(key, name), hidden, outputs, deviation, biases=False)

    def projected(self, linear: Linear, y: jax.Array) -> jax.Array:
        """Of y [b, split s, h] [b, whole s, g, ...]."""
        axes = (*LEAD, *[None] * (linear.kernel.ndim - 2))
        return checkpoint_name(linear(y, self.operations.column, axes), "qkv")

    def __call__(
        self,
        y: jax.Array,
        microbatch: Microbatch,
        layer: jax.Array,
        dropout: Dropout,
        cache: Cache | None = None,
        lora_drop: Dropout | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """From y [b, split s, h] to the same shape, and with a cache the state after the last token (`state_arrays`)."""
        config, document = self.config, microbatch.get("document")
        mixed, gate, steps = self.project(y)  # [b, s, g, 2n + rp], [b, s, g, rp], [b, s, g, r or 2r]
        samples, tokens, _, width = mixed.shape
        if cache is None:
            before = _zeros((samples, config.recurrent_convolution - 1, self.heads[0], width), mixed, mixed.dtype)
            state = _zeros((samples, *self.heads, config.state_head_size, config.recurrent_state), mixed)
        else:
            filled = (cache.positions != PADDING_POSITION).any(-1)
            before, state = (
                jnp.where(filled.reshape(-1, *[1] * (array.ndim - 1)), array, 0)
                for array in (cache.arrays["convolution"], cache.arrays["state"])
            )
            real = (microbatch["positions"] != PADDING_POSITION)[..., None, None]
            mixed = jnp.where(real, mixed, 0)
        inputs = jnp.concatenate([before.astype(mixed.dtype), mixed], 1)
        convolved = self.constrain(self.convolution(inputs, document), *LEAD, None)
        query, key, value = jnp.split(convolved, (config.recurrent_state, 2 * config.recurrent_state), -1)
        steps = jnp.split(steps.astype(jnp.float32), steps.shape[-1] // self.heads[1], -1)
        time = jax.nn.softplus(steps[-1] + self.step_bias[...].astype(jnp.float32))
        if config.recurrent_least_step:
            time = jnp.maximum(time, config.recurrent_least_step)
        decay, weight = -jnp.exp(self.log_rate[...].astype(jnp.float32)) * time, self.weight(time, steps)
        if cache is not None:
            decay, weight = (jnp.where(real, x, 0) for x in (decay, weight))
        by_head = lambda x: x.reshape(*x.shape[:2], *self.heads, -1)  # noqa: E731
        value, gate = by_head(value), by_head(gate).astype(jnp.float32)
        length = min(config.recurrent_chunk, tokens)
        chunks = lambda x: None if x is None else _in_chunks(x, length)  # noqa: E731
        last = lambda x: jnp.moveaxis(chunks(x), 2, -1)  # noqa: E731
        left = _decays(last(decay), chunks(document))
        out, state = self.scan(chunks(query), chunks(key), chunks(value), last(weight), left, state)
        out = out.reshape(samples, -1, *value.shape[2:])[:, :tokens]
        out = checkpoint_name(self.constrain(out.astype(y.dtype), *LEAD, None, None), "context")
        out = self.gated(out.astype(jnp.float32), value.astype(jnp.float32), gate).astype(y.dtype)
        out = self.constrain(out.reshape(*out.shape[:2], -1, out.shape[-1]), *LEAD[:2], "heads", None)
        entries = (
            {"state": self.constrain(state, *STATE), "convolution": inputs[:, tokens:]} if cache is not None else {}
        )
        return self.output(out, self.operations.row, 2), entries


class Mamba2(Recurrent):
    """Mamba-2, whose heads have one rate of decay each; d is the step, and D v is added to o."""

    biases = True

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        super().__init__(config, key, context)
        inner = self.heads[1] * config.state_head_size
        self.gate_value = self.projection(key, "gate_value", 2, inner)
        self.key_query = self.projection(key, "key_query", 2, config.recurrent_state)
        self.step = self.projection(key, "step", self.heads[1])
        self.skip = parameter(jnp.ones(self.heads), "groups", None, decay=False)
        self.norm = parameter(jnp.ones((self.heads[0], inner)), "groups", None, decay=False)

    def project(self, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Recurrent.__call__`."""
        gate_value, key_query = self.projected(self.gate_value, y), self.projected(self.key_query, y)
        mixed = jnp.concatenate([key_query[..., 1, :], key_query[..., 0, :], gate_value[..., 1, :]], -1)
        return mixed, gate_value[..., 0, :], self.projected(self.step, y)

    def weight(self, time: jax.Array, steps: list[jax.Array]) -> jax.Array:
        """d."""
        return time

    def scan(self, query, key, value, weight, left: Decays, state) -> tuple[jax.Array, jax.Array]:
        """o and the last state, fp32; of chunks: q, k [b, c, l, g, n], v [b, c, l, g, r, p], and fp32 d [b, c, g, r, l].

        Only the scores, which are the largest array, are multiplied in v's type, as in the kernels of 2405.21060.
        """
        dtype = value.dtype
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        scores = jnp.einsum("bclgn,bcmgn->bcglm", query, key)[:, :, :, None] * left.within * weight[..., None, :]
        out = jnp.einsum("bcgrlm,bcmgrp->bclgrp", scores.astype(dtype), value.astype(dtype)).astype(jnp.float32)
        new = jnp.einsum("bcgrm,bcmgrp,bcmgn->bcgrpn", weight * left.to_end, value, key)

        def step(state, of):
            whole, new = of
            return state * whole[..., None, None] + new, state

        state, states = _over_chunks(step, state, (left.whole, new))
        before = jnp.einsum("bclgn,bcgrpn->bclgrp", query, states)
        return out + before * jnp.moveaxis(left.from_start, -1, 2)[..., None], state

    def gated(self, out: jax.Array, value: jax.Array, gate: jax.Array) -> jax.Array:
        """RMS norm of (o + D v) SiLU(gate) over the heads of a group; fp32 [b, s, g, r, p]."""
        out = (out + value * self.skip[...].astype(jnp.float32)[..., None]) * jax.nn.silu(gate)
        scale = self.norm[...].astype(jnp.float32).reshape(*self.heads, -1)
        return out * lax.rsqrt(jnp.square(out).mean((-2, -1), keepdims=True) + self.config.norm_epsilon) * scale


class GatedDelta(Recurrent):
    """The gated delta rule; q and k have length 1, and b is a sigmoid."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        super().__init__(config, key, context)
        each = self.heads[1] * config.state_head_size
        self.input = self.projection(key, "input", 2 * config.recurrent_state + 2 * each)
        self.step = self.projection(key, "step", 2 * self.heads[1])
        self.norm = parameter(jnp.ones(config.state_head_size), None, decay=False)

    def project(self, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Recurrent.__call__`."""
        width = 2 * self.config.recurrent_state + self.heads[1] * self.config.state_head_size
        mixed, gate = jnp.split(self.projected(self.input, y), (width,), -1)
        return mixed, gate, self.projected(self.step, y)

    def weight(self, time: jax.Array, steps: list[jax.Array]) -> jax.Array:
        """b."""
        return jax.nn.sigmoid(steps[0])

    def scan(self, query, key, value, weight, left: Decays, state) -> tuple[jax.Array, jax.Array]:
        """As of `Mamba2`, with b for d.

        With L the decays within a chunk, and S the state before it, the values that are written are (1 + A)^-1 (b v - b
        decay S k), where A = b L k k^T below the diagonal (2406.06484 section 3).
        """
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        unit = lambda x: x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
        query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)
        below = jnp.tril(jnp.ones(left.within.shape[-2:], bool), -1)
        system = jnp.einsum("bclgn,bcmgn->bcglm", key, key)[:, :, :, None] * left.within * weight[..., None]
        inverse = inverse_of_lower(jnp.where(below, system, 0))
        scores = jnp.einsum("bclgn,bcmgn->bcglm", query, key)[:, :, :, None] * left.within
        written = jnp.einsum("bcgrlm,bcmgrp->bcgrlp", inverse * weight[..., None, :], value)
        reads = jnp.einsum("bcgrlm,bcmgn->bcgrln", inverse * (weight * left.from_start)[..., None, :], key)

        def step(state, of):
            query, key, scores, written, reads, from_start, to_end, whole = of
            new = written - jnp.einsum("bgrln,bgrpn->bgrlp", reads, state)
            out = jnp.einsum("blgn,bgrpn->bgrlp", query, state) * from_start[..., None]
            out += jnp.einsum("bgrlm,bgrmp->bgrlp", scores, new)
            state = state * whole[..., None, None] + jnp.einsum("bgrlp,blgn->bgrpn", new * to_end[..., None], key)
            return state, jnp.moveaxis(out, 3, 1)

        return _over_chunks(
            step, state, (query, key, scores, written, reads, left.from_start, left.to_end, left.whole)
        )[::-1]

    def gated(self, out: jax.Array, value: jax.Array, gate: jax.Array) -> jax.Array:
        """RMS norm of o over the elements of a head, times SiLU(gate); fp32 [b, s, g, r, p]."""
        out = out * lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + self.config.norm_epsilon)
        return out * self.norm[...].astype(jnp.float32) * jax.nn.silu(gate)


@jax.custom_vjp
def inverse_of_lower(lower: jax.Array) -> jax.Array:
    """(1 + lower)^-1 of matrices [..., l, l] that are 0 on and above the diagonal; fp32.

    By blocks of 1, 2, 4, ...: a block's inverse is that of its halves, and in its lower left -D^-1 C A^-1. The sum of
    powers would have fewer products, but its terms can be 1e18 times as large as the result.
    """
    length, size = lower.shape[-1], 1
    inverse, place = jnp.broadcast_to(jnp.eye(length), lower.shape), jnp.arange(length)
    multiply = lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST)  # noqa: E731
    while size < length:
        row, column = place[:, None] // size, place // size
        corner = (row % 2 == 1) & (column == row - 1)
        inverse = inverse - multiply(multiply(inverse, jnp.where(corner, lower, 0)), inverse)
        size *= 2
    return inverse


def _backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    multiply = lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST)  # noqa: E731
    return (-jnp.tril(multiply(multiply(turned, gradient), turned), -1),)


inverse_of_lower.defvjp(lambda lower: (inverse_of_lower(lower),) * 2, _backward)


def _decays(decay: jax.Array, document: jax.Array | None) -> Decays:
    """Of the logarithms of each token's decay [b, c, g, r, l], and "document" [b, c, l]."""
    total = jnp.cumsum(decay, -1)
    seen = jnp.tril(jnp.ones((decay.shape[-1],) * 2, bool))
    from_start, to_end, whole = jnp.exp(total), jnp.exp(total[..., -1:] - total), jnp.exp(total[..., -1])
    if document is not None:
        end, of_heads = document[..., -1:], lambda x: x[:, :, None, None]
        before = jnp.concatenate([document[:, :1, :1], end[:, :-1]], 1)
        seen = seen & of_heads(document[..., :, None] == document[..., None, :])
        from_start = jnp.where(of_heads(document == before), from_start, 0)
        to_end = jnp.where(of_heads(document == end), to_end, 0)
        whole = jnp.where(of_heads(before == end)[..., 0], whole, 0)
    within = jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf)
    return Decays(jnp.exp(within), from_start, to_end, whole)


def _over_chunks(step, state: jax.Array, of: tuple) -> tuple[jax.Array, jax.Array]:
    """(the last state, results [b, c, ...]) of `step(state, arrays without c) -> (state, result)`; arrays [b, c, ...]."""
    if of[0].shape[1] == 1:
        state, out = step(state, jax.tree.map(lambda x: x[:, 0], of))
        return state, out[:, None]
    state, out = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), of))
    return state, jnp.moveaxis(out, 0, 1)


def _in_chunks(x: jax.Array, length: int) -> jax.Array:
    """[b, s, ...] as [b, c, length, ...], with zeros after the last token."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % length), *[(0, 0)] * (x.ndim - 2)])
    return x.reshape(x.shape[0], -1, length, *x.shape[2:])


def _zeros(shape: tuple[int, ...], like: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Zeros that vary over the mesh as `like` does."""
    return vary_over(jnp.zeros(shape, dtype), varying_axes(like))


def state_arrays(config: ModelConfig, dtype: Any, samples: int) -> dict[str, CachedArray]:
    """What a block keeps of earlier tokens: the state after them, and the last inputs of the convolution."""
    groups, each = config.recurrent_groups, config.state_heads // config.recurrent_groups
    width = 2 * config.recurrent_state + each * config.state_head_size
    state = (samples, groups, each, config.state_head_size, config.recurrent_state)
    inputs = (samples, config.recurrent_convolution - 1, groups, width)
    return {
        "state": CachedArray(state, jnp.float32, STATE, slot_axis=None),
        "convolution": CachedArray(inputs, dtype, ("batch", None, "groups", None), slot_axis=None),
    }
