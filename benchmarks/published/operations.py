"""Seconds of a published program's operations on one GPU, by the rates and link formulas of `megajax.estimate.rates`."""

import dataclasses
import math

from benchmarks.published.software import Software
from megajax.config import RunConfig
from megajax.estimate.gpus import Gpu
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.rates import devices_here, rates_of

__all__ = ["FITTED", "Fitted", "Operations"]


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The constants that are fitted to published rows: `python -m benchmarks.published --fit` finds them again.

    Attributes:
      gather_share: of the network's bandwidth, what DeepSpeed's gathers and scatters of ZeRO-3 reach, block by block over
        all GPUs.
      gather_overlap: how much of these collectives and the blocks' compute overlaps, as a fraction of the shorter of them.
    """

    gather_share: float
    gather_overlap: float


FITTED = Fitted(0.149, 0.501)
# Of the HBM's bandwidth, what kernels other than matmuls reach that are fused by hand, as those of these programs are. The
# rows say little of it: with 0.585 to 0.85, and shares of the products fitted to each, the root mean square of the errors of
# sources that are not held out is 4.4 to 5.2%.
FUSED_SHARE = 0.75
# Of the network's bandwidth, what ZeRO-3's collectives of other programs reach: nccl-tests reach 0.8 to 0.95 of it.
RINGS_SHARE = 0.8


class Operations:
    """Seconds of operations of a run; sizes are those on one device."""

    def __init__(self, run: RunConfig, gpu: Gpu, software: Software, fitted: Fitted = FITTED):
        """Raises ConfigError if the GPU has no peak for the run's precision."""
        self.parallel, self.software, self.fitted = run.parallel, software, fitted
        self.itemsize = ITEMSIZE[run.train.precision]
        rates = rates_of(gpu, run.train.precision)
        self.rates = dataclasses.replace(rates, memory=FUSED_SHARE * gpu.memory_bandwidth)
        share = software.attention_share
        self.attention_rate = share and share * gpu.peak(run.train.precision)
        # What ZeRO-3's collectives reach of the network, in which all GPUs take part.
        self.gather_share = fitted.gather_share if software.gathers_ahead else RINGS_SHARE
        self.adapter = gpu.network_bandwidth

    def matmul(self, rows: float, inner: float, columns: float, batch: float = 1) -> float:
        """`batch` products of [rows, inner] and [inner, columns]; on A100s all of the traffic comes on top.

        That makes small and narrow matmuls slower for each FLOP, as they are.
        """
        written = batch * rows * columns * self.itemsize
        moved = batch * (rows * inner + inner * columns) * self.itemsize + written
        flops = 2 * batch * rows * inner * columns
        if math.isinf(self.rates.bandwidth):
            return flops / self.rates.matmul + self.traffic(moved)
        return self.rates.product(flops, written, moved)

    def traffic(self, count: float) -> float:
        """Reading or writing `count` bytes of memory."""
        return count / self.rates.memory

    def attention(self, flops: float, keys: float, width: float) -> float:
        """Fused attention whose two products take `flops`, of the scores that the causal mask and window leave.

        `keys`: of these for each query, on average; `width`: elements of a head.
        """
        return flops / (self.attention_rate or self.rates.attention_rate(False, keys, width))

    def collective(
        self, count: float, group: int, axis: str, pieces: int = 1, apart: int = 1, zero_3: bool = False
    ) -> float:
        """A reduce-scatter or an all-gather of `count` bytes in all over `group` devices. An all-reduce is both.

        Args:
          count: bytes.
          group: devices.
          axis: of the mesh, along which they are neighbours.
          pieces: how many collectives the bytes are sent in; each has its own latency.
          apart: distance of the neighbours along that axis.
          zero_3: whether the network is used as by ZeRO-3's collectives, for all of the step.
        """
        if group == 1:
            return 0.0
        rates, here = self.rates, devices_here(self.parallel, self.rates.host_size, group, axis, apart)
        if zero_3:
            rates = dataclasses.replace(rates, network=self.gather_share * self.adapter)
        latency = rates.collective("all-gather", 0.0, group, here)
        return rates.collective("all-gather", count * (group - 1) / group, group, here) + (pieces - 1) * latency

    def send(self, count: float, axis: str) -> float:
        """`count` bytes from a device to its neighbour along a mesh axis."""
        here = devices_here(self.parallel, self.rates.host_size, 2, axis)
        return self.rates.collective("collective-permute", count, 2, here)
