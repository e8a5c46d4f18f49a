"""The backward of flash attention in Pallas (Triton), which skips what no query sees.

Each query sees a range of keys: from `first` of the query on, up to itself or to the last key. Causal attention,
documents packed in a sample, a sliding window, and the pieces of ring attention all have this form. No kernel holds more
than a tile of scores, and none visits a tile in which no query sees a key: `first` does not decrease along the sequence,
so the keys that a tile of queries sees are one range of tiles, and so are the queries that see a tile of keys.

Forwards are tokamax's (`megajax.ops.tokamax_kernels`), whose backward visits every tile that a causal mask does not hide:
with 8 documents in 8,192 tokens it took 5 times as long as this one on an H200 (docs/gpus.md).

The algorithm is 2307.08691's algorithm 2 in two kernels, one for the queries' gradient and one for the keys' and values',
so that no two programs add to the same element: results are equal to the bit in every run.

Shapes: b samples, s queries, t keys, a heads of size d in g groups that share a key and a value, n = a / g. In the bodies
of kernels, rows are the tile's queries and columns its keys.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from megajax.runtime.compat_kernels import pallas, pallas_call

__all__ = ["HIDDEN_SCORE", "flash_backward"]

HIDDEN_SCORE = -1e30  # of a key that a query does not see; finite, so that no difference of two can make a NaN
LOG2_E = math.log2(math.e)  # GPUs have an exponential of base 2


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call's kernels have in common.

    Attributes:
      queries: of a tile.
      keys: of a tile.
      length: keys, without those that fill the last tile.
      heads: of queries.
      groups: of keys and values.
      head_size: d.
      causal: a query sees no key after itself.
      masked: `first` is given.
    """

    queries: int
    keys: int
    length: int
    heads: int
    groups: int
    head_size: int
    causal: bool
    masked: bool

    @classmethod
    def of(cls, query, key, causal, first, queries: int) -> "_Call":
        """The call on these arrays, with tiles of `queries` queries if the head size allows it."""
        heads, head_size = query.shape[2:]
        largest = 1 if head_size <= 128 else 2  # a tile's arrays have to fit in the registers
        tiles = _tile(query.shape[1], queries // largest), _tile(key.shape[1], 64 // largest)
        return cls(*tiles, key.shape[1], heads, key.shape[2], head_size, causal, first is not None)

    @property
    def width(self) -> int:
        """d filled up to what Triton's arrays can have, a power of 2."""
        return max(16, 1 << (self.head_size - 1).bit_length())

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def settings(self) -> dict[str, int]:
        return {"warps": 8 if self.queries * self.width >= 128 * 128 else 4, "stages": 2}

    def load(self, ref, *at) -> jax.Array:
        """The tile [rows, width] of ref [sequence, (heads,) width], in which elements beyond d are 0."""
        place = ref.at[(*at, slice(None))]
        return pallas().load(place) if self.real is None else pallas().load(place, mask=self.real, other=0.0)

    def store(self, ref, x: jax.Array) -> None:
        """Writes a tile [rows, width], without the elements beyond d."""
        pallas().store(ref.at[:, :], x.astype(ref.dtype), mask=self.real)

    @property
    def real(self) -> jax.Array | None:
        """Which elements of a tile's row are not beyond d, [1, width]; None: all."""
        return None if self.width == self.head_size else (jnp.arange(self.width) < self.head_size)[None]

    def tile_spec(self, tile: int):
        """The block of [b, sequence, heads or groups, d] that belongs to a program's tile."""
        return pallas().BlockSpec((None, tile, None, self.width), lambda i, head, sample: (sample, i, head, 0))

    def group_spec(self, sequence: int):
        """The block of [b, t, g, d] that has all keys of a program's query head."""
        group = lambda i, head, sample: (sample, 0, head // (self.heads // self.groups), 0)  # noqa: E731
        return pallas().BlockSpec((None, sequence, None, self.width), group)

    def visible(self, query_tile, key_tile, first) -> jax.Array:
        """Which keys of a tile the queries of a tile see, [queries, keys]; `first` is the queries' [queries] or None."""
        row = query_tile * self.queries + lax.broadcasted_iota(jnp.int32, (self.queries, self.keys), 0)
        column = key_tile * self.keys + lax.broadcasted_iota(jnp.int32, (self.queries, self.keys), 1)
        seen = column <= row if self.causal else column < self.length  # keys that fill a tile are after all queries too
        return seen if first is None else seen & (column >= first[:, None])

    def key_tiles(self, query_tile, first, count: int) -> tuple:
        """The range of key tiles that the queries of a tile see."""
        low = 0 if first is None else lax.div(jnp.maximum(jnp.min(first), 0), self.keys)
        if not self.causal:
            return low, count
        return low, jnp.minimum(lax.div((query_tile + 1) * self.queries + self.keys - 1, self.keys), count)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y of tiles, in fp32; of fp32 tiles in full precision."""
    return jnp.dot(x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _gradient_of_scores(call: _Call, query, key, value, gradient, statistics, along, seen):
    """(probabilities, gradient of query key^T), fp32 [queries, keys]."""
    scores = _dot(query, key.T) * (call.scale * LOG2_E)
    weights = jnp.where(seen, jnp.exp2(scores - statistics[:, None] * LOG2_E), 0.0)
    return weights, weights * (_dot(gradient, value.T) - along[:, None]) * call.scale


def _query_kernel(
    call: _Call, query_ref, key_ref, value_ref, gradient_ref, statistics_ref, along_ref, first_ref, out_ref
):
    """The gradient of one tile of queries of one head."""
    index = pallas().program_id(0)
    first = first_ref[...] if call.masked else None
    query, gradient = call.load(query_ref, slice(None)), call.load(gradient_ref, slice(None))
    statistics, along = statistics_ref[...], along_ref[...]

    def step(tile, total):
        at = pallas().ds(tile * call.keys, call.keys)
        key, value, seen = call.load(key_ref, at), call.load(value_ref, at), call.visible(index, tile, first)
        _, slope = _gradient_of_scores(call, query, key, value, gradient, statistics, along, seen)
        return total + _dot(slope.astype(key.dtype), key)

    start = jnp.zeros((call.queries, call.width), jnp.float32)
    call.store(out_ref, lax.fori_loop(*call.key_tiles(index, first, key_ref.shape[0] // call.keys), step, start))


def _key_kernel(call: _Call, query_ref, key_ref, value_ref, gradient_ref, statistics_ref, along_ref, *refs):
    """The gradients of one tile of keys and values of one group, summed over the queries of its heads."""
    first_ref, after_ref, key_out_ref, value_out_ref = refs
    index, shared, tiles = pallas().program_id(0), query_ref.shape[1], query_ref.shape[0] // call.queries
    key, value = call.load(key_ref, slice(None)), call.load(value_ref, slice(None))

    def step(count, totals):
        head, tile = lax.rem(count, shared), lax.div(count, shared)
        at = pallas().ds(tile * call.queries, call.queries)
        query, gradient = call.load(query_ref, at, head), call.load(gradient_ref, at, head)
        seen = call.visible(tile, index, first_ref[at] if call.masked else None)
        weights, slope = _gradient_of_scores(
            call, query, key, value, gradient, statistics_ref[head, at], along_ref[head, at], seen
        )
        of_key, of_value = totals
        of_value = of_value + _dot(weights.astype(value.dtype).T, gradient)
        return of_key + _dot(slope.astype(key.dtype).T, query), of_value

    low = lax.div(index * call.keys, call.queries) if call.causal else 0
    high = lax.div(after_ref[0] + call.queries - 1, call.queries) if call.masked else tiles
    zeros = jnp.zeros((call.keys, call.width), jnp.float32)
    of_key, of_value = lax.fori_loop(low * shared, high * shared, step, (zeros, zeros))
    call.store(key_out_ref, of_key)
    call.store(value_out_ref, of_value)


def flash_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    statistics: jax.Array,
    gradient: jax.Array,
    causal: bool,
    first: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value, see `megajax.ops.attention.Kernel`.

    Args:
      query: [b, s, a, d].
      key: [b, t, g, d].
      value: [b, t, g, d].
      output: [b, s, a, d].
      statistics: fp32 [b, a, s], which may be those of a softmax over more keys.
      gradient: of the output, [b, s, a, d].
      causal: a query sees no key after itself (then s = t); otherwise all keys from `first` on.
      first: int32 [b, s], the first key that a query sees, not decreasing along s; 0 or less: from the first key on; t or
        more: none. None: 0 for all.
      interpret: run in Pallas's interpreter, on any device.
    """
    call, length = _Call.of(query, key, causal, first, queries=64), query.shape[1]
    along = jnp.einsum("bsad,bsad->bas", gradient, output, preferred_element_type=jnp.float32)
    query, key, value, first = _in_tiles(call, query, key, value, first)
    gradient = _fill(gradient, call.queries, 1)
    statistics, along = (_fill(x, call.queries, 2) for x in (statistics, along))
    samples, padded, shared = len(query), query.shape[1], call.heads // call.groups
    arrays = [query, key, value, gradient, statistics, along, first]
    settings = {"interpret": interpret} | call.settings

    tile, keys, rows = call.tile_spec(call.queries), call.group_spec(key.shape[1]), _rows_of_head(call.queries)
    (of_query,) = pallas_call(
        functools.partial(_query_kernel, call),
        arrays,
        [tile, keys, keys, tile, rows, rows, _rows_of_sample(call.queries)],
        [(query.shape, query.dtype)],
        [tile],
        grid=(padded // call.queries, call.heads, samples),
        settings=settings | {"name": "flash_attention_backward_query"},
    )

    after = None
    if first is not None:  # for each tile of keys, the number of queries that see its last key or an earlier one
        last = jnp.arange(call.keys - 1, key.shape[1], call.keys)
        after = (first[:, None] <= last[:, None]).sum(-1, dtype=jnp.int32)
    spec = pallas().BlockSpec
    heads = spec((None, padded, shared, call.width), lambda i, group, sample: (sample, 0, group, 0))
    rows = spec((None, shared, padded), lambda i, group, sample: (sample, group, 0))
    whole = spec((None, padded), lambda i, group, sample: (sample, 0))
    tile = call.tile_spec(call.keys)
    of_key, of_value = pallas_call(
        functools.partial(_key_kernel, call),
        [*arrays, after],
        [heads, tile, tile, heads, rows, rows, whole, _rows_of_sample(1)],
        [(key.shape, key.dtype), (value.shape, value.dtype)],
        [tile, tile],
        grid=(key.shape[1] // call.keys, call.groups, samples),
        settings=settings | {"name": "flash_attention_backward_key_value"},
    )
    return of_query[:, :length], of_key[:, : call.length], of_value[:, : call.length]


def _rows_of_head(tile: int):
    """The block of [b, a, s] that belongs to a program's tile."""
    return pallas().BlockSpec((None, None, tile), lambda i, head, sample: (sample, head, i))


def _rows_of_sample(tile: int):
    """The block of [b, s] that belongs to a program's tile."""
    return pallas().BlockSpec((None, tile), lambda i, head, sample: (sample, i))


def _tile(length: int, largest: int) -> int:
    """Rows of a tile: a power of 2, and at least the 16 that Triton multiplies."""
    return min(largest, max(16, 1 << (length - 1).bit_length()))


def _in_tiles(call: _Call, query, key, value, first) -> list[jax.Array | None]:
    """The arrays with sequences that are whole tiles: the added queries see no key, and no query sees the added keys."""
    if first is not None:
        first = _fill(first, call.queries, 1, call.length)
    return [_fill(query, call.queries, 1), *(_fill(x, call.keys, 1) for x in (key, value)), first]


def _fill(x: jax.Array, tile: int, axis: int, value=0) -> jax.Array:
    """x with an axis filled up with `value` to a multiple of `tile`."""
    missing = -x.shape[axis] % tile
    widths = [(0, missing if index == axis else 0) for index in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x
