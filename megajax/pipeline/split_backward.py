"""Splits a block's backward in two: I, the gradient of its input, and W, the gradients of its weights.

In the zero-bubble paper (2401.10241) these are "B" and "W". Only I is on the pipeline's critical path, because the
previous stage waits for it; W can run later, in a bubble. With all calls inlined (jax.checkpoint and jit included),
the backward of any block is a flat list of equations, which is partitioned:

* I has the equations on which the input's gradient depends, and all weight gradients that need no matmul (biases,
  norms). The latter are small and computed from large activations, which then need not be stored until W.
* W has the remaining matmuls. Each of their operands is read from the stash, or recomputed from it if that needs no
  matmul (a norm, an activation function), or else *kept*: returned by I and passed to W.

For y = tanh(x @ up + bias) @ down, with stash {x, h = tanh(...)}:

    I:  dh = dy @ down.T;  da = dh * (1 - h * h);  dx = da @ up.T;  dbias = da.sum(...)     keeps dy, da
    W:  dup = x.T @ da;  ddown = h.T @ dy

No matmul runs twice. An `optimization_barrier` orders the operations of a backward that is not split; each part keeps it
for those of its operands that the part has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from megajax.ops.in_place import ADDEND, OF_PART
from megajax.pipeline.jaxprs import bind, inlined_jaxpr, read, variables_of
from megajax.runtime.compat import Literal

Tree = Any
BARRIER = "optimization_barrier"
PASSED_THROUGH = ("sharding_constraint", BARRIER)
MATMULS = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot_general",
    "custom_call",
    "pallas_call",
    "shard_map",
    ADDEND.name,
    OF_PART.name,
)


class Split(NamedTuple):
    """A backward in two parts.

    Attributes:
      input: I, (residuals, weights, x, dy) -> (dx, early, kept): the input's gradient, the list of the weight
        gradients that are complete, and the list of values that `weight` needs.
      weight: W, (residuals, weights, x, kept) -> late, the list of the other weight gradients.
      is_late: pytree of bools like weights: whether `weight` computes the gradient.
      kept: list of ShapeDtypeStruct, the types of the values kept.
    """

    input: Callable
    weight: Callable
    is_late: Tree  # bools like weights
    kept: list


def split_backward(backward: Callable, residuals: Tree, weights: Tree, x: Tree, dy: Tree) -> Split:
    """Splits `backward(residuals, weights, x, dy) -> (gradients like weights, dx like x)`.

    The other arguments are examples of the backward's; only their types are read.
    """
    examples = (residuals, weights, x, dy)
    flat, structure = jax.tree.flatten(examples)

    closed = inlined_jaxpr(lambda *leaves: backward(*jax.tree.unflatten(structure, leaves)), *flat)
    jaxpr = closed.jaxpr
    count = len(jax.tree.leaves(weights))
    dw, dx = jaxpr.outvars[:count], jaxpr.outvars[count:]
    inputs = len(flat) - len(jax.tree.leaves(dy))  # arguments without dy
    makers = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    known = set(jaxpr.invars) | set(jaxpr.constvars)
    for_input = _needed(jaxpr, makers, dx)
    stashed = known - set(jaxpr.invars[inputs:])  # W can read all arguments again except dy
    cheap = _without_matmul(jaxpr, stashed)
    late = [_has_late_matmul(jaxpr, makers, var, for_input) for var in dw]
    early_vars = [var for var, is_late in zip(dw, late, strict=True) if not is_late]
    late_vars = [var for var, is_late in zip(dw, late, strict=True) if is_late]
    for_input = _needed(jaxpr, makers, [*dx, *early_vars])
    kept, for_weight = _partition(jaxpr, makers, late_vars, for_input, stashed, cheap)

    def run(indices, inputs, outputs):
        values = dict(inputs)
        values |= dict(zip(jaxpr.constvars, closed.consts, strict=True))
        for index in sorted(indices):
            _run(jaxpr.eqns[index], values)
        return [read(values, var) for var in outputs]

    def input_part(residuals, weights, x, dy):
        leaves = jax.tree.leaves((residuals, weights, x, dy))
        values = run(for_input, zip(jaxpr.invars, leaves, strict=True), [*dx, *early_vars, *kept])
        rest = values[len(dx) :]
        dx_values = jax.tree.unflatten(jax.tree.structure(x), values[: len(dx)])
        return dx_values, rest[: len(early_vars)], rest[len(early_vars) :]

    def weight_part(residuals, weights, x, kept_values):
        leaves = jax.tree.leaves((residuals, weights, x))
        given = [*zip(jaxpr.invars[:inputs], leaves, strict=True), *zip(kept, kept_values, strict=True)]
        return run(for_weight, given, late_vars)

    is_late = jax.tree.unflatten(jax.tree.structure(weights), late)
    return Split(input_part, weight_part, is_late, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept])


def _run(eqn, values: dict) -> None:
    """Evaluates an equation; a barrier for the operands that `values` has."""
    if eqn.primitive.name != BARRIER:
        bind(eqn, values)
        return
    found = [
        (out, var)
        for out, var in zip(eqn.outvars, eqn.invars, strict=True)
        if isinstance(var, Literal) or var in values
    ]
    results = lax.optimization_barrier([read(values, var) for _, var in found])
    values |= dict(zip((out for out, _ in found), results, strict=True))


def _inputs(eqn, var) -> list:
    """The variables that an equation computes `var` from: of a barrier one, of others all."""
    operands = [eqn.invars[eqn.outvars.index(var)]] if eqn.primitive.name == BARRIER else eqn.invars
    return variables_of(operands)


def _needed(jaxpr, makers: dict, variables: list) -> set[int]:
    """Indices of the equations on which the variables depend."""
    found, seen, todo = set(), set(), variables_of(variables)
    while todo:
        index = makers.get(var := todo.pop())
        if index is not None and var not in seen:
            seen.add(var)
            found.add(index)
            todo += _inputs(jaxpr.eqns[index], var)
    return found


def _without_matmul(jaxpr, stashed: set) -> set:
    """The variables that can be computed from stashed ones without a matmul."""
    cheap = set(stashed)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in MATMULS:
            cheap |= {out for out in eqn.outvars if all(var in cheap for var in _inputs(eqn, out))}
    return cheap


def _has_late_matmul(jaxpr, makers: dict, var, for_input: set[int]) -> bool:
    """Whether a weight's gradient depends on a matmul that the input's gradient does not."""
    return any(jaxpr.eqns[index].primitive.name in MATMULS for index in _needed(jaxpr, makers, [var]) - for_input)


def _partition(jaxpr, makers, late_vars, for_input, stashed, cheap) -> tuple[list, set[int]]:
    """(variables that I keeps for W, indices of the equations of W)."""
    kept, for_weight, seen = [], set(), set()
    todo = variables_of(late_vars)
    while todo:
        var = todo.pop()
        if var in seen or var in stashed:
            continue
        seen.add(var)
        index = makers.get(var)
        passed = index is not None and jaxpr.eqns[index].primitive.name in PASSED_THROUGH
        if index is None or (index in for_input and var not in cheap and not passed):
            kept.append(var)  # dy, or a result of I; before a sharding constraint, which may all-gather it
        else:
            for_weight.add(index)
            todo += _inputs(jaxpr.eqns[index], var)
    return kept, for_weight
