"""A gradient that can be added where its accumulator is, by the kernel that computes it.

A backward has no accumulators: it returns gradients, which the pipeline adds. XLA does both in one kernel for its own
matmuls, but not for a kernel of ours, nor for a scatter: the gradient is an array of its own, the accumulator is read and
written once more. So `addend` makes an equation in which the pipeline finds, besides the gradient, the function that adds it
(`megajax.pipeline.jaxprs`). Everything else sees the gradient.
"""

from collections.abc import Callable

import jax

from megajax.runtime.compat import Primitive, jaxpr_as_fun, lower_by

__all__ = ["ADDEND", "addend"]

Add = Callable[..., jax.Array]
ADDEND = Primitive("addend")


def addend(gradient: Callable[..., jax.Array], add: Add, *operands: jax.Array) -> jax.Array:
    """`gradient(*operands)`, of which the pipeline may compute `add(total, place, *operands)` instead.

    For backwards: it has no derivative.

    Args:
      gradient: traceable; the result is fp32.
      add: (fp32 total [n, *shape of the gradient], int32 place, *operands) -> total with the gradient added to total[place].
      operands: arrays.
    """
    return ADDEND.bind(*operands, jaxpr=jax.make_jaxpr(gradient)(*operands), add=add)


@ADDEND.def_impl
def _gradient(*operands: jax.Array, jaxpr, add: Add) -> jax.Array:
    return jaxpr_as_fun(jaxpr)(*operands)[0]


ADDEND.def_abstract_eval(lambda *operands, jaxpr, add: jaxpr.out_avals[0])
lower_by(ADDEND, _gradient)
