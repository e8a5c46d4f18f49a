"""The implementations of attention that `fused_attention` calls: XLA's, cuDNN's, tokamax's, and what is made of them.

Shapes: b samples, s queries, t keys, a heads of size d in g groups that share a key and a value of size v, n = a / g.
"""

import operator
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.ops.attention import Kernel
from megajax.ops.attention_choice import UNEQUAL_FROM, has_head_sizes
from megajax.ops.flash_attention import HIDDEN_SCORE, flash_backward
from megajax.ops.score_dropout import ScoreDropout
from megajax.ops.tokamax_kernels import attention_backward, attention_forward, has_backward
from megajax.runtime.compat_kernels import cudnn_attention_backward, cudnn_attention_forward, cudnn_version

__all__ = ["CUDNN", "INTERPRETED", "XLA", "cudnn_kernel", "tokamax_kernel", "with_one_size", "with_window"]


def with_window(kernel: Kernel, window: int | None) -> Kernel:
    """The kernel for queries that see the last `window` keys only, themselves included; causal only."""
    if window is None:
        return kernel

    def both(query, first):
        start = jnp.maximum(jnp.arange(query.shape[1], dtype=jnp.int32) - (window - 1), 0)[None]
        return jnp.broadcast_to(start, query.shape[:2]) if first is None else jnp.maximum(start, first)

    def forward(query, key, value, causal, first=None):
        return kernel.forward(query, key, value, causal, both(query, first))

    def backward(query, *arguments):
        *others, first = arguments
        return kernel.backward(query, *others, both(query, first))

    return Kernel(forward, backward, kernel.dropping and (lambda drop: with_window(kernel.dropping(drop), window)))


def with_one_size(kernel: Kernel, has: Callable[[int, int], bool] = operator.eq) -> Kernel:
    """The kernel for any sizes of heads: where it does not have them, the smaller ones get zeros up to the larger size.

    Args:
      kernel: for heads of one size.
      has: of d and v, whether it has these.
    """

    def widen(query, key, value, *others):
        """The arrays with heads of one size, and the factor in the queries: scores have the scale of their own size."""
        width = max(query.shape[-1], value.shape[-1])
        factor = (width / query.shape[-1]) ** 0.5
        arrays = query * factor, key, value, *others
        return [jnp.pad(x, (*[(0, 0)] * 3, (0, width - x.shape[-1]))) for x in arrays], factor

    def forward(query, key, value, causal, first=None):
        if has(query.shape[-1], value.shape[-1]):
            return kernel.forward(query, key, value, causal, first)
        output, statistics = kernel.forward(*widen(query, key, value)[0], causal, first)
        return output[..., : value.shape[-1]], statistics

    def backward(query, key, value, output, statistics, gradient, causal, first=None):
        if has(query.shape[-1], value.shape[-1]):
            return kernel.backward(query, key, value, output, statistics, gradient, causal, first)
        (*wide, output, gradient), factor = widen(query, key, value, output, gradient)
        gradients = kernel.backward(*wide, output, statistics, gradient, causal, first)
        dq, dk, dv = (x[..., : own.shape[-1]] for x, own in zip(gradients, (query, key, value), strict=True))
        return dq * factor, dk, dv

    return Kernel(forward, backward)


# XLA's own kernel: it materializes the scores of its queries and keys. For tests, and for ring attention's pieces.


def _probabilities(query, key, causal, first, statistics=None):
    """exp(score - statistics), fp32 [b, g, n, s, t], and the statistics [b, g, n, s]."""
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1]) * query.shape[-1] ** -0.5
    scores = jnp.einsum("bsgnd,btgd->bgnst", grouped, key, preferred_element_type=jnp.float32)
    row, column = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    seen = column <= row if causal else np.ones((1, 1), bool)
    if first is not None:
        seen = (seen & (column >= first[..., None]))[:, None, None]
    scores = jnp.where(seen, scores, HIDDEN_SCORE)
    if statistics is None:
        statistics = jnp.maximum(jax.nn.logsumexp(scores, axis=-1), HIDDEN_SCORE)
    return jnp.where(seen, jnp.exp(scores - statistics[..., None]), 0), statistics


def _xla_forward(query, key, value, causal, first=None, drop=None):
    probabilities, statistics = _probabilities(query, key, causal, first)
    if drop is not None:
        probabilities = drop(probabilities, drop.kept(probabilities.shape))
    output = jnp.einsum("bgnst,btgd->bsgnd", probabilities.astype(value.dtype), value)
    return output.reshape(*query.shape[:3], -1), statistics.reshape(len(query), -1, query.shape[1])


def _xla_backward(query, key, value, output, statistics, gradient, causal, first=None, drop=None):
    groups, fp32 = key.shape[2], jnp.float32
    split = lambda x: x.reshape(*x.shape[:2], groups, -1, x.shape[-1])  # noqa: E731
    statistics = statistics.reshape(len(query), groups, -1, query.shape[1])
    p, _ = _probabilities(query, key, causal, first, statistics)
    dp = jnp.einsum("bsgnd,btgd->bgnst", split(gradient), value, preferred_element_type=fp32)
    of_values = p
    if drop is not None:
        kept = drop.kept(p.shape)
        dp, of_values = drop(dp, kept), drop(p, kept)
    dv = jnp.einsum("bgnst,bsgnd->btgd", of_values.astype(value.dtype), split(gradient), preferred_element_type=fp32)
    along = jnp.einsum("bsgnd,bsgnd->bgns", split(gradient), split(output), preferred_element_type=fp32)
    ds = (p * (dp - along[..., None]) * query.shape[-1] ** -0.5).astype(query.dtype)
    dq = jnp.einsum("bgnst,btgd->bsgnd", ds, key, preferred_element_type=fp32).reshape(query.shape)
    dk = jnp.einsum("bgnst,bsgnd->btgd", ds, split(query), preferred_element_type=fp32)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)


def _xla_kernel(drop: ScoreDropout | None = None) -> Kernel:
    return Kernel(partial(_xla_forward, drop=drop), partial(_xla_backward, drop=drop), _xla_kernel)


XLA = _xla_kernel()
# On any device: XLA's forward, and megajax's backward in Pallas's interpreter; Mosaic's does not run tokamax's kernels.
INTERPRETED = with_one_size(Kernel(_xla_forward, partial(flash_backward, interpret=True)))


@cache
def tokamax_kernel(device: jax.Device) -> Kernel:
    """tokamax's on this NVIDIA GPU, one of the mesh's; where `first` hides keys, or it has none, megajax's backward."""

    def backward(query, key, value, output, statistics, gradient, causal, first=None):
        arrays = (query, key, value, output, statistics, gradient)
        if first is None and has_backward(device, query.shape[-1]):
            return attention_backward(device, *arrays, causal)
        return flash_backward(*arrays, causal, first)

    return with_one_size(Kernel(partial(attention_forward, device), backward))


def cudnn_kernel(window: int | None = None) -> Kernel:
    """cuDNN's, for queries that see the last `window` keys only, if it is given; it has no `first`."""

    def forward(query, key, value, causal, first=None):
        assert first is None, "cuDNN's kernel has no document mask"
        return cudnn_attention_forward(query, key, value, causal, window)

    def backward(query, key, value, output, statistics, gradient, causal, first=None):
        return cudnn_attention_backward(query, key, value, output, statistics, gradient, causal, window)

    def has(head_size: int, value_size: int) -> bool:
        if head_size == value_size:
            return True
        return has_head_sizes("cudnn", head_size, value_size) and (cudnn_version() or 0) >= UNEQUAL_FROM

    return with_one_size(Kernel(forward, backward), has)


CUDNN = cudnn_kernel()
