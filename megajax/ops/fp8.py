"""Matmuls in fp8, with qwix: operands are quantized just before they are multiplied, in forward and backward.

Activations and weights are E4M3, gradients E5M2, which has the range they need (2209.05433 section 3, "hybrid"). Scaling is
dynamic: each row of one operand and each column of the other is scaled so that its largest absolute value becomes the
format's. No state is carried from step to step, so microbatches' gradients can be accumulated. (Delayed scaling, as in
flax's `fp8_ops`, returns new scales in place of gradients, which must not be summed.)
"""

from functools import partial

import jax
import jax.numpy as jnp
import qwix

__all__ = ["tensordot"]

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def tensordot(x: jax.Array, kernel: jax.Array, contracted: int) -> jax.Array:
    """`jnp.tensordot`: [..., *i], [*i, *o] -> [..., *o], for `contracted` axes in i; the result has x's type.

    The backward saves x and the kernel, not their quantized copies: the weight is held anyway.
    """
    lead = x.ndim - contracted
    return _product(x, kernel, (range(lead, x.ndim), range(contracted)), (E4M3, E4M3))


def _product(left: jax.Array, right: jax.Array, contracted, formats) -> jax.Array:
    """Contracts axes of two arrays, each quantized to its format; the other axes stay in their order."""
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
