"""Devices: starting jax on the ones a run asks for, and laying the mesh axes ("data", "pipe", "tensor") over them."""

import contextlib
import glob
import logging
import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from megajax.config import ConfigError, ParallelConfig
from megajax.runtime.compat import PLUGIN_LOGGER
from megajax.runtime.xla_flags import CPU_FLAGS, add_flags, add_gpu_flags

AXES = ("data", "pipe", "tensor")


def start_devices(spec: str | None = None, count: int = 1) -> list[jax.Device]:
    """Starts jax on the devices that `spec` names. Call it before anything else makes jax start.

    Args:
        spec: "cpu:8" is eight CPU devices in this process that share its cores, "cpu" one of them, "gpu" the GPUs;
            None is the GPUs (or other accelerators) if there are any, and else `count` CPU devices.
        count: CPU devices to make when `spec` is None.

    Returns:
        All devices of that kind, of every process: at least as many as `spec` says.

    Raises:
        ConfigError: `spec` is none of these, there is no GPU, jax has already started with fewer CPU devices, or
            jaxlib does not know a flag in XLA_FLAGS.
    """
    kind, _, number = (spec or "").partition(":")
    if spec == "gpu" or (spec is None and _has_nvidia_gpu()):
        add_gpu_flags()
    if spec == "gpu":
        try:
            return jax.devices("gpu")
        except RuntimeError as error:
            raise ConfigError(
                "devices = gpu, but jax finds no GPU: type --devices cpu:8 to run on the CPU, or install "
                "megajax[cuda12] or megajax[cuda13], see that nvidia-smi lists a GPU, and unset JAX_PLATFORMS."
            ) from error
    if spec is None:
        _make_cpu_devices(count)
        with contextlib.nullcontext() if _has_nvidia_gpu() else _without_plugin_errors():
            return jax.devices()
    if spec != "cpu" and not (kind == "cpu" and number.isdecimal() and int(number) > 0):
        raise ConfigError(f"devices = {spec!r} is not known: type --devices gpu, --devices cpu or --devices cpu:8.")
    wanted = int(number or 1)
    if _make_cpu_devices(wanted):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that this one starts
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices("cpu")
    if jax.local_device_count("cpu") < wanted:
        raise ConfigError(
            f"devices = {spec}, but jax has already started with {jax.local_device_count('cpu')} CPU device(s) in this "
            f"process: call megajax.runtime.mesh.start_devices({spec!r}) before anything else uses jax, or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before Python starts."
        )
    return devices if jax.process_count() > 1 else devices[:wanted]


def _make_cpu_devices(count: int) -> bool:
    """Asks for `count` CPU devices in this process; False if jax has already started, and nothing was changed."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return False
    add_flags(CPU_FLAGS)
    return True


def _has_nvidia_gpu() -> bool:
    """Whether jax may find one; it cannot be asked, as its flags are read when it starts."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg"))  # the second: under Windows


@contextlib.contextmanager
def _without_plugin_errors() -> Iterator[None]:
    """The CUDA plugin, installed to compile for GPUs, fails to start without one, and jax logs a traceback of that."""
    logger = logging.getLogger(PLUGIN_LOGGER)
    hush = lambda record: "plugin configuration error" not in record.getMessage()  # noqa: E731
    logger.addFilter(hush)
    try:
        yield
    finally:
        logger.removeFilter(hush)


def choose_devices(spec: str | None, count: int) -> list[jax.Device]:
    """The first `count` of the devices that `spec` names, started if need be (see `start_devices`).

    Raises:
        ConfigError: as start_devices, or there are fewer than `count`.
    """
    devices = start_devices(spec, count)
    _check_enough(devices, count)
    return devices[:count]


def make_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The device mesh of a run, with axes always named and ordered ("data", "pipe", "tensor").

    `parallel.axis_order` says how the axes lie on the list of devices, outermost first. jax lists GPUs host by host, so
    with tensor innermost a tensor group is consecutive devices: NVLink neighbours in one host, as long as tensor
    divides the number of a host's GPUs. (A larger tensor is legal, but its reduce-scatters and all-gathers, four of
    each per layer and microbatch, then cross the network.) Pipeline neighbours, which exchange one activation per
    microbatch, come next and may lie in different hosts; data-parallel replicas, which meet once a step, are farthest
    apart (2104.04473 section 3, takeaways 1 to 3). The `context` devices that share a sample's sequence are neighbours
    on the data axis, which is data * context long: to all but attention they are replicas that see other tokens.

        axis_order data, pipe, tensor with data=2 pipe=2 tensor=2:
                       tensor 0  tensor 1
        data 0  pipe 0     0         1
                pipe 1     2         3
        data 1  pipe 0     4         5
                pipe 1     6         7

    Args:
        parallel: sizes of the axes, and their order.
        devices: devices to use; the first data * context * pipe * tensor are taken. Default: jax.devices().

    Returns:
        Mesh of shape [data * context, pipe, tensor], its axes of type Auto.

    Raises:
        ConfigError: there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    _check_enough(devices, parallel.devices)
    sizes = {"data": parallel.data * parallel.context, "pipe": parallel.pipe, "tensor": parallel.tensor}
    laid = np.array(devices[: parallel.devices], dtype=object).reshape([sizes[axis] for axis in parallel.axis_order])
    grid = laid.transpose([parallel.axis_order.index(axis) for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check_enough(devices: Sequence[jax.Device], count: int) -> None:
    """Raises ConfigError if there are fewer than `count` devices."""
    if len(devices) < count:
        raise ConfigError(
            f"the mesh needs data * pipe * tensor = {count} devices, but there are {len(devices)}: lower --data, "
            f"--pipe or --tensor, or, for a trial on the CPU, type --devices cpu:{count}."
        )
