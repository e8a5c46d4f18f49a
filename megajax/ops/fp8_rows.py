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

__all__ = ["bytes_of_element", "in_8_bits", "pack", "unpack"]

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
    largest = lax.bitcast_convert_type(jnp.abs(tiles).max(-1), jnp.int32) >> MANTISSA
    exponent = jnp.maximum(largest, LARGEST + 1)  # so that the inverse scale below is finite
    inverse = _power_of_two(BIAS + LARGEST - (exponent - BIAS))
    elements = (tiles * inverse[..., None]).astype(jnp.float8_e4m3fn).reshape(x.shape)
    return jnp.concatenate([lax.bitcast_convert_type(elements, jnp.uint8), exponent.astype(jnp.uint8)], -1)


def unpack(packed: jax.Array, hidden: int, dtype: jnp.dtype) -> jax.Array:
    """The elements [..., hidden] of what `pack` returns; bytes that are 0 are elements 0."""
    elements = lax.bitcast_convert_type(packed[..., :hidden], jnp.float8_e4m3fn).astype(jnp.float32)
    scales = _power_of_two(packed[..., hidden:].astype(jnp.int32) - LARGEST)
    tiles = elements.reshape(*scales.shape, -1) * scales[..., None]
    return tiles.reshape(elements.shape).astype(dtype)


def in_8_bits(x: jax.Array, send: Callable[[jax.Array], jax.Array] = lambda packed: packed) -> jax.Array:
    """send(x), for which `send` gets and returns bytes; by default x as it would arrive."""
    return unpack(send(pack(x)), x.shape[-1], x.dtype)


def _tile(hidden: int) -> int:
    return math.gcd(hidden, TILE)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """fp32 with this exponent, as it is stored; 0 or less: 0."""
    return lax.bitcast_convert_type(jnp.maximum(exponent, 0) << MANTISSA, jnp.float32)
