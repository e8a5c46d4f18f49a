"""Measures the devices there are and writes the rates to a cluster's file, for the planner and the dry run to take.

python -m megajax.plan --calibrate                              writes cluster.toml
python -m megajax.plan --calibrate --cluster ours.toml          keeps the fields of ours.toml, replaces its table [measured]
srun python -m megajax.plan --calibrate --cluster ours.toml     on several hosts: one process for each host, or for each GPU

Measured are matmuls by shape, a copy, causal attention forward and backward, and all-gather, reduce-scatter, all-reduce and
ppermute by size, within a host and between hosts, with a latency and a bandwidth fitted to each. It takes a few minutes.
On CPU devices it measures the machine's cores, which says nothing about a GPU.
"""

import dataclasses
import datetime
import pathlib
import socket
import tomllib
import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from megajax.config import ConfigError, LaunchConfig
from megajax.config.options import Parser, add_options, option_names
from megajax.config.toml import save_config
from megajax.estimate.gpus import DTYPES, GPUS
from megajax.estimate.measured import Links, Measured, fit_link, rates_by_size
from megajax.estimate.rates import FUSED_BACKWARD, TOKAMAX_BACKWARD
from megajax.ops.attention_choice import choose_attention
from megajax.ops.attention_kernels import CUDNN, XLA, tokamax_kernel
from megajax.plan.cluster import load_cluster, measured_text
from megajax.plan.compiler import compiler_versions, installed_versions
from megajax.plan.measure import attention_rates, collective_times, copy_rate, matmul_rate
from megajax.runtime.distributed import start
from megajax.runtime.mesh import start_devices
from megajax.schedules.arguments import plain_text, whole
from megajax.schedules.paths import local_path

DRIVER = pathlib.Path("/proc/driver/nvidia/version")  # NVIDIA's
CPU_GPU = "h100-80gb"  # the file of CPU devices must name a GPU; gpu_of takes the same one for them


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      widths: of a transformer; for each, layers with as many, three and four times as many outputs.
      rows: tokens of a microbatch.
      work: FLOPs of a call.
      copied: bytes of the array that is copied.
      attention: samples, tokens, heads and head dimension.
      collectives: bytes, of each kind.
      seconds: how long each matmul and attention is measured; copies five times as long.
    """

    widths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    rows: int = 2048
    work: float = 2e12
    copied: int = 2 << 30
    attention: tuple[int, int, int, int] = (8, 4096, 16, 128)
    collectives: tuple[int, ...] = tuple(1 << power for power in range(16, 30, 2))
    seconds: float = 0.2

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(rows, inner, columns) of the matmuls."""
        return [(self.rows, width, wider * width) for width in self.widths for wider in (1, 3, 4)]


FULL = Sizes()
# Of CPU devices: a few seconds on one core.
SMALL = Sizes(
    (64, 128, 256), 256, 1e8, 16 << 20, (1, 256, 2, 64), tuple(1 << power for power in range(12, 21, 2)), 0.02
)


def calibrate(arguments: Sequence[str] | None) -> int:
    """The command; returns 0. Raises ConfigError if an option, the devices or the file are not valid."""
    parser = Parser(prog="python -m megajax.plan --calibrate", description=__doc__)
    parser.add_argument("--calibrate", action="store_true", help="measure the devices there are")
    parser.add_argument(
        "--cluster",
        type=local_path,
        default="cluster.toml",
        metavar="FILE.toml",
        help="to write (default: %(default)s)",
    )
    parser.add_argument("--gpu", type=plain_text, choices=GPUS, help="of the new file (default: what the driver says)")
    parser.add_argument("--precision", default="bf16", choices=tuple(DTYPES), help="of matmuls (default: bf16)")
    parser.add_argument("--devices", type=plain_text, metavar="cpu:COUNT|gpu", help="as of a run (default: the GPUs)")
    parser.add_argument(
        "--host-size", type=whole(), metavar="COUNT", help="GPUs of a host (default: those of one host)"
    )
    add_options(parser, LaunchConfig, "several processes")
    args = parser.parse_args(arguments)
    launch = LaunchConfig(**{name: value for name, value in vars(args).items() if name in option_names(LaunchConfig)})
    launch.validate()
    path = pathlib.Path(args.cluster)
    kept = _kept(path)  # before the devices start: a wrong file is reported at once
    start(launch)
    devices = start_devices(args.devices)
    gpu, host = _gpu_name(path, args.gpu, devices[0]), _host_size(args.host_size, devices)
    text = measure(devices, host, args.precision, FULL if devices[0].platform == "gpu" else SMALL)
    if jax.process_index() == 0:
        head = kept or f'gpu = "{gpu}"\nhost_size = {host}\n'
        save_config(path, f"{head.rstrip()}\n\n{text}", "pass --cluster with a writable path")
        load_cluster(str(path))
        print(text, end="")
        print(
            f"written: {path}   python -m megajax.plan --model NAME --cluster {path} --gpus COUNT --global-batch-size COUNT"
        )
    return 0


def _kept(path: pathlib.Path) -> str:
    """The lines of an existing file of a cluster before its table [measured], which is replaced."""
    if not path.exists():
        return ""
    load_cluster(str(path))
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    first = next((place for place, line in enumerate(lines) if line.lstrip().startswith("[measured")), len(lines))
    kept = "".join(lines[:first])
    if "measured" in tomllib.loads(kept):
        raise ConfigError(f"cluster = {path} has measured rates outside the table [measured]: remove them.")
    return kept


def _gpu_name(path: pathlib.Path, given: str | None, device: jax.Device) -> str:
    """The name in `GPUS` of the devices, or of an existing file, which must not name others."""
    known = next((gpu.name for gpu in GPUS.values() if gpu.device_kind == device.device_kind), None)
    if path.exists():
        name = load_cluster(str(path)).gpu.name
        if given not in (None, name) or (known and known != name):
            raise ConfigError(
                f"cluster = {path} has gpu = {name}, but the devices are {given or known}: pass another --cluster."
            )
        return name
    if device.platform == "gpu" and not (given or known):
        raise ConfigError(
            f"gpu = {device.device_kind} is not in megajax's table: pass --gpu with the nearest of {', '.join(GPUS)}."
        )
    return given or known or CPU_GPU


def _host_size(given: int | None, devices: Sequence[jax.Device]) -> int:
    """Devices of a host: of the processes on the machine of process 0."""
    size = given
    if size is None:
        name = np.array([zlib.crc32(socket.gethostname().encode())], np.uint32)
        names = np.ravel(multihost_utils.process_allgather(name)) if jax.process_count() > 1 else name
        size = sum(names[device.process_index] == names[0] for device in devices)
    if len(devices) % size:
        raise ConfigError(f"host_size = {size} does not divide the {len(devices)} devices: pass --host-size that does.")
    return int(size)


def measure(devices: Sequence[jax.Device], host_size: int, precision: str, sizes: Sizes) -> str:
    """Measures the devices of all processes, host by host; every process must call it. Returns the table as TOML."""
    device, dtype = jax.local_devices(backend=devices[0].platform)[0], DTYPES[precision]
    products = {shape: matmul_rate(device, dtype, shape, sizes.work, sizes.seconds) for shape in sizes.shapes}
    memory = copy_rate(device, sizes.copied, seconds=5 * sizes.seconds)
    heads = (sizes.attention[-1],) * 2
    name = choose_attention("auto", head_sizes=heads, dropout=0.0, precision=precision, device=device).name
    kernel = {"cudnn": CUDNN, "xla": XLA}.get(name) or tokamax_kernel(device)
    of_backward = TOKAMAX_BACKWARD if name == "tokamax" else FUSED_BACKWARD
    attention = attention_rates(device, dtype, kernel, of_backward, sizes.attention, sizes.seconds)
    links, comments = {}, []
    for axis, group in (("host", host_size), ("network", len(devices) // host_size)):
        times = collective_times(devices, host_size, axis, sizes.collectives) if group > 1 else {}
        links[axis] = Links(**{field: fit_link(points) for field, points in times.items()})
        for field, points in times.items():  # that a latency and a bandwidth are fitted to
            shown = ", ".join(f"{sent / 1e3:,.0f} kB {1e6 * seconds:,.1f}" for sent, seconds in points)
            comments.append(f"# {axis}, groups of {group}, {field}: sent and microseconds: {shown}\n")
    rates = [(2.0 * rows * inner * columns, rate) for (rows, inner, columns), rate in products.items()]
    measured = Measured(precision, rates_by_size(rates), memory, attention, **links)
    return measured_text(measured, products, versions(devices, name, sizes)) + "".join(comments)


def versions(devices: Sequence[jax.Device], attention: str, sizes: Sizes) -> dict[str, str]:
    """What is measured on and with, as texts."""
    samples, tokens, heads, size = sizes.attention
    found = {
        "device": devices[0].device_kind,
        "devices": f"{len(devices)} in {jax.process_count()} processes",
        "date": datetime.date.today().isoformat(),
        "attention": f"{attention}, {samples} samples of {tokens} tokens, {heads} heads of {size}",
        "driver": DRIVER.read_text().splitlines()[0] if DRIVER.exists() else "",
        "platform": devices[0].client.platform_version.splitlines()[0],
    }
    found |= compiler_versions() | installed_versions("nvidia-nccl-cu12", "nvidia-nccl-cu13")
    return {name: text for name, text in found.items() if text}
