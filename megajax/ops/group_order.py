"""The permutation that sorts rows by group: each item copied to its rows, and its rows summed; both read by index alone."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from megajax.runtime.compat import vary_over, varying_axes

__all__ = ["combine", "dispatch", "rows_at", "sort_by_group"]


def sort_by_group(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(order, places), int32 [R]: `groups[order]` is sorted, equal ones in their given order; `order[places]` counts up."""
    # jax types argsort's result as equal on all devices (0.12)
    rows = vary_over(lax.iota(jnp.int32, groups.size), varying_axes(groups))
    _, order = lax.sort((groups, rows), num_keys=1, is_stable=True)
    how = {"unique_indices": True, "wrap_negative_indices": False}
    return order, order.at[order].set(lax.iota(jnp.int32, order.size), **how)  # all elements


def rows_at(x: jax.Array, index: jax.Array, fill: bool = False) -> jax.Array:
    """x[index] along the first axis, for an int32 index that is not negative; beyond the end the last row, or 0 if `fill`.

    `jnp.take` would wrap negative numbers, by an array of zeros that all gathers of a program share. XLA joins kernels with
    a common operand: a merged tick's forward and backward then waited for each other's collectives (jax 0.12).
    """
    how = {"mode": "fill", "fill_value": 0} if fill else {"mode": "clip"}
    return x.at[index].get(wrap_negative_indices=False, **how)


@jax.custom_vjp
def dispatch(x: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """Copies each item to its rows, sorted: [n, ...] to [R, ...]; item i has rows i R / n to (i + 1) R / n - 1 before that.

    The gradient is `combine`, which reads by index: a scatter would add in any order on GPUs.

    Args:
      x: the items.
      order: of `sort_by_group`; or its first elements only, whose rows the result then has.
      places: of `sort_by_group`, [R].
    """
    return rows_at(x, lax.div(order, places.size // x.shape[0]))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine(rows: jax.Array, order: jax.Array, places: jax.Array, count: int) -> jax.Array:
    """The transpose of `dispatch`: sums the rows of each of `count` items in fp32, [R, ...] to [count, ...]."""
    found = rows_at(rows, places, order.size < places.size).reshape(count, -1, *rows.shape[1:])
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
