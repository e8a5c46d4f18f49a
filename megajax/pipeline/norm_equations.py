"""The equations of a block's backward that one kernel computes together with that of a norm (`megajax.ops.norm_kernel`).

The kernel reads x and y's gradient. So it also adds what else x's gradient is a sum of, and computes y = norm(x) again where
the backward needs it, two equations more. They may come before or after the norm's gradients in the backward, which is
traced again in an order in which each equation follows those that it reads.
"""

import jax

from megajax.ops.in_place import OF_PART, of_part
from megajax.ops.norm_kernel import NORM, NormGradients
from megajax.pipeline.jaxprs import SAME, SUMS, bind, given_values, read, variables_of
from megajax.runtime.compat import Literal

__all__ = ["with_merged_norms"]


def with_merged_norms(closed):
    """The closed jaxpr, calls inlined, with the equations beside each norm's gradients merged into them.

    It is returned as it is if merged equations would wait for each other.
    """
    jaxpr = closed.jaxpr
    if not any(map(_is_gradients, jaxpr.eqns)):
        return closed
    makers = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    groups = [_Group(jaxpr, makers, index) for index, eqn in enumerate(jaxpr.eqns) if _is_gradients(eqn)]
    merged = {index for group in groups for index in group.indices}
    single = [_Single(eqn) for index, eqn in enumerate(jaxpr.eqns) if index not in merged]
    order = _order([*groups, *single], {*jaxpr.constvars, *jaxpr.invars})
    if order is None:
        return closed

    def run(*leaves):
        values = given_values(jaxpr, closed.consts, leaves)
        for one in order:
            one.bind(values)
        return [read(values, var) for var in jaxpr.outvars]

    return jax.make_jaxpr(run)(*(var.aval for var in jaxpr.invars))


def _order(left: list, known: set) -> list | None:
    """`_Group`s and `_Single`s, each after those whose results it reads; None if there is no such order."""
    order = []
    while left:
        waiting = []
        for one in left:
            if known.issuperset(one.operands):
                known.update(one.results)
                order.append(one)
            else:
                waiting.append(one)
        if len(waiting) == len(left):
            return None
        left = waiting
    return order


class _Single:
    """An equation that stays as it is; the attributes of `_Group`."""

    def __init__(self, eqn):
        self.eqn, self.operands, self.results = eqn, variables_of(eqn.invars), eqn.outvars

    def bind(self, values: dict) -> None:
        bind(self.eqn, values)


class _Group:
    """A norm's gradients and the equations that are merged with them.

    Attributes:
      indices: of the equations.
      operands: the variables that they read.
      results: those that they compute.
    """

    def __init__(self, jaxpr, makers: dict, index: int):
        """`makers`: the index of the equation that computes each variable."""
        self.eqn, self.added, self.residual, self.normed = jaxpr.eqns[index], None, None, None
        self.makers, self.eqns = makers, jaxpr.eqns
        self.indices, self.operands = [index], variables_of(self.eqn.invars)
        uses = [number for number, eqn in enumerate(jaxpr.eqns) if self.eqn.outvars[0] in variables_of(eqn.invars)]
        if len(uses) == 1 and self.eqn.outvars[0] not in variables_of(jaxpr.outvars):
            self._add(uses[0])
        for number, eqn in enumerate(jaxpr.eqns):
            same = eqn.primitive is NORM and list(map(self._root, eqn.invars)) == list(
                map(self._root, self.eqn.invars[:2])
            )
            if same and number not in self._before(self.operands):
                self.indices.append(number)
                self.normed = eqn.outvars[0]
                break

    def _add(self, index: int) -> None:
        """Merges the sum number `index` if the other term does not depend on the norm's gradients."""
        eqn, own = self.eqns[index], self.eqn.outvars[0]
        others = [var for var in eqn.invars if var is not own]
        if eqn.primitive.name not in SUMS or len(others) != 1 or isinstance(others[0], Literal):
            return
        if others[0].aval.shape == own.aval.shape and self.indices[0] not in self._before(others):
            self.added, self.residual = eqn.outvars[0], others[0]
            self.indices.append(index)
            self.operands = [*self.operands, others[0]]

    def _root(self, var):
        """The variable that the value of `var` was computed as."""
        while not isinstance(var, Literal) and var in self.makers:
            eqn = self.eqns[self.makers[var]]
            if eqn.primitive.name not in SAME:
                break
            var = eqn.invars[0]
        return var

    def _before(self, variables) -> set[int]:
        """The equations that the variables depend on."""
        found, left = set(), list(variables)
        while left:
            index = self.makers.get(left.pop())
            if index is not None and index not in found:
                found.add(index)
                left += variables_of(self.eqns[index].invars)
        return found

    @property
    def results(self) -> list:
        dx = self.eqn.outvars[0] if self.added is None else self.added
        return [dx, *self.eqn.outvars[1:], *([] if self.normed is None else [self.normed])]

    def bind(self, values: dict) -> None:
        """Evaluates the merged equations."""
        operands = [read(values, var) for var in self.eqn.invars]
        if self.residual is not None:
            operands.append(read(values, self.residual))
        dx, *others, y = of_part(self.eqn.params["of_stack"], *operands)
        values |= dict(zip(self.results, [dx, *others, y, y], strict=False))


def _is_gradients(eqn) -> bool:
    return eqn.primitive is OF_PART and isinstance(eqn.params["of_stack"], NormGradients)
