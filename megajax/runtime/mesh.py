"""Devices: starts jax on the requested devices, and builds the mesh with axes data, pipe, tensor, and at times expert."""

import contextlib
import glob
import logging
import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from megajax.config import ConfigError, ParallelConfig
from megajax.config.parallel import MESH_AXES, MOST_CPU_DEVICES
from megajax.runtime.compat import PLUGIN_LOGGER, coordination_service
from megajax.runtime.gpu_environment import set_gpu_environment
from megajax.runtime.xla_flags import add_flags, add_gpu_flags, cpu_flags
from megajax.schedules.arguments import is_count
from megajax.schedules.errors import shown


def start_devices(spec: str | None = None, count: int = 1) -> list[jax.Device]:
    """Starts jax on the devices that `spec` names. It must be called before anything else starts jax.

    Args:
        spec: "cpu:8" for eight CPU devices in this process that share its cores, "cpu" for one, "gpu" for the GPUs;
            None for the GPUs (or other accelerators) if there are any, otherwise `count` CPU devices.
        count: number of CPU devices if `spec` is None.

    Returns:
        All devices of that kind, of every process: at least the number in `spec`.

    Raises:
        ConfigError: `spec` is illegal, there is no GPU, jax has already started with fewer CPU devices, or jaxlib does
            not support a flag in XLA_FLAGS.
    """
    kind, _, number = (spec or "").partition(":")
    if spec == "gpu" or (spec is None and _has_nvidia_gpu()):
        add_gpu_flags()
        set_gpu_environment()
    if spec == "gpu":
        try:
            with contextlib.nullcontext() if _has_nvidia_gpu() else _without_plugin_errors():
                return jax.devices("gpu")
        except RuntimeError as error:
            raise ConfigError(
                "devices = gpu, but jax finds no GPU: pass --devices cpu:8 to run on the CPU, or install "
                "megajax[cuda12] or megajax[cuda13], see that nvidia-smi lists a GPU, and unset JAX_PLATFORMS."
            ) from error
    if spec is None:
        _make_cpu_devices(min(count, MOST_CPU_DEVICES))
        with contextlib.nullcontext() if _has_nvidia_gpu() else _without_plugin_errors():
            devices = jax.devices()
        if devices[0].platform == "cpu" and count > MOST_CPU_DEVICES:
            raise _too_many(count)
        return devices
    if spec != "cpu" and not (kind == "cpu" and number.isdecimal() and number.strip("0")):
        raise ConfigError(
            f"devices = {shown(spec)} is not known: pass --devices gpu, --devices cpu or --devices cpu:8."
        )
    if number and (not is_count(number) or int(number) > MOST_CPU_DEVICES):
        raise _too_many(number)
    requested = int(number or 1)
    if _make_cpu_devices(requested):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that this one starts
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices("cpu")
    if jax.local_device_count("cpu") < requested:
        raise ConfigError(
            f"devices = {spec}, but jax has already started with {jax.local_device_count('cpu')} CPU device(s) in this "
            f"process: call megajax.runtime.mesh.start_devices({spec!r}) before anything else uses jax, or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={requested} before Python starts."
        )
    return devices if jax.process_count() > 1 else devices[:requested]


def _too_many(count: int | str) -> ConfigError:
    return ConfigError(
        f"{shown(count)} CPU devices are too many for a process, which starts threads for each: pass --devices "
        f"cpu:{MOST_CPU_DEVICES} or fewer, and smaller --data, --pipe and --tensor, or run on GPUs."
    )


def _make_cpu_devices(count: int) -> bool:
    """Requests `count` CPU devices in this process; returns False, without effect, if jax has already started."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return False
    add_flags(cpu_flags(count))
    # The threads of the process. A device that waits in a collective keeps one (`pipeline.loops.serializes`); as many as
    # cores remain, so that no core is idle because devices wait. With more, steps are slower.
    os.environ.setdefault("PJRT_NPROC", str(count + (os.cpu_count() or 1)))
    return True


def _has_nvidia_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU, without starting jax, which would read XLA_FLAGS."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg"))  # /dev/dxg: WSL


@contextlib.contextmanager
def _without_plugin_errors() -> Iterator[None]:
    """Hides the traceback that jax logs if the CUDA plugin, installed to compile for GPUs, finds no GPU."""
    logger = logging.getLogger(PLUGIN_LOGGER)
    hush = lambda record: "plugin configuration error" not in record.getMessage()  # noqa: E731
    logger.addFilter(hush)
    try:
        yield
    finally:
        logger.removeFilter(hush)


def choose_devices(spec: str | None, count: int) -> list[jax.Device]:
    """The first `count` of the devices that `spec` names (see `start_devices`); of several processes, equal shares.

    Raises:
        ConfigError: as in start_devices, or there are fewer than `count` devices, or the processes cannot share them.
    """
    processes = coordination_service().num_processes
    devices = start_devices(spec, -(-count // processes))
    _check_enough(devices, count)
    if count % processes:
        raise ConfigError(
            f"the mesh has data * pipe * tensor = {count} devices, which {processes} processes cannot share equally: pass "
            f"--data, --pipe and --tensor for a multiple of {processes}, or start fewer processes."
        )
    chosen: list[jax.Device] = []
    for process in range(processes):
        own = [device for device in devices if device.process_index == process][: count // processes]
        if len(own) < count // processes:
            raise ConfigError(
                f"process {process} has {len(own)} devices, but each of the {processes} gives {count // processes} to "
                f"the mesh of {count}: give all processes the same number of devices."
            )
        chosen += own
    return chosen


def make_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The device mesh of a run, with axes ("data", "pipe", "tensor"), or ("data", "expert", "pipe", "tensor").

    `parallel.axis_order` maps the axes to the list of devices, outermost first. jax lists GPUs host by host, so with
    tensor innermost a tensor group is consecutive devices: NVLink neighbours in one host, if tensor divides the number
    of GPUs per host. (A larger tensor is legal, but its reduce-scatters and all-gathers, four of each per layer and
    microbatch, then cross the network.) Pipeline neighbours, which exchange one activation per microbatch, come next
    and may be on different hosts. Data-parallel replicas, which communicate once per step, are farthest apart
    (2104.04473 section 3, takeaways 1 to 3). The `context` devices that share a sample's sequence are neighbours on the
    data axis, whose size is data * context: outside attention they act as replicas with other tokens. With expert above 1,
    that axis is split in two: the `expert` neighbours that split the experts are the axis expert, and the data axis is
    data * context / expert. A mesh without expert parallelism has no axis of that name.

        axis_order data, pipe, tensor with data=2 pipe=2 tensor=2:
                       tensor 0  tensor 1
        data 0  pipe 0     0         1
                pipe 1     2         3
        data 1  pipe 0     4         5
                pipe 1     6         7

    Args:
        parallel: sizes of the axes, and their order, in which expert has no place of its own.
        devices: devices to use; the first data * context * pipe * tensor are taken. Default: jax.devices().

    Returns:
        Mesh whose shape is `parallel.mesh_sizes`, its axes of type Auto.

    Raises:
        ConfigError: there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    _check_enough(devices, parallel.devices)
    grid = np.array(devices[: parallel.devices], dtype=object)[mesh_places(parallel)]
    axes, shape = zip(*parallel.mesh_sizes.items(), strict=True)
    return Mesh(grid.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def mesh_places(parallel: ParallelConfig) -> np.ndarray:
    """The place on the list of devices of each device of the mesh, int [devices], in the order of the mesh's axes.

    In compiled programs a collective's groups have numbers of devices in this order.
    """
    sizes = {"data": parallel.replicas, "pipe": parallel.pipe, "tensor": parallel.tensor}
    places = np.arange(parallel.devices).reshape([sizes[axis] for axis in parallel.axis_order])
    return places.transpose([parallel.axis_order.index(axis) for axis in MESH_AXES]).reshape(-1)


def _check_enough(devices: Sequence[jax.Device], count: int) -> None:
    """Raises ConfigError if there are fewer than `count` devices."""
    if len(devices) < count:
        trial = f", or, for a trial on the CPU, pass --devices cpu:{count}" if count <= MOST_CPU_DEVICES else ""
        raise ConfigError(
            f"the mesh needs data * pipe * tensor = {count} devices, but there are {len(devices)}: lower --data, "
            f"--pipe or --tensor{trial}."
        )
