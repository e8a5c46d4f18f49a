"""Values that XLA cannot compute before others: a bit that is never set decides, which XLA does not know."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["choose", "wait_for", "wait_for_all"]

Tree = Any


def choose(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    """`jnp.where` for pytrees: `new` where the condition holds, else `old`, a pytree alike or a scalar."""
    if not isinstance(old, int | float):
        return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)
    return jax.tree.map(lambda new: jnp.where(condition, new, old), new)


def wait_for(received: Iterable[Tree], values: Tree) -> Tree:
    """`values`, in a form that XLA cannot compute before `received`.

    Args:
      received: each a scalar, an array of the shape and sharding of every leaf of `values`, or a pytree like `values`, of
        which each leaf then waits for its own.
      values: pytree of arrays.
    """
    for one in received:
        if isinstance(one, jax.Array):
            values = _where(_arrived(one), values)
        else:
            values = jax.tree.map(lambda array, value: _where(_arrived(array), value), one, values)
    return values


def wait_for_all(received: Tree, values: Tree) -> Tree:
    """As `wait_for`, for a pytree of arrays of any shapes and shardings. It reads all of them."""
    for array in jax.tree.leaves(received):
        values = _where(_arrived(array).all(), values)
    return values


def _where(condition: jax.Array, values: Tree) -> Tree:
    return choose(condition, values, jax.tree.map(jnp.zeros_like, values))


def _arrived(array: jax.Array) -> jax.Array:
    """bool, of the array's shape: always True, because the first bit of `bits >> 1` is 0; XLA does not know it."""
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    return bits >> 1 != jnp.full_like(bits, jnp.iinfo(bits.dtype).max)
