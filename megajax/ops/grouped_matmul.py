"""Matmuls of groups of rows with a kernel for each group, and the permutation that sorts rows by group.

A mixture of experts sorts (token, choice) pairs by expert, and multiplies each group of rows with its expert's weights. No
row is dropped or padded: R = tokens * choices rows, whatever the sizes of the groups. If some groups are elsewhere, their
rows come last, of which as many may be left out as are surely there.

XLA compiles `lax.ragged_dot_general` to a dense product with masked rows on CPUs and GPUs: it computes, for each row, the
products with all kernels (jax 0.10.2 and 0.12).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from megajax.runtime.compat import varying_axes

__all__ = ["combine", "dispatch", "group_sizes", "grouped_matmul", "sort_by_group"]


def grouped_matmul(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies each row with its group's kernel.

    Args:
      rows: [R, i], sorted by group.
      kernels: [groups, i, *o].
      sizes: int32 [groups], rows of each group; their sum is at most R.

    Returns:
      [R, *o], of the rows' type; zeros for rows of no group, which have no part in the kernels' gradients either.
    """
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return lax.ragged_dot_general(rows, kernels, sizes, dimensions)


def group_sizes(groups: jax.Array, count: int) -> jax.Array:
    """int32 [count]: how often each of 0 to count - 1 occurs in `groups` [R]."""
    return (groups[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)


def sort_by_group(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(order, places), int32 [R]: `groups[order]` is sorted, equal ones in their given order; `order[places]` counts up."""
    rows = lax.iota(jnp.int32, groups.size)
    if axes := tuple(sorted(varying_axes(groups))):  # jax types argsort's result as equal on all devices (0.12)
        rows = lax.pcast(rows, axes, to="varying")
    _, order = lax.sort((groups, rows), num_keys=1, is_stable=True)
    return order, jnp.zeros_like(order).at[order].set(lax.iota(jnp.int32, order.size), unique_indices=True)


@jax.custom_vjp
def dispatch(x: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """Copies each item to its rows, sorted: [n, ...] to [R, ...]; item i has rows i R / n to (i + 1) R / n - 1 before that.

    The gradient is `combine`, which reads by index: a scatter would add in any order on GPUs.

    Args:
      x: the items.
      order: of `sort_by_group`; or its first elements only, whose rows the result then has.
      places: of `sort_by_group`, [R].
    """
    return jnp.take(x, order // (places.size // x.shape[0]), axis=0, mode="clip")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine(rows: jax.Array, order: jax.Array, places: jax.Array, count: int) -> jax.Array:
    """The transpose of `dispatch`: sums the rows of each of `count` items in fp32, [R, ...] to [count, ...]."""
    how = {"mode": "clip"} if order.size == places.size else {"mode": "fill", "fill_value": 0}  # without the last rows
    found = jnp.take(rows, places, axis=0, **how).reshape(count, -1, *rows.shape[1:])
    return found[:, 0] if found.shape[1] == 1 else found.astype(jnp.float32).sum(1).astype(rows.dtype)


def _dispatch_forward(x, order, places):
    return dispatch(x, order, places), (order, places, x)


def _dispatch_backward(saved, gradient):
    order, places, x = saved
    return combine(gradient, order, places, x.shape[0]), None, None


def _combine_forward(rows, order, places, count):
    return combine(rows, order, places, count), (order, places)


def _combine_backward(count, saved, gradient):
    return dispatch(gradient, *saved), None, None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)
combine.defvjp(_combine_forward, _combine_backward)
