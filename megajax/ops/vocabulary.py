"""Token tables whose rows are split: over the tensor axis (1909.08053 section 3), or over pipe as well.

Left to XLA's partitioner a gather from a sharded axis can abort the compiler inside a partly manual `shard_map`. So
both directions enter a nested `shard_map` over "tensor": each rank looks up the tokens whose rows it has, and the rest
come from the others. All communication stays in a tensor group, so a pipeline rank may look up while others do not.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.models.gpt import RowsOverRanks

__all__ = ["lookup", "over_pipe"]

AXIS, PIPE = "tensor", "pipe"


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, tokens: jax.Array, sequence_parallel: bool = False) -> jax.Array:
    """Rows of `table` for `tokens`; call it with a mesh set that has a "tensor" axis, in a plain jit or a `shard_map`.

    Args:
      table: [vocabulary, hidden], rows split over tensor, which must divide them. Inside a `shard_map` it must vary
        over the manual axes that the tokens or the gradient vary over (`lax.pcast`): its gradient does.
      tokens: [b, s] integers, 0 <= token < vocabulary.
      sequence_parallel: whether the result is split along s over tensor (tensor must divide s) or whole on each rank.

    Returns:
      [b, s, hidden] of the table's type. hidden must be even if that is a 16-bit type.
    """
    return _forward(table, tokens, sequence_parallel)[0]


def _split(sequence_parallel: bool) -> P:
    """How the rows found, [b, s, hidden], lie over tensor."""
    return P(None, AXIS) if sequence_parallel else P()


def _own(tokens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The tokens as indices into this rank's rows, and which of them are there."""
    local = tokens.astype(jnp.int32) - lax.axis_index(AXIS) * rows
    return local, (local >= 0) & (local < rows)


def _forward(table, tokens, sequence_parallel):
    """Each rank's own rows, zero elsewhere, summed over tensor, or reduce-scattered along the sequence."""

    def local(table, tokens):
        index, mine = _own(tokens, len(table))
        found = table.at[jnp.clip(index, 0, len(table) - 1)].get(mode="promise_in_bounds")
        bits = _to_bits(jnp.where(mine[..., None], found, 0))
        if sequence_parallel:
            bits = lax.psum_scatter(bits, AXIS, scatter_dimension=1, tiled=True)
        else:
            bits = lax.psum(bits, AXIS)
        return _from_bits(bits, table.dtype)

    specs = dict(in_specs=(P(AXIS), P()), out_specs=_split(sequence_parallel))
    rows = jax.shard_map(local, axis_names={AXIS}, **specs)(table, tokens)
    return rows, (tokens, table[:, :0])  # no element of the table, but its rows, type and sharding


def _backward(sequence_parallel, residuals, gradient):
    """Scatter-adds the gradient [b, s, hidden] into each rank's own rows, in fp32: a frequent token is many terms."""

    def local(like, tokens, gradient):
        index, mine = _own(tokens, len(like))
        if sequence_parallel:
            gradient = lax.all_gather(gradient, AXIS, axis=1, tiled=True)
        rows = jnp.zeros((len(like), gradient.shape[-1]), jnp.float32)
        index = jnp.where(mine, index, len(like))  # past the end: dropped
        return rows.at[index].add(gradient.astype(jnp.float32), mode="drop").astype(like.dtype)

    specs = dict(in_specs=(P(AXIS), P(), _split(sequence_parallel)), out_specs=P(AXIS))
    tokens, like = residuals
    return jax.shard_map(local, axis_names={AXIS}, **specs)(like, tokens, gradient), None


lookup.defvjp(_forward, _backward)


def over_pipe(sequence_parallel: bool) -> tuple[Callable[[jax.Array, jax.Array], jax.Array], RowsOverRanks]:
    """`lookup` and the rest for tables whose rows are split over pipe and tensor (Yeung et al. 2024, 2411.05288).

    No stage then has more of the vocabulary than another, in memory or in work. To be called in a `shard_map` that is
    manual over pipe, by all its ranks at once: a sum over pipe brings the rows found to all, another the head's input,
    two small ones the softmax's normaliser, and a last one the head's gradient. Each rank has rows
    [rank * rows, (rank + 1) * rows) and splits them over tensor.
    """

    def look_up(table, tokens):
        return _found(lookup(table, tokens - lax.axis_index(PIPE) * table.shape[0], sequence_parallel))

    return look_up, RowsOverRanks(_spread, _first_row, _total, _most, _whole)


def _first_row(rows: int) -> jax.Array:
    return lax.axis_index(PIPE) * rows


def _vary(x: jax.Array) -> jax.Array:
    """Marks x as each rank's own, so that no gradient is summed over pipe but where it is written here."""
    return lax.pcast(x, PIPE, to="varying")


def _copied(x: jax.Array) -> jax.Array:
    """What one rank has and the others have zeros for, on all of them. Element by element."""
    return _vary(_from_bits(lax.psum(_to_bits(x), PIPE), x.dtype))


def _total(x: jax.Array) -> jax.Array:
    return _vary(lax.psum(x, PIPE))


def _most(x: jax.Array) -> jax.Array:
    return _vary(lax.pmax(x, PIPE))


def _whole(logits: jax.Array) -> jax.Array:
    return lax.all_gather(logits, PIPE, axis=logits.ndim - 1, tiled=True)


@jax.custom_vjp
def _spread(y: jax.Array) -> jax.Array:
    """From the last stage to all ranks; back, the sum of what each rank's part of the head has of the gradient, in fp32."""
    return _copied(y)


_spread.defvjp(
    lambda y: (_copied(y), None),
    lambda _, gradient: (_total(gradient.astype(jnp.float32)).astype(gradient.dtype),),
)


@jax.custom_vjp
def _found(rows: jax.Array) -> jax.Array:
    """Rows that one rank each found, on all ranks; back, the gradient that one rank has (the others have zeros)."""
    return _copied(rows)


_found.defvjp(lambda rows: (_copied(rows), None), lambda _, gradient: (_copied(gradient),))


def _to_bits(x: jax.Array) -> jax.Array:
    """Bits of x as uint32, two 16-bit elements to one.

    Only one rank's are not zero, so their sum is a copy, exact in any type. And a sum of 16-bit
    floats inside a `shard_map` aborts XLA's CPU compiler (jax 0.10.2, AllReducePromotion).
    """
    if x.dtype.itemsize == 2:
        x = x.reshape(*x.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(x, jnp.uint32)


def _from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `_to_bits`."""
    x = lax.bitcast_convert_type(bits, dtype)
    return x.reshape(*bits.shape[:-1], -1)
