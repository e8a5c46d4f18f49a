"""What kernels and links of a GPU reach: shares of the published peaks, or what a calibration measured. All rates are here.

`benchmarks.published` compares them with published throughputs of other programs, `benchmarks.gpu_day` with a GPU's kernels.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from megajax.config import ParallelConfig
from megajax.estimate.gpus import Gpu
from megajax.estimate.measured import Link, Measured, rate_at

__all__ = ["FUSED_BACKWARD", "TOKAMAX_BACKWARD", "Rates", "devices_here", "in_a_host", "rates_of", "spread"]

# The share of the dense peak that a product's arithmetic reaches with all GPUs at work (power limits lower the clocks);
# writing its result comes on top of that, at the HBM's whole bandwidth. In tilelang's table of 8192 x K x 8192 on an H800
# (benchmark/matmul_fp8) times are linear in K from 256 to 16,384, and at K = 0 that of writing the result. mamf-finder's
# best products (stas00/ml-engineering) reach 0.80 of the peak on H100s and 0.78 on B200s; in training there is less power.
# `python -m benchmarks.published --fit` finds the H100's and Blackwell's again; matmuls of steps on an H200 take 0.97 to
# 1.02 of what its share gives (docs/gpus.md). The A100's is what four rows of 2104.04473's tables 1 and 2 gave for products
# of 8192 x 8192, writing included.
MATMUL_SHARE = {"a100": 0.784, "h100": 0.714, "h200": 0.735, "blackwell": 0.534}
# Fused attention's share of that peak, of heads of any size and sequences of any length; the number of keys of a query at
# which a kernel reaches half of it; and what a score costs besides its products, as so many elements of a head (a head of
# 64 has half as many FLOPs for the same exponentials, 2407.08608 section 3.1). The A100's fit 2307.08691's figure 4 within
# 2%, forward and backward, heads of 64 and 128, 512 to 16,384 tokens; Hopper's fit cuDNN's kernels on an H200 within 6%,
# 1,024 to 8,192 tokens (docs/gpus.md). No kernels of others were fitted.
ATTENTION_SHARE = {"a100": 0.70, "h100": 0.638, "h200": 0.638, "blackwell": 0.638}
ATTENTION_KEYS = {"a100": 247.0, "h100": 522.0, "h200": 522.0, "blackwell": 522.0}
ATTENTION_SCORE = {"a100": 16.0, "h100": 36.0, "h200": 36.0, "blackwell": 36.0}
# Standard deviation of a GPU's step time, relative to it: each step waits for the slowest GPU (`waiting`). Of runs that
# differ in the number of replicas only, fitted to the differences (`--fit`), on H100s. The A100's share of the peak is of
# runs on 384 to 3,072 GPUs and has it in it.
JITTER = {"a100": 0.0, "h100": 0.0211, "h200": 0.0211, "blackwell": 0.0211}
# A backward is five matmuls to the forward's two (2307.08691 section 3.1); two kernels, tokamax's or those of
# megajax/ops/flash_attention.py, compute seven.
FUSED_BACKWARD, TOKAMAX_BACKWARD = 2.5, 3.5
# Of the HBM's bandwidth, what kernels other than matmuls reach. Large copies reach 0.9, and elementwise kernels of steps on
# an H200 reached 0.43 to 0.73 (docs/gpus.md), 0.585 in all, which is 21 GB/s of a multiprocessor; A100s and H100s need less
# than that for 0.75, Blackwell more.
MEMORY_SHARE = {"a100": 0.75, "h100": 0.75, "h200": 0.585, "blackwell": 0.585}
# Of NVLink's one-way rate, what NCCL's large collectives reach: nccl-tests on DGX A100, about 230 of 300 GB/s. Of a network
# adapter's, what one point-to-point stream reaches: NCCL's send and receive over HDR, about 20 of 25 GB/s.
NVLINK_SHARE, STREAM_SHARE = 0.77, 0.8
# Seconds to start a collective, and of a hop of its ring over NVLink and over the network: NCCL's own table for rings and
# large messages (src/graph/tuning.cc: baseLat and hwLat, ring, Simple; a tree's hop over the network takes as long).
START, NVLINK_HOP, NETWORK_HOP = 8.4e-6, 3.4e-6, 14e-6
# Of NVLink's one-way rate, what XLA's ragged all-to-all reaches within a host: 16.4 GiB/s of 900 GB/s on B200s, and nearly
# all of the network's between hosts (openxla/xla#33386). And its seconds for each device of the group, whatever is sent
# (openxla/xla#46982, A100s).
RAGGED_SHARE, RAGGED_PEER = 0.02, 12e-6


@dataclasses.dataclass(frozen=True)
class Rates:
    """What kernels reach on a GPU.

    Attributes:
      matmul, attention: FLOP/s, of matmuls in 8 bits twice as many. Attention's are of the scores that are computed, of
        large heads and many keys.
      bandwidth: bytes/s of HBM at which a product writes its result.
      attention_keys, attention_score: see ATTENTION_KEYS.
      matmuls: measured rates by size (`measured.rate_at`), in place of `matmul` and `bandwidth`.
      attention_backward: measured FLOP/s of attention's backward; None: those of its forward.
      memory: bytes/s of HBM.
      host, network: bytes/s that a GPU sends to its host's other GPUs, and to other hosts.
      host_size: GPUs in a host.
      stream: bytes/s that a GPU sends to one GPU of another host.
      links: measured latencies and bandwidths by XLA's kind of collective, within a host and between hosts, in place of
        `host`, `network` and `stream`.
      ragged: bytes/s of a ragged all-to-all to the host's other GPUs.
      attention_part: of the square of scores, the part that attention kernels compute that do not say it themselves: half
        under a causal mask, else 1; the mean over layers where these have windows, outside which kernels visit no tile
        (`ops/flash_attention.py`, tokamax's forward). An `attention_rate` is such that the mean gives the time of all.
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
    stream: float = math.inf
    ragged: float = math.inf
    attention_part: float = 0.5
    pcie: float = 64e9
    routed_part: float = 1.0
    ragged_part: float = 1.0
    gap: float = 2e-6
    synchronisation: float = 25e-6
    bandwidth: float = math.inf
    attention_keys: float = 0.0
    attention_score: float = 0.0
    matmuls: tuple[tuple[float, float], ...] = ()
    attention_backward: float | None = None
    links: Mapping[str, tuple[Link | None, Link | None]] = dataclasses.field(default_factory=dict)

    def product(self, flops: float, written: float, moved: float, faster: float = 1) -> float:
        """Seconds of a product: its arithmetic, at `faster` times the rate of 16 bits, and writing `written` bytes.

        It takes no less than all of its traffic, `moved` bytes with those written. Measured rates have the writing in them.
        """
        if self.matmuls:
            return max(flops / rate_at(self.matmuls, flops) / faster, moved / self.memory)
        return max(flops / self.matmul / faster + written / self.bandwidth, moved / self.memory)

    def attention_rate(self, backward: bool, keys: float = math.inf, width: float = math.inf) -> float:
        """FLOP/s of attention's forward or backward, of queries that see so many keys on average and heads so wide."""
        if self.attention_backward and backward:
            return self.attention_backward
        return self.attention / (1 + self.attention_keys / keys) / (1 + self.attention_score / width)

    def collective(self, kind: str, sent: float, group: int, here: int) -> float:
        """Seconds of one of XLA's kinds of collectives, in which each device of a group sends `sent` bytes in a ring.

        An all-reduce passes the ring twice, or over many hosts a tree up and down, whose bandwidth is the same; so do others
        where each host has one device (NCCL 2.23's PAT). Measured links have one latency, whatever the group.

        Args:
          kind: such as "all-gather".
          sent: bytes.
          group: devices.
          here: devices of the group in each host. Between hosts each of these contributes its network adapter.
        """
        near, far = self.links.get(kind, (None, None))
        hosts = -(-group // here)
        ring = (group - hosts) * NVLINK_HOP + (hosts - 1) * NETWORK_HOP
        tree = (here - 1) * NVLINK_HOP + math.ceil(math.log2(hosts)) * NETWORK_HOP
        hops = min(ring, tree) if kind == "all-reduce" or here == 1 else ring
        latency = START + hops * (2 if kind == "all-reduce" else 1)
        network = self.stream if kind == "collective-permute" else self.network
        near, far = near or Link(latency, self.host), far or Link(latency, network)
        if hosts == 1:
            return near.seconds(sent)
        return far.latency + sent / min(near.bandwidth, here * far.bandwidth)

    def all_to_all(self, part: float, group: int, here: int, ragged: bool = False) -> float:
        """Seconds of an all-to-all in which a device sends `part` bytes to each other one of its group.

        `group` and `here` as for `collective`; what goes to other hosts takes the device's own adapter. `ragged`: the sizes
        are known at run time only.
        """
        inside = (here - 1) * part / (self.ragged if ragged else self.host)
        outside = (group - here) * part / self.network
        start = START + (NETWORK_HOP if group > here else NVLINK_HOP)
        return max(inside, outside) + start + group * RAGGED_PEER * ragged


def waiting(gpu: Gpu, devices: int) -> float:
    """What waiting for the slowest of so many GPUs takes, relative to a GPU's mean: the expected largest of normal times."""
    return JITTER[gpu.family] * math.sqrt(2 * math.log(devices))


@functools.lru_cache(maxsize=64)  # a search asks for each block
def rates_of(gpu: Gpu, precision: str) -> Rates:
    """The rates of a GPU in "bf16", "fp16" or "fp32": shares of its peaks, and `network_share` of its cluster's network.

    What a calibration measured replaces all of these; matmuls and attention if it was in this precision. All-to-alls, which
    it does not measure, have its bandwidths of all-gathers.

    Raises:
      ConfigError: the GPU has no tensor cores for that type.
    """
    peak = gpu.peak(precision)
    published = Rates(
        matmul=MATMUL_SHARE[gpu.family] * peak,
        attention=ATTENTION_SHARE[gpu.family] * peak,
        bandwidth=math.inf if gpu.family == "a100" else gpu.memory_bandwidth,
        attention_keys=ATTENTION_KEYS[gpu.family],
        attention_score=ATTENTION_SCORE[gpu.family],
        memory=MEMORY_SHARE[gpu.family] * gpu.memory_bandwidth,
        host=NVLINK_SHARE * gpu.host_bandwidth,
        network=gpu.network_share * gpu.network_bandwidth,
        host_size=gpu.host_size,
        stream=STREAM_SHARE * gpu.network_bandwidth,
        ragged=RAGGED_SHARE * gpu.host_bandwidth,
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
    rates = dataclasses.replace(rates, matmuls=measured.matmuls)
    if measured.attention is None:
        return rates
    forward, backward = measured.attention
    flat = {"attention_keys": 0.0, "attention_score": 0.0}
    return dataclasses.replace(rates, attention=forward, attention_backward=backward, **flat)


def spread(parallel: ParallelConfig, axis: str) -> int:
    """Distance of neighbours along a mesh axis on the list of devices: the product of the axes inside it."""
    inside = parallel.axis_order[parallel.axis_order.index(axis) + 1 :]
    sizes = {"data": parallel.replicas, "pipe": parallel.pipe, "tensor": parallel.tensor}
    return math.prod(sizes[name] for name in inside)


def devices_here(parallel: ParallelConfig, host_size: int, group: int, axis: str, apart: int = 1) -> int:
    """Of a group of so many devices along a mesh axis, every `apart`-th, those in each host."""
    return max(1, min(group, host_size // (apart * spread(parallel, axis))))


def in_a_host(parallel: ParallelConfig, gpu: Gpu, ranks: int, axis: str) -> bool:
    """Whether groups of so many neighbours along a mesh axis each lie within a host."""
    return ranks * spread(parallel, axis) <= gpu.host_size
