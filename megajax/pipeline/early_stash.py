"""A block's forward that writes what it saves to the stash as soon as it is computed, or at the block's end.

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

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from megajax.ops.gated_down import KEPT
from megajax.ops.in_place import OF_PART
from megajax.ops.norm_kernel import NORM, saved_norm
from megajax.pipeline.jaxprs import SAME, VIEWS, Parts, given_values, inlined_jaxpr, read, variables_of
from megajax.pipeline.stash import StashRef
from megajax.runtime.compat import Literal

__all__ = ["saved_residual", "stash_as_computed", "stash_at_end"]

Tree = Any


def stash_as_computed(
    function: Callable,
    arguments: Sequence[jax.Array],
    stash: StashRef,
    block,
    stacks: Sequence = (),
    residual: tuple[int, int] | None = None,
) -> tuple[Tree, Tree]:
    """Evaluates `function(*arguments) -> (result, values to save)` and writes the values to one block's part of the stash.

    Args:
      function: traceable; the result is a pytree, and the values are one like the stash's buffer.
      arguments: arrays.
      stash: in device memory.
      block: its number in the chunk.
      stacks: of arguments, see `jaxprs.Parts`.
      residual: (number of the argument x, what `saved_residual` returns for it). Then x is given as what is added to the
        saved value of that number of the block before, and the result is likewise what is added to this block's.

    Returns:
      (the result, the stash's buffer).
    """
    jaxpr, makers, values, of_result = _traced(function, arguments)
    buffers, structure = jax.tree.flatten(stash.buffer)
    results, saved = jaxpr.outvars[: of_result.num_leaves], jaxpr.outvars[of_result.num_leaves :]
    unwritten = dict(enumerate(saved))
    norms = _saving_norms(jaxpr, makers, saved)
    later = {place for place, _ in norms.values()}  # written by a norm's kernel, with what it is the sum of
    skipped = {index for _, indices in norms.values() for index in indices}
    at = [stash.place(place, whole, block) for place, whole in enumerate(buffers)]
    written: dict[int, list] = {}  # places of values that are no matmuls' results, and the names of each
    last_use = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in variables_of(eqn.invars)}
    x, terms_of_x = None, []
    if residual is not None:
        x = jaxpr.invars[residual[0]]
        terms_of_x = [(stash.stack(buffers[residual[1]], at[residual[1]])[0], 1), (values.pop(x), None)]
        skipped |= {number for number, eqn in enumerate(jaxpr.eqns) if _is_view_of(makers, eqn, x)}

    def write(known: Callable) -> None:
        for place in [place for place, var in unwritten.items() if place not in later and known(var)]:
            var = unwritten.pop(place)
            value, names = read(values, var), _names(makers, var)
            whole = stash.write_array(buffers[place], at[place], value)
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
    numbers = {_root(makers, var): place for place, var in unwritten.items() if place not in later}
    for index, eqn in enumerate(jaxpr.eqns):
        if index in skipped:
            continue
        if index in norms:
            place, indices = norms[index]
            var, terms = unwritten.pop(place), jaxpr.eqns[indices[0]].invars if indices else eqn.invars[:1]
            of_terms = ([(read(values, one), None)] if _root(makers, one) is not x else terms_of_x for one in terms)
            terms, before = zip(*itertools.chain.from_iterable(of_terms), strict=True)
            stack, row = stash.stack(buffers[place], at[place])
            scale = read(values, eqn.invars[1])
            stack, values[eqn.outvars[0]] = saved_norm(stack, row, scale, *terms, before=before, **eqn.params)
            buffers[place] = stack.reshape(buffers[place].shape)
            if indices:
                value = stash.read_array(lax.optimization_barrier(buffers[place]), at[place])
                values.update(dict.fromkeys(_names(makers, var), value))
            elif x is not None:
                terms_of_x = [(stack, 0)]
        elif (place := _written_by_kernel(eqn, numbers, parts, values, stash, buffers, at)) is not None:
            del unwritten[place]
        else:
            parts.bind(eqn, values)
        if eqn.primitive.name == "dot_general":
            for place, names in written.items():
                if any(last_use.get(name, -1) > index for name in names):
                    value = stash.read_array(lax.optimization_barrier(buffers[place]), at[place])
                    values.update(dict.fromkeys(names, value))
            written.clear()
        write(lambda var: var in eqn.outvars)  # noqa: B023
    if residual is not None:
        results = makers[_root(makers, results[0])].invars[1:]
    return of_result.unflatten(read(values, var) for var in results), jax.tree.unflatten(structure, buffers)


def stash_at_end(
    function: Callable,
    arguments: Sequence[jax.Array],
    stash: StashRef,
    block,
    stacks: Sequence = (),
    *,
    waits: bool = True,
) -> tuple[Tree, Tree]:
    """As `stash_as_computed`, but everything is written after the last value that is saved.

    In a loop over blocks a block's result has the memory of its input, if nothing reads that afterwards. A write of the
    input, or of a sum with it, may come after the result, and XLA then copies the input. So with `waits` a result that is
    the sum of a saved value and another waits for the writes, and reads the saved one in the stash.

    A kernel that can write its result there does (`megajax.ops.in_place`), when it is computed.
    """
    jaxpr, makers, values, of_result = _traced(function, arguments)
    buffers, structure = jax.tree.flatten(stash.buffer)
    results, saved = jaxpr.outvars[: of_result.num_leaves], jaxpr.outvars[of_result.num_leaves :]
    total, place = _sum_with_saved(makers, results, saved) if waits else (None, None)
    parts, last = Parts(jaxpr.invars, arguments, stacks), []
    at = [stash.place(number, whole, block) for number, whole in enumerate(buffers)]
    numbers, by_kernel = {_root(makers, var): number for number, var in enumerate(saved)}, set()
    for eqn in jaxpr.eqns:
        if eqn is total or total is not None and _is_view_of(makers, eqn, total.outvars[0]):
            last.append(eqn)
        elif (number := _written_by_kernel(eqn, numbers, parts, values, stash, buffers, at)) is not None:
            by_kernel.add(number)
        else:
            parts.bind(eqn, values)
    written = [
        buffers[number] if number in by_kernel else stash.write_array(buffers[number], at[number], read(values, var))
        for number, var in enumerate(saved)
    ]
    if total is not None:
        written = lax.optimization_barrier(written)
        values[total.invars[0]] = stash.read_array(written[place], at[place])
    for eqn in last:
        parts.bind(eqn, values)
    return of_result.unflatten(read(values, var) for var in results), jax.tree.unflatten(structure, written)


def saved_residual(function: Callable, arguments: Sequence[jax.Array], number: int) -> int | None:
    """Which saved value, by number, the result is the sum of with another one; None if a kernel does not add up both norms.

    Of a block x + f(norm(x)), then + g(norm), of which norms' kernels write x and the first sum to the stash. If its
    result is not added up, but given to the next block's kernel, which has the first sum in the stash, one kernel less
    reads and writes. Arguments as for `stash_as_computed`; nothing but a norm and a sum may read x, the argument `number`.
    """
    jaxpr, makers, _, of_result = _traced(function, arguments)
    # With experts XLA copied a whole slot of the stash in each tick (OLMoE: 79 GB, and 60 without; it is not known why).
    if any(eqn.primitive is OF_PART for eqn in jaxpr.eqns):
        return None
    saved, x = jaxpr.outvars[of_result.num_leaves :], jaxpr.invars[number]
    norms = {place: (index, indices) for index, (place, indices) in _saving_norms(jaxpr, makers, saved).items()}
    sums = [place for place, (_, indices) in norms.items() if indices]
    total = makers.get(_root(makers, jaxpr.outvars[0]))
    if of_result.num_leaves != 1 or total is None or total.primitive.name != "add" or len(sums) != 1:
        return None
    ((_, (start, *_)),) = (norms[place] for place in sums)
    ends = [eqn for eqn in jaxpr.eqns if eqn.primitive.name not in SAME and x in {_root(makers, v) for v in eqn.invars}]
    normed = [norms[place][0] for place, var in enumerate(saved) if place in norms and _root(makers, var) is x]
    fits = (
        sum(_root(makers, var) is x for var in saved) == 1
        and [jaxpr.eqns[index] for index in normed] == ends[:1]
        and ends[1:] == [jaxpr.eqns[start]]
        and _root(makers, ends[1].invars[0]) is x
        and _root(makers, total.invars[0]) is _root(makers, saved[sums[0]])
        and total.invars[1].aval == x.aval
    )
    return sums[0] if fits else None


def _traced(function: Callable, arguments: Sequence[jax.Array]) -> tuple[Any, dict, dict, Any]:
    """(The jaxpr of `function(*arguments) -> (result, values to save)` with every call inlined, the equation that computes
    each variable, the values of constants and arguments, the structure of the result.)
    """
    closed = inlined_jaxpr(lambda *leaves: jax.tree.leaves(function(*leaves)), *arguments)
    jaxpr = closed.jaxpr
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    values = given_values(jaxpr, closed.consts, arguments)
    return jaxpr, makers, values, jax.tree.structure(jax.eval_shape(function, *arguments)[0])


def _written_by_kernel(
    eqn, numbers: dict, parts: Parts, values: dict, stash: StashRef, buffers: list, at: list
) -> int | None:
    """The number of the saved value that an equation's kernel wrote to its buffer, which is replaced in `buffers`; or None.

    What computes with the value reads it there. `numbers`: by the variable that has the value and is computed first.
    """
    number = numbers.get(eqn.outvars[0]) if eqn.outvars else None
    if number is None or (whole := parts.saved_by(eqn, values, *stash.stack(buffers[number], at[number]))) is None:
        return None
    buffers[number] = whole.reshape(buffers[number].shape)
    values[eqn.outvars[0]] = stash.read_array(buffers[number], at[number])
    return number


def _sum_with_saved(makers: dict, results: Sequence, saved: Sequence) -> tuple[Any, int | None]:
    """The equation of the result, if it adds something to a value that is computed and saved, and that value's number."""
    total = makers.get(_root(makers, results[0])) if len(results) == 1 else None
    if total is None or total.primitive.name != "add" or any(var.aval != total.outvars[0].aval for var in total.invars):
        return None, None
    root = _root(makers, total.invars[0])
    found = [number for number, var in enumerate(saved) if root in makers and _root(makers, var) is root]
    return (total, found[0]) if found else (None, None)


def _is_view_of(makers: dict, eqn, var) -> bool:
    """Whether an equation gives another name to the value of `var`."""
    return eqn.primitive.name in SAME and _root(makers, eqn.outvars[0]) is var


def _root(makers: dict, var):
    """The variable that has the value of `var` and was computed first; None of a literal."""
    return names[-1] if (names := _names(makers, var)) else None


def _saving_norms(jaxpr, makers: dict, saved: list) -> dict[int, tuple[int, list[int]]]:
    """The norms of saved values, which a kernel computes, sums and writes (`megajax.ops.norm_kernel`).

    Returns:
      For the index of a norm, the place of the value, and the equations from its sum to the norm, which the kernel replaces;
      none if it is an argument.
    """
    found: dict[int, tuple[int, list[int]]] = {}
    roots = [_root(makers, var) for var in saved]
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is not NORM or (root := _root(makers, eqn.invars[0])) not in roots:
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
