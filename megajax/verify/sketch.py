"""Sketches: short statistics of arrays that do not depend on their sharding and from which distances are estimated.

The sketch of an array x is fp32 [PROJECTIONS + 2]:

    p_k = sum over i of s_k(i) x_i,  k < PROJECTIONS      s_k(i) = +1 or -1, a hash of the index i in the whole array
    the two 16-bit halves of the sum of bits(x_i) * odd hash(i) modulo 2^32

The expectation of p_k(x)^2 over hashes is |x|^2, and p_k is linear: the mean over k of (p_k(a) - p_k(b))^2 estimates
|a - b|^2 (Alon, Matias, Szegedy 1996; Johnson and Lindenstrauss). With eight projections an estimate below a fifth of the
true distance has a probability of 1e-7. The last two are a checksum: an integer sum does not depend on the order, so arrays
with equal bits have equal checksums on any mesh.

A sketch of 40 bytes replaces every tensor, so the record of a step is small for a model of any size.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.checkpoint.layout import layers_of, named
from megajax.pipeline import layout
from megajax.schedules.stages import StageLayers

Tree = Any
PROJECTIONS = 8
WIDTH = PROJECTIONS + 2
# Elements whose gradient is smaller than this part of the tensor's largest are damped, see `well_conditioned`.
DAMPED_BELOW = 1e-3


def sketch(x: jax.Array, keep: int = 1, positions: jax.Array | None = None, salt: int = 0) -> jax.Array:
    """Sketches of the slices of x along its first `keep` axes.

    Args:
      x: floating-point or integer.
      keep: leading axes that are kept; 0: one sketch of the whole array.
      positions: int32 [samples, sequence], the indices along axis 1 of x where x has a part of them (context parallelism).
      salt: of the hash; arrays whose sketches are added have different ones.

    Returns:
      fp32 [*x.shape[:keep], WIDTH].
    """
    mixed = _hash(x, keep, positions, salt)
    axes = tuple(range(keep, x.ndim))
    signs = 1 - 2 * ((mixed[..., None] >> jnp.arange(PROJECTIONS, dtype=jnp.uint32)) & 1).astype(jnp.float32)
    projections = (signs * x[..., None].astype(jnp.float32)).sum(axes)
    checksum = (_bits(x) * (mixed | 1)).sum(axes, dtype=jnp.uint32)
    return jnp.concatenate([projections, _halves(checksum)], axis=-1)


def tree_sketch(tree: Tree, positions: jax.Array | None = None) -> jax.Array:
    """Sketches of the samples of what blocks pass on, an array or a pytree [samples, ...]: the sum of its leaves' sketches.

    `positions`: as for `sketch`.
    """
    first, *rest = (sketch(leaf, 1, positions, salt) for salt, leaf in enumerate(jax.tree.leaves(tree)))
    for more in rest:
        total = _checksum(first) + _checksum(more)  # modulo 2^32
        first = jnp.concatenate([first[..., :PROJECTIONS] + more[..., :PROJECTIONS], _halves(total)], axis=-1)
    return first


def _halves(checksum: jax.Array) -> jax.Array:
    """fp32 [..., 2] of uint32 [...]; exact, as they are below 2^24."""
    return jnp.stack([checksum >> 16, checksum & 0xFFFF], axis=-1).astype(jnp.float32)


def _checksum(sketches: jax.Array) -> jax.Array:
    high, low = (sketches[..., PROJECTIONS + half].astype(jnp.uint32) for half in (0, 1))
    return (high << 16) | low


def _hash(x: jax.Array, keep: int, positions: jax.Array | None, salt: int) -> jax.Array:
    """uint32 like x: murmur3's finalizer of the index along the axes from `keep` on."""
    total = jnp.full(x.shape, (0x9E3779B9 + salt * 0x7F4A7C15) & 0xFFFFFFFF, jnp.uint32)
    for number, axis in enumerate(range(keep, x.ndim)):
        index = lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        if positions is not None and axis == 1:
            index = jnp.broadcast_to(
                positions.astype(jnp.uint32).reshape(*positions.shape, *[1] * (x.ndim - 2)), x.shape
            )
        total = _mix(total ^ ((index + 1) * jnp.uint32(0x85EBCA6B + 2 * number)))
    return _mix(total)


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize == 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    if x.dtype.itemsize == 2:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return x.astype(jnp.uint32)


def tensor_sketches(tree: Tree, where: StageLayers) -> dict[str, jax.Array]:
    """By name (checkpoint/layout.py): fp32 [layers, WIDTH] for a leaf of blocks, in the model's order, else [1, WIDTH].

    Of a leaf that only layers of one kind have, the rows of the others are zero.
    """

    def one(name, leaf):
        if own := layers_of(name, where, leaf.shape):
            rows = layout.from_pipeline_layout(sketch(leaf, 3), own)
            if own.layers == where.layers:
                return rows
            return jnp.zeros((where.layers, WIDTH), rows.dtype).at[np.array(own.numbers)].set(rows)
        return sketch(leaf, 0)[None]

    return {name: one(name, leaf) for name, leaf in named(tree).items()}


def well_conditioned(update: jax.Array, gradient: jax.Array, keep: int) -> jax.Array:
    """`update` with the elements damped whose gradient is next to zero.

    Adam divides by the gradient's size: in its first step an element's update is the sign of its gradient. Where the
    gradient is rounding noise, so is the update, at full size. With q = gradient / (DAMPED_BELOW * the tensor's largest
    gradient) the factor is q^2 / (1 + q^2).
    """
    axes = tuple(range(keep, gradient.ndim))
    largest = jnp.abs(gradient).max(axes, keepdims=True) if axes else jnp.abs(gradient)
    q = gradient / jnp.where(largest > 0, DAMPED_BELOW * largest, 1)
    return update * jnp.where(largest > 0, q * q / (1 + q * q), 1)


def add_parts(sketches: np.ndarray, axis: int) -> np.ndarray:
    """The sketch of a whole from those of its parts, along an axis (context ranks hold parts of a sample)."""
    projections = sketches[..., :PROJECTIONS].sum(axis, dtype=np.float32)
    sums = checksums(sketches).sum(axis, dtype=np.uint32)
    return np.concatenate([projections, np.stack([sums >> 16, sums & 0xFFFF], -1).astype(np.float32)], -1)


def checksums(sketches: np.ndarray) -> np.ndarray:
    """uint32 [...] of sketches [..., WIDTH]."""
    high, low = (sketches[..., PROJECTIONS + half].astype(np.uint32) for half in (0, 1))
    return (high << 16) | low


def size(sketches: np.ndarray) -> np.ndarray:
    """The estimated norm of each sketched array, float64 [...]."""
    return np.sqrt(np.square(sketches[..., :PROJECTIONS].astype(np.float64)).mean(-1))


def distance(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The estimated norm of the differences, relative to `scale`; float64 [...].

    0 only where all statistics are equal, the checksum included (a NaN equals a NaN); infinite where only one is finite, or
    the scale is 0.
    """
    same = ((a == b) | (np.isnan(a) & np.isnan(b))).all(-1)
    with np.errstate(all="ignore"):
        apart = size(a.astype(np.float64) - b.astype(np.float64)) / scale
    return np.where(same, 0.0, np.where(np.isfinite(apart), np.maximum(apart, np.finfo(np.float64).tiny), np.inf))
