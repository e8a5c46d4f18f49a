"""GPUs and the clusters they come in: memory, bandwidths and latencies, each with its source. No jax is started here."""

import dataclasses

from megajax.config import ConfigError, near
from megajax.estimate.hardware import published_peak

GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU and how GPUs of its kind are wired. Rates are bytes/s of one GPU in one direction; latencies seconds.

    Attributes:
      name: as typed, e.g. "a100-80gb".
      device_kind: jax's name, which finds its peak in `hardware.PEAKS`.
      memory: bytes that the driver reports.
      memory_bandwidth: HBM, bytes/s.
      host_size: GPUs that share NVLink.
      host_bandwidth: NVLink to all the others of the host together.
      network_bandwidth: the GPU's share of its host's InfiniBand.
      network_share: share of that which collectives reach when every GPU of the cluster is in one.
      compute_capability: (major, minor).
      cores: streaming multiprocessors.
      clock: GHz, the boost clock.
      cache: bytes of L2.
      shared_memory: bytes of one multiprocessor's shared memory.
      description: what the XLA compiler is told the device is called.
    """

    name: str
    device_kind: str
    memory: int
    memory_bandwidth: float
    host_size: int
    host_bandwidth: float
    network_bandwidth: float
    network_share: float
    compute_capability: tuple[int, int]
    cores: int
    clock: float
    cache: int
    shared_memory: int
    description: str

    @property
    def family(self) -> str:
        """The chip: "a100", "h100" or "h200"."""
        return self.name.split("-")[0]

    def peak(self, precision: str) -> float:
        """Dense FLOP/s in "bf16", "fp16" or "fp32".

        Raises:
          ConfigError: the card has no matrix units for that type.
        """
        peak = published_peak(self.device_kind, precision)
        if peak is None:
            raise ConfigError(f"gpu = {self.name} has no peak for precision = {precision}: type --precision fp16|fp32.")
        return peak


# Memory is what nvidia-smi and the driver report, not the sales figure. Bandwidths: NVIDIA's datasheets (NVLink's figure
# is both directions together, halved here). Network: DGX A100 has eight HDR 200 Gb/s cards, DGX H100 and H200 eight NDR
# 400 Gb/s (their datasheets): one for each GPU. Its share on A100s: 2104.04473 section 5.9 reports a bisection bandwidth of
# 12.9 TB/s for the gradient all-reduce of 3,072 GPUs, 8.4 of 25 GB/s for each of 1,536 pairs. On H100s nobody prints one for
# a training run; nccl-tests reach 0.8 to 0.95, and the lower is taken. Cores, clocks, caches: NVIDIA's whitepapers.
CARDS = {
    card.name: card
    for card in (
        Card("a100-40gb", "NVIDIA A100-SXM4-40GB", 42_298_834_944, 1555 * GIGA, 8, 300 * GIGA, 25 * GIGA, 0.336,
             (8, 0), 108, 1.41, 40 << 20, 164 << 10, "NVIDIA A100-SXM4-40GB"),
        Card("a100-80gb", "NVIDIA A100-SXM4-80GB", 84_987_740_160, 2039 * GIGA, 8, 300 * GIGA, 25 * GIGA, 0.336,
             (8, 0), 108, 1.41, 40 << 20, 164 << 10, "NVIDIA A100-SXM4-80GB"),
        Card("h100-80gb", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3352 * GIGA, 8, 450 * GIGA, 50 * GIGA, 0.8,
             (9, 0), 132, 1.98, 50 << 20, 228 << 10, "NVIDIA H100 80GB HBM3"),
        Card("h200-141gb", "NVIDIA H200", 150_121_545_728, 4800 * GIGA, 8, 450 * GIGA, 50 * GIGA, 0.8,
             (9, 0), 132, 1.98, 50 << 20, 228 << 10, "NVIDIA H200"),
    )
}  # fmt: skip


def card(name: str) -> Card:
    """The card called `name`.

    Raises:
      ConfigError: there is none; the message names those there are.
    """
    if name not in CARDS:
        raise ConfigError(f"gpu = {name!r} is not known: {near(name, CARDS)} Type --gpu {'|'.join(CARDS)}.")
    return CARDS[name]
