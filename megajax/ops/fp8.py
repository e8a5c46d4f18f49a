"""Matmuls in fp8, with qwix: operands are scaled into eight bits just before they are multiplied, forwards and backwards.

Activations and weights are E4M3, gradients E5M2, which has the range they need (2209.05433 section 3, "hybrid"). Scales are
found anew each time, of every row of the one operand and every column of the other: its largest absolute value becomes the
format's. So there is nothing to carry from step to step, and a microbatch's gradient is a gradient and can be added up.
(Scales from a history of maxima, as flax's `fp8_ops` have them, come as "gradients" that are to replace the old ones.)
"""

from functools import partial

import jax
import jax.numpy as jnp
import qwix

__all__ = ["tensordot"]

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def tensordot(x: jax.Array, kernel: jax.Array, contracted: int) -> jax.Array:
    """`jnp.tensordot`: [..., *i], [*i, *o] -> [..., *o], for `contracted` axes in i; the result is of x's type.

    Kept for the backward are x and the kernel themselves: a weight is there anyway, and its eight bits would be more.
    """
    lead = x.ndim - contracted
    return _product(x, kernel, (range(lead, x.ndim), range(contracted)), (E4M3, E4M3))


def _product(left: jax.Array, right: jax.Array, contracted, formats) -> jax.Array:
    """Contracts axes of two arrays, each in its format; the other axes stay in their order."""
    scaled = [
        qwix.quantize(
            array, dtype, channelwise_axes=[a for a in range(array.ndim) if a not in axes], scale_dtype=jnp.float32
        )
        for array, axes, dtype in zip((left, right), contracted, formats, strict=True)
    ]
    axes = tuple(map(tuple, contracted))
    return qwix.dot_general(*scaled, (axes, ((), ())), preferred_element_type=left.dtype)


def _backward(contracted: int, operands, gradient):
    x, kernel = operands
    lead = x.ndim - contracted
    outputs = range(lead, gradient.ndim), range(contracted, kernel.ndim)
    dx = _product(gradient, kernel, outputs, (E5M2, E4M3))
    dkernel = _product(x, gradient, (range(lead), range(lead)), (E4M3, E5M2))
    return dx, dkernel


tensordot.defvjp(lambda x, kernel, contracted: (tensordot(x, kernel, contracted), (x, kernel)), _backward)
