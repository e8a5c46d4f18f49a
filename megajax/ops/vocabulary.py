"""Token tables whose rows are sharded: over the tensor axis (1909.08053 section 3), or over pipe as well.

Embedding lookup, and the cross entropy and the most likely tokens of logits that are sharded as the table's rows are.

Left to XLA's partitioner, a gather from a sharded axis can abort the compiler inside a partly manual `shard_map`. So
both directions of `lookup` enter a nested `shard_map` over "tensor": each rank looks up the tokens whose rows it has,
and the others contribute zeros to a sum. All communication stays in a tensor group, so one pipeline rank may look up
while others do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.ops.activation import largest_and_sum
from megajax.ops.in_place import addend

__all__ = [
    "ALL_ROWS",
    "IGNORED_LABEL",
    "WHOLE_VOCABULARY",
    "RowsOverRanks",
    "VocabularySharding",
    "cross_entropy",
    "logsumexp",
    "lookup",
    "mask_padding",
    "normaliser",
    "over_pipe",
    "plain_lookup",
    "token_scores",
]

AXIS, PIPE = "tensor", "pipe"
IGNORED_LABEL = -100  # as in torch: a label without a loss
MASKED_LOGIT = -1e30  # of a padded row: its exponential is 0 in fp32, and the number is finite


def _same(x: jax.Array) -> jax.Array:
    return x


class RowsOverRanks(NamedTuple):
    """Collectives over ranks that each have some rows of the token tables. The defaults: this rank has all rows.

    Attributes:
      broadcast: y [b, s, h], zeros on all ranks but one -> that rank's y on all ranks.
      first_row: number of local rows -> index of the first of them in the whole table.
      sum: fp32 [b, s] -> its sum over the ranks.
      max: fp32 or int32 [b, s] -> its maximum over the ranks.
      gather: logits [b, s, local rows] -> [b, s, rows].
    """

    broadcast: Callable[[jax.Array], jax.Array] = _same
    first_row: Callable[[int], jax.Array | int] = lambda rows: 0
    sum: Callable[[jax.Array], jax.Array] = _same
    max: Callable[[jax.Array], jax.Array] = _same
    gather: Callable[[jax.Array], jax.Array] = _same


ALL_ROWS = RowsOverRanks()


def plain_lookup(table: jax.Array, tokens: jax.Array, dtype: Any = None) -> jax.Array:
    """The lookup of a model that runs on no mesh: rows of table [v, h] for tokens [b, s] -> [b, s, h], as of `lookup`."""
    return jnp.take(table, tokens, axis=0).astype(dtype or table.dtype)


class VocabularySharding(NamedTuple):
    """How a model's token tables are sharded, and what a loss computes from logits of such rows, on any mesh.

    In the methods `logits` is [b, s, local rows] and `vocabulary` the number of rows that count; those from there on are
    padding. All return fp32 [b, s] on all ranks.

    Attributes:
      shares: devices that the rows are split over, which must divide them (`padded_vocabulary`).
      lookup: (table [local rows, h], tokens [b, s], dtype) -> rows [b, s, h] of this type, or if none is given the table's.
      ranks: the collectives of `cross_entropy` and of the head's input.
    """

    shares: int = 1
    lookup: Callable[..., jax.Array] = plain_lookup
    ranks: RowsOverRanks = ALL_ROWS

    def broadcast(self, y: jax.Array) -> jax.Array:
        """The head's input [b, s, h] on all ranks that have rows of the table; logits are computed from it."""
        return self.ranks.broadcast(y)

    def cross_entropy(self, logits: jax.Array, labels: jax.Array, vocabulary: int) -> jax.Array:
        """-log softmax(logits)[label] of labels [b, s]; 0 for IGNORED_LABEL (see `cross_entropy`)."""
        return cross_entropy(logits, labels, vocabulary, self.ranks)

    def regularised(
        self, logits: jax.Array, labels: jax.Array, vocabulary: int, z_loss: float = 0.0, label_smoothing: float = 0.0
    ) -> jax.Array:
        """(1 - e) cross entropy + e mean over the vocabulary of -log softmax(logits) + z_loss logsumexp(logits)^2."""
        losses = self.cross_entropy(logits, labels, vocabulary)
        if not z_loss and not label_smoothing:
            return losses
        z = self.logsumexp(logits, vocabulary)
        if label_smoothing:
            uniform = z - self.sum(logits, vocabulary) / vocabulary
            losses = (1 - label_smoothing) * losses + label_smoothing * uniform
        return jnp.where(labels == IGNORED_LABEL, 0, losses + z_loss * z**2)

    def log_probabilities(self, logits: jax.Array, tokens: jax.Array, vocabulary: int) -> jax.Array:
        """log softmax(logits)[token] of tokens [b, s]; 0 for IGNORED_LABEL."""
        return -cross_entropy(logits, tokens, vocabulary, self.ranks)

    def logsumexp(self, logits: jax.Array, vocabulary: int) -> jax.Array:
        """The logarithm of the sum over the vocabulary of exp(logits)."""
        return logsumexp(logits, vocabulary, self.ranks)

    def sum(self, values: jax.Array, vocabulary: int) -> jax.Array:
        """The sum over the vocabulary of a value for each row, [b, s, local rows], of any float type."""
        counts = _rows(values, self.ranks) < vocabulary
        return self.ranks.sum(jnp.where(counts, values.astype(jnp.float32), 0).sum(-1))


WHOLE_VOCABULARY = VocabularySharding()


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(table: jax.Array, tokens: jax.Array, sequence_parallel: bool = False, dtype: Any = None) -> jax.Array:
    """Rows of `table` for `tokens`, [b, s, hidden]; to be called with a mesh set that has a "tensor" axis.

    Args:
      table: [vocabulary, hidden], rows split over tensor, which must divide them. Inside a `shard_map` it must vary
        over the manual axes that the tokens or the gradient vary over (`lax.pcast`), as its gradient does.
      tokens: [b, s] integers, 0 <= token < vocabulary.
      sequence_parallel: whether the result is split along s over tensor (tensor must divide s) or replicated.
      dtype: of the result, and of what ranks send; hidden must be even if it has 16 bits. None: the table's.
    """
    return _forward(table, tokens, sequence_parallel, dtype)[0]


def _split(sequence_parallel: bool) -> P:
    """How the result, [b, s, hidden], is sharded over tensor."""
    return P(None, AXIS) if sequence_parallel else P()


def _own(tokens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The tokens as indices into this rank's rows, and which of them are in range."""
    local = tokens.astype(jnp.int32) - lax.axis_index(AXIS) * rows
    return local, (local >= 0) & (local < rows)


def _forward(table, tokens, sequence_parallel, dtype):
    """Each rank's own rows, zero elsewhere, summed over tensor, or reduce-scattered along the sequence."""

    def local(table, tokens):
        index, mine = _own(tokens, len(table))
        found = table.at[jnp.clip(index, 0, len(table) - 1)].get(mode="promise_in_bounds")
        bits = _to_bits(jnp.where(mine[..., None], found, 0).astype(dtype))
        if sequence_parallel:
            bits = lax.psum_scatter(bits, AXIS, scatter_dimension=1, tiled=True)
        else:
            bits = lax.psum(bits, AXIS)
        return _from_bits(bits, dtype)

    dtype = dtype or table.dtype
    run = jax.shard_map(local, axis_names={AXIS}, in_specs=(P(AXIS), P()), out_specs=_split(sequence_parallel))
    return run(table, tokens), (tokens, table[:, :0])  # no element of the table, but its rows, type and sharding


def _backward(sequence_parallel, dtype, residuals, gradient):
    """Scatter-adds the gradient [b, s, hidden] into each rank's own rows, or an accumulator's (`addend`), in fp32: a
    frequent token is many terms.
    """

    def scatter(rows, tokens, gradient, at=()):  # adds to rows[at], [local rows, hidden]
        count = rows.shape[-2]
        index, mine = _own(tokens, count)
        if sequence_parallel:
            gradient = lax.all_gather(gradient, AXIS, axis=1, tiled=True)
        index = jnp.where(mine, index, count)  # past the end: dropped
        return rows.at[(*at, index)].add(gradient.astype(jnp.float32), mode="drop")

    def of_table(like, tokens, gradient):
        return scatter(jnp.zeros((len(like), gradient.shape[-1]), jnp.float32), tokens, gradient)

    def add(total, place, like, tokens, gradient):
        return scatter(total, tokens, gradient, (place,))

    tokens, like = residuals
    split, run = _split(sequence_parallel), partial(jax.shard_map, axis_names={AXIS})
    of_table = run(of_table, in_specs=(P(AXIS), P(), split), out_specs=P(AXIS))
    add = run(add, in_specs=(P(None, AXIS), P(), P(AXIS), P(), split), out_specs=P(None, AXIS))
    return addend(of_table, add, like, tokens, gradient).astype(like.dtype), None


lookup.defvjp(_forward, _backward)


def over_pipe(sequence_parallel: bool) -> tuple[Callable[..., jax.Array], RowsOverRanks]:
    """`lookup` and collectives for tables whose rows are sharded over pipe and tensor (Yeung et al. 2024, 2411.05288).

    Every stage then has the same share of the vocabulary, in memory and in work. To be called in a `shard_map` that is
    manual over pipe, by all its ranks together. Collectives over pipe: one sum replicates the rows that were looked up,
    one the head's input, two small ones compute the softmax's normaliser, and one sums the gradient of the head's input.
    Each rank has rows [rank * rows, (rank + 1) * rows) and splits them over tensor.
    """

    def look_up(table, tokens, dtype=None):
        return _replicate_rows(lookup(table, tokens - _first_row(table.shape[0]), sequence_parallel, dtype))

    return look_up, RowsOverRanks(
        partial(_broadcast, sequence_parallel=sequence_parallel), _first_row, _sum, _max, _gather
    )


def _first_row(rows: int) -> jax.Array:
    return lax.axis_index(PIPE) * rows


def _vary(x: jax.Array) -> jax.Array:
    """Marks x as varying over pipe: gradients are summed over pipe only where these functions say so."""
    return lax.pcast(x, PIPE, to="varying")


def _sum_of_one(x: jax.Array) -> jax.Array:
    """The x of the one rank that has it, on all ranks; the others have zeros. Element by element."""
    return _vary(_from_bits(lax.psum(_to_bits(x), PIPE), x.dtype))


def _sum(x: jax.Array) -> jax.Array:
    return _vary(lax.psum(x, PIPE))


def _max(x: jax.Array) -> jax.Array:
    return _vary(lax.pmax(x, PIPE))


def _gather(logits: jax.Array) -> jax.Array:
    return lax.all_gather(logits, PIPE, axis=logits.ndim - 1, tiled=True)


def _sum_in_fp32(x: jax.Array, sequence_parallel: bool) -> jax.Array:
    """The sum of x [b, split s, h] over pipe, added in fp32 and rounded once.

    Of 16-bit elements by an all-to-all, a local sum and an all-gather, which send half the bytes of an fp32 all-reduce.
    """

    def local(x):  # manual over tensor too: XLA's partitioner would gather the sequence first
        ranks = lax.axis_size(PIPE)
        if x.dtype.itemsize > 2 or x.size % ranks:
            return _sum(x.astype(jnp.float32)).astype(x.dtype)
        parts = lax.all_to_all(x.reshape(ranks, -1), PIPE, split_axis=0, concat_axis=0)
        part = parts.astype(jnp.float32).sum(0).astype(x.dtype)
        return lax.all_gather(part, PIPE, tiled=True).reshape(x.shape)

    split = _split(sequence_parallel)
    return jax.shard_map(local, axis_names={AXIS}, in_specs=split, out_specs=split)(x)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _broadcast(y: jax.Array, sequence_parallel: bool) -> jax.Array:
    """The last stage's y on all ranks; backward sums the gradients of all ranks' parts of the head, in fp32."""
    return _sum_of_one(y)


_broadcast.defvjp(
    lambda y, sequence_parallel: (_sum_of_one(y), None),
    lambda sequence_parallel, _, gradient: (_sum_in_fp32(gradient, sequence_parallel),),
)


@jax.custom_vjp
def _replicate_rows(rows: jax.Array) -> jax.Array:
    """Each row, which one rank has, on all ranks; backward replicates the gradient that one rank has."""
    return _sum_of_one(rows)


_replicate_rows.defvjp(lambda rows: (_sum_of_one(rows), None), lambda _, gradient: (_sum_of_one(gradient),))


def _to_bits(x: jax.Array) -> jax.Array:
    """Bits of x as uint32, two 16-bit elements to one.

    All ranks but one have zeros, so the sum is an exact copy in any type. A sum of 16-bit
    floats inside a `shard_map` aborts XLA's CPU compiler (jax 0.10.2, AllReducePromotion).
    """
    if x.dtype.itemsize == 2:
        x = x.reshape(*x.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(x, jnp.uint32)


def _from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `_to_bits`."""
    x = lax.bitcast_convert_type(bits, dtype)
    return x.reshape(*bits.shape[:-1], -1)


def _rows(logits: jax.Array, ranks: RowsOverRanks) -> jax.Array:
    """The index in the whole table of the row that each logit belongs to."""
    return ranks.first_row(logits.shape[-1]) + lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def mask_padding(logits: jax.Array, vocabulary: int, ranks: RowsOverRanks = ALL_ROWS) -> jax.Array:
    """Logits in fp32, those of padded rows (from `vocabulary` on) at MASKED_LOGIT."""
    return jnp.where(_rows(logits, ranks) < vocabulary, logits.astype(jnp.float32), MASKED_LOGIT)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(logits: jax.Array, labels: jax.Array, vocabulary: int, ranks: RowsOverRanks = ALL_ROWS) -> jax.Array:
    """-log softmax(logits)[label], in fp32; it only sums over the vocabulary, which may be split over tensor and ranks.

    The label's logit is picked by a masked sum, as a gather from a sharded axis can abort XLA's partitioner. The
    derivative (softmax - one-hot) is written out so that the logits are saved in their own type, without an fp32 copy.

    Args:
      logits: [b, s, local rows] of any float type.
      labels: [b, s] integers below `vocabulary`; or IGNORED_LABEL, with loss and gradient 0.
      vocabulary: rows that count; those from there on are padding.
      ranks: the ranks that have the other rows. Its incoming gradient may be zeros on all ranks but one.

    Returns:
      fp32 [b, s], on all ranks.
    """
    return _cross_entropy_forward(logits, labels, vocabulary, ranks)[0]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def logsumexp(logits: jax.Array, vocabulary: int, ranks: RowsOverRanks = ALL_ROWS) -> jax.Array:
    """log(sum(exp(logits))) over the vocabulary, which may be split over tensor and ranks, fp32 [b, s], on all ranks.

    Args:
      logits, vocabulary, ranks: as for `cross_entropy`; the incoming gradient too.
    """
    return normaliser(mask_padding(logits, vocabulary, ranks), ranks)[0]


def _logsumexp_backward(vocabulary, ranks, residuals, gradient):
    logits, total = residuals
    softmax = jnp.exp(mask_padding(logits, vocabulary, ranks) - total[..., None])
    return ((softmax * ranks.sum(gradient)[..., None]).astype(logits.dtype),)


def _logsumexp_forward(logits, vocabulary, ranks):
    total = logsumexp(logits, vocabulary, ranks)
    return total, (logits, total)


logsumexp.defvjp(_logsumexp_forward, _logsumexp_backward)


def token_scores(
    logits: jax.Array, labels: jax.Array, vocabulary: int, ranks: RowsOverRanks = ALL_ROWS
) -> tuple[jax.Array, jax.Array]:
    """The cross entropy of each label, and whether it is the most likely token; without a derivative.

    Of equal logits the one of the smaller token id is the most likely, as in numpy's argmax.

    Args:
      logits, labels, vocabulary, ranks: as for `cross_entropy`.

    Returns:
      fp32 [b, s] and bool [b, s], on all ranks.
    """
    losses, largest, _ = _softmax(logits, labels, vocabulary, ranks)
    rows, masked = _rows(logits, ranks), mask_padding(logits, vocabulary, ranks)
    first = ranks.max(jnp.where(masked == largest[..., None], -rows, -vocabulary).max(-1))
    return losses, -first == labels


def normaliser(masked, ranks):
    """fp32 [b, s]: the logarithms of the softmax's normalisers, and the largest logits."""
    here, total = largest_and_sum(masked)
    largest = ranks.max(here)
    return largest + jnp.log(ranks.sum(total * jnp.exp(here - largest))), largest


def _softmax(logits, labels, vocabulary, ranks):
    """fp32 [b, s]: the losses, the largest logits and the logarithms of the softmax's normalisers."""
    masked = mask_padding(logits, vocabulary, ranks)
    total, largest = normaliser(masked, ranks)
    picked = ranks.sum(jnp.where(_rows(logits, ranks) == labels[..., None], masked, 0).sum(-1))
    return jnp.where(labels == IGNORED_LABEL, 0, total - picked), largest, total


def _cross_entropy_forward(logits, labels, vocabulary, ranks):
    losses, _, total = _softmax(logits, labels, vocabulary, ranks)
    return losses, (logits, labels, total)


def _cross_entropy_backward(vocabulary, ranks, residuals, gradient):
    logits, labels, total = residuals
    softmax = jnp.exp(mask_padding(logits, vocabulary, ranks) - total[..., None])
    is_label = _rows(logits, ranks) == labels[..., None]
    slope = jnp.where(labels == IGNORED_LABEL, 0, ranks.sum(gradient))
    return ((softmax - is_label) * slope[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
