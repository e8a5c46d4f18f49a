"""Pallas (Triton) kernels of grouped matmuls: each row with its group's kernel, and the sums over a group's rows.

XLA compiles `lax.ragged_dot_general` to a dense product with masked rows: it computes, for each row, the products with all
kernels (jax 0.10.2 and 0.12). These kernels compute a row's own product only, so that FLOPs and memory are those of R rows
and not of R times G.

Shapes: R rows sorted by group, G groups, kernels [G, i, o]. The sizes of groups are known at run time only. So the grid has
as many tiles of rows as there can be whatever the sizes, at most one for each group more than R rows fill, and three small
arrays say which rows of which group a tile has (`Tiles`). A tile begins where its group begins or where the tile before
it ends, so that no tile has rows of two groups. Tiles that are left over do nothing.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.runtime.compat_kernels import pallas, pallas_call, whole_block

__all__ = [
    "Tiles",
    "load",
    "pallas_add",
    "pallas_gradient",
    "pallas_into",
    "pallas_product",
    "product_and_into",
    "swizzled",
    "tile_of",
    "within",
]

# Tiles of rows whose programs run beside each other, so that they read a kernel, or slopes, from the L2 cache. Without it
# the gradient of an expert's gate and value [4096, 28672], whose slopes are larger than that cache, ran at 330 TFLOP/s on an
# H100, and that of its other matmul at 510.
TOGETHER = 8


class Tiles(NamedTuple):
    """Of each tile of rows, int32: its group (G: none, its rows are zeros), its first row, the row after its last one."""

    group: jax.Array
    start: jax.Array
    stop: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, rows: int, tile: int) -> "Tiles":
        """The tiles of groups of these sizes and of the rows after them, then some of no rows."""
        sizes = jnp.append(sizes, rows - sizes.sum()).astype(jnp.int32)
        ends, tiles = jnp.cumsum(sizes), jnp.cumsum((sizes + tile - 1) // tile)
        index = jnp.arange(_most_tiles(rows, len(sizes), tile), dtype=jnp.int32)
        group = (tiles[None] <= index[:, None]).sum(1, dtype=jnp.int32)
        at = jnp.minimum(group, len(sizes) - 1)
        earlier = tiles[at] - (sizes[at] + tile - 1) // tile  # tiles of the groups before
        start = jnp.minimum(ends[at] - sizes[at] + (index - earlier) * tile, rows)
        return cls(at, start, jnp.where(group < len(sizes), jnp.minimum(start + tile, ends[at]), start))


def _most_tiles(rows: int, groups: int, tile: int) -> int:
    """Tiles of any groups of `rows` rows in all."""
    return (rows + groups * (tile - 1)) // tile


class _Tile(NamedTuple):
    """Sizes of tiles: rows, columns of the result, and elements that one step of the loop contracts."""

    rows: int
    columns: int
    step: int

    @classmethod
    def of(cls, dtype, rows: int, columns: int, contracted: int) -> "_Tile":
        """What H100s and A100s hold in registers and, three steps deep, in shared memory."""
        most = cls(128, 256, 64) if jnp.dtype(dtype).itemsize == 2 else cls(64, 64, 32)
        return cls(*(min(large, tile_of(size)) for large, size in zip(most, (rows, columns, contracted), strict=True)))

    @property
    def settings(self) -> dict:
        return {"warps": 8 if self.rows * self.columns >= 128 * 256 else 4, "stages": 3}


def tile_of(size: int) -> int:
    """The power of 2 from size on, and at least the 16 that Triton multiplies."""
    return max(16, 1 << (size - 1).bit_length())


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y of tiles, in fp32; of fp32 tiles in full precision."""
    return jnp.dot(x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def within(start, count: int, stop) -> jax.Array:
    """Which of `count` places from `start` on are before `stop`."""
    return start + jnp.arange(count, dtype=jnp.int32) < stop


def load(ref, places: tuple, rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """The elements at `places`, two slices after any indices, with 0 where a mask of rows or columns is False."""
    mask = None if rows is None else rows[:, None]
    if columns is not None:
        mask = columns[None] if mask is None else mask & columns[None]
    at = ref.at[places]
    if mask is None:
        return pallas().load(at)
    sizes = tuple(place.size for place in places[-2:])
    return pallas().load(at, mask=jnp.broadcast_to(mask, sizes), other=0.0)


def _product_kernel(tile: _Tile, transposed: bool, tiles: int, *refs):
    """One tile of rows and of columns: a loop over the elements that are contracted.

    With one more reference, the kernels' place, they are a part of a stack; with two more after it, the result's place and
    the stack that it is in, so is the result.
    """
    group_ref, start_ref, stop_ref, rows_ref, kernels_ref, *places, out_ref = refs
    (groups, *shape), columns = kernels_ref.shape[-3:], out_ref.shape[-1]
    lead, into = [ref[0] for ref in places[:1]], [places[1][0], jnp.zeros((), jnp.int32)] if len(places) > 1 else []
    contracted = shape[transposed]
    index, column = swizzled(pallas().program_id(0), tiles, -(-columns // tile.columns))
    group, start, stop = group_ref[index], start_ref[index], stop_ref[index]
    out_at = pallas().ds(start, tile.rows), pallas().ds(column * tile.columns, tile.columns)
    own = within(start, tile.rows, stop)
    here = None if columns % tile.columns == 0 else within(column * tile.columns, tile.columns, columns)

    def step(count, total):
        at = pallas().ds(count * tile.step, tile.step)
        real = None if contracted % tile.step == 0 else within(count * tile.step, tile.step, contracted)
        rows = load(rows_ref, (out_at[0], at), own, real)
        if transposed:
            return total + _dot(rows, load(kernels_ref, (*lead, group, out_at[1], at), here, real).T)
        return total + _dot(rows, load(kernels_ref, (*lead, group, at, out_at[1]), real, here))

    # Rows of no group are zeros, and a tile without rows has nothing to multiply.
    steps = ((group < groups) & (start < stop)).astype(jnp.int32) * -(-contracted // tile.step)
    total = lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    mask = own[:, None] if here is None else own[:, None] & here[None]
    mask = jnp.broadcast_to(mask, total.shape)
    pallas().store(out_ref.at[(*into, *out_at)], total.astype(out_ref.dtype), mask=mask)


def swizzled(program, tiles: int, columns: int) -> tuple:
    """(tile of rows, tile of columns) of a program: TOGETHER tiles of rows with one tile of columns after the other."""
    block, within = lax.div(program, TOGETHER * columns), lax.rem(program, TOGETHER * columns)
    height = jnp.minimum(tiles - block * TOGETHER, TOGETHER)
    return block * TOGETHER + lax.rem(within, height), lax.div(within, height)


def product_and_into(call: Callable) -> tuple[Callable, Callable]:
    """`product` and `into` of `megajax.ops.grouped_matmul.GroupedKernel`, which also take `interpret`, a bool.

    Args:
      call: (rows, kernels, sizes, transposed, place or None, more, interpret) -> the product; `more` is empty, or the place
        of the result and the stack [m, R, 1, o] that it is written to, which is returned.
    """

    def product(rows, kernels, sizes, transposed=False, place=None, *, interpret=False):
        return call(rows, kernels, sizes, transposed, place, [], interpret)

    def into(out, at, rows, kernels, sizes, place, *, interpret=False):
        return call(rows, kernels, sizes, False, place, [at[None], out[:, None]], interpret)[:, 0]

    return product, into


def _call_product(rows, kernels, sizes, transposed: bool, place, more: list, interpret: bool) -> jax.Array:
    """The result of `_product_kernel`; in place of the last of the arrays `more`, if there are any."""
    count, contracted = rows.shape
    columns = kernels.shape[-2 if transposed else -1]
    tile = _Tile.of(rows.dtype, count, columns, contracted)
    tiles = Tiles.of(sizes, count, tile.rows)
    programs = len(tiles.group) * -(-columns // tile.columns)
    inputs = [*tiles, rows, kernels, *([] if place is None else [place[None]]), *more]
    shape = more[-1].shape if more else (count, columns)
    (out,) = pallas_call(
        functools.partial(_product_kernel, tile, transposed, len(tiles.group)),
        inputs,
        [whole_block(x.shape) for x in inputs],
        [(shape, rows.dtype)],
        [whole_block(shape)],
        grid=(programs,),
        settings=tile.settings | {"name": "grouped_matmul_product", "interpret": interpret},
        updated=len(inputs) - 1 if more else None,
    )
    return out


pallas_product, pallas_into = product_and_into(_call_product)


def _gradient_kernel(tile: _Tile, size: tuple[int, int], starts_ref, stops_ref, rows_ref, slopes_ref, *refs):
    """One tile of a group's kernel, of `size` = (i, o) elements: a loop over the group's rows.

    With three more references, the place in the sum, the sum and the result in its place, the tile is added there.
    """
    *place_and_sum, out_ref = refs
    group, program = pallas().program_id(1), pallas().program_id(0)
    row, column = swizzled(program, -(-size[0] // tile.rows), -(-size[1] // tile.columns))
    corner = row * tile.rows, column * tile.columns
    start, stop = starts_ref[group], stops_ref[group]
    places = pallas().ds(corner[0], tile.rows), pallas().ds(corner[1], tile.columns)
    here = [
        None if whole % part == 0 else within(first, part, whole)
        for first, part, whole in zip(corner, (tile.rows, tile.columns), size, strict=True)
    ]

    def step(count, total):
        first = start + count * tile.step
        own, at = within(first, tile.step, stop), pallas().ds(first, tile.step)
        rows = load(rows_ref, (at, places[0]), own, here[0])
        return total + _dot(rows.T, load(slopes_ref, (at, places[1]), own, here[1]))

    steps = lax.div(stop - start + tile.step - 1, tile.step)
    total = lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    masks = [jnp.expand_dims(one, 1 - axis) for axis, one in enumerate(here) if one is not None]
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), total.shape) if masks else None
    if not place_and_sum:
        pallas().store(out_ref.at[(group, *places)], total, mask=mask)
        return
    place_ref, sum_ref = place_and_sum
    at, some = (place_ref[0], group, *places), jnp.broadcast_to(start < stop, total.shape)
    mask = some if mask is None else mask & some  # of a group without rows nothing is read or written
    pallas().store(out_ref.at[at], pallas().load(sum_ref.at[at], mask=mask, other=0.0) + total, mask=mask)


def pallas_gradient(rows: jax.Array, slopes: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The kernels' gradient, see `megajax.ops.grouped_matmul.GroupedKernel`."""
    shape = len(sizes), rows.shape[1], slopes.shape[1]
    return _call_gradient(rows, slopes, sizes, [], shape, "grouped_matmul_gradient", interpret)


def pallas_add(
    total: jax.Array, place: jax.Array, rows: jax.Array, slopes: jax.Array, sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Adds the kernels' gradient to total[place] in place, see `megajax.ops.grouped_matmul.GroupedKernel`."""
    more = [place[None], total]
    return _call_gradient(rows, slopes, sizes, more, total.shape, "grouped_matmul_add", interpret)


def _call_gradient(rows, slopes, sizes, more: list, shape: tuple[int, ...], name: str, interpret: bool) -> jax.Array:
    """The result of `_gradient_kernel`, fp32 of this shape; in place of the last of the arrays `more`, if there are any."""
    (count, into), out = rows.shape, slopes.shape[1]
    tile = _Tile.of(rows.dtype, into, out, count)
    stops = jnp.cumsum(sizes).astype(jnp.int32)
    inputs = [stops - sizes, stops, rows, slopes, *more]
    (result,) = pallas_call(
        functools.partial(_gradient_kernel, tile, (into, out)),
        inputs,
        [whole_block(x.shape) for x in inputs],
        [(shape, jnp.float32)],
        [whole_block(shape)],
        grid=(-(-into // tile.rows) * -(-out // tile.columns), len(sizes)),
        settings=tile.settings | {"name": name, "interpret": interpret},
        updated=len(inputs) - 1 if more else None,
    )
    return result
