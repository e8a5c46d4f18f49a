"""What a block takes at least, whatever its schedule and other fields of its layout are: for bounds (`plan/bounds.py`)."""

from megajax.estimate.gpus import is_fused
from megajax.estimate.program_blocks import MERGED, Blocks
from megajax.estimate.program_kernels import Work
from megajax.estimate.trained import trained_parameters

__all__ = ["LeastBlocks"]


class LeastBlocks(Blocks):
    """A block of a run as for `Blocks`."""

    @property
    def least(self) -> tuple[float, float]:
        """Seconds of products, fused attention and experts' rows of a forward and a backward, whatever the schedule is.

        And those of the products that full recomputation does not repeat.
        """
        products = self._matmuls(self._products) + self._matmuls(self._products, "inputs")
        added = lambda one: "weights" if self.parallel.pipe > 1 or not one.experts else "outputs"  # noqa: E731
        if trained_parameters(self.program.run) is None:
            products += sum((self._matmuls([one], added(one)) for one in self._products), Work())
        if full := self.parallel.recompute == "full":
            products += self._matmuls(one for one in self._products if one.repeated)
        if is_fused(self.parallel):
            products += self.attention[0] * (1 + full) + self.attention[1]
        rows = self.traffic(self.expert_rows(0) + self.expert_rows(1, once=True)).total if self.held else 0.0
        once = self._matmuls(one for one in self._products if not one.repeated).matmul if full else 0.0
        return products.compute + rows, once

    @property
    def gathered(self) -> float:
        """Seconds of ZeRO-3's collectives of a forward and a backward, one after the other."""
        each = self.sharded([(one.weights, one.experts) for one in self._products])
        return 2 * (sum(each["gathers"]) + each["other_gathers"]) + sum(each["scatters"]) + each["other_scatters"]

    @property
    def kernels_alone(self) -> float:
        """Seconds of a forward and a backward, of several stages, without communication and the stash.

        Nothing takes less than both in a merged tick, but for the forward's norms where ticks do not merge.
        """
        norms = self.norms(backward=False, early=True).total - self.norms(backward=False).total
        kernels = self._forward_kernels + self._input_kernels + self._weight_kernels + self.kernels(-MERGED)
        return kernels.total + min(0.0, norms)
