"""Costs of single operations on a GPU: a matmul, a pass over memory, a collective, a send. All constants are here.

`Software` says what a training program does that a layout does not; `MEGAJAX` is this one, `estimate/published.py` has those
that the published tables were measured with.
"""

import dataclasses

from megajax.config import ParallelConfig
from megajax.estimate.gpus import Gpu
from megajax.estimate.measured import Link, Measured, rate_at
from megajax.estimate.memory import ITEMSIZE

__all__ = [
    "FITTED",
    "FLASH_1_SHARE",
    "MEGAJAX",
    "PALLAS_BACKWARD",
    "RAGGED_PEER",
    "RAGGED_SHARE",
    "Fitted",
    "OpCosts",
    "Software",
    "in_a_host",
    "spread",
]

# Fraction of NVLink's one-way rate that NCCL's large collectives reach: nccl-tests on DGX A100, about 230 of 300 GB/s.
LINK_SHARE = 0.77
# Fraction of a network adapter's rate that one point-to-point stream reaches: NCCL's send and receive over HDR, about 20 of
# 25 GB/s.
STREAM_SHARE = 0.8
# The same of collectives of many megabytes in which all adapters of a host take part, one ring for each: nccl-tests reach
# 0.8 to 0.95, and the lower is used.
RINGS_SHARE = 0.8
# Fraction of NVLink's one-way rate that XLA's ragged all-to-all reaches within a host: 16.4 GiB/s of 900 GB/s on B200s, and
# nearly all of the network's between hosts (openxla/xla#33386).
RAGGED_SHARE = 0.02
# Seconds that it takes for each device of the group, whatever is sent (openxla/xla#46982, A100s).
RAGGED_PEER = 12e-6
# Seconds to start a collective, and of a hop of its ring over NVLink and over the network: NCCL's own table for rings and
# large messages (src/graph/tuning.cc: baseLat and hwLat, ring, Simple).
START, LINK_HOP, NETWORK_HOP = 8.4e-6, 3.4e-6, 14e-6
# Fused attention's fraction of the matmul peak: FlashAttention-2 reaches 50 to 73% on A100, its first version 25 to 40%, of
# which the middle is taken (2307.08691, abstract); cuDNN's and FlashAttention-3's kernels 400 to 640 TFLOP/s on H100 for
# causal attention at head dimension 128 (2407.08608, figure 5). A backward is five matmuls to the forward's two (2307.08691
# section 3.1); Pallas's two kernels (megajax/ops/flash_attention.py) compute seven.
FLASH_1_SHARE = 0.325
FUSED_ATTENTION_SHARE = {"a100": 0.6, "h100": 0.455, "h200": 0.455}
FUSED_BACKWARD, PALLAS_BACKWARD = 2.5, 3.5


@dataclasses.dataclass(frozen=True)
class Software:
    """Properties of a training program that determine its speed.

    Attributes:
      name: as printed.
      fused_attention: scores are never written to memory (2205.14135), and masked ones are not computed. A run may also
        select this (`gpus.is_fused`).
      attention_share: fused attention's fraction of the matmul peak; None: that of the GPU's best kernels.
      tensor_overlap: fraction of the tensor-parallel communication that overlaps matmuls.
      data_overlap: the gradient reduction overlaps the last microbatch's backward.
      send_overlap: with several chunks a rank, pipeline sends overlap the next chunk, except while the pipeline fills and
        drains: there an operation waits for what the rank before it has just computed.
      scatter_gather: a tensor group sends each element once (2104.04473 section 4.1), without sequence parallelism too.
      context_overlap: sends round the rings of context parallelism overlap attention.
      lockstep: all ranks start a tick together.
      gradient_bytes: bytes of a gradient element in the reduction over data-parallel replicas.
      accumulation_bytes: memory traffic, for each parameter and microbatch, of the kernels that add gradients to their sum,
        or with ZeRO-3 copy and scale them before they are scattered; 0 where the matmul that computes a gradient adds it.
      buffer_bytes: memory traffic, for each parameter and step, of setting the sums to zero, checking and scaling them.
      logit_bytes: memory traffic of the loss for each logit, forward and backward.
      dropout: blocks draw and apply masks.
      gathers_again: all-gathers in a block's backward beyond those of its matmul pairs, with sequence parallelism: the
        inputs of the column-parallel matmuls are gathered again for their weights' gradients (2205.05198 section 4.2.2
        hides these).
      gathered_pieces: collectives in which ZeRO-3 gathers a block's weights.
      gathers_ahead: ZeRO-3's gathers and scatters overlap the blocks' compute, with the constants of `Fitted`.
      gathers_hidden: they overlap all of it, at the rate of nccl-tests: of `gathers_ahead` and this at most one.
      gathers_for_recompute: with full recompute, ZeRO-3 gathers a block for its second forward and for its backward;
        otherwise once for both.
      routed_dispatch: of experts on other replicas, only the routed tokens are sent (all-to-all), not all tokens to all.
      expert_gradient_bytes: traffic of a microbatch's gradients of experts, for each parameter: 8 if a matmul adds them to
        the fp32 sum, 16 if it writes them, in fp32, and another kernel adds.
    """

    name: str
    fused_attention: bool = False
    attention_share: float | None = None
    tensor_overlap: float = 0.0
    data_overlap: bool = False
    send_overlap: bool = False
    scatter_gather: bool = False
    context_overlap: bool = False
    lockstep: bool = False
    gradient_bytes: int = 4
    accumulation_bytes: int = 0
    buffer_bytes: int = 0
    logit_bytes: int = 10
    dropout: bool = False
    gathers_again: int = 0
    gathered_pieces: int = 12  # one for each tensor: four matrices, four biases, two norms of two tensors each
    gathers_ahead: bool = False
    gathers_hidden: bool = False
    gathers_for_recompute: bool = True
    routed_dispatch: bool = False
    expert_gradient_bytes: int = 8


# 10 bytes a logit: read in 16 bit for the maximum, the sum and the label, again in the backward, and the gradient written.
# These properties price models with experts; others are priced as the program that XLA compiles (`program_time.py`).
MEGAJAX = Software(
    "megajax",
    gathers_for_recompute=False,
    lockstep=True,
    context_overlap=True,
    gathers_again=2,
    expert_gradient_bytes=16,
)


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The constants that are fitted to published rows: `python -m megajax.estimate.validate --fit` finds them again.

    Attributes:
      matmul_share: by chip, the fraction of the dense peak that a large matmul sustains with all GPUs at work (power limits
        lower the clocks). The A100's is fitted; the others are `H100_MATMUL_SHARE`.
      memory_share: the fraction of the memory bandwidth that a streaming kernel reaches.
      gather_share: the fraction of the hosts' network bandwidth that ZeRO-3's gathers and scatters reach, block by block
        over all GPUs.
      gather_overlap: how much of these collectives and the blocks' compute overlaps, as a fraction of the shorter of them.
    """

    matmul_share: dict[str, float]
    memory_share: float
    gather_share: float
    gather_overlap: float


# About 700 TFLOP/s of large bf16 products in training, as `rates.py` has it: a product alone was measured at 790, whole
# steps of training at up to 544. The H200 is the H100's chip.
H100_MATMUL_SHARE = 0.71
CHIPS = {"h100": H100_MATMUL_SHARE, "h200": H100_MATMUL_SHARE}
FITTED = Fitted({"a100": 0.838, **CHIPS}, 0.717, 0.151, 0.441)


class OpCosts:
    """Seconds of operations on one GPU; sizes are those on one device."""

    fused_backward = FUSED_BACKWARD

    def __init__(self, gpu: Gpu, precision: str, software: Software, fitted: Fitted):
        """Raises ConfigError if the GPU has no peak for `precision`."""
        peak = gpu.peak(precision)
        self.gpu, self.software, self.fitted, self.itemsize = gpu, software, fitted, ITEMSIZE[precision]
        self.matmul_rate = peak * fitted.matmul_share[gpu.family]
        self.attention_rate = peak * (software.attention_share or FUSED_ATTENTION_SHARE[gpu.family])
        self.memory_rate = gpu.memory_bandwidth * fitted.memory_share
        self.measured = gpu.measured or Measured(precision)
        self.matmuls = self.measured.matmuls if self.measured.precision == precision else ()
        self.memory_rate = self.measured.memory or self.memory_rate
        if self.measured.attention and self.measured.precision == precision:
            self.attention_rate, backward = self.measured.attention
            self.fused_backward = FUSED_BACKWARD * self.attention_rate / backward

    def matmul(self, rows: float, inner: float, columns: float, batch: float = 1) -> float:
        """`batch` products of [rows, inner] and [inner, columns]: the arithmetic, and operands and result moved once.

        The two are added, which makes small and narrow matmuls slower for each FLOP, as they are. Measured rates are of
        both, by size: then the longer of the two counts.
        """
        moved = self.traffic(batch * (rows * inner + inner * columns + rows * columns) * self.itemsize)
        flops = 2 * batch * rows * inner * columns
        return max(flops / rate_at(self.matmuls, flops), moved) if self.matmuls else flops / self.matmul_rate + moved

    def traffic(self, count: float) -> float:
        """Reading or writing `count` bytes of memory."""
        return count / self.memory_rate

    def fused_attention(self, flops: float) -> float:
        """Attention whose two products take `flops`, twice those of the scores that the causal mask and window leave."""
        return flops / 2 / self.attention_rate

    def collective(
        self, count: float, group: int, spread: int, pieces: int = 1, network_share: float | None = None
    ) -> float:
        """A reduce-scatter or an all-gather of `count` bytes in all over `group` devices. An all-reduce is both.

        Of measured links both take the all-gather's.

        Args:
          count: bytes.
          group: devices.
          spread: distance of neighbours on the list of devices; a host has consecutive ones. Where the group spans hosts,
            each of its members in a host contributes its network adapter.
          pieces: how many collectives the bytes are sent in; each has its own latency.
          network_share: fraction of the network bandwidth that is reached, instead of the GPU's own.
        """
        if group == 1:
            return 0.0
        here = max(1, min(group, self.gpu.host_size // spread))
        hosts = -(-group // here)
        hops = (group - hosts) * LINK_HOP + (hosts - 1) * NETWORK_HOP
        link = self.measured.host.all_gather or Link(START + hops, self.gpu.host_bandwidth * LINK_SHARE)
        if hosts > 1:
            rate = self.gpu.network_bandwidth * (network_share or self.gpu.network_share)
            adapter = self.measured.network.all_gather or Link(START + hops, rate)
            link = Link(adapter.latency, min(link.bandwidth, here * adapter.bandwidth))
        return count * (group - 1) / group / link.bandwidth + pieces * link.latency

    def all_to_all(self, count: float, group: int, spread: int, ragged: bool = False) -> float:
        """An all-to-all in which a device sends `count` bytes to each other one of a group.

        Args:
          count: bytes.
          group: devices.
          spread: as of `collective`. What goes to other hosts takes the device's own adapter.
          ragged: whether the sizes are known at run time only.
        """
        here = max(1, min(group, self.gpu.host_size // spread))
        hosts = -(-group // here)
        near, far = self.measured.host.all_gather, self.measured.network.all_gather
        inside = (here - 1) * count / (near.bandwidth if near else self.gpu.host_bandwidth * LINK_SHARE)
        if ragged:
            inside = (here - 1) * count / (self.gpu.host_bandwidth * RAGGED_SHARE)
        outside = (
            (group - here) * count / (far.bandwidth if far else self.gpu.network_bandwidth * self.gpu.network_share)
        )
        once = START + (NETWORK_HOP if hosts > 1 else LINK_HOP) + group * RAGGED_PEER * ragged
        return max(inside, outside) + once

    def send(self, count: float, spread: int) -> float:
        """`count` bytes from a device to the one `spread` places later on the list."""
        if spread < self.gpu.host_size:
            link = Link(START + LINK_HOP, self.gpu.host_bandwidth * LINK_SHARE)
            return (self.measured.host.ppermute or link).seconds(count)
        link = Link(START + NETWORK_HOP, self.gpu.network_bandwidth * STREAM_SHARE)
        return (self.measured.network.ppermute or link).seconds(count)


def spread(parallel: ParallelConfig, axis: str) -> int:
    """Distance of neighbours along a mesh axis on the list of devices: the product of the axes inside it."""
    inside = parallel.axis_order[parallel.axis_order.index(axis) + 1 :]
    distance = 1
    for name in inside:
        distance *= getattr(parallel, name)
    return distance


def in_a_host(parallel: ParallelConfig, gpu: Gpu, ranks: int, axis: str) -> bool:
    """Whether groups of so many neighbours along a mesh axis each lie within a host."""
    return ranks * spread(parallel, axis) <= gpu.host_size
