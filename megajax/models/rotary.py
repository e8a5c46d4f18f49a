"""Rotary position embeddings (2104.09864), and the scalings of their frequencies that extend a trained context.

Elements i and i + n/2 of a head's first n elements form a pair, as in llama; position m rotates the pair by m f_i, where
f_i = base^(-2i/n) without scaling.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.config import ModelConfig
from megajax.config.layer_pattern import VARYING, variant_numbers, variants

__all__ = ["attention_factor", "frequencies", "of_layer", "rotary_table", "rotary_tables", "rotate", "table_of_layer"]


def frequencies(config: ModelConfig, library: Any = jnp) -> Any:
    """Radians by which a step of one position rotates each pair of elements: [n / 2].

    In fp32 their rounding is that of the angle, position times frequency, which is fp32 too. `library`: numpy for fp64.

    `config.rotary_scaling` with factor k and original context L (a pair makes L f / 2 pi turns in it):

    * linear (2306.15595): f / k.
    * llama3 (Llama 3.1): f / k for pairs of fewer turns than rotary_low_frequency, f for those of more than
      rotary_high_frequency, and linear in the turns in between.
    * yarn (2309.00071 section 3.2): f for pairs of more than rotary_beta_fast turns, f / k for those of fewer than
      rotary_beta_slow, and linear in the pair's index in between.
    * longrope (2402.13753): f by a factor of each pair, one for samples of up to L tokens and another for longer ones.
    """
    half = config.rotated_dimension // 2
    plain = config.rotary_base ** (-library.arange(half) / half)
    length = config.rotary_original_length or config.sequence_length
    if config.rotary_scaling == "none":
        return plain
    if config.rotary_scaling == "longrope":
        divisors = config.rotary_factors[half:] if config.sequence_length > length else config.rotary_factors[:half]
        return plain / library.array([*map(float, divisors)])
    divided = plain / config.rotary_factor
    if config.rotary_scaling == "linear":
        return divided
    if config.rotary_scaling == "llama3":
        low, high = config.rotary_low_frequency, config.rotary_high_frequency
        share = (length * plain / (2 * math.pi) - low) / (high - low or 1e-9)  # equal bounds: a step (Llama 4)
    else:
        first, last = _ramp_of_yarn(config, length)
        share = 1 - (library.arange(half) - first) / (last - first or 0.001)
    share = share.clip(0, 1)
    return share * plain + (1 - share) * divided


def _ramp_of_yarn(config: ModelConfig, length: int) -> tuple[float, float]:
    """First and last pair of yarn's ramp, rounded outwards unless `rotary_truncate` is off."""
    dimension = config.rotated_dimension

    def pair_of(turns: float) -> float:  # where L f / 2 pi = turns
        return dimension * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    first, last = pair_of(config.rotary_beta_fast), pair_of(config.rotary_beta_slow)
    if config.rotary_truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, dimension - 1)


def attention_factor(config: ModelConfig) -> float:
    """The factor on rotated queries and keys: by default 0.1 ln(k) + 1 for yarn (2309.00071 equation 22), for longrope
    sqrt(1 + ln(k) / ln(L)) (2402.13753 section 3.3), 1 for others.
    """
    given, length = config.rotary_attention_factor, config.rotary_original_length or config.sequence_length
    if config.rotary_scaling == "yarn":
        return 0.1 * math.log(config.rotary_factor) + 1 if given is None else given
    if config.rotary_scaling == "longrope":
        return math.sqrt(1 + math.log(config.rotary_factor) / math.log(length)) if given is None else given
    return 1.0


@functools.lru_cache(maxsize=256)
def rotations(config: ModelConfig) -> tuple[tuple[ModelConfig, ...], tuple[int, ...]]:
    """Models with the rotations of the layers, each rotation once, and which one of them each layer has."""
    each, numbers = variants(config), variant_numbers(config)
    of = [tuple(getattr(one, name) for name in VARYING if name.startswith(("rotary", "positions"))) for one in each]
    return tuple(each[of.index(one)] for one in dict.fromkeys(of)), tuple(
        [*dict.fromkeys(of)].index(of[n]) for n in numbers
    )


def rotary_tables(config: ModelConfig, positions: jax.Array) -> jax.Array:
    """The table of the model's rotation; of several, fp32 [b, rotations, s, 2, n / 2]."""
    tables = [rotary_table(one, positions) for one in rotations(config)[0]]
    return tables[0] if len(tables) == 1 else jnp.stack(tables, 1)


def of_layer(values: Sequence[float], numbers: Sequence[int], layer: jax.Array) -> jax.Array:
    """values[numbers[layer]]: without an array of the numbers, which would be kept for each block's backward.

    int32, or fp32 if the values are floats.
    """
    period = next(
        n for n in range(1, len(numbers) + 1) if all(a == b for a, b in zip(numbers, numbers[n:], strict=False))
    )
    places, place = numbers[:period], layer % period
    usual = max(set(places), key=places.count)
    found = (jnp.float32 if isinstance(values[usual], float) else jnp.int32)(values[usual])
    for number in sorted(set(places) - {usual}):
        here = functools.reduce(operator.or_, (place == at for at, one in enumerate(places) if one == number))
        found = jnp.where(here, values[number], found)
    return found


def table_of_layer(config: ModelConfig, tables: jax.Array, layer: jax.Array) -> jax.Array:
    """The table of one layer [b, s, 2, n / 2], of those of `rotary_tables`."""
    each, numbers = rotations(config)
    if len(each) == 1:
        return tables
    return lax.dynamic_index_in_dim(tables, of_layer(range(len(each)), numbers, layer), 1, keepdims=False)


def rotary_table(config: ModelConfig, positions: jax.Array) -> jax.Array:
    """Cosines and sines of the angles at the positions [b, s], times `attention_factor`: fp32 [b, s, 2, n / 2].

    Those of a model without positions rotate nothing.
    """
    if config.positions != "rotary":
        shape = (*positions.shape, config.rotated_dimension // 2)
        return jnp.stack([jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)], axis=-2)
    angles = positions[..., None] * frequencies(config) * (-1 if config.rotary_pairs == "halves_backwards" else 1)
    return attention_factor(config) * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-2)


def rotate(x: jax.Array, table: jax.Array, neighbours: bool = False) -> jax.Array:
    """Rotates the first n elements of each head; the others are unchanged.

    Args:
      x: [b, s, ..., d] queries or keys.
      table: [b, s, 2, n / 2] or [1, s, 2, n / 2], see `rotary_table`.
      neighbours: pairs are elements 2i and 2i + 1, as in GPT-J; else i and i + n/2.

    Returns:
      The same shape and type; computed in fp32.
    """
    half = table.shape[-1]
    if neighbours:
        first = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2).swapaxes(-1, -2).reshape(*x.shape[:-1], 2 * half)
        turned = rotate(first, table).reshape(*x.shape[:-1], 2, half).swapaxes(-1, -2).reshape(first.shape)
        return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
    table = table.reshape(*table.shape[:2], *[1] * (x.ndim - 3), 2, 1, half)
    cosine, sine = table[..., 0, :, :], table[..., 1, :, :]
    pairs = x[..., : 2 * half].astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
    # Reversing the pairs, and a sign that is a product, are part of an elementwise kernel on GPUs; concatenating the halves,
    # or sines of both signs, would be one of its own.
    signs = 2 * lax.iota(jnp.float32, 2)[:, None] - 1
    turned = pairs * cosine + lax.rev(pairs, (pairs.ndim - 2,)) * (sine * signs)
    turned = turned.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
