"""GELU (1606.08415): by tanh as GPT-2 has it, and exact; and what a softmax divides by.

The backward of the former computes the same sigmoid in another form.

With z = sqrt(2 / pi) (x + 0.044715 x^3) and s = sigmoid(2 z) = (1 + tanh z) / 2,

    y = x s,    dy/dx = s + x s (1 - s) 2 dz/dx

In a program without loops XLA's GPU compiler finds that the backward computes the forward's tanh again, and stores it from
the one to the other in fp32, twice the bytes of the input. It does not find that in a sigmoid.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["exact_gelu", "gelu", "largest_and_sum"]

SCALE, CUBIC = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """By tanh, as above; elementwise, of an array of floats."""
    return jax.nn.gelu(x, approximate=True)


def _gelu_backward(x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    s = lax.logistic(2 * SCALE * (x + CUBIC * x**3))
    return (dy * (s + x * s * (1 - s) * (2 * SCALE * (1 + 3 * CUBIC * x**2))),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


@jax.custom_jvp
def exact_gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), with the normal distribution's Phi. jax 0.12's derivative of erf fails inside `shard_map`."""
    return 0.5 * x * (1 + lax.erf(x * 0.5**0.5))


@exact_gelu.defjvp
def _exact_gelu_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    density = jnp.exp(-0.5 * x * x) * (2 * jnp.pi) ** -0.5
    return exact_gelu(x), (0.5 * (1 + lax.erf(x * 0.5**0.5)) + x * density) * tangent


def largest_and_sum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest element m of the last axis of x, fp32, and the sum of exp(x - m).

    On GPUs in one pass over memory (1805.02867), where XLA makes a kernel for each of two reductions.
    """
    return lax.platform_dependent(x, cpu=_in_turn, default=_at_once)


def _in_turn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = x.max(-1)
    return largest, jnp.exp(x - largest[..., None]).sum(-1)


def _at_once(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    start = jnp.finfo(jnp.float32).min, jnp.float32(0)
    return lax.reduce((x, jnp.ones_like(x)), start, _joined, (x.ndim - 1,))


def _joined(one: tuple, other: tuple) -> tuple:
    """One exponential, which is what takes the time: on an H100 a pass with two ran at a third of the memory's rate."""
    less = jnp.exp(-jnp.abs(one[0] - other[0]))
    is_larger = one[0] > other[0]
    return jnp.maximum(one[0], other[0]), jnp.where(is_larger, one[1] + other[1] * less, one[1] * less + other[1])
