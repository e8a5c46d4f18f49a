"""Causal attention: as XLA compiles it, and by a fused kernel that never holds the s x s scores.

Under the executor a custom call can neither be partitioned nor be differentiated through a nested `shard_map`. So the
fused kernel's forward and backward each enter a `shard_map` over "tensor" of their own; attention needs no data of another
rank's heads. The forward saves its output and the softmax's statistics, one number per query, and names both for
`jax.checkpoint`: a backward that has both does not run the forward again (2205.14135 section 3.1, 2307.08691).

Shapes: b samples, s queries, t keys, a heads of size d in g groups that share a key and a value, n = a / g.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError
from megajax.ops.linear import Constrain, identity
from megajax.runtime.compat import cudnn_attention_backward, cudnn_attention_forward, cudnn_version

__all__ = [
    "CUDNN",
    "XLA",
    "Choice",
    "Kernel",
    "causal_attention",
    "choose_attention",
    "cudnn_installed",
    "fused_attention",
]

AXIS = "tensor"
HEADS = P(None, None, AXIS)  # queries, keys, values and outputs: their third axis is heads or groups
STATISTICS = P(None, AXIS)
SCORES = ("batch", "groups", None, None, None)  # logical axes of [b, g, n, s, t]
HIDDEN_SCORE = -1e30  # of a key after its query; finite, so that no row of scores can make a NaN
NAMES = ("context", "attention_statistics")  # saved by the forward, as megajax.models.remat names them


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def causal_softmax(scores: jax.Array, document: jax.Array | None = None, window: int | None = None) -> jax.Array:
    """Softmax over the keys up to each query: [..., s queries, s keys], computed in fp32, returned in the scores' type.

    With `document` [b, s], the number of each token's document, over the keys of the query's own document only. With
    `window`, over the query's own key and the window - 1 before it.

    The derivative is written out so that the backward needs the rounded result, named "probabilities", and not its fp32
    copy: a block that saves it does not multiply queries and keys again.
    """
    query, key = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if document is not None:
        own = document[:, :, None] == document[:, None, :]
        seen = seen & own.reshape(len(own), *[1] * (scores.ndim - 3), *own.shape[1:])
    return jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), HIDDEN_SCORE)).astype(scores.dtype)


@causal_softmax.defjvp
def _causal_softmax_jvp(window, primals, tangents):
    """The tangent is p (ds - sum p ds); p is 0 where a key is hidden."""
    probabilities = checkpoint_name(causal_softmax(*primals, window), "probabilities")
    p, tangent = probabilities.astype(jnp.float32), tangents[0].astype(jnp.float32)
    return probabilities, (p * (tangent - (p * tangent).sum(-1, keepdims=True))).astype(probabilities.dtype)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    drop: Callable[[jax.Array], jax.Array],
    constrain: Constrain = identity,
    document: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """softmax(query key^T / sqrt(d)) value, over the keys up to each query (1706.03762 section 3.2.1).

    Args:
      query: [b, s, g, a/g, d], all queries of a group attend to the group's one key and value.
      key: [b, s, g, d].
      value: [b, s, g, d].
      drop: dropout on the probabilities.
      constrain: (x, *logical axes) -> x, a sharding constraint.
      document: number of each token's document, [b, s], if tokens attend to their own document only.
      window: latest tokens that a token attends to, itself included (2310.06825); None: all before it.

    Returns:
      [b, s, g, a/g, d].
    """
    query = query * query.shape[-1] ** -0.5  # before the product: a sum of d terms could overflow fp16
    scores = constrain(jnp.einsum("bsgnd,btgd->bgnst", query, key), *SCORES)
    return jnp.einsum("bgnst,btgd->bsgnd", drop(causal_softmax(scores, document, window)), value)


class Kernel(NamedTuple):
    """An implementation of attention, on the heads and the part of the sequence that a device has.

    Attributes:
      forward: (query [b, s, a, d], key [b, t, g, d], value [b, t, g, d], causal) -> (output [b, s, a, d], statistics
        [b, a, s]). Statistics are the fp32 logarithm of the sum over keys of exp(score), score = query key / sqrt(d).
        `causal` hides keys after their query (then s = t); otherwise all queries see all keys.
      backward: (query, key, value, output, statistics, gradient of the output, causal) -> gradients of query, key and
        value. Output and statistics may be those of a softmax over more keys than these: the gradients are then
        these keys' part, which is what ring attention sums.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def fused_attention(query: jax.Array, key: jax.Array, value: jax.Array, kernel: Kernel) -> jax.Array:
    """softmax(query key^T / sqrt(d)) value over the keys up to each query; needs a mesh with a "tensor" axis set.

    Args:
      query: [b, s, g, n, d], groups split over tensor.
      key: [b, s, g, d], likewise.
      value: [b, s, g, d], likewise.
      kernel: CUDNN or XLA.

    Returns:
      [b, s, g, n, d], named "context" where it is differentiated.
    """
    return _forward(query, key, value, kernel)[0]


def _forward(query, key, value, kernel):
    def local(query, key, value):
        output, statistics = kernel.forward(join_heads(query), key, value, True)
        return output.reshape(query.shape), statistics

    specs = dict(in_specs=HEADS, out_specs=(HEADS, STATISTICS))
    kept = jax.shard_map(local, axis_names={AXIS}, **specs)(query, key, value)
    output, statistics = map(checkpoint_name, kept, NAMES)
    return output, (query, key, value, output, statistics)


def _backward(kernel, residuals, gradient):
    def local(query, key, value, output, statistics, gradient):
        joined = map(join_heads, (query, output, gradient))
        query_, output, gradient = joined
        dq, dk, dv = kernel.backward(query_, key, value, output, statistics, gradient, True)
        return dq.reshape(query.shape), dk, dv

    specs = dict(in_specs=(*[HEADS] * 4, STATISTICS, HEADS), out_specs=HEADS)
    return jax.shard_map(local, axis_names={AXIS}, **specs)(*residuals, gradient)


fused_attention.defvjp(_forward, _backward)


def join_heads(x: jax.Array) -> jax.Array:
    """[b, s, g, n, d] -> [b, s, g n, d], the order of heads in which kernels assign keys and values to queries."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


# XLA's own kernel: it materializes the scores of its queries and keys. For tests, and for ring attention's pieces.


def _probabilities(query, key, causal, statistics=None):
    """exp(score - statistics), fp32 [b, g, n, s, t], and the statistics [b, g, n, s]."""
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1]) * query.shape[-1] ** -0.5
    scores = jnp.einsum("bsgnd,btgd->bgnst", grouped, key, preferred_element_type=jnp.float32)
    if causal:
        row, column = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
        scores = jnp.where(column <= row, scores, HIDDEN_SCORE)
    if statistics is None:
        statistics = jax.nn.logsumexp(scores, axis=-1)
    return jnp.exp(scores - statistics[..., None]), statistics


def _xla_forward(query, key, value, causal):
    probabilities, statistics = _probabilities(query, key, causal)
    output = jnp.einsum("bgnst,btgd->bsgnd", probabilities.astype(value.dtype), value)
    return output.reshape(query.shape), statistics.reshape(len(query), -1, query.shape[1])


def _xla_backward(query, key, value, output, statistics, gradient, causal):
    groups, fp32 = key.shape[2], jnp.float32
    split = lambda x: x.reshape(*x.shape[:2], groups, -1, x.shape[-1])  # noqa: E731
    statistics = statistics.reshape(len(query), groups, -1, query.shape[1])
    p, _ = _probabilities(query, key, causal, statistics)
    dv = jnp.einsum("bgnst,bsgnd->btgd", p.astype(value.dtype), split(gradient), preferred_element_type=fp32)
    dp = jnp.einsum("bsgnd,btgd->bgnst", split(gradient), value, preferred_element_type=fp32)
    along = jnp.einsum("bsgnd,bsgnd->bgns", split(gradient), split(output), preferred_element_type=fp32)
    ds = (p * (dp - along[..., None]) * query.shape[-1] ** -0.5).astype(query.dtype)
    dq = jnp.einsum("bgnst,btgd->bsgnd", ds, key, preferred_element_type=fp32).reshape(query.shape)
    dk = jnp.einsum("bgnst,bsgnd->btgd", ds, split(query), preferred_element_type=fp32)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)


XLA = Kernel(_xla_forward, _xla_backward)


CUDNN = Kernel(cudnn_attention_forward, cudnn_attention_backward)


class Choice(NamedTuple):
    """The attention of a run.

    Attributes:
      name: "xla" or "cudnn".
      reason: why, as printed at the start.
    """

    name: str
    reason: str


def choose_attention(
    requested: str,
    *,
    head_size: int,
    dropout: float,
    precision: str,
    device: jax.Device,
    cudnn: bool | None = None,
    window: int | None = None,
) -> Choice:
    """The attention that runs: the requested one, or for "auto" cuDNN's wherever it is supported.

    Args:
      requested: auto, xla or cudnn.
      head_size: elements of a head.
      dropout: of the model; cuDNN draws its own mask, which depends on the mesh, so dropout needs XLA's attention.
      precision: bf16, fp16 or fp32.
      device: one of the mesh's; it may belong to a topology that is only compiled for.
      cudnn: whether the cuDNN library is installed; None: found out here.
      window: the model's sliding window, if it has one.

    Raises:
      ConfigError: cudnn was requested and cannot run: why, and which option to pass.
    """
    if requested == "xla":
        return Choice("xla", "as requested")
    problem = _cudnn_problem(head_size, dropout, precision, device, cudnn)
    if problem is None and window is not None:
        problem = f"fused attention has no sliding window, and sliding_window = {window}"
    if problem is None:
        return Choice("cudnn", "as requested" if requested == "cudnn" else "the fastest that these devices have")
    if requested == "cudnn":
        raise ConfigError(f"attention = cudnn, but {problem}: pass --attention xla or --attention auto.")
    return Choice("xla", problem)


def _cudnn_problem(head_size, dropout, precision, device, cudnn) -> str | None:
    """Why cuDNN's attention cannot run; None if it can."""
    capability = getattr(device, "compute_capability", "")
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return f"{device.device_kind} is not an NVIDIA GPU"
    largest = 256 if float(capability) >= 9 else 128
    if float(capability) < 8:
        return f"cuDNN needs compute capability 8.0 or more, and {device.device_kind} has {capability}"
    if head_size > largest or head_size % 8:
        return f"cuDNN's head size is a multiple of 8 up to {largest} on {device.device_kind}, and this is {head_size}"
    if dropout > 0:
        return f"cuDNN cannot drop the same elements on every mesh, and dropout = {dropout}"
    if precision == "fp32":
        return "cuDNN computes in bf16 or fp16, and precision = fp32"
    if not (cudnn_installed() if cudnn is None else cudnn):
        return "the cuDNN library is not installed (it comes with megajax[cuda12] and megajax[cuda13])"
    return None


def cudnn_installed() -> bool:
    """Whether the cuDNN library is installed on this machine; needs no GPU."""
    return cudnn_version() is not None
