"""Matmuls of groups of rows with a kernel for each group; `group_order.py` sorts the rows.

A mixture of experts sorts (token, choice) pairs by expert, and multiplies each group of rows with its expert's weights. No
row is dropped or padded: R = tokens * choices rows, whatever the sizes of the groups. If some groups are elsewhere, their
rows come last, of which as many may be left out as are surely there.

    x [n, i] -> dispatch [R, i] -> column: kernels [G, i, o] -> [R, o] -> row: kernels [G, o, h] -> combine [n, h]

The matmuls are XLA's `lax.ragged_dot_general`, or on NVIDIA GPUs kernels of Pallas (`grouped_kernels.py`) or tokamax
(`tokamax_kernels.py`), which can neither be partitioned nor be differentiated: each direction of `column` and `row` enters
a `shard_map` over "tensor" of its own, as fused attention does. Tensor parallelism splits o (1909.08053 section 3). Before
a sum over tensor each rank adds up its own rows of each item, so that n rows are sent and not R. Or each tensor rank has
whole kernels, and rows of its own: of the kernels' axis G, and of a new first axis of all other arrays.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from megajax.ops.group_order import combine, dispatch, sort_by_group
from megajax.ops.grouped_fp8 import pallas_into_in_8_bits, pallas_product_in_8_bits, rounded
from megajax.ops.grouped_kernels import pallas_add, pallas_gradient, pallas_into, pallas_product
from megajax.ops.in_place import addend, of_part
from megajax.ops.tensor_shards import TENSOR, Shard, on_numbered_shards
from megajax.ops.tokamax_kernels import generation, grouped_product, has_product
from megajax.runtime.compat_kernels import tokamax_installed

__all__ = [
    "INTERPRETED",
    "PALLAS",
    "XLA",
    "GroupedKernel",
    "GroupedMatmuls",
    "Part",
    "Routing",
    "kernel_for",
    "route",
]


class GroupedKernel(NamedTuple):
    """An implementation of the matmuls on one device, of rows [R, i] sorted by group and kernels [G, i, o].

    `sizes`, int32 [G], has the rows of each group; their sum is at most R.

    Attributes:
      product: (rows [R, i], kernels, sizes, transposed=False, place=None) -> [R, o], each row times its group's kernel; of
        rows of no group 0. `transposed`: rows [R, o] times the kernels transposed, [R, i]. With an int32 `place`, which only
        those with `add` take, the kernels are that part of a stack [n, G, i, o], and are read there.
      gradient: (rows [R, i], slopes [R, o], sizes) -> fp32 [G, i, o], rows^T slopes of each group's rows; 0 for no rows.
      add: (total fp32 [n, G, i, o], place int32, rows, slopes, sizes) -> total, with the gradient added to total[place]; in
        place if nothing else reads `total`. None: there is no such kernel.
      into: (out [m, R, o], at int32, rows, kernels [n, G, i, o], sizes, place) -> out, with the product with kernels[place]
        as out[at]; in place if nothing else reads `out` later. None: likewise.
      interpreted: whether Pallas's interpreter runs them.
      eight_bits: `product` and `into` of kernels that multiply in 8 bits. None: there are no such kernels.
    """

    product: Callable[..., jax.Array]
    gradient: Callable[..., jax.Array]
    add: Callable[..., jax.Array] | None = None
    into: Callable[..., jax.Array] | None = None
    interpreted: bool = False
    eight_bits: tuple[Callable[..., jax.Array], Callable[..., jax.Array]] | None = None

    def in_8_bits(self) -> "GroupedKernel":
        """These with products in 8 bits, or of numbers rounded to 8 bits, see `grouped_fp8.py`."""
        product, into = self.eight_bits or (rounded(self.product), None)
        return self._replace(product=product, into=into)


def _xla_product(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    contracted = (((1,), (2 if transposed else 1,)), ((), ()))
    dimensions = lax.RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
    return lax.ragged_dot_general(rows, kernels, sizes, dimensions)


def _xla_gradient(rows: jax.Array, slopes: jax.Array, sizes: jax.Array) -> jax.Array:
    contracted = (((0,), (0,)), ((), ()))
    dimensions = lax.RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
    return lax.ragged_dot_general(rows, slopes, sizes, dimensions, preferred_element_type=jnp.float32)


XLA = GroupedKernel(_xla_product, _xla_gradient)
KERNELS = pallas_product, pallas_gradient, pallas_add, pallas_into
MULTIPLIES_8_BITS = 9  # the generation of GPUs on which Triton does, with these kernels
EIGHT_BITS = pallas_product_in_8_bits, pallas_into_in_8_bits
PALLAS = GroupedKernel(*KERNELS)  # Triton's, on NVIDIA GPUs
INTERPRETED = GroupedKernel(  # on any device
    *(partial(kernel, interpret=True) for kernel in KERNELS),
    True,
    tuple(partial(kernel, interpret=True) for kernel in EIGHT_BITS),
)


def kernel_for(device: jax.Device) -> GroupedKernel:
    """On NVIDIA GPUs of compute capability 8.0 or more Pallas's, on B200s with tokamax's product, else XLA's.

    Args:
      device: one of the mesh's; it may belong to a topology that is only compiled for.
    """
    if generation(device) is None:
        return XLA
    if generation(device) == MULTIPLIES_8_BITS:
        return PALLAS._replace(eight_bits=EIGHT_BITS)
    tokamax = has_product(device) and tokamax_installed()
    return PALLAS._replace(product=partial(_tokamax_product, device), into=None) if tokamax else PALLAS


def _tokamax_product(device: jax.Device, rows: jax.Array, *given, **how) -> jax.Array:
    """tokamax's product; of fp32, which it refuses, megajax's."""
    return (
        grouped_product(device, rows, *given, **how)
        if rows.dtype.itemsize == 2
        else pallas_product(rows, *given, **how)
    )


class Part(NamedTuple):
    """Kernels that are stack[place]. They have no gradient of their own: it is that of `total`, if there is one.

    Attributes:
      stack: [n, G, i, *o].
      place: int32.
      total: fp32 [n, G, i, *o]; its "gradient" is itself, with that of the kernels added to total[at].
      at: int32.
    """

    stack: jax.Array
    place: jax.Array
    total: jax.Array | None = None
    at: jax.Array | None = None


class Routing(NamedTuple):
    """Which row is whose; int32.

    Attributes:
      order: [R], of `group_order.sort_by_group`; or its first elements only, whose rows are computed.
      places: of `sort_by_group`, for all rows.
      sizes: [G], rows of each group.
    """

    order: jax.Array
    places: jax.Array
    sizes: jax.Array


def route(groups: jax.Array, count: int, at_most: int | None = None) -> Routing:
    """The routing of rows of these groups, int32 [rows]: 0 to `count` - 1, others are elsewhere.

    Args:
      groups: items' groups, item after item.
      count: groups that are here.
      at_most: rows that can be here; None: all.
    """
    order, places = sort_by_group(groups)
    sizes = (groups[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    return Routing(order[:at_most], places, sizes)


@dataclasses.dataclass(frozen=True)
class GroupedMatmuls:
    """The two matmuls of experts, on the devices of a tensor group.

    Attributes:
      kernel: their implementation.
      on_mesh: whether a mesh with an axis "tensor" is set.
      split: whether that axis splits the kernels: the first matmul's last axis, the second one's middle axis.
      once: whether the second one's backward should pass once over a gated activation (`grouped_gated.py`).
      over_groups: whether that axis splits the groups instead: each rank has G / T of them, and all arrays but the kernels
        are [T, ...], of each rank's own. Nothing is then summed over tensor.
    """

    kernel: GroupedKernel = XLA
    on_mesh: bool = False
    split: bool = False
    once: bool = False
    over_groups: bool = False

    def each(self, function: Callable) -> Callable:
        """`function` of one rank's arrays, as one of these arrays."""
        return jax.vmap(function) if self.over_groups else function

    def of_kernels(self, axis: int, stacked: bool = False) -> Shard:
        """The shards of kernels, or of a stack of them, of which `split` splits this axis."""
        if self.over_groups:
            return Shard(P(*[None] * stacked, TENSOR))
        return Shard(P(*[None] * (axis + stacked), TENSOR) if self.split else P())

    def of_rows(self, axis: int | None, stacked: bool = False) -> Shard:
        """Those of another array, or of a stack of them; None: all ranks have all of it."""
        if self.over_groups:
            return Shard(P(*[None] * stacked, TENSOR), int(stacked))
        return Shard(P()) if axis is None or not self.split else Shard(P(*[None] * (axis + stacked), TENSOR))

    def on_shards(self, local: Callable, given: tuple[Shard, ...], result: Any) -> Callable:
        """`on_numbered_shards`; without a mesh `local`."""
        return on_numbered_shards(local, given, result) if self.on_mesh else local

    @property
    def one_pass(self) -> bool:
        """Whether it does: with kernels of Pallas."""
        return self.once and self.kernel.add is not None

    def column(self, x: jax.Array, kernels: jax.Array | Part, routing: Routing) -> jax.Array:
        """The rows of x [n, i], replicated over tensor, times their groups' kernels [G, i, *o]: [R, *o], split over tensor.

        Names the rows "dispatched" where it is differentiated.
        """
        return _column(x, kernels, routing, self, x.shape[-2])

    def row(self, rows: jax.Array, kernels: jax.Array | Part, routing: Routing, count: int) -> jax.Array:
        """rows [R, f], split over tensor, times their groups' kernels [G, f, h], summed for each of `count` items: [n, h].

        The result and its gradient are replicated over tensor; XLA scatters a sum of which each device needs a part.
        """
        return _row(rows, kernels, routing, self, count)

    def row_slopes(
        self, kernels: jax.Array | Part, routing: Routing, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Of a gradient [n, h] of `row`'s result, (that of each product [R, h], that of the rows [R, f])."""
        slopes = self.each(dispatch)(gradient, routing.order, routing.places)

        def local(kernels, place, slopes, sizes):
            return self.kernel.product(slopes, kernels, sizes, transposed=True, **_at(place))

        return slopes, self._multiply(local, kernels, 1, (None, None), 1, slopes, routing.sizes)

    def row_gradient(self, kernels: jax.Array | Part, routing: Routing, rows, slopes) -> jax.Array | Part | None:
        """The gradient of `row`'s kernels, of the rows and what `row_slopes` returns first."""
        return self.gradient((1, None, None), 1, kernels, rows, slopes, routing.sizes)

    def _multiply(
        self, local: Callable, kernels: jax.Array, axis: int, in_axes: tuple, out_axis: int | None, *arrays, into=None
    ):
        """`local(kernels, place, *arrays)` on each device, of which `split` splits these axes, and `out_axis` of the result.

        `arrays` are pytrees. The kernels are read where they are stored, if theirs is the part `place` of a stack. If so,
        `into(out, at, kernels, place, *arrays)` may run instead, which writes the result to out[at].
        """
        rows, result = tuple(map(self.of_rows, in_axes)), self.of_rows(out_axis)
        given = self.of_kernels(axis, stacked=True), Shard(P()), *rows
        if isinstance(kernels, Part) and self.kernel.add is not None:
            return self.on_shards(local, given, result)(kernels.stack, kernels.place, *arrays)
        if isinstance(kernels, Part):
            kernels = lax.dynamic_index_in_dim(kernels.stack, kernels.place, keepdims=False)
        if self.kernel.add is None:
            plain = lambda kernels, *arrays: local(kernels, None, *arrays)  # noqa: E731
            return self.on_shards(plain, (self.of_kernels(axis), *rows), result)(kernels, *arrays)
        leaves, structure = jax.tree.flatten(arrays)

        def of_stack(stack, place, *leaves):
            return (self.on_shards(local, given, result)(stack, place, *structure.unflatten(leaves)),)

        def into_stack(out, at, stack, place, *leaves):
            outs = self.of_rows(out_axis, stacked=True)
            run = self.on_shards(into, (outs, Shard(P()), *given), outs)
            return run(out, at, stack, place, *structure.unflatten(leaves))

        return of_part(of_stack, kernels, *leaves, into=into and into_stack)[0]

    def sum_over_split(self, local: Callable, kernels: jax.Array | Part, axis: int, in_axes: tuple, *arrays):
        """As `_multiply`, of a result that is the sum of the ranks' where these have parts of the kernels."""
        if self.over_groups:
            return self._multiply(local, kernels, axis, in_axes, None, *arrays)
        return _sum_first(self._multiply(lambda *given: local(*given)[None], kernels, axis, in_axes, 0, *arrays))

    def gradient(
        self, in_axes: tuple, axis: int, kernels: jax.Array | Part, rows, slopes, sizes
    ) -> jax.Array | Part | None:
        """The kernels' gradient [G, i, *o] of rows [R, i] and slopes [R, *o], fp32 until it is added; a `Part` has its own.

        `in_axes` and `axis`: those of the arrays, and the gradient's, that `split` splits.
        """
        given = tuple(map(self.of_rows, in_axes))

        def local(rows, slopes, sizes):
            found = self.kernel.gradient(rows, _vectors(slopes), sizes)
            return found.reshape(*found.shape[:2], *slopes.shape[1:])

        def add(total, place, rows, slopes, sizes):
            if self.kernel.add is None:
                return total.at[place].add(local(rows, slopes, sizes))
            matrices = total.reshape(*total.shape[:3], -1)
            return self.kernel.add(matrices, place, rows, _vectors(slopes), sizes).reshape(total.shape)

        total = self.of_kernels(axis, stacked=True)
        of_kernels = self.on_shards(local, given, self.of_kernels(axis))
        of_total = self.on_shards(add, (total, Shard(P()), *given), total)
        if isinstance(kernels, Part):
            if kernels.total is None:
                return None
            return Part(None, None, of_total(kernels.total, kernels.at, rows, slopes, sizes), None)
        found = of_kernels if self.kernel.add is None else partial(addend, of_kernels, of_total)
        return found(rows, slopes, sizes).astype(kernels.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _column(x, kernels, routing: Routing, how: GroupedMatmuls, count: int):
    return _column_forward(x, kernels, routing, how, count)[0]


def _column_forward(x, kernels, routing, how, count):
    rows = checkpoint_name(how.each(dispatch)(x, routing.order, routing.places), "dispatched")

    def local(kernels, place, rows, sizes):
        found = how.kernel.product(rows, _matrices(kernels, last), sizes, **_at(place))
        return found.reshape(len(rows), *kernels.shape[1 - last :])

    def into(out, at, kernels, place, rows, sizes):
        whole = out.reshape(*out.shape[:2], -1)
        return how.kernel.into(whole, at, rows, _matrices(kernels, last), sizes, place).reshape(out.shape)

    last, arrays = _last_axis(kernels), (rows, routing.sizes)
    how_into = into if how.kernel.into is not None else None
    found = how._multiply(local, kernels, last, (None, None), last - 1, *arrays, into=how_into)
    return found, (rows, kernels, routing)


def _column_backward(how, count, saved, gradient):
    rows, kernels, routing = saved

    def of_items(kernels, place, gradient, routing):
        matrices = _matrices(kernels, last)
        slopes = how.kernel.product(_vectors(gradient), matrices, routing.sizes, transposed=True, **_at(place))
        return combine(slopes, routing.order, routing.places, count)

    last = _last_axis(kernels)
    of_x = how.sum_over_split(of_items, kernels, last, (last - 1, None), gradient, routing)
    return of_x, how.gradient((None, last - 1, None), last, kernels, rows, gradient, routing.sizes), None


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _row(rows, kernels, routing: Routing, how: GroupedMatmuls, count: int):
    return _row_forward(rows, kernels, routing, how, count)[0]


def _row_forward(rows, kernels, routing, how, count):
    def local(kernels, place, rows, routing):
        products = how.kernel.product(rows, kernels, routing.sizes, **_at(place))
        return combine(products, routing.order, routing.places, count)

    return how.sum_over_split(local, kernels, 1, (1, None), rows, routing), (rows, kernels, routing)


def _row_backward(how, count, saved, gradient):
    rows, kernels, routing = saved
    slopes, of_rows = how.row_slopes(kernels, routing, gradient)
    return of_rows, how.row_gradient(kernels, routing, rows, slopes), None


_column.defvjp(_column_forward, _column_backward)
_row.defvjp(_row_forward, _row_backward)


def _last_axis(kernels: jax.Array | Part) -> int:
    """The number of axes of one's kernels [G, i, *o], less one."""
    return kernels.stack.ndim - 2 if isinstance(kernels, Part) else kernels.ndim - 1


def _matrices(kernels: jax.Array, last: int) -> jax.Array:
    """Kernels [G, i, *o] as [G, i, o], or a stack of them; `last`: the number of axes of one's kernels, less one."""
    return kernels.reshape(*kernels.shape[: kernels.ndim - last + 1], -1)


def _at(place: jax.Array | None) -> dict:
    return {} if place is None else {"place": place}


def _vectors(rows: jax.Array) -> jax.Array:
    return rows.reshape(len(rows), -1)


def _sum_first(x: jax.Array) -> jax.Array:
    """The sum over the first axis, in x's type: `sum` would send fp32 between the devices of a tensor group."""
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, (0,))
