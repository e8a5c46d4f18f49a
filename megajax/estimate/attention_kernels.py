"""What a block has for attention: its products, and what ranks that share samples send, and copy, for it."""

import functools

from megajax.estimate.communication import context_elements, copied_heads, exchanged_elements
from megajax.estimate.program_kernels import Kernels, Work
from megajax.estimate.rates import TOKAMAX_BACKWARD, devices_here
from megajax.ops.attention_choice import FUSED, has_head_sizes

__all__ = ["CONTEXT_MERGED", "AttentionKernels"]

# Ring attention, of a forward and of a backward: passes over the queries, and over the keys and the values each, and kernels
# for each step of the ring; and once, to sum up the steps' results, over the queries.
RING_QUERIES, RING_KEYS, RING_KERNELS = (3, 7), (4, 10), (8, 13)
RING_ENDS = 2
# Exchange of the sequence for heads: passes over each array that is exchanged, and kernels of a forward.
EXCHANGE_PASSES, EXCHANGE_KERNELS = 2, 8
# Attention without a fused kernel: passes over queries, keys and values that bring them into the layout of its products, and
# their results and gradients out of it, besides those of fused attention; of a forward and of a backward.
UNFUSED_COPIES = (10 / 3, 8)
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
        if parallel.attention in FUSED:
            sizes = attention.sizes
            query, value = sizes if has_head_sizes(parallel.attention, *sizes) else [max(sizes)] * 2
            scores = heads * attention.pairs(tokens) / parallel.context
            # of a backward's five products, queries and keys are in three
            flops = 2 * scores * (query + value), 2 * scores * (3 * query + 2 * value)
            if parallel.attention == "tokamax":
                flops = flops[0], TOKAMAX_BACKWARD * flops[0]
            # a kernel of a ring's step has the keys of one rank only, on average half of them where they are masked
            here = tokens / parallel.ring_ranks / (2 if attention.causal else 1)
            keys = min(attention.pairs(tokens) / tokens, here)
            rates = [self.rates.attention_rate(backward, keys, attention.head_size) for backward in (False, True)]
            forward, backward = (
                Work(attention=one / rate, gaps=self.rates.gap) for one, rate in zip(flops, rates, strict=True)
            )
            return forward, backward, Work()
        return (self._unfused if parallel.context == 1 else self._with_statistics)(heads, queries, tokens)

    def _unfused(self, heads: float, queries: float, tokens: float) -> tuple[Work, Work, Work]:
        """As `attention`, of products and kernels that XLA makes of a softmax, on so many heads of all samples.

        A forward reads the scores for their maximum, for their sum, and for the probabilities that it writes. A backward
        reads scores or probabilities and their gradient twice, and writes the scores' gradient; where it computes scores
        again it reads them twice more, and writes the probabilities. What dropout kept is a byte of a score, written and
        read. Where the probabilities are kept, they are written before and after dropout.
        """
        attention, mode, scores = self.model.attention, self.parallel.recompute, heads * queries * tokens
        width = attention.mean_size
        written = scores * self.item
        moved = written + heads * (queries + tokens) * width * self.item
        product = self.rates.product(2 * scores * width, written, moved)

        arrays = (heads * queries + 2 * tokens * heads * attention.groups / attention.heads) * width * self.item
        forward, backward = UNFUSED_COPIES

        def work(products: int, passes: int, masks: int, copies: float = 0) -> Work:
            moved = passes * scores * self.item + self.drops * masks * scores + copies * arrays
            return Work(matmul=products * product, gaps=products * self.rates.gap) + self.traffic(moved, 4)

        if mode not in attention.scores_recomputed:
            return work(2, 4, 3), work(4, 4, 4), Work()
        of_gradients = work(4, 4, 3 if mode == "full" else 2, backward)
        return work(2, 4, 0, forward), of_gradients, work(1, 4, 0)

    def _with_statistics(self, heads: float, queries: float, tokens: float) -> tuple[Work, Work, Work]:
        """As `_unfused`, of XLA's attention on ranks that share samples (`ops/attention_kernels.py`), with scores in fp32.

        Of the pieces of a causal ring it has those that are not hidden. A forward reads the scores three times, and writes
        the probabilities. A backward computes the scores again, reads them and the probabilities' gradient, and writes the
        probabilities and the scores' gradient. What dropout kept is a byte of a score, written and read by the backward.
        """
        attention, ring = self.model.attention, self.parallel.ring_ranks
        scores = heads * queries * tokens * ((1 + ring) / (2 * ring) if attention.causal else 1)
        flops = 2 * scores * attention.mean_size
        fp32, probabilities = 4 * scores, self.item * scores
        writes, reads = self.rates.product(flops, fp32, fp32), self.rates.product(flops, 0, probabilities)
        gaps = ring * self.rates.gap
        forward = Work(matmul=writes + reads, gaps=2 * gaps) + self.traffic(3 * fp32 + probabilities, 3 * ring)
        moved = 2 * fp32 + 2 * probabilities + 2 * self.drops * scores
        return forward, Work(matmul=2 * writes + 3 * reads, gaps=5 * gaps) + self.traffic(moved, 2 * ring), Work()

    def between_ranks(self, backward: int) -> Work:
        """Copies and partial results of a forward (0) or a backward (1) whose samples several ranks share."""
        work = Work()
        heads, steps = self.model.attention, self.parallel.ring_ranks - 1
        if heads is not None and steps:
            moved = (steps * RING_QUERIES[backward] + RING_ENDS) * self._queries
            moved += steps * RING_KEYS[backward] * context_elements(self.run) * self.item
            work += self.traffic(moved, steps * RING_KERNELS[backward])
        if heads is not None and self.parallel.context > self.parallel.ring_ranks:
            arrays = (2 + 2 * backward) * sum(exchanged_elements(self.run)) * self.item
            work += self.traffic(EXCHANGE_PASSES * arrays, EXCHANGE_KERNELS * (1 + backward))
        if elements := copied_heads(self.run):
            work += self.traffic(EXCHANGE_PASSES * elements * self.item, EXCHANGE_KERNELS)
        return work

    @property
    def _queries(self) -> float:
        """Bytes of a block's queries on a device, or of their results: of both on average."""
        heads = self.model.attention
        return self.rows * heads.heads * heads.mean_size / self.parallel.tensor * self.item

    def around(self, backward: int) -> float:
        """Seconds of exposed sends of attention's arrays between C ranks, and over tensor (`copied_heads`), in one block.

        Exchanged for heads (`ops/exchanged_attention.py`) all of them are exposed. Keys and values round a ring:

        XLA starts those of a forward before the first product, beside the queries' rotation, and so hides only the last. In
        a backward they run beside the steps' products, those of gradients too. Where a tensor group has collectives as well,
        about as many of a backward as of a forward are exposed, and those of both run beside nothing else.
        """
        copied = self._copied(backward)
        if self.parallel.context == 1 or not context_elements(self.run):
            return copied
        if self.parallel.ring_ranks == 1:
            return copied + sum(self.exchanges(backward))
        sends, beside = self.round_ring(backward)
        return copied + max(0.0, sends - beside)

    def _copied(self, backward: int) -> float:
        """Seconds of the all-to-all that gives each rank of tensor a copy of a head of keys, and of its transpose."""
        tensor, elements = self.parallel.tensor, copied_heads(self.run)
        if not elements:
            return 0.0
        here = devices_here(self.parallel, self.rates.host_size, tensor, "tensor")
        again = 1 + (backward and self.parallel.recompute == "full")
        return again * self.rates.all_to_all(elements * self.item / tensor, tensor, here)

    def exchanges(self, backward: int) -> tuple[float, float]:
        """Seconds of the exchanges for heads before attention and behind it: in a backward of all arrays, then gradients."""
        parallel, ranks = self.parallel, self.parallel.context
        if ranks == 1 or parallel.ring_ranks > 1 or self.model.attention is None:
            return 0.0, 0.0
        here = devices_here(parallel, self.rates.host_size, ranks, "data")
        sent = (one * self.item / ranks for one in exchanged_elements(self.run))
        queries, keys = (self.rates.all_to_all(one, ranks, here) for one in sent)
        return (3 * queries + 2 * keys, queries + 2 * keys) if backward else (queries + 2 * keys, queries)

    def round_ring(self, backward: int) -> tuple[float, float]:
        """Seconds of the sends round the ring that attention waits for, and of the kernels beside them: see `around`."""
        if self.parallel.ring_ranks == 1 or not (elements := context_elements(self.run)):
            return 0.0, 0.0
        ranks = self.parallel.context
        one, alone = self.send(elements * self.item, "data", ranks), self.parallel.tensor == 1
        if backward and alone:
            return (4 * ranks - 2) * one, self.attention[1].compute
        beside = 2 * self._queries / self.rates.memory if alone else 0.0
        return (2 * (ranks - 1) - (1 - backward)) * one, beside
