"""Kernels that read a part of a stack, or add to one, where it is.

A block's backward is given parts of stacks, what its forward saved and its weights, and returns gradients, which the
pipeline adds to a part of another stack. XLA reads and adds in place in its own kernels and matmuls, but not in a kernel of
ours, nor in a scatter: the part is copied before, or the gradient added after. So `of_part` and `addend` make equations in
which the pipeline finds the function of the whole stack (`megajax.pipeline.jaxprs`). Everything else sees the function of
the part. Both are for backwards: they have no derivative. Of several parts each may be of a stack of its own; they are read
there if all of them are.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from megajax.runtime.compat import Primitive, jaxpr_as_fun, lower_by

__all__ = ["ADDEND", "OF_PART", "addend", "of_part", "whole"]

Add = Callable[..., jax.Array]
OfStack = Callable[..., tuple[jax.Array, ...]]
ADDEND, OF_PART = Primitive("addend"), Primitive("of_part")
OF_PART.multiple_results = True


def addend(gradient: Callable[..., jax.Array], add: Add, *operands: jax.Array, parts: int = 0) -> jax.Array:
    """`gradient(*operands)`, of which the pipeline may compute `add(total, place, *operands)` instead.

    Args:
      gradient: traceable; the result is fp32.
      add: (fp32 total [n, *shape of the gradient], int32 place, *operands) -> total with the gradient added to total[place].
      operands: arrays.
      parts: how many of them, the first ones, may be parts of stacks: `add` gets (stack, place) for each.
    """
    return ADDEND.bind(*operands, jaxpr=jax.make_jaxpr(gradient)(*operands), add=add, parts=parts)


def of_part(of_stack: OfStack, *operands: jax.Array, parts: int = 1, into: Add | None = None) -> list[jax.Array]:
    """`of_stack(part[None], 0, *operands)`, or `of_stack(stack, place, *operands)` where the part is stack[place].

    Args:
      of_stack: traceable, (stack [n, *shape of the part], int32 place, *operands) -> tuple of arrays.
      operands: arrays, of which the first `parts` are parts; `of_stack` gets (stack, place) for each of these.
      parts: see above.
      into: for the only result, of which a forward may save it in a stack: (that stack [m, *shape of the result], int32
        place, *arguments of `of_stack`) -> the stack with the result at the place.
    """
    plain = lambda *operands: of_stack(*whole(operands[:parts]), *operands[parts:])  # noqa: E731
    return OF_PART.bind(*operands, jaxpr=jax.make_jaxpr(plain)(*operands), of_stack=of_stack, parts=parts, into=into)


def whole(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """(stack, place) of each part that is in no stack, one after the other."""
    return [value for part in parts for value in (part[None], jnp.int32(0))]


@ADDEND.def_impl
def _gradient(*operands: jax.Array, jaxpr, add: Add, parts: int) -> jax.Array:
    return jaxpr_as_fun(jaxpr)(*operands)[0]


@OF_PART.def_impl
def _results(*operands: jax.Array, jaxpr, of_stack: OfStack, parts: int, into: Add | None) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*operands)


ADDEND.def_abstract_eval(lambda *operands, jaxpr, add, parts: jaxpr.out_avals[0])
OF_PART.def_abstract_eval(lambda *operands, jaxpr, of_stack, parts, into: jaxpr.out_avals)
lower_by(ADDEND, _gradient)
lower_by(OF_PART, _results)
