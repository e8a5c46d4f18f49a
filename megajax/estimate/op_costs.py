"""What single operations cost on a card: a matmul, a pass over memory, a collective, a send. The model's constants."""

import dataclasses

from megajax.config import ParallelConfig
from megajax.estimate.gpus import Card
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.software import Software

# Share of NVLink's one-way rate that NCCL's large collectives reach: nccl-tests on DGX A100, about 230 of 300 GB/s.
LINK_SHARE = 0.77
# Share of a network card's rate that one point-to-point stream reaches: NCCL's send and receive over HDR, about 20 of 25.
STREAM_SHARE = 0.8
# Seconds to start a collective, and of a hop of its ring over NVLink and over the network: NCCL's own table for rings and
# large messages (src/graph/tuning.cc: baseLat and hwLat, ring, Simple).
START, LINK_HOP, NETWORK_HOP = 8.4e-6, 3.4e-6, 14e-6
# Fused attention's share of the matmul peak: FlashAttention-2 reaches 50 to 73% on A100 (2307.08691, abstract), 35% on
# H100 (2407.08608, abstract). A backward is five matmuls to the forward's two (2307.08691 section 3.1).
FUSED_ATTENTION_SHARE = {"a100": 0.6, "h100": 0.35, "h200": 0.35}
FUSED_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The constants that are fitted to published rows: `python -m megajax.estimate.validate --fit` finds them again.

    Attributes:
      matmul_share: by chip, what a large matmul sustains of the dense peak with all GPUs at work (power lowers clocks).
      memory_share: what a streaming kernel reaches of the memory bandwidth.
      gather_share: what ZeRO-3's gathers and scatters, block by block over all GPUs, reach of the hosts' network cards.
      gather_overlap: of what they and the blocks' work could share in time, what they do share.
    """

    matmul_share: dict[str, float]
    memory_share: float
    gather_share: float
    gather_overlap: float


FITTED = Fitted({"a100": 0.812, "h100": 0.614, "h200": 0.614}, 0.704, 0.148, 0.464)  # the H200 is the H100's chip


class Prices:
    """Seconds of operations; sizes are one device's own."""

    fused_backward = FUSED_BACKWARD

    def __init__(self, card: Card, precision: str, software: Software, fitted: Fitted):
        """Raises ConfigError if the card has no peak for `precision`."""
        peak = card.peak(precision)
        self.card, self.software, self.fitted, self.itemsize = card, software, fitted, ITEMSIZE[precision]
        self.matmul_rate = peak * fitted.matmul_share[card.family]
        self.attention_rate = peak * FUSED_ATTENTION_SHARE[card.family]
        self.memory_rate = card.memory_bandwidth * fitted.memory_share

    def matmul(self, rows: float, inner: float, columns: float, batch: float = 1) -> float:
        """[rows, inner] times [inner, columns], `batch` of them: the arithmetic, and operands and result moved once.

        The two are added: it is what makes small and narrow matmuls slower for each FLOP.
        """
        moved = batch * (rows * inner + inner * columns + rows * columns) * self.itemsize
        return 2 * batch * rows * inner * columns / self.matmul_rate + self.traffic(moved)

    def traffic(self, count: float) -> float:
        """Reading or writing `count` bytes of memory."""
        return count / self.memory_rate

    def fused_attention(self, flops: float) -> float:
        """Attention whose two products would be `flops` in full; the causal half is done."""
        return flops / 2 / self.attention_rate

    def collective(
        self, count: float, group: int, spread: int, pieces: int = 1, network_share: float | None = None
    ) -> float:
        """A reduce-scatter or an all-gather of `count` bytes in all over `group` devices. An all-reduce is both.

        Args:
          spread: how far apart the members lie on the list of devices; a host has consecutive ones. Where the group
            spans hosts, its members in a host each bring their network card.
          pieces: how many collectives the bytes are sent in; each goes round the ring.
          network_share: of the network cards' rate, in place of the card's own.
        """
        if group == 1:
            return 0.0
        here = max(1, min(group, self.card.host_size // spread))
        hosts = -(-group // here)
        rate = self.card.host_bandwidth * LINK_SHARE
        if hosts > 1:
            rate = min(rate, here * self.card.network_bandwidth * (network_share or self.card.network_share))
        hops = (group - hosts) * LINK_HOP + (hosts - 1) * NETWORK_HOP
        return count * (group - 1) / group / rate + pieces * (START + hops)

    def send(self, count: float, spread: int) -> float:
        """`count` bytes from a device to the one `spread` further on the list."""
        if spread < self.card.host_size:
            return count / (self.card.host_bandwidth * LINK_SHARE) + START + LINK_HOP
        return count / (self.card.network_bandwidth * STREAM_SHARE) + START + NETWORK_HOP


def spread(parallel: ParallelConfig, axis: str) -> int:
    """How far apart neighbours along a mesh axis lie on the list of devices: the product of the axes inside it."""
    inside = parallel.axis_order[parallel.axis_order.index(axis) + 1 :]
    distance = 1
    for name in inside:
        distance *= getattr(parallel, name)
    return distance
