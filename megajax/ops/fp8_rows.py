"""Activations as bytes, to be sent: E4M3, with a power of two for each 128 elements (DeepSeek-V3, 2412.19437 section 3.3).

    x [..., h] -> pack -> uint8 [..., h + h / 128] -> unpack -> x, rounded to 3 bits of mantissa

A scale is stored as its exponent, behind the elements, so that one collective sends both. With it the largest of its 128
elements is between 2^7 and 2^8 (E4M3's largest number is 448), and elements 2^17 times smaller than that become 0. What
arrives is a number of bf16.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["TILE", "bytes_of_element", "in_8_bits", "pack", "powers_of_two", "unpack"]

TILE = 128
BIAS, MANTISSA = 127, 23  # of fp32: an exponent as it is stored, and the bits below it
LARGEST = 7


def bytes_of_element(hidden: int) -> float:
    """Bytes that each of `hidden` elements takes, with its share of a scale."""
    return 1 + 1 / _tile(hidden)


def pack(x: jax.Array) -> jax.Array:
    """uint8 [..., h + h / 128] of x [..., h]; a tile has fewer elements than 128 where that does not divide h.

    Elements that are not finite become NaN.
    """
    tiles = x.reshape(*x.shape[:-1], -1, _tile(x.shape[-1])).astype(jnp.float32)
    exponent = _exponent(jnp.abs(tiles).max(-1))
    elements = (tiles * _inverse(exponent)[..., None]).astype(jnp.float8_e4m3fn).reshape(x.shape)
    return jnp.concatenate([lax.bitcast_convert_type(elements, jnp.uint8), exponent.astype(jnp.uint8)], -1)


def unpack(packed: jax.Array, hidden: int, dtype: jnp.dtype) -> jax.Array:
    """The elements [..., hidden] of what `pack` returns; bytes that are 0 are elements 0."""
    elements = lax.bitcast_convert_type(packed[..., :hidden], jnp.float8_e4m3fn).astype(jnp.float32)
    scales = _power_of_two(packed[..., hidden:].astype(jnp.int32) - LARGEST)
    tiles = elements.reshape(*scales.shape, -1) * scales[..., None]
    return tiles.reshape(elements.shape).astype(dtype)


def powers_of_two(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(by what elements are multiplied before they are rounded, by what after), fp32, where the largest one is `largest`.

    Where that is not finite, neither is a product with the second.
    """
    exponent = _exponent(largest)
    scale = jnp.where(exponent > 2 * BIAS, jnp.nan, _power_of_two(exponent - LARGEST))
    return _inverse(exponent), scale


def in_8_bits(x: jax.Array, send: Callable[[jax.Array], jax.Array] = lambda packed: packed) -> jax.Array:
    """send(x), for which `send` gets and returns bytes; by default x as it would arrive."""
    return unpack(send(pack(x)), x.shape[-1], x.dtype)


def _tile(hidden: int) -> int:
    return math.gcd(hidden, TILE)


def _exponent(largest: jax.Array) -> jax.Array:
    """The exponent of fp32 numbers, as it is stored, int32; of small ones so that the inverse scale is finite."""
    return jnp.maximum(lax.bitcast_convert_type(largest, jnp.int32) >> MANTISSA, LARGEST + 1)


def _inverse(exponent: jax.Array) -> jax.Array:
    return _power_of_two(BIAS + LARGEST - (exponent - BIAS))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """fp32 with this exponent, as it is stored; 0 or less: 0."""
    return lax.bitcast_convert_type(jnp.maximum(exponent, 0) << MANTISSA, jnp.float32)
