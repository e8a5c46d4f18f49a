"""Matmuls with a block's weights: Megatron's column- and row-parallel pair as data (`Operations`), and the bias.

Logical axes of activations, which megajax.sharding.rules maps to mesh axes:

    RESIDUAL    ("batch", "sequence", "hidden")        between matmul pairs; sequence-sharded with sequence parallelism
    GATHERED    ("batch", "whole_sequence", "hidden")  the input of a column-parallel matmul

The pair is 1909.08053 section 3; its all-gather and reduce-scatter along the sequence are 2205.05198 section 4.2.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.norm import sum_of_rows

__all__ = [
    "GATHERED",
    "RESIDUAL",
    "Constrain",
    "Operations",
    "add_bias",
    "identity",
    "plain_operations",
    "reduce_scattered",
]

Constrain = Callable[..., jax.Array]
RESIDUAL = ("batch", "sequence", "hidden")
GATHERED = ("batch", "whole_sequence", "hidden")


def identity(x: jax.Array, *axes: str | None) -> jax.Array:
    """The `constrain` of a model that runs on no mesh."""
    return x


class Operations(NamedTuple):
    """The matmuls and the attention of a block; variants overlap communication or work on parts of the sequence.

    Attributes:
      column: (y [b, split s, h], kernel [h, *o], logical axes of the result) -> y kernel [b, whole s, *o].
      row: (x [b, whole s, *i], kernel [*i, h], number of axes in i) -> x kernel [b, split s, h].
      gated: (up [b, whole s, 2, f], kernel [f, h], activation) -> (activation(gate) * value) kernel, as `row`, see
        `megajax.ops.gated_down`. None: the activation, then `row`.
      attend: (query, key, value, document=None, padding=None, causal=True, sinks=None, drop=None) -> context, with shapes
        as in `megajax.ops.attention.plain_attention`; names the values that it saves. `document` [b, s] has the place in the
        sample of the first token of each token's document, as `megajax.ops.ring_attention.split_batch` writes it. A block
        passes `padding` and `causal` only if it is not causal, and `drop` only if it has dropout. None: `plain_attention`.
      norm: (x [b, split s, h], scale [h], epsilon) -> RMS norm, see `megajax.ops.norm_kernel`. None: `megajax.ops.norm`.
    """

    column: Callable[[jax.Array, jax.Array, tuple], jax.Array]
    row: Callable[[jax.Array, jax.Array, int], jax.Array]
    attend: Callable[..., jax.Array] | None = None
    gated: Callable[..., jax.Array] | None = None
    norm: Callable[[jax.Array, jax.Array, float], jax.Array] | None = None


def plain_operations(constrain: Constrain = identity, product: Callable[..., jax.Array] | None = None) -> Operations:
    """Matmuls whose communication XLA inserts before or after them, from the sharding constraints.

    Args:
      constrain: (x, *logical axes) -> x, see `megajax.sharding.rules.AxisRules.constrain`.
      product: (x, kernel, number of axes to contract) -> the matmul in another data type; None: `jnp.tensordot`.
    """
    multiply = jnp.tensordot if product is None else product

    def row(x: jax.Array, kernel: jax.Array, contracted: int) -> jax.Array:
        if product is None and contracted == 1:
            return _down_projection(x, kernel, constrain)
        return reduce_scattered(multiply(x, kernel, contracted), constrain)

    return Operations(
        column=lambda y, kernel, axes: constrain(multiply(constrain(y, *GATHERED), kernel, 1), *axes), row=row
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce_scattered(x: jax.Array, constrain: Constrain) -> jax.Array:
    """A row-parallel product, reduce-scattered. Its gradient is gathered here, or XLA gathers it once per matmul."""
    return constrain(x, *RESIDUAL)


reduce_scattered.defvjp(
    lambda x, constrain: (reduce_scattered(x, constrain), None),
    lambda constrain, _, gradient: (constrain(constrain(gradient, *RESIDUAL), *GATHERED),),
)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _down_projection(x: jax.Array, kernel: jax.Array, constrain: Constrain) -> jax.Array:
    """x [b, whole s, f] kernel [f, h], reduce-scattered: the second matmul of an MLP.

    The backward's barrier: on GPUs x, an activation, is recomputed while the gradient is gathered. XLA's scheduler would
    do so just before the matmul that reads x, and find nothing to do during the all-gather.
    """
    return reduce_scattered(jnp.tensordot(x, kernel, 1), constrain)


def _down_projection_backward(constrain, saved, gradient):
    x, kernel = saved
    gradient, x = lax.optimization_barrier((constrain(constrain(gradient, *RESIDUAL), *GATHERED), x))
    dx = jnp.tensordot(gradient, kernel, ((2,), (1,)))
    return dx, jnp.tensordot(gradient, x, ((0, 1), (0, 1))).T


_down_projection.defvjp(
    lambda x, kernel, *how: (_down_projection(x, kernel, *how), (x, kernel)), _down_projection_backward
)


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [..., *n] + bias [*n]; the bias's gradient is summed in fp32.

    A sum in 16 bits makes XLA's GPU compiler transpose the whole stash of y for every chunk (jax 0.10.2). The barrier keeps
    the bias out of the matmul, where XLA's GPU compiler would write a bias of several axes as a whole matrix, and slice the
    weight of a matmul with a bias from its stack; the sum is part of the next elementwise kernel anyway. `sum_of_rows` lets
    the kernel that computes dy begin the bias's gradient; with a single sum it would write dy in fp32 too.
    """
    return lax.optimization_barrier(y) + bias


def _add_bias_backward(bias, dy):
    return dy, sum_of_rows(dy.astype(jnp.float32), bias.ndim).astype(bias.dtype)


add_bias.defvjp(lambda y, bias: (add_bias(y, bias), bias), _add_bias_backward)
