"""Layer norm and RMS norm over the last axis, with a backward that passes over memory twice or three times.

With m = mean(x) (0 for RMS norm), c = x - m, r = 1 / sqrt(mean(c^2) + epsilon) (1607.06450, 1910.07467):

    y = c r scale + bias
    g = dy scale;    dx = r (g - mean(g) - c r^2 mean(g c));    without mean(g) for RMS norm
    dscale = sum over rows of dy c r;    dbias = sum over rows of dy
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["norm", "sum_of_rows"]

# In which a gradient is summed over rows; enough for a GPU's processors together with the blocks of columns.
ROW_BLOCKS = 64


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, centred: bool, epsilon: float) -> jax.Array:
    """Norms x [..., n] in fp32; the result has x's type.

    Args:
      x: [..., n].
      scale: [n].
      bias: [n], or None.
      centred: layer norm, which subtracts the mean; else RMS norm.
      epsilon: added to the variance.
    """
    c = x.astype(jnp.float32)
    if centred:
        c = c - c.mean(-1, keepdims=True)
    y = c * lax.rsqrt(jnp.square(c).mean(-1, keepdims=True) + epsilon) * scale.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def _backward(centred, epsilon, saved, dy):
    """The gradients; the barriers decide which kernels XLA's GPU compiler makes of it.

    One reads x and dy for the sums over columns. The next reads them again and writes dx and partial sums over rows; it
    would write dy c r too, in fp32, for a kernel that sums it over all rows at once.
    """
    x, scale, bias = saved
    c, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    if centred:
        c = c - lax.optimization_barrier(c.mean(-1, keepdims=True))
    g = dy * scale.astype(jnp.float32)
    sums = [(c * c).sum(-1, keepdims=True), (g * c).sum(-1, keepdims=True), g.sum(-1, keepdims=True)]
    variance, mean_gc, *mean_g = [total / x.shape[-1] for total in (sums if centred else sums[:2])]
    r = lax.rsqrt(variance + epsilon)
    r, weight_of_c, *mean_g = lax.optimization_barrier([r, r * r * mean_gc, *mean_g])
    dx = r * (g - sum(mean_g) - c * weight_of_c)
    dscale = sum_of_rows(dy * (c * r)).astype(scale.dtype)
    return dx.astype(x.dtype), dscale, None if bias is None else sum_of_rows(dy).astype(bias.dtype)


def sum_of_rows(x: jax.Array, axes: int = 1) -> jax.Array:
    """x [b, s, ..., *n] summed over all but its last `axes` axes.

    On GPUs in two steps, of which XLA makes the first a part of the kernel that computes x. Splitting s, and nothing else,
    keeps every part on one device where s is sharded over up to 64. XLA's CPU devices, which have no use for it, can wait
    for one another forever if the parts are gathered in a loop while activations are sent (jax 0.12).
    """
    lead = x.ndim - axes
    at = min(1, lead - 1)

    def by_parts(x):
        blocks = math.gcd(x.shape[at], ROW_BLOCKS)
        parts = x.reshape(*x.shape[:at], blocks, -1, *x.shape[at + 1 :]).sum(tuple(range(at + 1, lead + 1)))
        return lax.optimization_barrier(parts).sum(tuple(range(at + 1)))

    return lax.platform_dependent(x, cpu=lambda x: x.sum(tuple(range(lead))), default=by_parts)


norm.defvjp(lambda x, scale, bias, *how: (norm(x, scale, bias, *how), (x, scale, bias)), _backward)
