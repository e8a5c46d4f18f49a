"""What a block takes at least, whatever its schedule and other fields of its layout are: for bounds (`plan/bounds.py`)."""

from typing import NamedTuple

from megajax.estimate.gpus import is_fused
from megajax.estimate.program_blocks import MERGED, Blocks
from megajax.estimate.trained import trained_parameters

__all__ = ["LeastBlocks", "LeastTimes"]


class LeastTimes(NamedTuple):
    """Seconds of a forward, of the two parts of a backward, and of all in a merged tick, without communication."""

    forward: float
    input: float
    weight: float
    merged: float


class LeastBlocks(Blocks):
    """A block of a run as for `Blocks`."""

    @property
    def least(self) -> LeastTimes:
        """Of products, fused attention and experts' rows, whatever the schedule is."""
        outputs, inputs = self._matmuls(self._products).compute, self._matmuls(self._products, "inputs").compute
        added = lambda one: "weights" if self.parallel.pipe > 1 or not one.experts else "outputs"  # noqa: E731
        weight = 0.0
        if trained_parameters(self.program.run) is None:
            weight = sum(self._matmuls([one], added(one)).compute for one in self._products)
        forward, full = outputs, self.parallel.recompute == "full"
        if is_fused(self.parallel):
            forward += self.attention[0].compute
            inputs += self.attention[1].compute + full * self.attention[0].compute
        if full:
            inputs += self._matmuls(one for one in self._products if one.repeated).compute
        if self.held:
            forward += self.traffic(self.expert_rows(0)).compute
            inputs += self.traffic(self.expert_rows(1, once=True)).compute
        return LeastTimes(forward, inputs, weight, forward + inputs + weight)

    @property
    def once(self) -> float:
        """Seconds of the products that full recomputation does not repeat."""
        full = self.parallel.recompute == "full"
        return self._matmuls(one for one in self._products if not one.repeated).matmul if full else 0.0

    @property
    def gathered(self) -> float:
        """Seconds of ZeRO-3's collectives of a forward and a backward, one after the other."""
        each = self.sharded([(one.weights, one.experts) for one in self._products])
        return 2 * (sum(each["gathers"]) + each["other_gathers"]) + sum(each["scatters"]) + each["other_scatters"]

    @property
    def kernels_alone(self) -> LeastTimes:
        """Of all kernels of several stages, without the stash.

        Nothing takes less than both in a merged tick, but for the forward's norms where ticks do not merge. Where backwards
        are split, W reads a gated MLP's gates.
        """
        norms = self.norms(backward=False, early=True).total - self.norms(backward=False).total
        late = self.traffic(self._gates_of_w).total
        forward, part, weight = (
            one.total for one in (self._forward_kernels, self._input_kernels, self._weight_kernels)
        )
        merged = forward + part + weight + self.kernels(-MERGED).total + min(0.0, norms)
        return LeastTimes(forward + min(0.0, norms), part - late, weight + late, merged)
