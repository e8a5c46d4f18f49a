"""One transformer block, GPT's or llama's by configuration: attention, then feedforward, each on a normed residual.

Shapes: b samples, s tokens, h = hidden, a heads of size d in g groups that share a key and value head (g = a: plain
multi-head attention), f = feedforward. Every parameter carries the names of its axes (`logical_axes`), every
activation passes `constrain` with the names of its own; megajax.sharding.rules says which mesh axis a name means.
With "groups", "heads" and "feedforward" on the tensor axis this is Megatron's column- then row-parallel pair
(1909.08053 section 3), and with the residual's "sequence" there too its sequence parallelism (2205.05198 section 4.2):

    x [sequence split] -> norm -> (all-gather) -> qkv, attention -> output -> (reduce-scatter) -> + x
                       -> norm -> (all-gather) -> up, activation -> down   -> (reduce-scatter) -> + x

The modules only say what there is; `megajax.models.gpt` makes pure functions of them.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ConfigError, ModelConfig

__all__ = [
    "Block",
    "Dropout",
    "Norm",
    "Operations",
    "Places",
    "causal_attention",
    "identity",
    "named_key",
    "parameter",
    "plain_operations",
    "rotate",
]

Constrain = Callable[..., jax.Array]
RESIDUAL = ("batch", "sequence", "hidden")  # between matmul pairs
WHOLE = ("batch", "whole_sequence", "hidden")  # what enters a column-parallel matmul
QKV = ("batch", "whole_sequence", "groups", None, None)
SCORES = ("batch", "groups", None, None, None)
HIDDEN_SCORE = -1e30  # of a key after its query; finite, so that no row of scores can make a NaN


class Places(NamedTuple):
    """Where tokens stand, if not each at its own place of one text.

    Attributes:
      positions: int [b, s]; None: 0 to s - 1.
      document: int [b, s], a number for each document of a sample, that attends to itself only; None: all are one.
    """

    positions: jax.Array | None = None
    document: jax.Array | None = None


ONE_TEXT = Places()


def identity(x: jax.Array, *axes: str | None) -> jax.Array:
    """The `constrain` of a model that is on no mesh."""
    return x


class Operations(NamedTuple):
    """What a block computes with; megajax.parallel has some that communicate meanwhile, or on parts of the sequence.

    Attributes:
      column: (y [b, split s, h], kernel [h, *o], names of the result's axes) -> y kernel [b, whole s, *o].
      row: (x [b, whole s, *i], kernel [*i, h], number of axes in i) -> x kernel [b, split s, h].
      attend: (query, key, value) -> context, shaped as for `causal_attention`, naming what it keeps; None: that one.
    """

    column: Callable[[jax.Array, jax.Array, tuple], jax.Array]
    row: Callable[[jax.Array, jax.Array, int], jax.Array]
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None


def plain_operations(constrain: Constrain = identity, product: Callable[..., jax.Array] = jnp.tensordot) -> Operations:
    """Matmuls whose communication XLA puts before or after them, from `constrain`'s word on how things lie.

    Args:
      constrain: see the module's text.
      product: (x, kernel, number of axes to contract) -> the matmul: `jnp.tensordot`, or one in another format.
    """
    return Operations(
        column=lambda y, kernel, axes: constrain(product(constrain(y, *WHOLE), kernel, 1), *axes),
        row=lambda x, kernel, contracted: _reduced(product(x, kernel, contracted), constrain),
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduced(x: jax.Array, constrain: Constrain) -> jax.Array:
    """A row-parallel product, reduce-scattered. Its gradient is gathered here, or XLA does it for each of two matmuls."""
    return constrain(x, *RESIDUAL)


_reduced.defvjp(
    lambda x, constrain: (_reduced(x, constrain), None),
    lambda constrain, _, gradient: (constrain(constrain(gradient, *RESIDUAL), *WHOLE),),
)


def named_key(key: jax.Array, name: str) -> jax.Array:
    """A key for `name`: a parameter's value depends on its name, not on what else the model has."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def parameter(value: jax.Array, *axes: str | None, decay: bool = True) -> nnx.Param:
    """A parameter with one logical axis name (or None) for each of its axes.

    The names are our own metadata, not NNX's `out_sharding`: NNX would at once look for a mesh axis of that name.

    Args:
      value: fp32, full size.
      axes: names, see megajax.sharding.rules.
      decay: whether weight decay applies; not for biases and norms.
    """
    assert value.ndim == len(axes)
    return nnx.Param(value, logical_axes=axes, decay=decay)


class Dropout:
    """Masks that depend on the sample, the layer and the site alone: the same on any mesh, in any microbatch.

    Attributes:
      rate: probability of dropping an element.
      constrain: see the module's text.
      keys: one key for each sample, [b], already folded with the layer; None where the rate is 0.
    """

    def __init__(self, rate: float, constrain: Constrain, seed: int, sample: jax.Array | None, layer: jax.Array | int):
        """Takes the run's seed, the samples' index in the run [b] (read only if rate > 0) and the layer's index."""
        self.rate, self.constrain, self.keys = rate, constrain, None
        if rate > 0:
            key = jax.random.key(seed)
            self.keys = jax.vmap(lambda index: jax.random.fold_in(jax.random.fold_in(key, index), layer))(sample)

    def __call__(self, x: jax.Array, site: str, *axes: str | None) -> jax.Array:
        """Drops elements of x [b, ...], which has these logical axes, and scales up the rest; `site` names the mask."""
        if self.keys is None:
            return x

        def draw(key):  # threefry counts elements of the whole array: the bits are the same however it is sharded
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
        y = x.astype(jnp.float32)
        if self.config.norm == "layernorm":
            y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.config.norm_epsilon)
        y = y * self.scale[...].astype(jnp.float32)
        if hasattr(self, "bias"):
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [..., *n] + bias [*n], the bias's gradient summed in fp32.

    A sum in 16 bit makes XLA's GPU compiler transpose what y is stashed with, all of it, for every chunk (jax 0.10.2).
    """
    return y + bias


def _add_bias_backward(bias, dy):
    lead = tuple(range(dy.ndim - bias.ndim))
    return dy, dy.astype(jnp.float32).sum(lead).astype(bias.dtype)


add_bias.defvjp(lambda y, bias: (y + bias, bias), _add_bias_backward)


class Linear(nnx.Module):
    """A matmul from the last axes of x to new ones, in x's type, with or without a bias."""

    def __init__(self, key, inputs: dict[str, int], outputs: dict[str, int], deviation: float, biases: bool):
        """Takes the axes as name -> size, in order; a name that starts with "_" is of no logical axis."""
        shape, names = (*inputs.values(), *outputs.values()), [*inputs, *outputs]
        axes = [None if name.startswith("_") else name for name in names]
        self.kernel = parameter(jax.random.normal(named_key(key, "kernel"), shape) * deviation, *axes)
        if biases:
            self.bias = parameter(jnp.zeros(tuple(outputs.values())), *axes[len(inputs) :], decay=False)

    def __call__(self, x: jax.Array, product: Callable[..., jax.Array], *how) -> jax.Array:
        """`product(x, kernel, *how)`, from [..., *inputs] to [..., *outputs]; a row-parallel sum adds the bias once."""
        y = product(x, self.kernel[...].astype(x.dtype), *how)
        return add_bias(y, self.bias[...].astype(x.dtype)) if hasattr(self, "bias") else y


def rotate(x: jax.Array, base: float, positions: jax.Array | None = None) -> jax.Array:
    """Rotary position embedding (2104.09864) in llama's layout: element i turns with element i + d/2.

    Args:
      x: [b, s, ..., d] queries or keys.
      base: of the frequencies base^(-2i/d).
      positions: of the tokens, [b, s]; not given: 0 to s - 1.
    """
    half = x.shape[-1] // 2
    positions = jnp.arange(x.shape[1])[None] if positions is None else positions
    angle = positions[..., None] * base ** (-jnp.arange(half) / half)
    angle = angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


@jax.custom_jvp
def causal_softmax(scores: jax.Array, document: jax.Array | None = None) -> jax.Array:
    """Softmax over keys up to the query's own: [..., s queries, s keys], fp32 inside, the result of the scores' type.

    With `document` [b, s], the number of each token's document, over those of its own document only.

    The derivative is written out so that what the backward needs is the result as rounded, the named "probabilities",
    and not its fp32 copy: a block that keeps them then does not multiply queries and keys again.
    """
    query, key = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    seen = key <= query
    if document is not None:
        own = document[:, :, None] == document[:, None, :]
        seen = seen & own.reshape(len(own), *[1] * (scores.ndim - 3), *own.shape[1:])
    return jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), HIDDEN_SCORE)).astype(scores.dtype)


@causal_softmax.defjvp
def _causal_softmax_jvp(primals, tangents):
    """The tangent is p (ds - sum p ds); p is 0 where a key is hidden."""
    probabilities = checkpoint_name(causal_softmax(*primals), "probabilities")
    p, tangent = probabilities.astype(jnp.float32), tangents[0].astype(jnp.float32)
    return probabilities, (p * (tangent - (p * tangent).sum(-1, keepdims=True))).astype(probabilities.dtype)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    drop: Callable[[jax.Array], jax.Array],
    constrain: Constrain,
    document: jax.Array | None = None,
) -> jax.Array:
    """softmax(query key^T / sqrt(d)) value, over the keys up to each query (1706.03762 section 3.2.1).

    Args:
      query: [b, s, g, a/g, d], all queries of a group attend to the group's one key and value.
      key: [b, s, g, d].
      value: [b, s, g, d].
      drop: dropout on the probabilities.
      constrain: see the module's text.
      document: of each token, [b, s], if it is to attend to its own document only.

    Returns:
      [b, s, g, a/g, d].
    """
    query = query * query.shape[-1] ** -0.5  # before the product: a sum of d terms could overflow fp16
    scores = constrain(jnp.einsum("bsgnd,btgd->bgnst", query, key), *SCORES)
    return jnp.einsum("bgnst,btgd->bsgnd", drop(causal_softmax(scores, document)), value)


class Attention(nnx.Module):
    """Causal self-attention; queries, keys and values from one fused matmul, groups split over tensor."""

    def __init__(self, config: ModelConfig, key: jax.Array, constrain: Constrain, operations: Operations):
        self.config, self.constrain, self.operations = config, constrain, operations
        groups, size = config.key_value_heads, config.head_size
        fused = {"groups": groups, "_queries_key_value": config.heads // groups + 2, "_head_size": size}
        small = config.init_deviation / (2 * config.layers) ** 0.5  # 2L of these add up in the residual (GPT-2, 2.3)
        self.qkv = Linear(named_key(key, "qkv"), {"hidden": config.hidden}, fused, config.init_deviation, config.biases)
        joined = {"heads": config.heads, "_head_size": size}
        self.output = Linear(named_key(key, "output"), joined, {"hidden": config.hidden}, small, config.biases)

    def __call__(self, y: jax.Array, dropout: Dropout, places: Places) -> jax.Array:
        """Attention of y [b, split s, h] to itself: the same shape."""
        qkv = checkpoint_name(self.qkv(y, self.operations.column, QKV), "qkv")  # [b, whole s, g, a/g + 2, d]
        query, key, value = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        if self.config.positions == "rotary":
            query, key = (rotate(x, self.config.rotary_base, places.positions) for x in (query, key))
        if self.operations.attend is None:
            drop = lambda p: dropout(p, "probabilities", *SCORES)  # noqa: E731
            context = causal_attention(query, key, value, drop, self.constrain, places.document)
        elif places.document is not None:
            raise ConfigError(
                "--reset-attention-mask needs a mask, which fused attention and --context do not take: type "
                "--attention xla --context 1."
            )
        else:
            context = self.operations.attend(query, key, value)
        context = self.constrain(context.reshape(*y.shape[:2], self.config.heads, -1), *QKV[:2], "heads", None)
        if self.operations.attend is None:
            context = checkpoint_name(context, "context")
        return self.output(context, self.operations.row, 2)


class FeedForward(nnx.Module):
    """Two matmuls around GELU (its tanh form, as GPT-2) or SwiGLU (2002.05202), the inner width split over tensor."""

    def __init__(self, config: ModelConfig, key: jax.Array, constrain: Constrain, operations: Operations):
        self.config, self.constrain, self.operations = config, constrain, operations
        hidden, inner = {"hidden": config.hidden}, {"feedforward": config.feedforward_size}
        gated = {"_gate_and_up": 2, **inner} if config.activation == "swiglu" else inner
        small = config.init_deviation / (2 * config.layers) ** 0.5
        self.up = Linear(named_key(key, "up"), hidden, gated, config.init_deviation, config.biases)
        self.down = Linear(named_key(key, "down"), inner, hidden, small, config.biases)

    def __call__(self, y: jax.Array) -> jax.Array:
        """From [b, split s, h] to the same, through [b, whole s, split f]."""
        gates = (None,) if self.config.activation == "swiglu" else ()
        lead = ("batch", "whole_sequence")
        up = checkpoint_name(self.up(y, self.operations.column, (*lead, *gates, "feedforward")), "up")
        wide = up.astype(jnp.float32)
        if self.config.activation == "swiglu":  # up [b, s, 2, f]: the gate, then what it lets through
            active = jax.nn.silu(wide[..., 0, :]) * wide[..., 1, :]
        else:
            active = jax.nn.gelu(wide, approximate=True)
        # Its gradient must be split by feedforward too: left free, XLA may split it by sequence and add an all-to-all.
        active = checkpoint_name(self.constrain(active.astype(y.dtype), *lead, "feedforward"), "activation")
        return self.down(active, self.operations.row, 1)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        key: jax.Array,
        constrain: Constrain = identity,
        operations: Operations | None = None,
    ):
        """Draws the block's weights from `key`, which is of this layer alone."""
        self.constrain = constrain
        operations = plain_operations(constrain) if operations is None else operations
        self.attention_norm, self.feedforward_norm = Norm(config), Norm(config)
        self.attention = Attention(config, named_key(key, "attention"), constrain, operations)
        self.feedforward = FeedForward(config, named_key(key, "feedforward"), constrain, operations)

    def _split(self, y: jax.Array, name: str) -> jax.Array:
        """The normed residual, split by sequence before it is gathered: so its gradient is reduce-scattered."""
        return checkpoint_name(self.constrain(y, *RESIDUAL), name)

    def __call__(self, x: jax.Array, dropout: Dropout, places: Places = ONE_TEXT) -> jax.Array:
        """From x [b, split s, h] to the same shape, type and sharding."""
        y = self._split(self.attention_norm(x), "attention_input")
        x = x + dropout(self.attention(y, dropout, places), "attention", *RESIDUAL)
        x = checkpoint_name(self.constrain(x, *RESIDUAL), "residual")
        y = self._split(self.feedforward_norm(x), "feedforward_input")
        x = x + dropout(self.feedforward(y), "feedforward", *RESIDUAL)
        return self.constrain(x, *RESIDUAL)
