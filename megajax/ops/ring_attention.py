"""Context parallelism: a sample's sequence shared out over ranks, attention passing keys and values round a ring.

For sequences whose activations do not fit one tensor group. All but attention works on tokens one by one, and needs only
their positions. In attention each of C ranks keeps its queries, while keys and values travel: after C - 1 sends every
rank has seen all of them, and has at no time held more than two ranks' (ring attention, 2310.01889). The parts of the
softmax are put together by their statistics, so the result is the whole softmax's, whatever the scores.

Under a causal mask the rank with the last tokens would have all the work. So the sequence is cut in 2C pieces, and rank r
has pieces r and 2C - 1 - r (as in Llama 3, 2407.21783 section 3.3.2, and in Megatron-LM):

    pieces of 4 ranks     0 1 2 3 4 5 6 7
    rank that has them    0 1 2 3 3 2 1 0

Of a visiting rank's two pieces, an earlier rank's first is before both of ours and its second after both; a later rank's are
both before our second and after our first. Either way two of the four products of pieces count, none of which needs a
mask: every rank does 2C + 1 products of pieces, its share of the (2C)(2C + 1) / 2 that a causal mask leaves.

One rank sends (C - 1) 2 b (s/C) g d elements per layer forward, and twice that backward, less what tensor splits.

The ranks of a sample are neighbours on the mesh's data axis, which context parallelism makes C times as long: like data
parallelism it replicates weights, sees different tokens, and meets once a step to sum gradients.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config import ConfigError
from megajax.ops.attention import Kernel

__all__ = ["ring_attention", "select_owner_rank", "split_batch", "zigzag"]

NOTHING = -1e30  # statistics of a softmax over no keys; finite, so that no difference of two can make a NaN


def zigzag(length: int, ranks: int) -> np.ndarray:
    """Positions that each rank has, [ranks, length / ranks]: pieces r and 2 ranks - 1 - r, in this order.

    Raises:
      ConfigError: the sequence cannot be cut in 2 * ranks pieces.
    """
    if ranks > 1 and length % (2 * ranks):
        raise ConfigError(
            f"sequence_length = {length} cannot be cut in 2 * context = {2 * ranks} pieces: pass --context 1, or "
            f"--sequence-length {-(-length // (2 * ranks)) * 2 * ranks}."
        )
    if ranks == 1:
        return np.arange(length)[None]
    pieces = np.arange(length).reshape(2 * ranks, -1)
    return np.concatenate([pieces[:ranks], pieces[: ranks - 1 : -1]], axis=1)


def split_batch(batch: dict[str, jax.Array], data: int, context: int) -> dict[str, jax.Array]:
    """A batch with one row for each sample and context rank, a replica's context ranks beside each other.

    Args:
      batch: arrays [microbatches, data * samples, sequence], or without the last axis, which are given to all ranks.
      data: replicas.
      context: ranks that share a sample; they must cut its sequence (see `zigzag`).

    Returns:
      Arrays [microbatches, data * context * samples, sequence / context], and "positions", their places in the sample.
    """
    if context == 1:
        return batch
    if "positions" in batch or "document" in batch:
        raise ConfigError(
            f"--reset-position-ids and --reset-attention-mask want a sample's tokens in one place, and context = {context} "
            "parts them: pass --context 1."
        )
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
    return {name: split(array) for name, array in batch.items()} | {"positions": places}


def select_owner_rank(rows: jax.Array, position: jax.Array, length: int, data: int, context: int) -> jax.Array:
    """Of what each row of a split batch gave, that of the context rank which has the sample's `position`.

    Args:
      rows: [data * context * samples, ...], in the order of `split_batch`.
      position: int [data * samples].
      length: of the whole sequence.
      data: replicas.
      context: ranks that share a sample.

    Returns:
      [data * samples, ...].
    """
    if context == 1:
        return rows
    position = position.reshape(data, -1)
    owner = (zigzag(length, context)[:, None, None] == position[..., None]).any(-1).argmax(0)  # [data, samples]
    by_rank = rows.reshape(data, context, *position.shape[1:], *rows.shape[1:])
    replica, sample = np.indices(position.shape)
    return by_rank[replica, owner, sample].reshape(-1, *rows.shape[1:])


def ring_attention(kernel: Kernel, axis_name: str, ranks: int) -> Kernel:
    """The kernel for a sequence that `ranks` neighbours on a mesh axis share as `zigzag` says; causal only.

    Call it inside a `shard_map` that is manual over `axis_name`, whose size `ranks` must divide. Every rank of the mesh
    has to come by: it sends.

    Args:
      kernel: what multiplies pieces: twice as many samples as there are, of half a rank's sequence.
      axis_name: the mesh axis.
      ranks: C; not 1.
    """
    ring = _Ring(axis_name, ranks)
    return Kernel(partial(_forward, kernel, ring), partial(_backward, kernel, ring))


class _Ring:
    """Who sends to whom: groups of `ranks` neighbours on a mesh axis."""

    def __init__(self, axis_name: str, ranks: int):
        self.axis_name, self.ranks = axis_name, ranks

    def send(self, *arrays: jax.Array) -> list[jax.Array]:
        """The arrays of the rank before."""
        size, ranks = lax.axis_size(self.axis_name), self.ranks
        route = [(rank, rank // ranks * ranks + (rank + 1) % ranks) for rank in range(size)]
        return [lax.ppermute(array, self.axis_name, route) for array in arrays]

    def is_earlier(self, step: int) -> jax.Array:
        """Whether the pieces that have come after `step` sends are of a rank before this one."""
        return lax.axis_index(self.axis_name) % self.ranks >= step


def _halves(x: jax.Array, axis: int = 1) -> list[jax.Array]:
    return jnp.split(x, 2, axis)


def _pairs(choose: Callable, queries: list[jax.Array], keys: list[jax.Array]) -> list[jax.Array]:
    """What goes into the two products of a visit, as twice as many samples.

    Always our second piece and the visitor's first; and besides, for an earlier rank our first with the same, for a
    later rank our second with the visitor's second. `queries` and `keys` are arrays in two halves by sequence.
    """
    ours = [jnp.concatenate([second, choose(first, second)]) for first, second in queries]
    return ours + [jnp.concatenate([first, choose(first, second)]) for first, second in keys]


def _merge(output, statistics, new_output, new_statistics):
    """Two parts of a softmax as one: fp32 outputs [b, s, a, d], statistics [b, a, s]."""
    total = jnp.logaddexp(statistics, new_statistics)
    share = lambda part: jnp.exp(part - total).swapaxes(1, 2)[..., None]  # noqa: E731
    return output * share(statistics) + new_output * share(new_statistics), total


def _forward(kernel, ring, query, key, value, causal):
    """Own pieces first, the only ones with a mask; then each visitor's, while the next is on its way."""
    assert causal, "without a mask the zigzag is pointless"
    visiting = (key, value)
    for step in range(ring.ranks):
        here, visiting = visiting, ring.send(*visiting) if step < ring.ranks - 1 else None
        if step == 0:
            output, statistics = kernel.forward(query, *here, True)
            outputs, sums = _halves(output.astype(jnp.float32)), _halves(statistics, 2)
            continue
        earlier = ring.is_earlier(step)
        pairs = _pairs(partial(jnp.where, earlier), [_halves(query)], [_halves(x) for x in here])
        (sure, other), (sure_sum, other_sum) = map(partial(_halves, axis=0), kernel.forward(*pairs, False))
        of_first, of_second = (jnp.where(flag, other_sum, NOTHING) for flag in (earlier, ~earlier))
        outputs[0], sums[0] = _merge(outputs[0], sums[0], other, of_first)
        outputs[1], sums[1] = _merge(outputs[1], sums[1], sure, sure_sum)
        outputs[1], sums[1] = _merge(outputs[1], sums[1], other, of_second)
    return jnp.concatenate(outputs, 1).astype(query.dtype), jnp.concatenate(sums, 2)


def _backward(kernel, ring, query, key, value, output, statistics, gradient, causal):
    """Gradients of keys and values travel with them, are added to at every rank, and end where they began."""
    assert causal
    here, ours = (key, value), (query, output, gradient)
    own = kernel.backward(query, key, value, output, statistics, gradient, True)
    dq, travelling = _halves(own[0].astype(jnp.float32)), own[1:]
    for step in range(1, ring.ranks):
        here, travelling = ring.send(*here), ring.send(*travelling)
        earlier = ring.is_earlier(step)
        choose = partial(jnp.where, earlier)
        queries, outputs, gradients, keys, values = _pairs(
            choose, [_halves(x) for x in ours], [_halves(x) for x in here]
        )
        first, second = _halves(statistics, 2)
        sums = jnp.concatenate([second, choose(first, second)])
        new = kernel.backward(queries, keys, values, outputs, sums, gradients, False)
        (sure, other), *of_keys = (_halves(x.astype(jnp.float32), 0) for x in new)
        dq = [dq[0] + choose(other, 0), dq[1] + sure + choose(0, other)]
        travelling = [
            (total + jnp.concatenate([sure + choose(other, 0), choose(0, other)], 1)).astype(total.dtype)
            for total, (sure, other) in zip(travelling, of_keys, strict=True)
        ]
    dk, dv = ring.send(*travelling)
    return jnp.concatenate(dq, 1).astype(query.dtype), dk, dv
