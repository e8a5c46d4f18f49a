"""What kernels and links of a GPU reach: shares of the published peaks, or what a calibration measured."""

import dataclasses
from collections.abc import Mapping

from megajax.estimate.gpus import Gpu
from megajax.estimate.measured import Link, Measured, rate_at
from megajax.estimate.op_costs import CHIPS, FUSED_ATTENTION_SHARE, RINGS_SHARE

__all__ = ["Rates", "rates_of"]


@dataclasses.dataclass(frozen=True)
class Rates:
    """What kernels reach on a GPU.

    Attributes:
      matmul, attention: FLOP/s, of matmuls in 8 bits twice as many. Attention's are of the scores that are computed.
      matmuls: measured rates by size (`measured.rate_at`), in place of `matmul`.
      attention_backward: measured FLOP/s of attention's backward; None: those of its forward.
      memory: bytes/s of HBM.
      host, network: bytes/s that a GPU sends to its host's other GPUs, and to other hosts.
      host_size: GPUs in a host.
      links: measured latencies and bandwidths by XLA's kind of collective, within a host and between hosts, in place of
        `host` and `network`.
      attention_part: of the square of scores, the part that attention kernels compute that do not say it themselves: half
        under a causal mask, else 1.
      pcie: bytes/s to and from the host's memory.
      routed_part: of the rows that a device has for experts, those that balanced routing gives it.
      ragged_part: of the rows that a ragged all-to-all has room for, those that balanced routing sends.
      gap: seconds between two kernels.
      synchronisation: seconds for which the device idles when the host reads a loop's condition or a branch's index.
    """

    matmul: float
    attention: float
    memory: float
    host: float
    network: float
    host_size: int
    attention_part: float = 0.5
    pcie: float = 64e9
    routed_part: float = 1.0
    ragged_part: float = 1.0
    gap: float = 2e-6
    synchronisation: float = 25e-6
    matmuls: tuple[tuple[float, float], ...] = ()
    attention_backward: float | None = None
    links: Mapping[str, tuple[Link | None, Link | None]] = dataclasses.field(default_factory=dict)

    def matmul_rate(self, flops: float) -> float:
        """FLOP/s of a product of this size."""
        return rate_at(self.matmuls, flops) if self.matmuls else self.matmul

    def attention_rate(self, backward: bool) -> float:
        """FLOP/s of attention's forward or backward."""
        return self.attention_backward if backward and self.attention_backward else self.attention

    def collective(self, kind: str, sent: float, group: int, here: int) -> float:
        """Seconds of one of XLA's kinds of collectives, in which each device of a group sends `sent` bytes.

        A latency is of a measured link; otherwise it is the gap between two kernels. `group` and `here` as for `link`.
        """
        near, far = self.links.get(kind, (None, None))
        if here >= group:
            return near.seconds(sent) if near else sent / self.host + self.gap
        if far is None:
            return sent / self.link(group, here) + self.gap
        fastest = near.bandwidth if near else self.host
        return far.latency + sent / min(fastest, here * far.bandwidth)

    def link(self, group: int, here: int) -> float:
        """Bytes/s at which a device sends in a ring of `group` devices, `here` of them in each host.

        Between hosts each of these contributes its network adapter.
        """
        return self.host if here >= group else min(self.host, here * self.network)


# The share of the peak that a large product reaches with the traffic of its operands, which is not added here. The A100's
# is that of two matrices of 8192 x 8192 by `OpCosts`, with the constants fitted there.
MATMUL_SHARE = {"a100": 0.784, **CHIPS}
MEMORY = 0.9  # of the HBM's bandwidth: what copy kernels reach


def rates_of(gpu: Gpu, precision: str) -> Rates:
    """The rates of a GPU in "bf16", "fp16" or "fp32": of matmuls and attention by their shares of the peak.

    Links are at their peaks; the network of a cluster that was measured is as much slower as that was than nccl-tests. What
    a calibration measured replaces all of these; matmuls and attention if it was in this precision. All-to-alls, which it
    does not measure, have its bandwidths of all-gathers.

    Raises:
      ConfigError: the GPU has no tensor cores for that type.
    """
    peak = gpu.peak(precision)
    published = Rates(
        matmul=MATMUL_SHARE[gpu.family] * peak,
        attention=FUSED_ATTENTION_SHARE[gpu.family] * peak,
        memory=MEMORY * gpu.memory_bandwidth,
        host=gpu.host_bandwidth,
        network=gpu.network_bandwidth * min(1.0, gpu.network_share / RINGS_SHARE),
        host_size=gpu.host_size,
        pcie=gpu.pcie_bandwidth,
    )
    return published if gpu.measured is None else _with_measured(published, gpu.measured, precision)


def _with_measured(rates: Rates, measured: Measured, precision: str) -> Rates:
    near, far = measured.host.all_gather, measured.network.all_gather
    rates = dataclasses.replace(
        rates,
        memory=measured.memory or rates.memory,
        host=near.bandwidth if near else rates.host,
        network=far.bandwidth if far else rates.network,
        links=measured.links,
    )
    if measured.precision != precision:
        return rates
    forward, backward = measured.attention or (rates.attention, None)
    return dataclasses.replace(rates, matmuls=measured.matmuls, attention=forward, attention_backward=backward)
