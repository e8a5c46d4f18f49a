"""What a block with experts has besides its matmuls: weights and gradients, rows, tokens to other replicas and back.

Expert parallelism gathers the tokens of a group of replicas, or sends each token to its experts' replicas
(`ops/expert_dispatch.py`). Arrays have room for all rows that can be there (`Experts.rows`), and elementwise kernels process
all of it. The constants were read from programs compiled for H100s.
"""

import functools

import numpy as np

from megajax.estimate.communication import BlockSends, block_sends
from megajax.estimate.expert_dispatch import dispatches
from megajax.estimate.program_kernels import Kernels, Work

__all__ = ["EXPERTS_HIDDEN", "SLICE", "ExpertKernels"]

SLICE = 4  # bytes for each parameter of a 16-bit copy out of the stack of layers, read and written
# Bytes for each parameter on the device of its fp32 gradient, which is copied out of the sums, added and written, or without
# a loop over blocks added. Passes over the hidden elements of rows and over what the MLP computes of them, of a forward and
# of a backward; kernels of both, and more of them where tokens are sent by all-to-all.
EXPERT_SUMS, UNROLLED_SUMS = 20, 12
HIDDEN_PASSES, INNER_PASSES = (3, 4), (1, 3)
EXPERT_KERNELS, ROUTED_KERNELS = (25, 45), (15, 20)
# And of their communication in a merged tick what the other pass hides: with tensor parallelism, and without.
EXPERTS_HIDDEN = (0.4, 0.0)


class ExpertKernels(Kernels):
    """The parts of a block that has experts; nothing for one without."""

    @functools.cached_property
    def room(self) -> float:
        """Rows that experts' arrays have for each row that balanced routing gives them; elementwise kernels process all."""
        return self.model.expert_rows(self.parallel.expert)

    @functools.cached_property
    def held(self) -> int:
        """Parameters of a block's experts on the device."""
        parallel = self.parallel
        return self.model.experts.on_device(parallel.tensor, parallel.expert) if self.model.experts else 0

    def expert_traffic(self, backward: int) -> Work:
        """What a forward (0) or a backward (1) moves of experts' weights, of their gradients' sums, and of rows."""
        if not self.held:
            return Work()
        model, parallel, unrolls = self.model, self.parallel, self.program.unrolls
        copies = 1 + backward * self.program.splits  # of weights out of the stack: I and W have one each
        weights = self.held * (SLICE * (0 if backward and unrolls else copies))
        sums = backward * self.held * (UNROLLED_SUMS if unrolls else EXPERT_SUMS)
        hidden = HIDDEN_PASSES[backward] * model.experts.chosen * model.hidden
        inner = INNER_PASSES[backward] * model.routed_inner / parallel.tensor
        tokens = parallel.expert * model.hidden  # which the group sends here
        rows = self.rows * self.item * (self.room * (hidden + inner) + 2 * tokens)
        kernels = EXPERT_KERNELS[backward] + ROUTED_KERNELS[backward] * (parallel.expert_dispatch == "all_to_all")
        return self.traffic(weights + sums + rows, kernels)

    @functools.cached_property
    def dispatched(self) -> tuple[float, float]:
        """Seconds in which a forward and a backward send tokens to their experts' replicas, and results back."""
        sent = [
            (one, one.seconds(self.parallel, self.rates)) for one in dispatches(self.model, self.parallel, self.item)
        ]
        return sum(one.forward * each for one, each in sent), sum(one.backward * each for one, each in sent)

    @functools.cached_property
    def sends(self) -> BlockSends:
        """The block's collectives over `tensor`, as the program's description has them."""
        return block_sends(self.parallel, self.model)

    @functools.cached_property
    def _prices(self) -> np.ndarray:
        """Seconds of each of `PAIRS`."""
        one, tensor = self._collective, self.parallel.tensor
        tokens = self.parallel.expert * self.rows * self.model.hidden * self.item
        gather, reduce = self.ring(tokens, tensor, "tensor"), self.all_reduce(tokens, tensor, "tensor")
        return np.array([one, one, 2 * one, one, one, 2 * one, gather, gather, reduce])

    def over_tensor(self, counts: np.ndarray) -> tuple[float, float, float]:
        """Seconds of so many of `PAIRS`: (of all that kernels may hide, of those round a ring, of the others).

        The others are of experts over several replicas: tokens that all of these have here, the sums of their results, and
        the router's own.
        """
        seconds, alone = counts * self._prices, 6 if self.parallel.expert == 1 else 3
        return float(seconds[:alone].sum()), float(seconds[:3].sum()), float(seconds[alone:].sum())
