"""Reads and evaluates the jaxpr of a block's backward: with calls inlined, and with weight gradients in fp32.

With all calls inlined (jax.checkpoint and jit included) the backward of any block is a flat list of equations.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megajax.ops.in_place import ADDEND, OF_PART, addend, of_part, whole
from megajax.runtime.compat import Literal, jaxpr_as_fun, traced_where, vary_over, varying_axes

CALLS = ("jit", "pjit", "checkpoint", "remat2", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
OPTIMIZED = "optimization_barrier"
SUMS = ("add", "add_any")
KERNELS = ("shard_map", "pallas_call", ADDEND.name)  # compute a gradient in fp32 if their result is
# Primitives whose operands may vary over other axes than one another.
APART = ("psum", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter", OPTIMIZED)
# What leaves a value as it is: `jax.checkpoint` rounds what it saves to the type that it has.
SAME = ("name", "sharding_constraint", "reduce_precision")
# What may stand between a weight gradient's matmul and the gradient: only the order of its elements changes, or its type.
VIEWS = ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", "pvary")


@dataclasses.dataclass(frozen=True)
class Addend:
    """A gradient that is not computed yet, of equations that `megajax.ops.in_place` made. Its methods run them.

    Attributes:
      terms: for each equation (it, its arrays, what its `add` is given after the total and the place).
    """

    terms: tuple[tuple[Any, tuple[jax.Array, ...], tuple[jax.Array, ...]], ...]

    def added_to(self, total: jax.Array, place) -> jax.Array:
        """fp32 [n, ...], with the gradient added to total[place] where it is."""
        for eqn, _, given in self.terms:
            total = eqn.params["add"](total, jnp.asarray(place, jnp.int32), *given)
        return total

    def value(self) -> jax.Array:
        """The gradient, fp32."""
        return sum(jaxpr_as_fun(eqn.params["jaxpr"])(*operands)[0] for eqn, operands, _ in self.terms)


class Parts:
    """The variables of a jaxpr that are parts of stacks, which a kernel that can (`megajax.ops.in_place`) reads there."""

    def __init__(
        self, variables: Sequence, arguments: Sequence[jax.Array], stacks: Sequence, freed: list | None = None
    ):
        """The arguments' variables; `stacks` has (argument, (stack, place)) of those that are a part of a stack.

        `freed`: gets the results of kernels that are the last to read a part.
        """
        self.freed = freed
        places = {id(part): place for part, place in stacks}
        self.found = {var: places[id(x)] for var, x in zip(variables, arguments, strict=True) if id(x) in places}

    def bind(self, eqn, values: dict) -> None:
        """As the function `bind`."""
        first = eqn.invars[0] if eqn.invars and not isinstance(eqn.invars[0], Literal) else None
        if eqn.primitive is OF_PART and (stacks := self._stacks(eqn)):
            operands = [read(values, var) for var in eqn.invars[eqn.params["parts"] :]]
            results = eqn.params["of_stack"](*stacks, *operands)
            values |= dict(zip(eqn.outvars, results, strict=True))
            if self.freed is not None and _frees(eqn):
                self.freed += results
            return
        bind(eqn, values)
        if eqn.primitive.name in SAME and first in self.found:
            self.found[eqn.outvars[0]] = self.found[first]

    def saved_by(self, eqn, values: dict, stack: jax.Array, place) -> jax.Array | None:
        """A stack with an equation's only result at a place, where its kernel writes it; None if there is none that can."""
        if eqn.primitive is not OF_PART or eqn.params["into"] is None or not (stacks := self._stacks(eqn)):
            return None
        operands = [read(values, var) for var in eqn.invars[eqn.params["parts"] :]]
        return eqn.params["into"](stack, jnp.asarray(place, jnp.int32), *stacks, *operands)

    def _stacks(self, eqn) -> list[jax.Array]:
        """(stack, place) of each of an equation's parts, one after the other; none if one is in no stack."""
        parts = eqn.invars[: eqn.params["parts"]]
        if any(isinstance(var, Literal) or var not in self.found for var in parts):
            return []
        return [value for var in parts for value in self.found[var]]

    def addend(self, eqn, values: dict) -> Addend:
        """The gradient of an `ADDEND`."""
        operands, parts = tuple(read(values, var) for var in eqn.invars), eqn.params["parts"]
        stacks = self._stacks(eqn) or whole(operands[:parts])
        return Addend(((eqn, operands, (*stacks, *operands[parts:])),))


def freed_arguments(function: Callable, *arguments: jax.Array) -> frozenset[int]:
    """Which arguments of a backward, by number, one kernel reads alone, that says so (`of_part`'s `of_stack.frees`)."""
    jaxpr = inlined_jaxpr(function, *arguments).jaxpr
    readers: dict[Any, list] = {}
    for eqn in jaxpr.eqns:
        for var in variables_of(eqn.invars):
            readers.setdefault(var, []).append(eqn)
    results = set(variables_of(jaxpr.outvars))

    def freed(var) -> bool:
        if var in results or len(own := readers.get(var, [])) != 1:
            return False
        return freed(own[0].outvars[0]) if own[0].primitive.name in SAME else _frees(own[0]) and own[0].invars[0] is var

    return frozenset(number for number, var in enumerate(jaxpr.invars) if freed(var))


def _frees(eqn) -> bool:
    return eqn.primitive is OF_PART and getattr(eqn.params["of_stack"], "frees", False)


def reading_in_place(function: Callable, arguments: Any, stacks: Sequence) -> Any:
    """`function(*arguments)`, pytrees, with kernels that read in place the arguments of which `stacks` tells (`Parts`)."""
    leaves, structure = jax.tree.flatten(arguments)
    flat = lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))  # noqa: E731
    jaxpr = (closed := inlined_jaxpr(flat, *leaves)).jaxpr
    if all(eqn.primitive is not OF_PART for eqn in jaxpr.eqns):
        return function(*arguments)
    values = given_values(jaxpr, closed.consts, leaves)
    parts = Parts(jaxpr.invars, leaves, stacks)
    for eqn in jaxpr.eqns:
        parts.bind(eqn, values)
    results = jax.tree.structure(jax.eval_shape(function, *arguments))
    return jax.tree.unflatten(results, [read(values, var) for var in jaxpr.outvars])


def inlined_jaxpr(function: Callable, *arguments: jax.Array):
    """The closed jaxpr of a function of arrays, with every call inlined."""

    def inlined(*leaves):
        closed = jax.make_jaxpr(function)(*leaves)
        return evaluate(closed.jaxpr, closed.consts, leaves)

    return jax.make_jaxpr(inlined)(*arguments)


def with_fp32_gradients(
    function: Callable,
    count: int,
    *arguments: jax.Array,
    stacks: Sequence = (),
    rewrite: Callable = lambda closed: closed,
    ahead: Sequence[jax.Array] | None = None,
    freed: list | None = None,
) -> list[jax.Array | Addend]:
    """Evaluates a function of arrays, with those of its first `count` results that are matmuls computed in fp32.

    A matmul accumulates in fp32 in any case; here its result is not rounded to the type of its operands, nor is that of a
    kernel whose result is fp32. A sum of several matmuls, or a result of another operation, keeps its type. Of a kernel
    that can add to an accumulator, or of a sum of such, the result is the `Addend`.

    Args:
      function: traceable.
      count: see above.
      arguments: arrays.
      stacks: see `Parts`.
      rewrite: closed jaxpr -> another one of the same function.
      ahead: the last argument in other shardings (`resharding`); None: they are computed here.
      freed: see `Parts`.
    """
    jaxpr = (closed := rewrite(inlined_jaxpr(function, *arguments))).jaxpr
    makers = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    uses = Counter(var for eqn in jaxpr.eqns for var in variables_of(eqn.invars))
    uses.update(variables_of(jaxpr.outvars))
    chains: set[int] = set()
    for var in jaxpr.outvars[:count]:
        chains |= _chain_to_matmul(jaxpr, makers, uses, var)
    values = given_values(jaxpr, closed.consts, arguments)
    parts = Parts(jaxpr.invars, arguments, stacks, freed)
    reshards = _reshards(jaxpr)
    given = {} if ahead is None else dict(zip(reshards, ahead, strict=True))
    for index, eqn in enumerate(jaxpr.eqns):
        if index in given:
            values[eqn.outvars[0]] = given[index]
        elif index not in chains:
            parts.bind(eqn, values)
        elif eqn.primitive.name == "dot_general":
            bind(eqn, values, preferred_element_type=jnp.dtype(jnp.float32))
        elif eqn.primitive is ADDEND:
            values[eqn.outvars[0]] = parts.addend(eqn, values)
        elif eqn.primitive.name == "convert_element_type":
            values[eqn.outvars[0]] = read(values, eqn.invars[0])
        elif eqn.primitive.name in SUMS:
            values[eqn.outvars[0]] = _sum(*(read(values, var) for var in eqn.invars))
        else:
            if isinstance(viewed := read(values, eqn.invars[0]), Addend):
                values[eqn.invars[0]] = viewed.value()
            bind(eqn, values)

    return [read(values, var) for var in jaxpr.outvars]


def resharding(function: Callable, *arguments: Any) -> Callable[[jax.Array], list[jax.Array]]:
    """From the last array of a function's arguments, pytrees, to what it is only resharded to, as a gradient is.

    A loop over blocks can compute them an iteration ahead; `with_fp32_gradients` takes them.
    """
    leaves, structure = jax.tree.flatten(arguments)
    jaxpr = inlined_jaxpr(lambda *leaves: jax.tree.leaves(function(*structure.unflatten(leaves))), *leaves).jaxpr
    reshards = _reshards(jaxpr)

    def run(last: jax.Array) -> list[jax.Array]:
        values = {jaxpr.invars[-1]: last}
        for index in sorted({index for chain in reshards.values() for index in chain}):
            bind(jaxpr.eqns[index], values)
        return [values[jaxpr.eqns[index].outvars[0]] for index in reshards]

    return run


def _reshards(jaxpr) -> dict[int, list[int]]:
    """The equations that change the sharding of the last argument, each with those before it; by index."""
    chains: dict[Any, list[int]] = {jaxpr.invars[-1]: []}
    found, first = {}, None
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name not in SAME or eqn.invars[0] not in chains:
            continue
        chain = chains[eqn.outvars[0]] = [*chains[eqn.invars[0]], index]
        sharding = eqn.params.get("sharding")
        first = first or sharding
        if sharding is not None and sharding.spec != first.spec:
            found[index] = chain
    return found


def fp32_gradients(backward: Callable, *arguments: Any, **how: Any) -> tuple[Any, Any]:
    """`backward(*arguments) -> (gradients, others)`, pytrees, with `with_fp32_gradients(**how)` of the gradients."""
    leaves, structure = jax.tree.flatten(arguments)
    gradients, others = jax.eval_shape(backward, *arguments)
    count, results = len(jax.tree.leaves(gradients)), jax.tree.structure((gradients, others))
    flat = lambda *leaves: jax.tree.leaves(backward(*jax.tree.unflatten(structure, leaves)))  # noqa: E731
    return jax.tree.unflatten(results, with_fp32_gradients(flat, count, *leaves, **how))


def _chain_to_matmul(jaxpr, makers: dict, uses: Counter, var) -> set[int]:
    """Indices of the equations from a matmul to `var`, if it is a view of one that nothing else reads; else empty."""
    chain: set[int] = set()
    while not isinstance(var, Literal) and uses[var] == 1 and var in makers:
        eqn = jaxpr.eqns[makers[var]]
        if not jnp.issubdtype(var.aval.dtype, jnp.floating):
            return set()
        chain.add(makers[var])
        if eqn.primitive.name == "dot_general" or (eqn.primitive.name in KERNELS and var.aval.dtype == jnp.float32):
            return chain
        if eqn.primitive.name in SUMS:
            terms = [
                set() if isinstance(one, Literal) else _chain_to_matmul(jaxpr, makers, uses, one) for one in eqn.invars
            ]
            added = all(any(jaxpr.eqns[index].primitive is ADDEND for index in term) for term in terms)
            return chain.union(*terms) if added else set()
        if eqn.primitive.name not in VIEWS:
            return set()
        var = eqn.invars[0]
    return set()


def _sum(one: jax.Array | Addend, other: jax.Array | Addend) -> jax.Array | Addend:
    """The sum of two gradients in fp32; of those that are not computed yet such a one."""
    if isinstance(one, Addend) and isinstance(other, Addend):
        return Addend((*one.terms, *other.terms))
    values = [term.value() if isinstance(term, Addend) else term for term in (one, other)]
    return values[0] + values[1]


def evaluate(jaxpr, consts, arguments) -> list:
    """Evaluates a jaxpr with every call inlined; returns its outputs."""
    values = given_values(jaxpr, consts, arguments)
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in CALLS and inner is not None:
            body, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            with traced_where(eqn):
                results = evaluate(body, constants, [read(values, var) for var in eqn.invars])
            values |= dict(zip(eqn.outvars, results, strict=True))
        else:
            bind(eqn, values)
    return [read(values, var) for var in jaxpr.outvars]


def variables_of(operands: Sequence) -> list:
    """The operands of an equation, or the results of a jaxpr, without literals."""
    return [var for var in operands if not isinstance(var, Literal)]


def inner_jaxprs(eqn) -> list:
    """The jaxprs in the parameters of an equation, as of calls, loops and branches."""
    values = [one for value in eqn.params.values() for one in (value if isinstance(value, tuple) else (value,))]
    return [jaxpr for value in values if hasattr(jaxpr := getattr(value, "jaxpr", value), "eqns")]


def given_values(jaxpr, consts: Sequence, arguments: Sequence) -> dict:
    """The values of a jaxpr's variables before its first equation: of constants and of arguments."""
    return dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))


def read(values: dict, var):
    """The value of a variable or literal."""
    return var.val if isinstance(var, Literal) else values[var]


def _alike(eqn, operands: list) -> list:
    """The operands of an equation, varying over the same manual axes, as those of most primitives must.

    A constant that the forward pass has stored was traced as equal on all devices, and is read as varying. Collectives, and
    operations that have a jaxpr of their own, are left as they are.
    """
    varying = [varying_axes(operand) for operand in operands]
    every = frozenset().union(*varying)
    if all(axes == every for axes in varying) or eqn.primitive.name in APART or inner_jaxprs(eqn):
        return operands
    return [vary_over(operand, every) for operand in operands]


def bind(eqn, values: dict, **changed: Any) -> None:
    """Evaluates an equation, with some of its parameters changed; adds its outputs to `values`."""
    if eqn.primitive is ADDEND:  # traced again, as the operands may vary over more axes now
        gradient = lambda *operands: jaxpr_as_fun(eqn.params["jaxpr"])(*operands)[0]  # noqa: E731
        operands, parts = [read(values, var) for var in eqn.invars], eqn.params["parts"]
        values[eqn.outvars[0]] = addend(gradient, eqn.params["add"], *operands, parts=parts)
        return
    if eqn.primitive is OF_PART:
        operands, parts = [read(values, var) for var in eqn.invars], eqn.params["parts"]
        results = of_part(eqn.params["of_stack"], *operands, parts=parts, into=eqn.params["into"])
        values |= dict(zip(eqn.outvars, results, strict=True))
        return
    params = eqn.primitive.get_bind_params(eqn.params | changed)
    if eqn.primitive.name == "pvary":  # in an inlined body the argument may vary over these axes already
        value = read(values, eqn.invars[0])
        axes = tuple(axis for axis in params["axes"] if axis not in varying_axes(value))
        if not axes:
            values[eqn.outvars[0]] = value
            return
        params = params | {"axes": axes}
    with traced_where(eqn):
        results = eqn.primitive.bind(*_alike(eqn, [read(values, var) for var in eqn.invars]), **params)
    results = results if eqn.primitive.multiple_results else [results]
    values |= dict(zip(eqn.outvars, results, strict=True))
