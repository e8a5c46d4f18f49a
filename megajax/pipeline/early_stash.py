"""A block's forward that writes what it saves to the stash as soon as it is computed, not at the block's end.

XLA's GPU compiler updates arrays in place only after the last reader, and a matmul's result can be where the matmul writes
it. So two things depend on the order:

* x + y w is one matmul whose result has x's memory, if nothing reads x afterwards. A write of x to the stash that may come
  after it makes XLA copy x. An `optimization_barrier` puts the write before.
* A matmul writes its result into the stash itself if nothing else reads the result, and if the slice's place is known when
  the program is compiled, except for the loop's counter (jax 0.12). What computes with the result reads it from the stash.
  So does what computes with an activation that is kept, of which a kernel would write a copy for it.

Of another value, such as a sum, XLA makes a part of each kernel that reads it. What computes with it after the next matmul
reads it from the stash instead of its terms.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from megajax.ops.gated_down import KEPT
from megajax.ops.norm_kernel import NORM, saved_norm
from megajax.pipeline.jaxprs import SAME, VIEWS, Parts, inlined_jaxpr, read
from megajax.pipeline.stash import StashRef
from megajax.runtime.compat import Literal

__all__ = ["stash_as_computed"]

Tree = Any


def stash_as_computed(
    function: Callable, arguments: Sequence[jax.Array], stash: StashRef, block, stacks: Sequence = ()
) -> tuple[Tree, Tree]:
    """Evaluates `function(*arguments) -> (result, values to save)` and writes the values to one block's part of the stash.

    Args:
      function: traceable; the result is a pytree, and the values are one like the stash's buffer.
      arguments: arrays.
      stash: in device memory.
      block: its number in the chunk.
      stacks: of arguments, see `jaxprs.Parts`.

    Returns:
      (the result, the stash's buffer).
    """
    of_result = jax.tree.structure(jax.eval_shape(function, *arguments)[0])
    closed = inlined_jaxpr(lambda *leaves: jax.tree.leaves(function(*leaves)), *arguments)
    jaxpr, (buffers, structure) = closed.jaxpr, jax.tree.flatten(stash.buffer)
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))
    results, saved = jaxpr.outvars[: of_result.num_leaves], jaxpr.outvars[of_result.num_leaves :]
    unwritten = dict(enumerate(saved))
    norms = _saving_norms(jaxpr, makers, saved)
    later = {place for place, _ in norms.values()}  # written by a norm's kernel, with what it is the sum of
    waiting = {index for _, indices in norms.values() for index in indices}
    at = [stash.place(place, whole, block) for place, whole in enumerate(buffers)]
    written: dict[int, list] = {}  # places of values that are no matmuls' results, and the names of each
    last_use = {
        var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.invars if not isinstance(var, Literal)
    }

    def write(known: Callable) -> None:
        for place in [place for place, var in unwritten.items() if place not in later and known(var)]:
            var = unwritten.pop(place)
            whole = stash.write_array(buffers[place], at[place], read(values, var))
            names = _names(makers, var)
            value = read(values, var)
            if stash.fixed and names and (_is_matmul(makers, names[-1]) or _is_kept(makers, var)):
                value = stash.read_array(lax.optimization_barrier(whole), at[place])
            elif not stash.fixed or var in jaxpr.invars:
                value, whole = lax.optimization_barrier((value, whole))
            else:
                written[place] = names
            buffers[place] = whole
            values.update(dict.fromkeys(names, value))

    write(lambda var: isinstance(var, Literal) or var in values)
    parts = Parts(jaxpr.invars, arguments, stacks)
    for index, eqn in enumerate(jaxpr.eqns):
        if index in waiting:
            continue
        if index in norms:
            place, indices = norms[index]
            var, terms = unwritten.pop(place), jaxpr.eqns[indices[0]].invars if indices else eqn.invars[:1]
            terms = [read(values, term) for term in terms]
            stack, row = stash.stack(buffers[place], at[place])
            stack, values[eqn.outvars[0]] = saved_norm(stack, row, read(values, eqn.invars[1]), *terms, **eqn.params)
            buffers[place] = stack.reshape(buffers[place].shape)
            if indices:
                value = stash.read_array(lax.optimization_barrier(buffers[place]), at[place])
                values.update(dict.fromkeys(_names(makers, var), value))
        else:
            parts.bind(eqn, values)
        if eqn.primitive.name == "dot_general":
            for place, names in written.items():
                if any(last_use.get(name, -1) > index for name in names):
                    value = stash.read_array(lax.optimization_barrier(buffers[place]), at[place])
                    values.update(dict.fromkeys(names, value))
            written.clear()
        write(lambda var: var in eqn.outvars)  # noqa: B023
    return of_result.unflatten(read(values, var) for var in results), jax.tree.unflatten(structure, buffers)


def _saving_norms(jaxpr, makers: dict, saved: list) -> dict[int, tuple[int, list[int]]]:
    """The norms of saved values, which a kernel computes, sums and writes (`megajax.ops.norm_kernel`).

    Returns:
      For the index of a norm, the place of the value, and the equations from its sum to the norm, which the kernel replaces;
      none if it is an argument.
    """
    found: dict[int, tuple[int, list[int]]] = {}
    roots = [names[-1] if (names := _names(makers, var)) else None for var in saved]
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is not NORM or (root := _names(makers, eqn.invars[0])[-1]) not in roots:
            continue
        place = roots.index(root)
        if root in jaxpr.invars:
            found[index] = place, []
        elif makers[root].primitive.name == "add" and all(term.aval == root.aval for term in makers[root].invars):
            start = next(number for number, one in enumerate(jaxpr.eqns) if root in one.outvars)
            if all(one.primitive.name in SAME for one in jaxpr.eqns[start + 1 : index]):
                found[index] = place, [*range(start, index)]
    return found


def _names(makers: dict, var) -> list:
    """The variables that have the value of `var`, back to the one that was computed first; none of a literal."""
    names = []
    while not isinstance(var, Literal):
        names.append(var)
        eqn = makers.get(var)
        if eqn is None or eqn.primitive.name not in SAME:
            break
        var = eqn.invars[0]
    return names


def _is_kept(makers: dict, var) -> bool:
    """Whether a variable has the name that operations give to what they read from the stash at once."""
    names = (
        eqn.params["name"] for one in _names(makers, var) if (eqn := makers.get(one)) and eqn.primitive.name == "name"
    )
    return KEPT in names


def _is_matmul(makers: dict, var) -> bool:
    """Whether a variable is the result of a matmul, or a view of it."""
    while (eqn := makers.get(var)) is not None and eqn.primitive.name in (*VIEWS, *SAME):
        var = eqn.invars[0]
        if isinstance(var, Literal):
            return False
    return eqn is not None and eqn.primitive.name == "dot_general"
