"""Attention: as XLA compiles it, and by fused kernels that never hold the s x s scores.

Under the executor a custom call can neither be partitioned nor be differentiated through a nested `shard_map`. So the
fused kernel's forward and backward each enter a `shard_map` over "tensor" of their own; attention needs no data of another
rank's heads. The forward saves its output and the softmax's statistics, one number per query, and names both for
`jax.checkpoint`: a backward that has both does not run the forward again (2205.14135 section 3.1, 2307.08691).

No kernel knows sinks. With one more score of a head the softmax of the keys is what it was times exp(statistics) /
(exp(statistics) + exp(sink)), and a kernel's backward takes output and statistics of a softmax over more keys than its own.
So the forward's results are changed, the backward gets them, and a sink's gradient follows from both.

Shapes: b samples, s queries, t keys, a heads of size d in g groups that share a key and a value, n = a / g; values have
heads of size v, which is d but for latent attention.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from megajax.ops.flash_attention import HIDDEN_SCORE
from megajax.ops.linear import Constrain, identity
from megajax.ops.score_dropout import ScoreDropout
from megajax.ops.tensor_shards import TENSOR, on_tensor_shards

__all__ = [
    "Kernel",
    "Scoring",
    "plain_attention",
    "softcapped",
    "softmax_with_sinks",
    "document_starts",
    "fused_attention",
]

HEADS = P(None, None, TENSOR)  # queries, keys, values and outputs: their third axis is heads or groups
STATISTICS = P(None, TENSOR)  # and of the random keys of dropout
SCORES = ("batch", "groups", None, None, None)  # logical axes of [b, g, n, s, t]
NAMES = ("context", "attention_statistics")  # saved by the forward, as megajax.models.remat names them


class Scoring(NamedTuple):
    """What attention does to its scores besides hiding some; of it fused attention has no soft cap.

    Attributes:
      drop: dropout of the probabilities; None: there is none.
      softcap: their bound, see `softcapped`; None: they have none.
      sinks: one more score of each head, [g, n], see `softmax_with_sinks`; None: there is none.
    """

    drop: ScoreDropout | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None

    def capped(self, scores: jax.Array) -> jax.Array:
        """The scores within their bound."""
        return scores if self.softcap is None else softcapped(scores, self.softcap)

    def dropped(self, probabilities: jax.Array, constrain: Constrain) -> jax.Array:
        """The probabilities [b, g, n, s, t] after dropout; its mask is named for `jax.checkpoint`."""
        if self.drop is None:
            return probabilities
        kept = checkpoint_name(constrain(self.drop.kept(probabilities.shape), *SCORES), "probabilities_mask")
        return self.drop(probabilities, kept)


def softcapped(x: jax.Array, cap: float) -> jax.Array:
    """cap tanh(x / cap), computed in fp32, in x's type (2408.00118 section 2)."""
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


def softmax_with_sinks(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax over the last axis; with sinks [g, n] as if each head of [b, g, n, s, t] had one more score, of no key."""
    if sinks is None:
        return jax.nn.softmax(scores)
    sinks = sinks.astype(scores.dtype)[..., None, None]
    largest = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sinks))
    shares = jnp.exp(scores - largest)
    return shares / (shares.sum(-1, keepdims=True) + jnp.exp(sinks - largest))


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def masked_softmax(
    scores: jax.Array,
    document: jax.Array | None = None,
    padding: jax.Array | None = None,
    window: jax.Array | int | None = None,
    causal: bool = True,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Softmax over the keys that each query sees: [..., s queries, s keys], in fp32, returned in the scores' type.

    Arguments: see `plain_attention`.

    The derivative is written out so that the backward needs the rounded result, named "probabilities", and not its fp32
    copy: a block that saves it does not multiply queries and keys again.
    """
    query, key = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    seen = key <= query if causal else np.ones((1, 1), bool)
    if window is not None:
        seen = seen & (key > query - window)
        seen = seen if causal else seen & (key < query + window)
    if document is not None:
        own = document[:, :, None] == document[:, None, :]
        seen = seen & own.reshape(len(own), *[1] * (scores.ndim - 3), *own.shape[1:])
    if padding is not None:
        seen = seen & (key < scores.shape[-1] - padding.reshape(-1, *[1] * (scores.ndim - 1)))
    scores_ = jnp.where(seen, scores.astype(jnp.float32), HIDDEN_SCORE)
    return softmax_with_sinks(scores_, sinks).astype(scores.dtype)


@masked_softmax.defjvp
def _masked_softmax_jvp(causal, primals, tangents):
    """The tangent is p (ds - sum p ds); p is 0 where a key is hidden. A sink has what the others leave of 1."""
    *others, sinks = primals
    probabilities = checkpoint_name(masked_softmax(*others, causal, sinks), "probabilities")
    p, tangent = probabilities.astype(jnp.float32), tangents[0].astype(jnp.float32)
    mean = (p * tangent).sum(-1, keepdims=True)
    if sinks is not None:
        mean = mean + (1 - p.sum(-1, keepdims=True)) * tangents[-1].astype(jnp.float32)[..., None, None]
    return probabilities, (p * (tangent - mean)).astype(probabilities.dtype)


def plain_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    constrain: Constrain = identity,
    document: jax.Array | None = None,
    window: jax.Array | int | None = None,
    causal: bool = True,
    padding: jax.Array | None = None,
) -> jax.Array:
    """softmax(query key^T / sqrt(d)) value, over the keys that each query sees (1706.03762 section 3.2.1).

    Args:
      query: [b, s, g, a/g, d], all queries of a group attend to the group's one key and value.
      key: [b, s, g, d].
      value: [b, s, g, d].
      scoring: what is done to scores and probabilities.
      constrain: (x, *logical axes) -> x, a sharding constraint.
      document: number of each token's document, [b, s], if tokens attend to their own document only.
      window: latest tokens that a token attends to, itself included (2310.06825), a scalar or [b, 1, 1, s, 1]; without a
        causal mask as many later ones too. None: all.
      causal: whether keys after their query are hidden.
      padding: number of tokens at the end of each sample that nothing attends to, [b]; None: 0.

    Returns:
      [b, s, g, a/g, d].
    """
    query = query * query.shape[-1] ** -0.5  # before the product: a sum of d terms could overflow fp16
    scores = constrain(jnp.einsum("bsgnd,btgd->bgnst", query, key), *SCORES)
    probabilities = masked_softmax(scoring.capped(scores), document, padding, window, causal, scoring.sinks)
    return jnp.einsum("bgnst,btgd->bsgnd", scoring.dropped(probabilities, constrain), value)


class Kernel(NamedTuple):
    """An implementation of attention, on the heads and the part of the sequence that a device has.

    Attributes:
      forward: (query [b, s, a, d], key [b, t, g, d], value [b, t, g, v], causal, first) -> (output [b, s, a, v],
        statistics [b, a, s]). Statistics are the fp32 logarithm of the sum over keys of exp(score), score =
        query key / sqrt(d). `causal` hides keys after their query (then s = t). `first`, int32 [b, s] and not decreasing
        along s, hides keys before first[query]; None hides none. A query that sees no key has output 0 and statistics
        HIDDEN_SCORE; with `causal` each sees itself.
      backward: (query, key, value, output, statistics, gradient of the output, causal, first) -> gradients of query, key
        and value. Output and statistics may be those of a softmax over more keys than these: the gradients are then
        these keys' part, which is what ring attention sums.
      dropping: (dropout of a call's queries and keys) -> the kernel with it; None: it has none, as fused kernels.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    dropping: Callable[[ScoreDropout], "Kernel"] | None = None


@partial(jax.custom_vjp, nondiff_argnums=(3, 6))
def fused_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kernel: Kernel,
    document: jax.Array | None = None,
    padding: jax.Array | None = None,
    causal: bool = True,
    sinks: jax.Array | None = None,
    drop: ScoreDropout | None = None,
) -> jax.Array:
    """softmax(query key^T / sqrt(d)) value over the keys that each query sees; needs a mesh with a "tensor" axis set.

    Kernels hide the keys before `first` of their query, and padding is at the end of a sample. So attention with padding
    reverses keys and values: without a causal mask their order does not matter. Context ranks may do so too: the reverse
    of the pieces that `zigzag` gives a rank are its pieces of the reversed sequence.

    Args:
      query: [b, s, g, n, d], groups split over tensor.
      key: [b, s, g, d], likewise.
      value: [b, s, g, v], likewise.
      kernel: one of this module's, or ring attention.
      document: int32 [b, s], the place in the sample of the first token of each token's document (`document_starts`), if
        tokens attend to their own document only; causal only.
      padding: int32 [b], the number of tokens at the end of each sample that nothing attends to; not causal only.
      causal: whether keys after their query are hidden.
      sinks: one more score of each head, [g, n], groups split over tensor, see `softmax_with_sinks`; None: there is none.
      drop: dropout of the probabilities, heads split over tensor; None: there is none.

    Returns:
      [b, s, g, n, v], named "context" where it is differentiated.
    """
    return _forward(query, key, value, kernel, document, padding, causal, sinks, drop)[0]


def _forward(query, key, value, kernel, document, padding, causal, sinks, drop):
    assert (document if not causal else padding) is None
    assert drop is None or kernel.dropping is not None, "this kernel has no dropout"

    def local(query, key, value, hidden, sinks, drop):
        own, key, value, first = _of_kernel(kernel, query, key, value, causal, hidden, drop)
        output, statistics = own.forward(join_heads(query), key, value, causal, first)
        if sinks is not None:
            output, statistics = _with_sinks(output, statistics, sinks)
        return output.reshape(*query.shape[:-1], -1), statistics

    specs = (HEADS, HEADS, HEADS, P(), P(TENSOR), STATISTICS), (HEADS, STATISTICS)
    hidden = document if causal else padding
    results = on_tensor_shards(local, *specs)(query, key, value, hidden, sinks, drop)
    output, statistics = map(checkpoint_name, results, NAMES)
    return output, (query, key, value, output, statistics, hidden, sinks, drop)


def _backward(kernel, causal, residuals, gradient):
    def local(query, key, value, output, statistics, hidden, sinks, drop, gradient):
        own, key, value, first = _of_kernel(kernel, query, key, value, causal, hidden, drop)
        query_, output, gradient = map(join_heads, (query, output, gradient))
        dq, *others = own.backward(query_, key, value, output, statistics, gradient, causal, first)
        dk, dv = (_in_order(x, causal, hidden) for x in others)
        of_sinks = None if sinks is None else _gradient_of_sinks(output, statistics, sinks, gradient)
        return dq.reshape(query.shape), dk, dv, of_sinks

    specs = (*[HEADS] * 4, STATISTICS, P(), P(TENSOR), STATISTICS, HEADS), (*[HEADS] * 3, P(TENSOR))
    *of_arrays, of_sinks = on_tensor_shards(local, *specs)(*residuals, gradient)
    return *of_arrays, None, None, of_sinks, None


def _of_kernel(
    kernel, query, key, value, causal, hidden, drop
) -> tuple[Kernel, jax.Array, jax.Array, jax.Array | None]:
    """The kernel with dropout, keys and values in its order, and the first key of each query.

    `hidden`: the documents of a causal call, the padding of another.
    """
    if drop is not None:
        kernel = kernel.dropping(dataclasses.replace(drop, is_reversed=not causal and hidden is not None))
    first = hidden if causal or hidden is None else jnp.broadcast_to(hidden[:, None], query.shape[:2])
    return kernel, *(_in_order(x, causal, hidden) for x in (key, value)), first


def _with_sinks(output: jax.Array, statistics: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A kernel's results with one more score of each head, [g, n]: output [b, s, a, d] and statistics [b, a, s]."""
    total = jnp.logaddexp(statistics, sinks.astype(jnp.float32).reshape(-1, 1))
    share = jnp.exp(statistics - total).swapaxes(1, 2)[..., None]
    return (output.astype(jnp.float32) * share).astype(output.dtype), total


def _gradient_of_sinks(output, statistics, sinks, gradient) -> jax.Array:
    """A sink has the probability p of no value: its gradient is -p (output . its gradient), summed over the queries."""
    along = jnp.einsum("bsad,bsad->bas", gradient, output, preferred_element_type=jnp.float32)
    shares = jnp.exp(sinks.astype(jnp.float32).reshape(-1, 1) - statistics)
    return -(shares * along).sum((0, 2)).reshape(sinks.shape).astype(sinks.dtype)


def _in_order(x: jax.Array, causal: bool, hidden: jax.Array | None) -> jax.Array:
    """Keys or values [b, t, ...], or their gradients, in the other order if there is padding."""
    return x if causal or hidden is None else jnp.flip(x, 1)


fused_attention.defvjp(_forward, _backward)


def document_starts(document: jax.Array) -> jax.Array:
    """The place of the first token of each token's document, int32 [..., s].

    Args:
      document: [..., s], a number that differs between neighbouring documents: each document's number, or its start.
    """
    place = lax.broadcasted_iota(jnp.int32, document.shape, document.ndim - 1)
    begins = document != jnp.roll(document, 1, -1)
    return lax.cummax(jnp.where(begins, place, 0), axis=document.ndim - 1)


def join_heads(x: jax.Array) -> jax.Array:
    """[b, s, g, n, d] -> [b, s, g n, d], the order of heads in which kernels assign keys and values to queries."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
