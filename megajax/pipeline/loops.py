"""Control flow whose path is known only at run time: loops of dynamic trip counts, and a choice between branches.

A rank that has no work in a tick skips it with a loop of zero iterations: on CPU devices, and with jax before 0.12, XLA
copies the stash and the gradient accumulators into and out of a conditional, while a loop updates its carry in place. On
GPUs with jax 0.12 a conditional copies nothing either, and the host waits for the device only once for it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from megajax.ops.order import choose

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
        # Without `zero` XLA knows the count before the loop has ended, if it knows how often the loop runs.
        return iterations + 1 + zero, zero + jnp.minimum(iterations, 0), step(index, zero, state)

    iterations = jnp.asarray(iterations, jnp.int32)
    iterations, _, state = lax.fori_loop(0, count, counted, (iterations, jnp.minimum(iterations, 0), state))
    return iterations, state


def unknown(count, iterations: jax.Array) -> jax.Array:
    """`count`, in a form that XLA does not know if it does not know `iterations`, of the loops before.

    It inlines a loop that it knows to have one iteration, with collectives that may then run beside a later loop.
    """
    return count + jnp.minimum(iterations, 0)


def run_one_of(iterations, index, branches: Sequence[Callable], state: Tree, *, always: bool) -> tuple[jax.Array, Tree]:
    """Runs one of the branches, or none, as one conditional.

    Args:
      iterations: as for `counted_loop`; a branch counts as one iteration.
      index: int32 scalar, which branch; outside of their range: none.
      branches: each `branch(zero, state) -> state`, with `zero` as for `counted_loop`.
      state: pytree.
      always: `index` is always one of the branches.

    Returns:
      (the iteration count, the final state).
    """

    def taken(branch: Callable) -> Callable:
        return lambda iterations, state: (iterations + 1, branch(jnp.minimum(iterations, 0), state))

    choices = [taken(branch) for branch in branches]
    if not always:
        choices.append(lambda iterations, state: (iterations, state))
        index = jnp.where((index >= 0) & (index < len(branches)), index, len(branches))
    return lax.switch(index, choices, jnp.asarray(iterations, jnp.int32), state)


def which(conditions: Iterable[jax.Array]) -> jax.Array:
    """The index of the condition that holds, int32, for `run_one_of`; -1 if none does. No two may hold."""
    index = jnp.int32(-1)
    for number, holds in enumerate(conditions):
        index = jnp.where(holds, number, index)
    return index


def serializes(mesh: Mesh) -> bool:
    """Whether a loop with collectives and any other collective must run one after the other: on CPU devices.

    A device starts a collective beside such a loop if neither depends on the other. Each collective that a device waits in
    keeps one of the process's threads (`runtime.mesh`): if many devices wait in two, the one that they wait for may have
    none. XLA's CPU backend drops optimization barriers before it schedules, so `wait_for` orders them.
    """
    return mesh.devices.flat[0].platform == "cpu"


def prevent_hoisting(zero: jax.Array, values: Tree) -> Tree:
    """Prevents XLA from hoisting the values out of the loop (loop-invariant code motion).

    Nor can it hoist what is computed from them.

    Args:
      zero: as `counted_loop` passes it to its step.
      values: pytree of arrays; returned with the same values.
    """
    return choose(zero == 0, values, jax.tree.map(jnp.zeros_like, values))
