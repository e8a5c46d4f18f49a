"""A block's backward in two: I, the gradient of its input, and W, the gradients of its weights (2401.10241, "B" and
"W").

Only I is on the pipeline's critical path; W can wait for a bubble. The block's backward is one flat list of primitive
operations once calls are inlined (remat and jit included), so it can be cut for any block:

* I does what the input's gradient needs, and every weight gradient that takes no matmul (biases, norms): those are
small, and made from large values that W then need not be given. * W does the matmuls that are left. What they need is
read from the stash again, or computed again where that takes no   matmul (a norm, an activation), or else, when it
comes from I's own matmuls, it is *kept*: I puts it out and W takes it.

No matmul is done twice. This is the one file that takes jaxprs apart.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from megajax.runtime.compat import Literal, varying_axes

Tree = Any
CALLS = ("jit", "pjit", "checkpoint", "remat2", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "custom_call", "pallas_call", "shard_map")


class Split(NamedTuple):
    """A backward in two parts.

    Attributes:
      input: (residuals, weights, x, dy) -> (dx, early, kept): `early` are the weight gradients that are finished.
      weight: (residuals, weights, x, kept) -> late, the others.
      merge: (early, late) -> gradients like weights.
      kept: shapes of what is kept between.
    """

    input: Callable
    weight: Callable
    is_late: Tree  # bools like weights
    kept: list


def split_backward(backward: Callable, residuals: Tree, weights: Tree, x: jax.Array, dy: jax.Array) -> Split:
    """Cuts `backward(residuals, weights, x, dy) -> (gradients like weights, dx)` in two.

    The arguments are examples, read for their types only.
    """
    examples = (residuals, weights, x, dy)
    flat, structure = jax.tree.flatten(examples)

    def inlined(*leaves):
        closed = jax.make_jaxpr(lambda *leaves: backward(*jax.tree.unflatten(structure, leaves)))(*leaves)
        return _evaluate(closed.jaxpr, closed.consts, leaves)

    closed = jax.make_jaxpr(inlined)(*flat)
    jaxpr = closed.jaxpr
    *dw, dx = jaxpr.outvars
    makers = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    known = set(jaxpr.invars) | set(jaxpr.constvars)
    for_input = _needed(jaxpr, makers, [dx])
    stashed = known - {jaxpr.invars[-1]}  # all that W can read again: not dy
    cheap = _without_matmul(jaxpr, stashed)
    late = [_has_late_matmul(jaxpr, makers, var, for_input) for var in dw]
    early_vars = [var for var, is_late in zip(dw, late, strict=True) if not is_late]
    late_vars = [var for var, is_late in zip(dw, late, strict=True) if is_late]
    for_input = _needed(jaxpr, makers, [dx, *early_vars])
    kept, for_weight = _cut(jaxpr, makers, late_vars, for_input, stashed, cheap)

    def run(indices, inputs, outputs):
        values = dict(inputs)
        values |= dict(zip(jaxpr.constvars, closed.consts, strict=True))
        for index in sorted(indices):
            _bind(jaxpr.eqns[index], values)
        return [_read(values, var) for var in outputs]

    def input_part(residuals, weights, x, dy):
        leaves = jax.tree.leaves((residuals, weights, x, dy))
        dx_value, *rest = run(for_input, zip(jaxpr.invars, leaves, strict=True), [dx, *early_vars, *kept])
        return dx_value, rest[: len(early_vars)], rest[len(early_vars) :]

    def weight_part(residuals, weights, x, kept_values):
        leaves = jax.tree.leaves((residuals, weights, x))
        inputs = [*zip(jaxpr.invars[:-1], leaves, strict=True), *zip(kept, kept_values, strict=True)]
        return run(for_weight, inputs, late_vars)

    is_late = jax.tree.unflatten(jax.tree.structure(weights), late)
    return Split(input_part, weight_part, is_late, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept])


def _evaluate(jaxpr, consts, arguments) -> list:
    """Runs a jaxpr with every call inlined."""
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in CALLS and inner is not None:
            body, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            results = _evaluate(body, constants, [_read(values, var) for var in eqn.invars])
            values |= dict(zip(eqn.outvars, results, strict=True))
        else:
            _bind(eqn, values)
    return [_read(values, var) for var in jaxpr.outvars]


def _read(values: dict, var):
    return var.val if isinstance(var, Literal) else values[var]


def _bind(eqn, values: dict) -> None:
    params = eqn.primitive.get_bind_params(eqn.params)
    if eqn.primitive.name == "pvary":  # the body of a call, inlined, may get what varies already
        value = _read(values, eqn.invars[0])
        axes = tuple(axis for axis in params["axes"] if axis not in varying_axes(value))
        if not axes:
            values[eqn.outvars[0]] = value
            return
        params = params | {"axes": axes}
    results = eqn.primitive.bind(*[_read(values, var) for var in eqn.invars], **params)
    results = results if eqn.primitive.multiple_results else [results]
    values |= dict(zip(eqn.outvars, results, strict=True))


def _inputs(eqn) -> list:
    return [var for var in eqn.invars if not isinstance(var, Literal)]


def _needed(jaxpr, makers: dict, variables: list) -> set[int]:
    """Indices of the equations that the variables come from."""
    found, todo = set(), [var for var in variables if not isinstance(var, Literal)]
    while todo:
        index = makers.get(todo.pop())
        if index is not None and index not in found:
            found.add(index)
            todo += _inputs(jaxpr.eqns[index])
    return found


def _without_matmul(jaxpr, stashed: set) -> set:
    """Variables that can be computed from what is stashed without a matmul."""
    cheap = set(stashed)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in MATMULS and all(var in cheap for var in _inputs(eqn)):
            cheap |= set(eqn.outvars)
    return cheap


def _has_late_matmul(jaxpr, makers: dict, var, for_input: set[int]) -> bool:
    """Whether a weight's gradient takes a matmul that the input's does not."""
    return any(jaxpr.eqns[index].primitive.name in MATMULS for index in _needed(jaxpr, makers, [var]) - for_input)


def _cut(jaxpr, makers, late_vars, for_input, stashed, cheap) -> tuple[list, set[int]]:
    """What to keep from I for W, and the equations of W."""
    kept, for_weight, seen = [], set(), set()
    todo = [var for var in late_vars if not isinstance(var, Literal)]
    while todo:
        var = todo.pop()
        if var in seen or var in stashed:
            continue
        seen.add(var)
        index = makers.get(var)
        laid_out = index is not None and jaxpr.eqns[index].primitive.name == "sharding_constraint"
        if index is None or (index in for_input and var not in cheap and not laid_out):
            kept.append(var)  # dy itself, or a result of I; as it was before it was gathered
        else:
            for_weight.add(index)
            todo += _inputs(jaxpr.eqns[index])
    return kept, for_weight
