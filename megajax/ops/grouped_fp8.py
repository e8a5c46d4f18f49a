"""The products of grouped matmuls in 8 bits, with a scale for each block (DeepSeek-V3, 2412.19437 section 3.3).

    rows [R, i]       E4M3, a scale for each row's 128 elements along i
    kernels [G, i, o] E4M3, a scale for each 128 x 128 elements

Both operands of a product are scaled along the axis that it contracts: rows, and gradients of results, in tiles of 1 x 128.
Scales are powers of two, as in `fp8_rows.py`, so that tokens that were sent in 8 bits are multiplied as they arrived, and a
rounded number is a number of bf16. Products of 128 elements are added in fp32 (section 3.3.2). The gradients of kernels
are products in the run's precision, of what was not rounded.

On H100s kernels of Pallas (Triton) quantize the operands and multiply them: `pallas_product_in_8_bits`. Triton multiplies
8-bit floats there only if their contracted axis is the innermost one of both; so kernels are transposed where they are
quantized, for the direction that needs it. On other devices `rounded` multiplies the rounded numbers as the device
multiplies others: results differ by the order of sums, and by the bits that H100s' tensor cores cut off in sums of 128.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.fp8_rows import TILE, powers_of_two
from megajax.ops.grouped_kernels import Tiles, load, product_and_into, swizzled, tile_of, within
from megajax.runtime.compat_kernels import pallas, pallas_call, whole_block

__all__ = ["pallas_into_in_8_bits", "pallas_product_in_8_bits", "rounded"]

E4M3 = jnp.float8_e4m3fn
WARPS, STAGES = 8, 4  # of a product's tile of 128 x 128


def rounded(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`product`, see `megajax.ops.grouped_matmul.GroupedKernel`, of the numbers that 8 bits have, in the operands' type."""

    def of_rounded(rows, kernels, sizes, transposed=False, place=None):
        kernels = kernels if place is None else lax.dynamic_index_in_dim(kernels, place, keepdims=False)
        return product(_rounded(rows, (1, TILE)), _rounded(kernels, (TILE, TILE)), sizes, transposed)

    return of_rounded


def _rounded(x: jax.Array, tile: tuple[int, int]) -> jax.Array:
    """x [..., r, c] with a scale for each tile of the last two axes, of which the last tiles may be smaller."""
    rows, columns = x.shape[-2:]
    whole = jnp.pad(
        x, [(0, 0)] * (x.ndim - 2) + [(0, -size % part) for size, part in zip((rows, columns), tile, strict=True)]
    )
    tiles = whole.reshape(*x.shape[:-2], -1, tile[0], whole.shape[-1] // tile[1], tile[1]).astype(jnp.float32)
    inverse, scale = powers_of_two(jnp.abs(tiles).max((-3, -1), keepdims=True))
    numbers = (tiles * inverse).astype(E4M3).astype(jnp.float32) * scale
    return numbers.reshape(whole.shape)[..., :rows, :columns].astype(x.dtype)


def _call_product(rows, kernels, sizes, transposed: bool, place, more: list, interpret: bool) -> jax.Array:
    """The result of `_product_kernel`; in place of the last of the arrays `more`, if there are any."""
    count, columns = len(rows), kernels.shape[-2 if transposed else -1]
    operands, row_scales = _quantized_rows(rows, sizes.sum(dtype=jnp.int32), interpret)
    matrices, block_scales = _quantized_kernels(kernels, place, transposed, interpret)
    tile = min(TILE, tile_of(count))
    tiles = Tiles.of(sizes, count, tile)
    inputs = [*tiles, operands, matrices, row_scales, block_scales, *more]
    shape = more[-1].shape if more else (count, columns)
    (out,) = pallas_call(
        functools.partial(_product_kernel, tile, len(tiles.group)),
        inputs,
        [whole_block(x.shape) for x in inputs],
        [(shape, rows.dtype)],
        [whole_block(shape)],
        grid=(len(tiles.group) * matrices.shape[1] // TILE,),
        settings={"warps": WARPS, "stages": STAGES, "name": "grouped_matmul_product", "interpret": interpret},
        updated=len(inputs) - 1 if more else None,
    )
    return out


pallas_product_in_8_bits, pallas_into_in_8_bits = product_and_into(_call_product)


def _product_kernel(tile: int, tiles: int, *refs):
    """One tile of rows and of columns: a loop over tiles of the elements that are contracted.

    With two more references, the result's place and the stack that it is in, the result is that.
    """
    group_ref, start_ref, stop_ref, rows_ref, kernels_ref, row_scales_ref, block_scales_ref, *places, out_ref = refs
    groups, whole, contracted = kernels_ref.shape
    into, columns = [places[0][0], jnp.zeros((), jnp.int32)] if places else [], out_ref.shape[-1]
    index, column = swizzled(pallas().program_id(0), tiles, whole // TILE)
    group, start, stop = group_ref[index], start_ref[index], stop_ref[index]
    out_at = pallas().ds(start, tile), pallas().ds(column * TILE, TILE)
    own = within(start, tile, stop)

    def step(count, total):
        at = pallas().ds(count * TILE, TILE)
        rows = load(rows_ref, (out_at[0], at), own, None)
        block = load(kernels_ref, (group, out_at[1], at), None, None)
        scales = pallas().load(row_scales_ref.at[(count, out_at[0])], mask=own, other=0.0)
        product = pallas().dot_in_8_bits(rows, block.T, jnp.zeros_like(total))
        return total + product * (scales * pallas().load(block_scales_ref.at[(group, column, count)]))[:, None]

    # Rows of no group are zeros, and a tile without rows has nothing to multiply.
    steps = ((group < groups) & (start < stop)).astype(jnp.int32) * (contracted // TILE)
    total = lax.fori_loop(0, steps, step, jnp.zeros((tile, TILE), jnp.float32))
    mask = own[:, None] if columns % TILE == 0 else own[:, None] & within(column * TILE, TILE, columns)[None]
    pallas().store(out_ref.at[(*into, *out_at)], total.astype(out_ref.dtype), mask=jnp.broadcast_to(mask, total.shape))


def _quantized_rows(rows: jax.Array, stop: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """(E4M3 [R, c], fp32 scales [c / 128, R]) of rows [R, contracted]; c: that, in whole tiles, with zeros.

    Nothing is written for tiles of rows from `stop` on, which are of no group.
    """
    count, contracted = rows.shape
    steps, tile, inputs = -(-contracted // TILE), min(TILE, tile_of(count)), [rows, stop[None]]
    return pallas_call(
        functools.partial(_quantize_rows, tile),
        inputs,
        [whole_block(x.shape) for x in inputs],
        [((count, steps * TILE), E4M3), ((steps, count), jnp.float32)],
        [whole_block((count, steps * TILE)), whole_block((steps, count))],
        grid=(-(-count // tile), steps),
        settings={"warps": 4, "stages": 1, "name": "quantize_rows", "interpret": interpret},
    )


def _quantize_rows(tile: int, rows_ref, stop_ref, out_ref, scales_ref):
    """One tile of rows, of 128 elements each."""
    count, contracted = rows_ref.shape
    row, step = pallas().program_id(0) * tile, pallas().program_id(1)

    def quantize():
        places, own = (pallas().ds(row, tile), pallas().ds(step * TILE, TILE)), within(row, tile, count)
        here = None if contracted % TILE == 0 else within(step * TILE, TILE, contracted)
        x = load(rows_ref, places, own, here).astype(jnp.float32)
        inverse, scale = powers_of_two(jnp.abs(x).max(1))
        numbers, mask = (x * inverse[:, None]).astype(E4M3), jnp.broadcast_to(own[:, None], x.shape)
        pallas().store(out_ref.at[places], numbers, mask=mask)
        pallas().store(scales_ref.at[(step, places[0])], scale, mask=own)

    pallas().when(row < stop_ref[0])(quantize)


def _quantized_kernels(kernels, place, transposed: bool, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """(E4M3 [G, o, i], fp32 scales [G, o / 128, i / 128]) of kernels [G, i, o], or of a part of a stack of them.

    If `transposed`, the result is [G, i, o]. i and o are in whole tiles, with zeros.
    """
    stack, place = (kernels[None], jnp.int32(0)) if place is None else (kernels, place)
    blocks = [-(-size // TILE) for size in stack.shape[-2:]]
    shape = len(stack[0]), *(blocks if transposed else blocks[::-1])
    whole = shape[0], shape[1] * TILE, shape[2] * TILE
    inputs = [place[None], stack]
    return pallas_call(
        functools.partial(_quantize_block, transposed),
        inputs,
        [whole_block(x.shape) for x in inputs],
        [(whole, E4M3), (shape, jnp.float32)],
        [whole_block(whole), whole_block(shape)],
        grid=(blocks[1], blocks[0], shape[0]),
        settings={"warps": 4, "stages": 1, "name": "quantize_blocks", "interpret": interpret},
    )


def _quantize_block(transposed: bool, place_ref, stack_ref, out_ref, scales_ref):
    """One block of a kernel."""
    column, row, group = (pallas().program_id(axis) for axis in range(3))
    places = pallas().ds(row * TILE, TILE), pallas().ds(column * TILE, TILE)
    here = [
        None if size % TILE == 0 else within(first * TILE, TILE, size)
        for first, size in zip((row, column), stack_ref.shape[-2:], strict=True)
    ]
    x = load(stack_ref, (place_ref[0], group, *places), *here).astype(jnp.float32)
    inverse, scale = powers_of_two(jnp.abs(x).max())
    numbers = (x * inverse).astype(E4M3)
    at = places if transposed else places[::-1]
    pallas().store(out_ref.at[(group, *at)], numbers if transposed else numbers.T)
    pallas().store(scales_ref.at[(group, *((row, column) if transposed else (column, row)))], scale)
