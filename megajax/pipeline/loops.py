"""Loops whose trip count is known only at run time and may be zero.

A rank that has no work in a tick skips it with a loop of zero iterations. `lax.cond` would copy the stash and the
gradient accumulators into and out of the conditional (jax 0.10.2); a loop updates its carry in place.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any


def counted_loop(iterations, count, step: Callable, state: Tree) -> tuple[jax.Array, Tree]:
    """A fori_loop whose trip count is dynamic and may be zero; returns the accumulated iteration count.

    The count orders loops: XLA does not know its value before the loop has ended, so a loop that starts from another
    loop's count, or an operation that reads the count, runs after that loop.

    Args:
      iterations: int32 scalar, the count of the loops before this one.
      count: int or int32 scalar, the trip count.
      step: `step(index, zero, state) -> state`. `zero` is an int32 scalar whose value is always 0 but which XLA cannot
        prove to be loop-invariant. Work that depends on it stays in the loop. XLA hoists other loop-invariant work out
        of the loop, where it would run even if the trip count is zero.
      state: pytree carried through the loop.

    Returns:
      (iterations + count, the final state).
    """

    def counted(index, carry):
        iterations, zero, state = carry
        return iterations + 1, zero + jnp.minimum(iterations, 0), step(index, zero, state)

    iterations = jnp.asarray(iterations, jnp.int32)
    iterations, _, state = lax.fori_loop(0, count, counted, (iterations, jnp.zeros_like(iterations), state))
    return iterations, state


def prevent_hoisting(zero: jax.Array, values: Tree) -> Tree:
    """Prevents XLA from hoisting the values out of the loop (loop-invariant code motion).

    Nor can it hoist what is computed from them.

    Args:
      zero: as `counted_loop` passes it to its step.
      values: pytree of arrays; returned with the same values.
    """
    return jax.tree.map(lambda value: jnp.where(zero == 0, value, jnp.zeros_like(value)), values)
