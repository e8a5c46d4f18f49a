"""Orders the loops of a backward among its other equations, where no collective may run beside a loop with collectives.

A loop of a computed number of iterations, such as that over the rounds of an exchange (`ops/expert_rounds.py`), needs what
the backward has computed before it, and gives what the rest needs, but for what `jax.checkpoint` recomputes: that needs
nothing of the loop, nor the loop of it. XLA may put it anywhere, so that its collectives run beside the loop's.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from megajax.ops.in_place import ADDEND, OF_PART
from megajax.ops.order import wait_for_all
from megajax.pipeline.jaxprs import SAME, bind, given_values, inlined_jaxpr, inner_jaxprs, read, variables_of
from megajax.runtime.compat import jaxpr_as_fun

__all__ = ["with_loops_in_order"]


def with_loops_in_order(function: Callable, given: int = 0) -> Callable:
    """`function`, of pytrees of arrays, with every `while` loop after the equations before it, and before those after it.

    The loop's scalars, one of which is its number of iterations, wait for the arguments and for all that is computed before
    and needed after the loop; then these wait for the loop's results (`ops.order`). Parts of stacks do not that only kernels
    need, which read them there (`ops.in_place`).

    Args:
      function: see above.
      given: for how many arguments, the first ones, no loop waits: those that no collective computes in this tick.
    """

    def run(*arguments: Any) -> Any:
        traced, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
        if not _has_loop(traced.jaxpr):
            return function(*arguments)
        leaves = jax.tree.leaves(arguments)
        found = _in_order(inlined_jaxpr(jaxpr_as_fun(traced), *leaves), leaves, len(jax.tree.leaves(arguments[:given])))
        return jax.tree.unflatten(jax.tree.structure(result), found)

    return run


def _in_order(closed, arguments: list[jax.Array], given: int) -> list[jax.Array]:
    """Evaluates a closed jaxpr in which all calls are inlined."""
    jaxpr = closed.jaxpr
    values = given_values(jaxpr, closed.consts, arguments)
    there, parts = {*jaxpr.constvars, *jaxpr.invars[:given]}, _parts(jaxpr)
    last = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in variables_of(eqn.invars)}
    last |= dict.fromkeys(variables_of(jaxpr.outvars), len(jaxpr.eqns))
    for index, eqn in enumerate(jaxpr.eqns):
        if not _is_loop(eqn):
            bind(eqn, values)
            continue
        needed = {var: value for var, value in values.items() if last.get(var, 0) > index and var not in parts}
        live = {var: value for var, value in needed.items() if _can_wait(value)}
        scalars = {
            var: values[var] for var in variables_of(eqn.invars) if not var.aval.shape and _can_wait(values[var])
        }
        before = [value for var, value in live.items() if var not in there]
        bind(eqn, found := values | _waiting(before, scalars))
        results = {var: found[var] for var in eqn.outvars}
        values |= results | _waiting(filter(_can_wait, results.values()), live)
    return [read(values, var) for var in jaxpr.outvars]


def _parts(jaxpr) -> set:
    """The variables that nothing needs but kernels that can read them where they are stored."""
    parts, others = set(), set(variables_of(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        count = eqn.params["parts"] if eqn.primitive in (ADDEND, OF_PART) else 0
        if eqn.primitive.name in SAME and eqn.outvars[0] in parts - others:
            count = len(eqn.invars)
        parts.update(variables_of(eqn.invars[:count]))
        others.update(variables_of(eqn.invars[count:]))
    return parts - others


def _waiting(received: Iterable[jax.Array], values: dict) -> dict:
    """The values of variables, computed after `received`."""
    return dict(zip(values, wait_for_all([*received], [*values.values()]), strict=True))


def _has_loop(jaxpr) -> bool:
    return any(map(_is_loop, jaxpr.eqns))


def _is_loop(eqn) -> bool:
    """Whether an equation is a `while` loop, or has one in a jaxpr of its parameters; those of a kernel send nothing."""
    if eqn.primitive.name == "pallas_call":
        return False
    return eqn.primitive.name == "while" or any(map(_has_loop, inner_jaxprs(eqn)))


def _can_wait(value: jax.Array) -> bool:
    """Not a random key, nor the gradient of integers."""
    return not jnp.issubdtype(value.dtype, jax.dtypes.extended) and value.dtype != jax.dtypes.float0
