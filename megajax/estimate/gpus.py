"""GPUs and the clusters they are built into: peak FLOP/s, memory, bandwidths and latencies (gpus.toml has the sources).

`GPUS` describes the GPUs that runs are planned for; nothing here needs one of them. `device_peak` gives the peak FLOP/s of
the devices that a run has, for MFU: published where there is a figure, otherwise measured.
"""

import dataclasses
import pathlib
import time
import tomllib
from collections.abc import Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config import ConfigError, ParallelConfig, RunConfig, near
from megajax.config.hashing import HashSlot, hashed_once
from megajax.estimate import model_costs
from megajax.estimate.measured import Measured
from megajax.ops.attention_choice import FUSED, choose_attention, mask_of

GIGA, TERA = 1e9, 1e12
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}

DATA = tomllib.loads(pathlib.Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
PEAKS: list[tuple[str, float, float]] = [tuple(row) for row in DATA["peaks"]]
# A MIG slice, a laptop or a 300 W workstation GPU has the GPU's name but not its peak.
LESSER = ("MIG", "Laptop", "Max-Q")


@hashed_once
@dataclasses.dataclass(frozen=True)
class Gpu(HashSlot):
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
      like: the GPU of gpus.toml that one from a file has its other fields of; "" of those in the table.
      peaks: FLOP/s in 16 bits and in fp32 of one from a file; None: those in `PEAKS`.
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
    like: str = ""
    peaks: tuple[float, float] | None = None
    measured: Measured | None = None

    @property
    def family(self) -> str:
        """The chip whose shares of the peak the time model takes (`rates.py`): "a100", "h100", "h200" or "blackwell".

        Of other chips no training run was fitted: Volta's and Ampere's take the A100's, AMD's and Ada's the H100's.
        """
        chip = (self.like or self.name).split("-")[0]
        if chip in ("a100", "h100", "h200"):
            return chip
        return (
            "a100"
            if chip in ("v100", "a10g")
            else "h100"
            if (self.compute_capability or (9, 0)) < (10, 0)
            else "blackwell"
        )

    def peak(self, precision: str) -> float:
        """Dense FLOP/s in "bf16", "fp16" or "fp32"; raises ConfigError if the GPU has no tensor cores for that type."""
        if self.peaks is not None:
            return self.peaks[precision == "fp32"]
        peak = published_peak(self.device_kind, precision)
        if peak is None:
            raise ConfigError(f"gpu = {self.name} has no peak for precision = {precision}: pass --precision fp16|fp32.")
        return peak


def _read() -> dict[str, Gpu]:
    """The GPUs of gpus.toml by name."""
    units = {f"{link}_bandwidth": GIGA for link in ("memory", "host", "network", "pcie")}
    tables, found = DATA["gpus"], {}
    for name, own in tables.items():
        fields = {"compute_capability": None} | tables.get(own.pop("like", None), {}) | own
        fields |= {field: fields[field] * unit for field, unit in units.items()}
        fields |= {field: int(fields[field] * unit) for field, unit in (("cache", 1 << 20), ("shared_memory", 1 << 10))}
        capability = fields.pop("compute_capability")
        found[name] = Gpu(name=name, compute_capability=capability and tuple(capability), **fields)
    return found


GPUS = _read()


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`; raises ConfigError, which lists the known ones, if there is none."""
    if name not in GPUS:
        raise ConfigError(f"gpu = {name!r} is not known: {near(name, GPUS)} Pass --gpu NAME.")
    return GPUS[name]


def gpu_of(device: jax.Device) -> Gpu:
    """The GPU that a device is, as far as the estimates know it: an H100 where they do not, and for CPU devices."""
    found = (gpu for gpu in GPUS.values() if gpu.device_kind == device.device_kind)
    return next(found, GPUS["h100-80gb"])


@dataclasses.dataclass(frozen=True)
class Peak:
    """FLOP/s of one device when all of them work, which MFU is relative to; "published" or "measured", to print with it."""

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
    """The run with `attention` resolved to "xla", "cudnn" or "tokamax", as it is on this GPU with both installed.

    Raises:
      ConfigError: a fused kernel is requested, which is not supported there.
    """
    attention = model_costs(run.model).attention
    if attention is None:
        return run.with_layout(attention="xla")
    device = SimpleNamespace(
        platform="gpu", device_kind=gpu.device_kind, compute_capability=".".join(map(str, gpu.compute_capability or ()))
    )
    choice = choose_attention(
        run.parallel.attention,
        head_sizes=attention.sizes,
        dropout=attention.dropout,
        window=attention.window,
        mask=mask_of(run.data.resets_attention, attention),
        context=run.parallel.ring_ranks,
        precision=run.train.precision,
        device=device,
        installed=FUSED,
    )
    return run.with_layout(attention=choice.name)


def is_fused(parallel: ParallelConfig) -> bool:
    """Whether blocks keep no attention scores: with fused kernels and with ring attention. "auto" counts as xla."""
    return parallel.attention in FUSED or parallel.context > 1
