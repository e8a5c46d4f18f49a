"""What a block has for attention: its products, and what ranks that share samples send, and copy, for it."""

import functools

from megajax.estimate.communication import context_sends, exchanged_elements
from megajax.estimate.gpus import is_fused
from megajax.estimate.program_kernels import Kernels, Work
from megajax.estimate.rates import FUSED_BACKWARD, TOKAMAX_BACKWARD, devices_here

__all__ = ["CONTEXT_MERGED", "AttentionKernels"]

# Ring attention: passes over the queries for each step of the ring, and kernels, of a forward and of a backward.
RING_PASSES, RING_KERNELS = (8, 18), (8, 13)
# Exchange of the sequence for heads: passes over each array that is exchanged, and kernels of a forward.
EXCHANGE_PASSES, EXCHANGE_KERNELS = 2, 8
# Of the exchanges of both passes merged, what is exposed.
CONTEXT_MERGED = 0.5


class AttentionKernels(Kernels):
    """Attention of a block; nothing for a model without."""

    @property
    def drops(self) -> bool:
        return self.model.attention is not None and self.model.attention.dropout > 0

    @functools.cached_property
    def attention(self) -> tuple[Work, Work, Work]:
        """Attention's forward, its backward, and what the backward recomputes in modes short of full."""
        attention, parallel = self.model.attention, self.parallel
        if attention is None:
            return Work(), Work(), Work()
        tokens, heads = self.model.sequence_length, parallel.microbatch_size * attention.heads / parallel.tensor
        queries = tokens // parallel.context
        if is_fused(parallel):
            flops = 4 * heads * attention.pairs(tokens) * attention.width / parallel.context
            factor = TOKAMAX_BACKWARD if parallel.attention == "tokamax" else FUSED_BACKWARD
            keys = attention.pairs(tokens) / tokens
            rates = [self.rates.attention_rate(backward, keys, attention.head_size) for backward in (False, True)]
            forward = Work(attention=flops / rates[0], gaps=self.rates.gap)
            backward = Work(attention=factor * flops / rates[1], gaps=self.rates.gap)
            return forward, backward, Work()
        scores = heads * queries * tokens
        moved = 4 * scores * self.item  # for the maximum, for the sum, and the softmax's reads and writes
        flops = scores * (
            attention.head_size + (attention.value_size or attention.head_size)
        )  # a product's, on average
        written = scores * self.item
        product = self.rates.product(flops, written, written)
        passes = self.traffic(moved + (scores * (2 * self.item + 1) if self.drops else 0), 4)
        forward = Work(matmul=2 * product, gaps=2 * self.rates.gap) + passes
        again = forward if parallel.recompute in attention.scores_recomputed else Work()
        backward = Work(matmul=4 * product, gaps=4 * self.rates.gap) + passes
        return forward, backward, again

    def between_ranks(self, backward: int) -> Work:
        """Copies and partial results of a forward (0) or a backward (1) whose samples several ranks share."""
        work = Work()
        heads, steps = self.model.attention, self.parallel.ring_ranks - 1
        if heads is not None and steps:
            queries = self.rows * heads.heads * heads.width / self.parallel.tensor * self.item
            work += self.traffic(steps * RING_PASSES[backward] * queries, steps * RING_KERNELS[backward])
        if heads is not None and self.parallel.context > self.parallel.ring_ranks:
            arrays = (2 + 2 * backward) * sum(exchanged_elements(self.run)) * self.item
            work += self.traffic(EXCHANGE_PASSES * arrays, EXCHANGE_KERNELS * (1 + backward))
        return work

    def around(self, backward: int) -> float:
        """Seconds of exposed sends of attention's arrays between C ranks, in one block.

        Exchanged for heads (`ops/exchanged_attention.py`) all of them are exposed. Keys and values round a ring:

        XLA starts all of them before the first product, and so hides only the last of a forward; in a backward, which sends
        gradients too, about as many are exposed.
        """
        ranks, (_, elements) = self.parallel.context, context_sends(self.run)
        if ranks == 1 or not elements:
            return 0.0
        if self.parallel.ring_ranks == 1:
            here = devices_here(self.parallel, self.rates.host_size, ranks, "data")
            part = [one * self.item / ranks for one in exchanged_elements(self.run)]
            return (2 + 2 * backward) * sum(self.rates.all_to_all(one, ranks, here) for one in part)
        return (2 * (ranks - 1) - (1 - backward)) * self.send(elements * self.item, "data", ranks)
