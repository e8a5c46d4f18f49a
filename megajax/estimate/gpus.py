"""GPUs and the clusters they are built into: peak FLOP/s, memory, bandwidths and latencies, each with its source.

`GPUS` describes the GPUs that runs are planned for; nothing here needs one of them. `device_peak` gives the peak FLOP/s of
the devices that a run has, for MFU: published where there is a figure, otherwise measured.
"""

import dataclasses
import time
from collections.abc import Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config import ConfigError, ParallelConfig, RunConfig, near
from megajax.estimate import model_costs
from megajax.estimate.measured import Measured
from megajax.ops.attention_choice import FUSED, choose_attention

GIGA, TERA = 1e9, 1e12
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}

# Dense tensor-core peaks in TFLOP/s, accumulating in fp32, without the sparsity that doubles the figures of the datasheets.
# A row: a part of jax's device_kind (the first row that matches counts, so special names stand before general ones),
# 16-bit peak, fp32 peak. XLA multiplies fp32 matrices in TF32 on GPUs that support it, so the fp32 peak is TF32's.
# bf16 and fp16 have the same peak on every GPU since Ampere; Volta has no bf16 tensor cores.
PEAKS: list[tuple[str, float, float]] = [
    ("V100S", 130.0, 16.4),  # NVIDIA V100 datasheet, PCIe "V100S" column
    ("V100-PCIE", 112.0, 14.0),  # NVIDIA V100 datasheet, PCIe column
    ("V100", 125.0, 15.7),  # NVIDIA V100 datasheet, SXM2 column
    ("A100", 312.0, 156.0),  # NVIDIA A100 datasheet, all forms
    ("H100 PCIe", 756.0, 378.0),  # NVIDIA H100 PCIe product brief: 1,513 and 756 with sparsity
    ("H100 NVL", 835.0, 417.5),  # NVIDIA H100 datasheet, NVL column: 1,671 and 835 with sparsity
    ("H100", 989.4, 494.7),  # NVIDIA H100 architecture whitepaper, SXM5 column ("NVIDIA H100 80GB HBM3")
    ("GH200", 989.4, 494.7),  # NVIDIA GH200 datasheet: the same chip: 1,979 and 989 with sparsity
    ("H200 NVL", 835.5, 417.5),  # NVIDIA H200 datasheet, NVL column: 1,671 and 835 with sparsity
    ("H200", 989.4, 494.7),  # NVIDIA H200 datasheet, SXM column: 1,979 and 989 with sparsity
    ("GB200", 2500.0, 1250.0),  # NVIDIA GB200 NVL72 datasheet, one GPU: 5,000 and 2,500 with sparsity
    ("B200", 2250.0, 1125.0),  # NVIDIA Blackwell datasheet, HGX B200, an eighth: 4,500 and 2,200 with sparsity
    ("L40S", 362.05, 183.0),  # NVIDIA L40S datasheet: 733 and 366 with sparsity
    ("L40", 181.05, 90.5),  # NVIDIA L40 datasheet: 362.1 and 181 with sparsity
    ("L4", 121.0, 60.0),  # NVIDIA L4 datasheet: 242 and 120 with sparsity
    ("A10G", 70.0, 35.0),  # NVIDIA's A10G datasheet for AWS: 140 and 70 with sparsity
    ("MI300X", 1307.4, 653.7),  # AMD Instinct MI300X datasheet: 2,614.9 and 1,307.4 with sparsity
    ("RTX 4090", 165.2, 82.6),  # NVIDIA Ada architecture whitepaper, appendix A, 16-bit with fp32 accumulate
]
# A MIG slice or a laptop GPU has the GPU's name but not its peak.
LESSER = ("MIG", "Laptop")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU and how GPUs of its kind are connected. Rates are bytes/s of one GPU in one direction; latencies seconds.

    Attributes:
      name: as passed to --gpu, e.g. "a100-80gb".
      device_kind: jax's and XLA's name, which finds its peak in `PEAKS`.
      memory: bytes that the driver reports.
      memory_bandwidth: HBM, bytes/s.
      host_size: GPUs that share NVLink.
      host_bandwidth: NVLink to all other GPUs of the host together.
      network_bandwidth: the GPU's share of its host's InfiniBand.
      network_share: fraction of that which collectives reach when every GPU of the cluster participates in one.
      pcie_bandwidth: to the host's memory.
      compute_capability: (major, minor); None: not NVIDIA's, for which nothing is compiled.
      cores: streaming multiprocessors.
      clock: GHz, the boost clock.
      cache: bytes of L2.
      shared_memory: bytes of one multiprocessor's shared memory.
      watts: of the board at full load, without its share of the host.
      measured: what a calibration measured; the estimates take it in place of shares of the rates above.
    """

    name: str
    device_kind: str
    memory: int
    memory_bandwidth: float
    host_size: int
    host_bandwidth: float
    network_bandwidth: float
    network_share: float
    pcie_bandwidth: float
    compute_capability: tuple[int, int] | None
    cores: int
    clock: float
    cache: int
    shared_memory: int
    watts: float = 0.0
    measured: Measured | None = None

    @property
    def family(self) -> str:
        """The chip whose measured shares of the peak the time model takes (`rates.py`): "a100", "h100" or "h200".

        Of other chips no training run was fitted: Volta's and Ampere's take the A100's, all newer ones the H100's.
        """
        chip = self.name.split("-")[0]
        return chip if chip in ("a100", "h100", "h200") else "a100" if chip in ("v100", "a10g") else "h100"

    def peak(self, precision: str) -> float:
        """Dense FLOP/s in "bf16", "fp16" or "fp32".

        Raises:
          ConfigError: the GPU has no tensor cores for that type.
        """
        peak = published_peak(self.device_kind, precision)
        if peak is None:
            raise ConfigError(f"gpu = {self.name} has no peak for precision = {precision}: pass --precision fp16|fp32.")
        return peak


# Memory is what nvidia-smi and the driver report, not the sales figure. Bandwidths: NVIDIA's datasheets (NVLink's figure
# is both directions together, halved here). Network: DGX A100 has eight HDR 200 Gb/s adapters, DGX H100 and H200 eight NDR
# 400 Gb/s (their datasheets): one for each GPU. Their share on A100s: 2104.04473 section 5.9 reports a bisection bandwidth
# of 12.9 TB/s for the gradient all-reduce of 3,072 GPUs, 8.4 of 25 GB/s for each of 1,536 pairs. For H100s no training run
# has published one; nccl-tests reach 0.8 to 0.95, and the lower is used. PCIe
# (version 4 of the A100, 5 of the others): 64 and 128 GB/s in both directions together, by the datasheets. Cores, clocks,
# caches: NVIDIA's whitepapers. Watts: the datasheets' maximum power.
#
# H100 PCIe, B200, GB200: cores, clocks, caches and memory as XLA's descriptions have them
# (xla/backends/gpu/target_config/specs). H100 PCIe and NVL have NVLink to one neighbour only: their host's link is PCIe, and
# two share a 400 Gb/s adapter (NVIDIA's reference configurations for PCIe servers). B200: DGX B200's datasheet. GB200 NVL72:
# 72 GPUs share NVLink, one 400 Gb/s adapter each; two share a CPU's NVLink-C2C of 900 GB/s. L40S, A10G: AWS's g6e.48xlarge
# (400 Gb/s) and g5.48xlarge (100 Gb/s), eight GPUs on PCIe 4. MI300X: AMD's datasheet, seven links of 64 GB/s each way;
# memory as its driver reports.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", 42_298_834_944, 1555 * GIGA, 8, 300 * GIGA, 25 * GIGA, 0.336,
            32 * GIGA, (8, 0), 108, 1.41, 40 << 20, 164 << 10, 400),
        Gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", 84_987_740_160, 2039 * GIGA, 8, 300 * GIGA, 25 * GIGA, 0.336,
            32 * GIGA, (8, 0), 108, 1.41, 40 << 20, 164 << 10, 400),
        Gpu("h100-80gb", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3352 * GIGA, 8, 450 * GIGA, 50 * GIGA, 0.8,
            64 * GIGA, (9, 0), 132, 1.98, 50 << 20, 228 << 10, 700),
        Gpu("h100-pcie", "NVIDIA H100 PCIe", 84_942_979_072, 2039 * GIGA, 8, 64 * GIGA, 25 * GIGA, 0.8,
            64 * GIGA, (9, 0), 114, 1.755, 50 << 20, 228 << 10, 350),
        Gpu("h100-nvl", "NVIDIA H100 NVL", 99_456_909_312, 3938 * GIGA, 8, 64 * GIGA, 25 * GIGA, 0.8,
            64 * GIGA, (9, 0), 132, 1.785, 50 << 20, 228 << 10, 400),
        Gpu("h200-141gb", "NVIDIA H200", 150_121_545_728, 4800 * GIGA, 8, 450 * GIGA, 50 * GIGA, 0.8,
            64 * GIGA, (9, 0), 132, 1.98, 50 << 20, 228 << 10, 700),
        Gpu("b200", "NVIDIA B200", 191_514_411_008, 7672 * GIGA, 8, 900 * GIGA, 50 * GIGA, 0.8,
            64 * GIGA, (10, 0), 148, 1.965, 132_644_864, 228 << 10, 1000),
        Gpu("gb200-nvl72", "NVIDIA GB200", 197_897_748_480, 7928 * GIGA, 72, 900 * GIGA, 50 * GIGA, 0.8,
            225 * GIGA, (10, 0), 152, 2.062, 135_528_448, 228 << 10, 1200),
        Gpu("l40s", "NVIDIA L40S", 47_675_604_992, 864 * GIGA, 8, 32 * GIGA, 6.25 * GIGA, 0.8,
            32 * GIGA, (8, 9), 142, 2.52, 96 << 20, 100 << 10, 350),
        Gpu("a10g", "NVIDIA A10G", 23_684_186_112, 600 * GIGA, 8, 32 * GIGA, 1.5625 * GIGA, 0.8,
            32 * GIGA, (8, 6), 80, 1.71, 6 << 20, 100 << 10, 300),
        Gpu("mi300x", "AMD Instinct MI300X", 206_141_652_992, 5300 * GIGA, 8, 448 * GIGA, 50 * GIGA, 0.8,
            64 * GIGA, None, 304, 2.1, 4 << 20, 64 << 10, 750),
    )
}  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`.

    Raises:
      ConfigError: there is none; the message lists the known ones.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu = {name!r} is not known: {near(name, GPUS)} Pass --gpu NAME.")
    return GPUS[name]


def gpu_of(device: jax.Device) -> Gpu:
    """The GPU that a device is, as far as the estimates know it: an H100 where they do not, and for CPU devices."""
    found = (gpu for gpu in GPUS.values() if gpu.device_kind == device.device_kind)
    return next(found, GPUS["h100-80gb"])


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of a device, which MFU is relative to.

    Attributes:
        flops: FLOP/s of one device when all of them work.
        source: "published" or "measured", to be printed with any utilisation derived from it.
    """

    flops: float
    source: str


def published_peak(device_kind: str, precision: str) -> float | None:
    """The published dense peak in FLOP/s of one device, by jax's `device_kind`; None for one without, or a precision."""
    if any(word in device_kind for word in LESSER):
        return None
    for pattern, half, full in PEAKS:
        if pattern in device_kind:
            if precision == "bf16" and "V100" in pattern:
                return None
            return TERA * (full if precision == "fp32" else half)
    return None


def measured_peak(devices: Sequence[jax.Device], precision: str, seconds: float = 0.15) -> float:
    """The rate of a large matmul, in FLOP/s for each of `devices` when all of them run at once.

    Devices of the CPU backend share the machine's cores. There one device runs alone and its rate is divided by the number
    of devices in this process. It multiplies in fp32 whatever the precision: XLA's 16-bit matmuls are slower on most CPUs,
    and a lower peak would overstate MFU. Other processes on the same machine are not taken into account.

    Args:
        devices: devices of the mesh; at least one belongs to this process.
        seconds: how long to measure, after compilation; the fastest matmul counts.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    on_cpu = local[0].platform == "cpu"
    size, dtype, sharing = (1024, jnp.float32, len(local)) if on_cpu else (8192, DTYPES[precision], 1)
    with jax.default_device(local[0]):
        matrix = jax.device_put(np.ones((size, size), dtype))  # jnp.ones would compile one more program
        multiply = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
        multiply(matrix, matrix).block_until_ready()  # the first call also starts threads and picks kernels
        best, start = float("inf"), time.perf_counter()
        while (begin := time.perf_counter()) - start < seconds:
            multiply(matrix, matrix).block_until_ready()
            best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best / sharing


def device_peak(devices: Sequence[jax.Device], precision: str) -> Peak:
    """The peak of one of `devices` (all of one kind): published if there is a figure, otherwise measured now."""
    published = published_peak(devices[0].device_kind, precision)
    if published is not None:
        return Peak(published, "published")
    return Peak(measured_peak(devices, precision), "measured")


def with_attention(run: RunConfig, gpu: Gpu) -> RunConfig:
    """The run with `attention` resolved to "xla", "cudnn" or "pallas", as the program chooses on this GPU with cuDNN.

    Raises:
      ConfigError: a fused kernel is requested, which is not supported there.
    """
    attention = model_costs(run.model).attention
    if attention is None:
        return dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, attention="xla"))
    device = SimpleNamespace(
        platform="gpu",
        device_kind=gpu.device_kind,
        compute_capability=".".join(map(str, gpu.compute_capability or ())),
    )
    choice = choose_attention(
        run.parallel.attention,
        head_size=attention.head_size,
        dropout=attention.dropout,
        window=attention.window,
        mask="documents" if run.data.resets_attention else None if attention.causal else "padding",
        context=run.parallel.context,
        precision=run.train.precision,
        device=device,
        cudnn=True,
    )
    return dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, attention=choice.name))


def is_fused(parallel: ParallelConfig) -> bool:
    """Whether blocks keep no attention scores: with fused kernels and with ring attention. "auto" counts as xla."""
    return parallel.attention in FUSED or parallel.context > 1
