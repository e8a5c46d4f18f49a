"""Rotary position embeddings (2104.09864), and the scalings of their frequencies that extend a trained context.

Elements i and i + n/2 of a head's first n elements form a pair, as in llama; position m rotates the pair by m f_i, where
f_i = base^(-2i/n) without scaling.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.config import ModelConfig

__all__ = ["attention_factor", "frequencies", "rotary_table", "rotate"]


def frequencies(config: ModelConfig, library: Any = jnp) -> Any:
    """Radians by which a step of one position rotates each pair of elements: [n / 2].

    In fp32 their rounding is that of the angle, position times frequency, which is fp32 too. `library`: numpy for fp64.

    `config.rotary_scaling` with factor k and original context L (a pair makes L f / 2 pi turns in it):

    * linear (2306.15595): f / k.
    * llama3 (Llama 3.1): f / k for pairs of fewer turns than rotary_low_frequency, f for those of more than
      rotary_high_frequency, and linear in the turns in between.
    * yarn (2309.00071 section 3.2): f for pairs of more than rotary_beta_fast turns, f / k for those of fewer than
      rotary_beta_slow, and linear in the pair's index in between.
    """
    half = config.rotated_dimension // 2
    plain = config.rotary_base ** (-library.arange(half) / half)
    if config.rotary_scaling == "none":
        return plain
    divided = plain / config.rotary_factor
    if config.rotary_scaling == "linear":
        return divided
    length = config.rotary_original_length or config.sequence_length
    if config.rotary_scaling == "llama3":
        low, high = config.rotary_low_frequency, config.rotary_high_frequency
        share = (length * plain / (2 * math.pi) - low) / (high - low)
    else:
        first, last = _ramp_of_yarn(config, length)
        share = 1 - (library.arange(half) - first) / (last - first or 0.001)
    share = share.clip(0, 1)
    return share * plain + (1 - share) * divided


def _ramp_of_yarn(config: ModelConfig, length: int) -> tuple[int, int]:
    """First and last pair of yarn's ramp, rounded outwards."""
    dimension = config.rotated_dimension

    def pair_of(turns: float) -> float:  # where L f / 2 pi = turns
        return dimension * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    first = max(math.floor(pair_of(config.rotary_beta_fast)), 0)
    return first, min(math.ceil(pair_of(config.rotary_beta_slow)), dimension - 1)


def attention_factor(config: ModelConfig) -> float:
    """The factor on rotated queries and keys: for yarn 0.1 ln(k) + 1 by default (2309.00071 equation 22), 1 for others."""
    if config.rotary_scaling != "yarn":
        return 1.0
    given = config.rotary_attention_factor
    return 0.1 * math.log(config.rotary_factor) + 1 if given is None else given


def rotary_table(config: ModelConfig, positions: jax.Array) -> jax.Array:
    """Cosines and sines of the angles at the positions [b, s], times `attention_factor`: fp32 [b, s, 2, n / 2]."""
    angles = positions[..., None] * frequencies(config)
    return attention_factor(config) * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-2)


def rotate(x: jax.Array, table: jax.Array) -> jax.Array:
    """Rotates the first n elements of each head; the others are unchanged.

    Args:
      x: [b, s, ..., d] queries or keys.
      table: [b, s, 2, n / 2] or [1, s, 2, n / 2], see `rotary_table`.

    Returns:
      The same shape and type; computed in fp32.
    """
    half = table.shape[-1]
    table = table.reshape(*table.shape[:2], *[1] * (x.ndim - 3), 2, 1, half)
    cosine, sine = table[..., 0, :, :], table[..., 1, :, :]
    pairs = x[..., : 2 * half].astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
    # Reversing the pairs, and a sign that is a product, are part of an elementwise kernel on GPUs; concatenating the halves,
    # or sines of both signs, would be one of its own.
    signs = 2 * lax.iota(jnp.float32, 2)[:, None] - 1
    turned = pairs * cosine + lax.rev(pairs, (pairs.ndim - 2,)) * (sine * signs)
    turned = turned.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
