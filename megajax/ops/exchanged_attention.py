"""Context parallelism by all-to-all: ranks that share a sample exchange parts of its sequence for parts of its heads.

As DeepSpeed-Ulysses (2309.14509), and Megatron-LM's `--cp-comm-type a2a`. Of C ranks each has a part of the sequence, as
`zigzag` says, for all operations but attention. Attention works on whole samples, of one C-th of the heads:

    [b, s / C, a, d] -> all-to-all -> [b, s, a / C, d] -> attention -> [b, s, a / C, d] -> all-to-all -> [b, s / C, a, d]

keys and values likewise; of fewer heads of keys than ranks, each is sent to all ranks that have its queries. So any kernel
runs, with the windows and documents that it has, and a causal mask has the same work for every rank.

One rank sends (C - 1) / C of its arrays: forward 2 a + 2 g heads, backward 4 a + 4 g, each b (s / C) d elements (g: heads of
keys, C at least), divided by the tensor size. A ring (`ring_attention.py`) sends its g heads 2 (C - 1) and 4 C - 2 times,
part of it while it multiplies. Unlike a ring, the ranks of a sample alone have to reach attention: every schedule runs it,
in branches too.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from megajax.config import ConfigError
from megajax.config.model_split import can_exchange
from megajax.ops.attention import Kernel
from megajax.ops.ring_attention import AxisName, neighbours
from megajax.ops.score_dropout import ScoreDropout

__all__ = ["exchanged_attention"]

SEQUENCE, HEADS = 1, 2  # axes of queries, keys and values


def exchanged_attention(kernel: Kernel, axis_name: AxisName, ranks: int) -> Kernel:
    """The kernel for a sequence that `ranks` neighbours on a mesh axis share as `zigzag` says.

    Its `first` has places in the whole sample, of the local queries. Call it inside a `shard_map` that is manual over
    `axis_name`, whose size `ranks` must divide.

    Args:
      kernel: multiplies whole samples.
      axis_name: the mesh axis, or several as one, outermost first.
      ranks: C; not 1.
    """
    return _Exchange(kernel, axis_name, ranks).kernel_of_parts()


class _Exchange:
    """The kernel of whole samples, and the all-to-alls among the groups of `ranks` neighbours on a mesh axis."""

    def __init__(self, kernel: Kernel, axis_name: AxisName, ranks: int, drop: ScoreDropout | None = None):
        self.kernel, self.axis_name, self.ranks, self.drop = kernel, axis_name, ranks, drop

    def kernel_of_parts(self) -> Kernel:
        """See `exchanged_attention`."""
        again = lambda drop: _Exchange(self.kernel, self.axis_name, self.ranks, drop).kernel_of_parts()  # noqa: E731
        return Kernel(partial(_forward, self), partial(_backward, self), self.kernel.dropping and again)

    def of_heads(self) -> Kernel:
        """The kernel for all queries of the samples, and this rank's part of the heads."""
        if self.drop is None:
            return self.kernel
        return self.kernel.dropping(dataclasses.replace(self.drop, keys=self.whole_samples(self.drop.keys, 1, 2)))

    def whole_samples(self, x: jax.Array, heads: int = HEADS, sequence: int = SEQUENCE) -> jax.Array:
        """From all heads of this rank's tokens to the whole sequence, in its order, of this rank's part of the heads."""
        x = self._all_to_all(x, heads, sequence)
        pieces = x.reshape(*x.shape[:sequence], self.ranks, 2, -1, *x.shape[sequence + 1 :])  # rank r: r, 2C - 1 - r
        first, second = (lax.index_in_dim(pieces, half, sequence + 1, keepdims=False) for half in (0, 1))
        return jnp.concatenate([first, jnp.flip(second, sequence)], sequence).reshape(x.shape)

    def own_tokens(self, x: jax.Array, heads: int = HEADS, sequence: int = SEQUENCE) -> jax.Array:
        """The inverse, and the transpose, of `whole_samples`."""
        pieces = x.reshape(*x.shape[:sequence], 2 * self.ranks, -1, *x.shape[sequence + 1 :])
        first, second = jnp.split(pieces, 2, sequence)
        pairs = jnp.stack([first, jnp.flip(second, sequence)], sequence + 1)
        return self._all_to_all(pairs.reshape(x.shape), sequence, heads)

    def _all_to_all(self, x: jax.Array, split: int, joined: int) -> jax.Array:
        groups = neighbours(self.axis_name, self.ranks)
        return lax.all_to_all(x, self.axis_name, split, joined, axis_index_groups=groups, tiled=True)

    def copies(self, query: jax.Array, key: jax.Array) -> int:
        """How often the heads of keys are repeated before they are sent.

        Raises:
          ConfigError: the heads of queries, or of keys, cannot be split over the ranks.
        """
        queries, keys = query.shape[HEADS], key.shape[HEADS]
        if not can_exchange(queries, keys, self.ranks):
            raise ConfigError(
                f"context_exchange = all_to_all cannot split {queries} heads of queries and {keys} of keys of a device over "
                f"context = {self.ranks}: pass --context-exchange ring."
            )
        return max(1, self.ranks // keys)

    def first_keys(self, first: jax.Array | None) -> jax.Array | None:
        """`first` of all queries of the samples, [b, s], from those of this rank's tokens."""
        if first is None:
            return None
        return self.whole_samples(jnp.repeat(first[..., None], self.ranks, -1))[..., 0]


def _forward(exchange, query, key, value, causal, first=None):
    copies = exchange.copies(query, key)
    query = exchange.whole_samples(query)
    key, value = (exchange.whole_samples(jnp.repeat(x, copies, HEADS)) for x in (key, value))
    output, statistics = exchange.of_heads().forward(query, key, value, causal, exchange.first_keys(first))
    return exchange.own_tokens(output), exchange.own_tokens(statistics, 1, 2)


def _backward(exchange, query, key, value, output, statistics, gradient, causal, first=None):
    copies = exchange.copies(query, key)
    repeated = (jnp.repeat(x, copies, HEADS) for x in (key, value))
    query, key, value, output, gradient = map(exchange.whole_samples, (query, *repeated, output, gradient))
    statistics = exchange.whole_samples(statistics, 1, 2)
    first = exchange.first_keys(first)
    gradients = exchange.of_heads().backward(query, key, value, output, statistics, gradient, causal, first)
    dq, dk, dv = map(exchange.own_tokens, gradients)
    if copies > 1:
        dk, dv = (_sum_of_copies(x, copies) for x in (dk, dv))
    return dq, dk, dv


def _sum_of_copies(x: jax.Array, copies: int) -> jax.Array:
    """The transpose of repeating heads, summed in fp32."""
    parts = x.reshape(*x.shape[:HEADS], -1, copies, x.shape[-1])
    return parts.sum(HEADS + 1, dtype=jnp.float32).astype(x.dtype)
