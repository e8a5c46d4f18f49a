"""What a block with experts has besides its matmuls: weights and gradients, rows, tokens to other devices and back.

Expert parallelism gathers the tokens of a group of replicas, or of their tensor ranks (`--expert-tensor 1`), or sends each
token to its experts' devices (`ops/expert_dispatch.py`). Arrays have room for all rows that can be there (`Experts.rows`),
and elementwise kernels process all of it. The constants were read from programs compiled for H100s.
"""

import functools
from collections.abc import Iterable

import numpy as np

from megajax.estimate.communication import BlockSends, block_sends
from megajax.estimate.expert_dispatch import DispatchSeconds, by_all_to_all, expert_seconds, sent_bytes
from megajax.estimate.kept import kept_by_experts, routed_tokens
from megajax.estimate.program_kernels import Kernels, Product, Work
from megajax.models.costs import Matmul
from megajax.ops.grouped_matmul import MULTIPLIES_8_BITS
from megajax.ops.tokamax_kernels import FASTEST_PRODUCT

__all__ = ["SLICE", "ExpertKernels"]

SLICE = 4  # bytes for each parameter of a 16-bit copy out of the stack of layers, read and written
# Bytes for each parameter on the device of its fp32 gradient where its kernel does not add it to the sums: it is copied out
# of them, added and written. Passes over the hidden elements of rows and over what the MLP computes of them, of a forward
# and of a backward; of a backward whose kernel reads gate and value once, over what it computes of those rows that balanced
# routing gives a device.
EXPERT_SUMS = 20
HIDDEN_PASSES, INNER_PASSES, ONE_PASS = (2, 3), (1, 3), 2
# Loops over rounds of dispatch, for each of which the host waits.
ROUNDS = (1, 3)
# For collectives: passes over the group's tokens, which are transposed where a tensor group shares the sequence, and
# otherwise read to be summed; with all-to-all over what is received and over what is sent. Kernels of both passes, and more
# of them with all-to-all or rounds.
GATHERED_PASSES, SUMMED_PASSES, RECEIVED_PASSES, SENT_PASSES = (4, 6), (1, 2), (1, 4), (2, 4)
EXPERT_KERNELS, ROUTED_KERNELS = (25, 45), (15, 20)
RANK_KERNELS = 10, 12  # more of them where tensor ranks have experts of their own: of logits and of each rank's choices
# Where tokens are sent in 8 bits: passes that have them so, over what is received, and those that make them, over a
# replica's own tokens (read off the program of two of DeepSeek-V3's layers).
PASSES_IN_8_BITS, ROUNDING_PASSES = (2, 4), (4.5, 4.5)
# Operands of experts' products that XLA rounds: read for their largest, read and written.
ROUNDED = 3


class ExpertKernels(Kernels):
    """The parts of a block that has experts; nothing for one without."""

    @functools.cached_property
    def room(self) -> float:
        """Rows that experts' arrays have for each row that balanced routing gives them; elementwise kernels process all."""
        return self.model.expert_rows(self.parallel.expert, self.parallel.expert_dispatch)

    @functools.cached_property
    def routed(self) -> int:
        """Tokens of a microbatch for each of which the device has rows of k experts, with balanced routing."""
        return routed_tokens(self.model, self.parallel)

    @functools.cached_property
    def received(self) -> float:
        """Places of tokens that the group sends to a device, for each of `routed`: all, or those of a bucket."""
        experts, parallel = self.model.experts, self.parallel
        return experts.places(parallel.expert, parallel.expert_dispatch) if experts else parallel.expert

    @functools.cached_property
    def held(self) -> int:
        """Parameters of a block's experts on the device."""
        parallel = self.parallel
        return self.model.experts.on_device(parallel.expert_shares, parallel.expert) if self.model.experts else 0

    def on_device(self, one: Matmul) -> tuple[float, float]:
        """`Matmul.on_device`; a router reads a part of the sequence where tensor ranks have experts of their own."""
        parallel = self.parallel
        if one.name.startswith("experts"):
            return one.on_device(parallel.expert_shares)
        part = parallel.tensor if one.name == "router" and parallel.experts_over_tensor else 1
        inputs, outputs = one.on_device(parallel.tensor)
        return inputs, outputs / part

    def elements(self, one: Product) -> tuple[float, float]:
        """(inputs, outputs) of a product for each token of a microbatch on the device."""
        part = self.routed / self.rows if one.experts else 1
        return one.inputs * part, one.outputs * part

    def expert_traffic(self, backward: int) -> Work:
        """What a forward (0) or a backward (1) moves of experts' weights, of their gradients' sums, and of rows."""
        if not self.held:
            return Work()
        parallel = self.parallel
        in_place, splits = self.program.experts_in_place, backward and self.program.splits
        copies = 2 if splits else not in_place  # out of the stack, one each of I and W
        weights = self.held * SLICE * copies
        alone = parallel.replicas == parallel.expert_replicas  # not scattered by ZeRO-3
        whole = in_place or self.program.in_place and alone
        sums = backward * self.held * (0 if whole else EXPERT_SUMS)
        experts = self.model.experts
        rounds = experts.in_rounds(parallel.expert, parallel.expert_dispatch)
        kernels = EXPERT_KERNELS[backward] + ROUTED_KERNELS[backward] * (rounds or by_all_to_all(experts, parallel))
        kernels += RANK_KERNELS[backward] * parallel.experts_over_tensor
        waits = Work(waits=rounds * ROUNDS[backward] * self.rates.synchronisation)
        return self.traffic(weights + sums + self.expert_rows(backward), kernels) + waits

    def expert_rows(self, backward: int, *, once: bool = False) -> float:
        """Bytes that a forward (0) or a backward (1) of a block with experts moves of rows; `once`: in one pass anyway."""
        model = self.model
        hidden = HIDDEN_PASSES[backward] * model.experts.choice.chosen * model.hidden
        once = backward and (once or self.program.expert_gates_in_one_pass)
        inner = (ONE_PASS / self.room if once else INNER_PASSES[backward]) * model.routed_inner
        inner /= self.parallel.expert_shares
        tokens = self.received * model.hidden  # which the group sends here
        return self.routed * self.item * (self.room * (hidden + inner) + 2 * tokens + self._copies(backward))

    @functools.cached_property
    def rate_in_8_bits(self) -> int:
        """The rate of experts' products relative to that of 16 bits: 2 where they are in 8 bits, with the kernels for it."""
        return 2 if self.run.train.expert_matmul_dtype == "fp8" and self._generation == MULTIPLIES_8_BITS else 1

    def multiplied(self, one: Product, of: str) -> float:
        """Elements of a token's rows that a product of experts multiplies by weights; `of` as of `Blocks._matmuls`."""
        size = one.inputs if of == "outputs" else one.outputs
        return size * (self.model.experts.choice.chosen if size == self.model.hidden else 1)

    def quantized(self, products: Iterable[tuple[Product, str]]) -> Work:
        """What experts' products of these need before them: their operands in 8 bits, or rounded to 16."""
        each, kernels = (self.item + 1, 2) if self.rate_in_8_bits > 1 else (ROUNDED * self.item, 4)
        counts = [self.routed * self.multiplied(*one) + one[0].experts for one in products]
        return self.traffic(each * sum(counts), kernels * len(counts))

    @property
    def _generation(self) -> int:
        return (self.gpu.compute_capability or (0, 0))[0]

    @functools.cached_property
    def stashed(self) -> int:
        """Bytes of rows that the kernel of experts' first matmul writes to the stash (`in_place.of_part`): Pallas's."""
        rounds = self.run.train.expert_matmul_dtype == "fp8" and self._generation != MULTIPLIES_8_BITS
        elsewhere = rounds or self._generation == FASTEST_PRODUCT
        writes = self.held and self.program.experts_in_place and not elsewhere
        return kept_by_experts(self.run, self.item) if writes else 0

    def _copies(self, backward: int) -> float:
        """Elements for each of the `routed` tokens that are moved for the collectives over `expert` and `tensor`."""
        parallel, degree = self.parallel, self.parallel.expert
        split = 1 if parallel.experts_over_tensor else self.split
        if degree == 1:
            return 0.0
        passes = GATHERED_PASSES[backward] * self.received * (split > 1)
        if not by_all_to_all(self.model.experts, parallel):
            passes = passes or SUMMED_PASSES[backward] * self.received
        else:
            to = self.model.experts.choice.destinations(degree)
            passes += RECEIVED_PASSES[backward] * self.received + SENT_PASSES[backward] * to
        if (sent := sent_bytes(self.run)) < self.item:
            passes -= PASSES_IN_8_BITS[backward] * self.received * (1 - sent / self.item)
            passes += ROUNDING_PASSES[backward]
        return passes * self.model.hidden / split

    @functools.cached_property
    def dispatched(self) -> DispatchSeconds:
        """Sending a microbatch's tokens to their experts' devices, and results back."""
        return expert_seconds(self.model, self.parallel, self.rates, self.item, sent_bytes(self.run))

    def exposed_dispatch(self, of: str, beside: Work) -> float:
        """Seconds of it that no kernel hides, `of` a "backward", or of both passes "merged", with these kernels."""
        whole = self.dispatched.backward + (self.dispatched.forward if of == "merged" else 0.0)
        return max(getattr(self.dispatched.exposed, of), whole - beside.compute)

    @functools.cached_property
    def sends(self) -> BlockSends:
        """The block's collectives over `tensor`, as the program's description has them."""
        return block_sends(self.parallel, self.model)

    @functools.cached_property
    def _prices(self) -> np.ndarray:
        """Seconds of each of `PAIRS`."""
        one, tensor = self._collective, self.parallel.tensor
        tokens = self.received * self.rows * self.model.hidden * self.item
        gather, reduce = self.ring(tokens, tensor, "tensor"), self.all_reduce(tokens, tensor, "tensor")
        return np.array([one, one, 2 * one, one, one, 2 * one, gather, gather, reduce])

    def over_tensor(self, counts: np.ndarray) -> tuple[float, float, float]:
        """Seconds of so many of `PAIRS`: (of all that kernels may hide, of those round a ring, of the others).

        The others are of experts over several replicas: tokens that all of these have here, the sums of their results, and
        the router's own.
        """
        seconds, alone = counts * self._prices, 6 if self.parallel.expert == 1 else 3
        return float(seconds[:alone].sum()), float(seconds[:3].sum()), float(seconds[alone:].sum())
