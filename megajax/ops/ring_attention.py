"""Context parallelism: a sample's sequence is split over ranks, and attention sends keys and values round a ring.

For sequences whose activations do not fit one tensor group. All operations but attention work on single tokens, and need
only their positions. In attention each of C ranks keeps its queries, while keys and values go round: after C - 1 sends
every rank has received all of them, and has never held more than two ranks' (ring attention, 2310.01889). Partial
softmaxes are combined by their statistics into the exact softmax.

Under a causal mask the rank with the last tokens would have most of the work. So the sequence is split into 2C pieces, and
rank r has pieces r and 2C - 1 - r (as in Llama 3, 2407.21783 section 3.3.2, and in Megatron-LM):

    pieces of 4 ranks     0 1 2 3 4 5 6 7
    rank that has them    0 1 2 3 3 2 1 0

Of the two pieces received from an earlier rank, the first is before both local pieces and the second after both; those from
a later rank are both before the second local piece and after the first. In both cases two of the four products of pieces
are unmasked and two are skipped: every rank computes 2C + 1 products of pieces, an equal share of (2C)(2C + 1) / 2.

Without a causal mask (BERT's blocks) every rank multiplies its queries with all keys, in C equal steps.

A document mask, a sliding window or padding hides keys before `first` of each query, a place in the sample. For a product
with a piece, the piece's own start is subtracted from it, so that only the queries' rank has to know their documents.

One rank sends (C - 1) 2 b (s/C) g d elements per layer forward, and twice that backward, divided by the tensor size.

The ranks of a sample are neighbours on the mesh's data axis, which context parallelism makes C times as long: as in data
parallelism, weights are replicated, tokens differ, and gradients are summed once per step.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config import ConfigError
from megajax.ops.attention import Kernel, document_starts
from megajax.ops.flash_attention import HIDDEN_SCORE
from megajax.ops.score_dropout import ScoreDropout

__all__ = ["AxisName", "gather_sequence", "neighbours", "ring_attention", "sequence_sum", "split_batch", "zigzag"]

AxisName = str | tuple[str, ...]


def zigzag(length: int, ranks: int) -> np.ndarray:
    """Positions that each rank has, [ranks, length / ranks]: pieces r and 2 ranks - 1 - r, in this order.

    Raises:
      ConfigError: the sequence cannot be split into 2 * ranks pieces.
    """
    if ranks > 1 and length % (2 * ranks):
        raise ConfigError(
            f"sequence_length = {length} cannot be split into 2 * context = {2 * ranks} pieces: pass --context 1, or "
            f"--sequence-length {-(-length // (2 * ranks)) * 2 * ranks}."
        )
    if ranks == 1:
        return np.arange(length)[None]
    pieces = np.arange(length).reshape(2 * ranks, -1)
    return np.concatenate([pieces[:ranks], pieces[: ranks - 1 : -1]], axis=1)


def split_batch(batch: dict[str, jax.Array], data: int, context: int) -> dict[str, jax.Array]:
    """A batch with one row for each sample and context rank; a replica's context ranks are neighbours.

    "document" becomes the start of each token's document (`document_starts`), whatever numbers the documents had, if it has
    one for each of "tokens": in a batch without them it is an array of a user's model, of any meaning.

    Args:
      batch: arrays [microbatches, data * samples, sequence], or without the last axis, which are copied to all ranks.
      data: replicas.
      context: ranks that share a sample; twice their number must divide its sequence (see `zigzag`).

    Returns:
      Arrays [microbatches, data * context * samples, sequence / context]; also "places", the tokens' in the sample, and
      "positions", which are the places if the batch has no others.
    """
    if "tokens" in batch and "document" in batch and batch["document"].shape == batch["tokens"].shape:
        batch = {**batch, "document": document_starts(batch["document"])}
    if context == 1:
        return batch
    microbatches, rows, length = batch["tokens"].shape
    samples, positions = rows // data, zigzag(length, context)

    def split(array):
        array = array.reshape(microbatches, data, samples, *array.shape[2:])
        if array.ndim == 3:
            parts = jnp.broadcast_to(array[:, :, None], (microbatches, data, context, samples))
        else:
            parts = jnp.moveaxis(array[..., positions], 3, 2)
        return parts.reshape(microbatches, data * context * samples, *parts.shape[4:])

    places = jnp.tile(jnp.asarray(positions, jnp.int32).repeat(samples, 0), (microbatches, data, 1))
    return {"positions": places, **{name: split(array) for name, array in batch.items()}, "places": places}


def ring_attention(kernel: Kernel, axis_name: AxisName, ranks: int, window: int | None = None) -> Kernel:
    """The kernel for a sequence that `ranks` neighbours on a mesh axis share as `zigzag` says.

    Its `first` has places in the whole sample, of the local queries. Without a causal mask there is no window.

    Call it inside a `shard_map` that is manual over `axis_name`, whose size `ranks` must divide. All ranks of the mesh must
    reach it: each one sends.

    Args:
      kernel: multiplies pieces: twice the samples, with half of a rank's sequence.
      axis_name: the mesh axis, or several as one, outermost first.
      ranks: C; not 1.
      window: keys that a query sees, the last ones, itself included; None: all.
    """
    return _Ring(kernel, axis_name, ranks, window).kernel_of_parts()


def neighbours(axis_name: AxisName, ranks: int) -> list[list[int]]:
    """The ranks of each sample on a mesh axis, as the groups of a collective."""
    count = lax.axis_size(axis_name)
    return [list(range(first, first + ranks)) for first in range(0, count, ranks)]


def sequence_sum(x: jax.Array, axis_name: AxisName, ranks: int) -> jax.Array:
    """The sum of a small array over `ranks` neighbours on a mesh axis, on all of them; no other ranks have to reach it."""
    if ranks == 1:
        return x
    copies = jnp.broadcast_to(x, (ranks, *x.shape))
    groups = neighbours(axis_name, ranks)
    return lax.all_to_all(copies, axis_name, 0, 0, axis_index_groups=groups, tiled=True).sum(0)


def gather_sequence(x: jax.Array, axis_name: AxisName, ranks: int) -> jax.Array:
    """The whole samples' [b, s, ...] from each of `ranks` neighbours' [b, s / ranks, ...], in the order of the sequence.

    For small arrays: all of the mesh axis is gathered. Only the ranks of a mesh axis have to reach it.
    """
    if ranks == 1:
        return x
    first = lax.axis_index(axis_name) // ranks * ranks
    parts = lax.dynamic_slice_in_dim(lax.all_gather(x, axis_name), first, ranks)
    whole = jnp.moveaxis(parts, 0, 1).reshape(len(x), -1, *x.shape[2:])
    return whole[:, zigzag(whole.shape[1], ranks).ravel().argsort()]


def _route(axis_name: AxisName, ranks: int) -> list[tuple[int, int]]:
    """(rank, the next one in its ring) of all ranks on the mesh axis, which is cut into rings of `ranks` neighbours."""
    return [(rank, rank // ranks * ranks + (rank + 1) % ranks) for rank in range(lax.axis_size(axis_name))]


class _Ring:
    """The kernel of pieces, the routes of the sends (rings of `ranks` neighbours on a mesh axis), window and dropout."""

    def __init__(
        self, kernel: Kernel, axis_name: AxisName, ranks: int, window: int | None, drop: ScoreDropout | None = None
    ):
        self.kernel, self.axis_name, self.ranks, self.window, self.drop = kernel, axis_name, ranks, window, drop

    def kernel_of_parts(self) -> Kernel:
        """See `ring_attention`."""
        ring = self.kernel, self.axis_name, self.ranks, self.window
        again = lambda drop: _Ring(*ring, drop).kernel_of_parts()  # noqa: E731
        return Kernel(partial(_forward, self), partial(_backward, self), self.kernel.dropping and again)

    def send(self, *arrays: jax.Array) -> list[jax.Array]:
        """The arrays of the previous rank."""
        route = _route(self.axis_name, self.ranks)
        return [lax.ppermute(array, self.axis_name, route) for array in arrays]

    def is_earlier(self, step: int) -> jax.Array:
        """Whether the pieces received after `step` sends come from a rank before this one."""
        return lax.axis_index(self.axis_name) % self.ranks >= step

    def starts(self, step: int, length: int) -> tuple[jax.Array, jax.Array]:
        """The places of the first tokens of the two pieces, of `length` tokens, received after `step` sends."""
        rank = (lax.axis_index(self.axis_name) - step) % self.ranks
        return rank * length, (2 * self.ranks - 1 - rank) * length

    def first_keys(self, first: jax.Array | None, query: jax.Array) -> list[jax.Array] | None:
        """The place of the first key that each local query sees, by piece: from its document and the window."""
        length = query.shape[1] // 2
        if self.window is not None:
            places = jnp.concatenate([start + jnp.arange(length) for start in self.starts(0, length)])
            reach = jnp.broadcast_to(places - (self.window - 1), query.shape[:2])
            first = reach if first is None else jnp.maximum(first, reach)
        return None if first is None else _halves(first.astype(jnp.int32))

    def first_local(self, pieces: list[jax.Array] | None, step: int = 0) -> jax.Array | None:
        """`first` of all local queries among the keys received after `step` sends: how many of them are before it."""
        if pieces is None:
            return None
        first, length = jnp.concatenate(pieces, 1), pieces[0].shape[1]
        return sum(jnp.clip(first - start, 0, length) for start in self.starts(step, length))

    def first_of_pairs(self, pieces: list[jax.Array] | None, choose: Callable, step: int) -> jax.Array | None:
        """`first` in the two products of `_pairs`, among the keys of the received pieces."""
        if pieces is None:
            return None
        (early, late), (first, second) = pieces, self.starts(step, pieces[0].shape[1])
        return jnp.concatenate([late - first, choose(early - first, late - second)])

    def kernel_of_local(self, step: int = 0) -> Kernel:
        """The kernel for all local queries and the keys received after `step` sends."""
        if self.drop is None:
            return self.kernel
        length = self.drop.keys.shape[2] // 2
        places = jnp.concatenate([start + jnp.arange(length) for start in self.starts(step, length)])
        return self.kernel.dropping(self.drop.at(self.drop.keys, places, 2 * self.ranks * length))

    def kernel_of_pairs(self, choose: Callable, step: int) -> Kernel:
        """The kernel for the two products of `_pairs`."""
        if self.drop is None:
            return self.kernel
        early, late = _halves(self.drop.keys, 2)
        length = early.shape[2]
        first, second = self.starts(step, length)
        starts = jnp.stack([first, choose(first, second)]).repeat(len(early))[:, None]
        keys = jnp.concatenate([late, choose(early, late)])
        return self.kernel.dropping(self.drop.at(keys, starts + jnp.arange(length), 2 * self.ranks * length))


def _halves(x: jax.Array, axis: int = 1) -> list[jax.Array]:
    return jnp.split(x, 2, axis)


def _pairs(choose: Callable, queries: list[jax.Array], keys: list[jax.Array]) -> list[jax.Array]:
    """The inputs of the two products of pieces after one send, as twice as many samples.

    The first product is of the local second piece and the received first one. The other is, for pieces of an earlier rank,
    of the local first and the received first; for a later rank, of the local second and the received second. `queries`
    and `keys` are arrays in two halves by sequence.
    """
    ours = [jnp.concatenate([second, choose(first, second)]) for first, second in queries]
    return ours + [jnp.concatenate([first, choose(first, second)]) for first, second in keys]


def _merge(output, statistics, new_output, new_statistics):
    """Combines two partial softmaxes: fp32 outputs [b, s, a, d], statistics [b, a, s]."""
    total = jnp.logaddexp(statistics, new_statistics)
    share = lambda part: jnp.exp(part - total).swapaxes(1, 2)[..., None]  # noqa: E731
    return output * share(statistics) + new_output * share(new_statistics), total


def _forward(ring, query, key, value, causal, first=None):
    """First the local pieces, the only ones with a causal mask; then the received ones, while the next are being sent."""
    if not causal:
        return _forward_of_all(ring, query, key, value, first)
    received, seen = (key, value), ring.first_keys(first, query)
    for step in range(ring.ranks):
        here, received = received, ring.send(*received) if step < ring.ranks - 1 else None
        if step == 0:
            output, statistics = ring.kernel_of_local().forward(query, *here, True, ring.first_local(seen))
            outputs, sums = _halves(output.astype(jnp.float32)), _halves(statistics, 2)
            continue
        earlier = ring.is_earlier(step)
        choose = partial(jnp.where, earlier)
        pairs = _pairs(choose, [_halves(query)], [_halves(x) for x in here])
        kernel = ring.kernel_of_pairs(choose, step)
        new = kernel.forward(*pairs, False, ring.first_of_pairs(seen, choose, step))
        (sure, other), (sure_sum, other_sum) = map(partial(_halves, axis=0), new)
        of_first, of_second = (jnp.where(flag, other_sum, HIDDEN_SCORE) for flag in (earlier, ~earlier))
        outputs[0], sums[0] = _merge(outputs[0], sums[0], other, of_first)
        outputs[1], sums[1] = _merge(outputs[1], sums[1], sure, sure_sum)
        outputs[1], sums[1] = _merge(outputs[1], sums[1], other, of_second)
    return jnp.concatenate(outputs, 1).astype(query.dtype), jnp.concatenate(sums, 2)


def _backward(ring, query, key, value, output, statistics, gradient, causal, first=None):
    """Gradients of keys and values are sent with them, accumulated on every rank, and return to their own rank."""
    if not causal:
        return _backward_of_all(ring, (query, key, value), (output, statistics, gradient), first)
    here, ours = (key, value), (query, output, gradient)
    seen, kernel = ring.first_keys(first, query), ring.kernel_of_local()
    own = kernel.backward(query, key, value, output, statistics, gradient, True, ring.first_local(seen))
    dq, moving = _halves(own[0].astype(jnp.float32)), own[1:]
    for step in range(1, ring.ranks):
        here, moving = ring.send(*here), ring.send(*moving)
        earlier = ring.is_earlier(step)
        choose = partial(jnp.where, earlier)
        queries, outputs, gradients, keys, values = _pairs(
            choose, [_halves(x) for x in ours], [_halves(x) for x in here]
        )
        first, second = _halves(statistics, 2)
        sums = jnp.concatenate([second, choose(first, second)])
        pairs = ring.first_of_pairs(seen, choose, step)
        kernel = ring.kernel_of_pairs(choose, step)
        new = kernel.backward(queries, keys, values, outputs, sums, gradients, False, pairs)
        (sure, other), *of_keys = (_halves(x.astype(jnp.float32), 0) for x in new)
        dq = [dq[0] + choose(other, 0), dq[1] + sure + choose(0, other)]
        moving = [
            (total + jnp.concatenate([sure + choose(other, 0), choose(0, other)], 1)).astype(total.dtype)
            for total, (sure, other) in zip(moving, of_keys, strict=True)
        ]
    dk, dv = ring.send(*moving)
    return jnp.concatenate(dq, 1).astype(query.dtype), dk, dv


def _forward_of_all(ring, query, key, value, first):
    """Without a causal mask: every rank computes the products of its queries with all keys, in C equal steps."""
    received, seen = (key, value), ring.first_keys(first, query)
    for step in range(ring.ranks):
        here, received = received, ring.send(*received) if step < ring.ranks - 1 else None
        part, of_part = ring.kernel_of_local(step).forward(query, *here, False, ring.first_local(seen, step))
        if step == 0:
            output, statistics = part.astype(jnp.float32), of_part
        else:
            output, statistics = _merge(output, statistics, part, of_part)
    return output.astype(query.dtype), statistics


def _backward_of_all(ring, inputs, results, first):
    """The backward of `_forward_of_all`; gradients of keys and values are sent with them."""
    query, *here = inputs
    seen, dq = ring.first_keys(first, query), jnp.zeros(query.shape, jnp.float32)
    moving = [jnp.zeros_like(x) for x in here]
    for step in range(ring.ranks):
        if step:
            here, moving = ring.send(*here), ring.send(*moving)
        new = ring.kernel_of_local(step).backward(query, *here, *results, False, ring.first_local(seen, step))
        dq = dq + new[0]
        moving = [total + part.astype(total.dtype) for total, part in zip(moving, new[1:], strict=True)]
    dk, dv = ring.send(*moving)
    return dq.astype(query.dtype), dk, dv
