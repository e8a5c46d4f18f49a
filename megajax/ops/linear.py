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

__all__ = ["GATHERED", "RESIDUAL", "Constrain", "Operations", "add_bias", "identity", "plain_operations"]

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
      attend: (query, key, value, document=None, padding=None, causal=True) -> context, with the shapes of
        `megajax.ops.attention.plain_attention`; names the values that it saves. `document` [b, s] has the place in the
        sample of the first token of each token's document, as `megajax.ops.ring_attention.split_batch` writes it. A block
        passes the last two only if it is not causal. None: `plain_attention`.
    """

    column: Callable[[jax.Array, jax.Array, tuple], jax.Array]
    row: Callable[[jax.Array, jax.Array, int], jax.Array]
    attend: Callable[..., jax.Array] | None = None


def plain_operations(constrain: Constrain = identity, product: Callable[..., jax.Array] = jnp.tensordot) -> Operations:
    """Matmuls whose communication XLA inserts before or after them, from the sharding constraints.

    Args:
      constrain: (x, *logical axes) -> x, see `megajax.sharding.rules.AxisRules.constrain`.
      product: (x, kernel, number of axes to contract) -> the matmul: `jnp.tensordot`, or one in another data type.
    """
    return Operations(
        column=lambda y, kernel, axes: constrain(product(constrain(y, *GATHERED), kernel, 1), *axes),
        row=lambda x, kernel, contracted: _reduce_scattered(product(x, kernel, contracted), constrain),
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduce_scattered(x: jax.Array, constrain: Constrain) -> jax.Array:
    """A row-parallel product, reduce-scattered. Its gradient is gathered here, or XLA gathers it once per matmul."""
    return constrain(x, *RESIDUAL)


_reduce_scattered.defvjp(
    lambda x, constrain: (_reduce_scattered(x, constrain), None),
    lambda constrain, _, gradient: (constrain(constrain(gradient, *RESIDUAL), *GATHERED),),
)


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [..., *n] + bias [*n]; the bias's gradient is summed in fp32.

    A sum in 16 bits makes XLA's GPU compiler transpose the whole stash of y for every chunk (jax 0.10.2). The barriers: the
    first keeps the bias out of the matmul, where XLA's GPU compiler would write a bias of several axes as a whole matrix,
    and slice the weight of a matmul with a bias from its stack; the sum is part of the next elementwise kernel anyway. The
    backward's makes the bias's gradient read dy as it is stored, or the kernel that computes dy writes it in fp32 too.
    """
    return lax.optimization_barrier(y) + bias


def _add_bias_backward(bias, dy):
    dy, lead = lax.optimization_barrier(dy), tuple(range(dy.ndim - bias.ndim))
    return dy, dy.astype(jnp.float32).sum(lead).astype(bias.dtype)


add_bias.defvjp(lambda y, bias: (add_bias(y, bias), bias), _add_bias_backward)
