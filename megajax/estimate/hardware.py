"""What a device can do at best: published peaks by device, and a quick measurement where none is published."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

TERA = 1e12
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}

# Dense tensor-core peaks in TFLOP/s, accumulating in fp32, without the sparsity that doubles the vendors' headlines.
# A row: what jax's device_kind contains (the first row that matches counts, so the special stand before the general),
# 16-bit peak, fp32 peak. XLA multiplies fp32 matrices in TF32 where the card has it, so fp32 is TF32's peak.
# bf16 and fp16 have one peak on every card since Ampere; Volta has no bf16 tensor cores at all.
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
    ("RTX 4090", 165.2, 82.6),  # NVIDIA Ada architecture whitepaper, appendix A, 16-bit with fp32 accumulate
]
# A slice of a card, or the laptop's version, has the card's name but not its peak.
LESSER = ("MIG", "Laptop")


@dataclass(frozen=True)
class Peak:
    """The most a device can do.

    Attributes:
        flops: FLOP/s of one device when all of them work.
        source: "published" or "measured", to be printed beside any utilisation derived from it.
    """

    flops: float
    source: str


def published_peak(device_kind: str, precision: str) -> float | None:
    """The published dense peak in FLOP/s of one device, or None for a device or precision with none.

    Args:
        device_kind: jax's `device.device_kind`, e.g. "NVIDIA H100 80GB HBM3".
        precision: "bf16", "fp16" or "fp32".
    """
    if any(word in device_kind for word in LESSER):
        return None
    for pattern, half, full in PEAKS:
        if pattern in device_kind:
            if precision == "bf16" and "V100" in pattern:
                return None
            return TERA * (full if precision == "fp32" else half)
    return None


def measured_peak(devices: Sequence[jax.Device], precision: str, seconds: float = 0.15) -> float:
    """The rate of a large matrix multiplication, in FLOP/s for each of `devices` when all of them run at once.

    Devices of the CPU backend share the machine's cores, so one device runs alone and its rate is divided by how many
    of them are in this process; it multiplies in fp32 whatever the precision, as XLA's 16-bit matmuls on most CPUs are
    slower, and a slow matmul would flatter the run. (Several processes on one machine do not know of each other.)

    Args:
        devices: devices of the mesh; at least one belongs to this process.
        precision: "bf16", "fp16" or "fp32".
        seconds: how long to measure, after compilation; the best multiplication counts.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    on_cpu = local[0].platform == "cpu"
    size, dtype, sharing = (1024, jnp.float32, len(local)) if on_cpu else (8192, DTYPES[precision], 1)
    with jax.default_device(local[0]):
        matrix = jax.device_put(np.ones((size, size), dtype))  # no jnp.ones: that is one more program to compile
        multiply = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
        multiply(matrix, matrix).block_until_ready()  # the first call also starts threads and picks kernels
        best, start = float("inf"), time.perf_counter()
        while (begin := time.perf_counter()) - start < seconds:
            multiply(matrix, matrix).block_until_ready()
            best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best / sharing


def device_peak(devices: Sequence[jax.Device], precision: str) -> Peak:
    """The peak of one of `devices` (all of one kind): the published one, or else measured now."""
    published = published_peak(devices[0].device_kind, precision)
    if published is not None:
        return Peak(published, "published")
    return Peak(measured_peak(devices, precision), "measured")
