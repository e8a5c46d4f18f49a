"""Environment variables that megajax sets before jax starts on GPUs, each with its reason; `xla_flags.py` has XLA's flags.

A variable that the user has set stays as it is. None of these settings has been timed by us yet; `python -m
benchmarks.gpu_settings` compares them, and those below, on the GPUs there are.

Not set, and why:

    NCCL_NVLS_ENABLE, --xla_gpu_enable_nccl_user_buffers    buffers registered with NCCL save a copy in each collective, but
                                          are in a memory pool of their own, beside what the planner counts
    --xla_gpu_enable_command_buffer       with its default CUDA graphs, which gained others 2%; see `xla_flags.GPU_FLAGS`
    --xla_gpu_enable_highest_priority_async_stream    collectives start before waiting kernels; XLA's default already
    NCCL_LAUNCH_MODE=GROUP                where one process drives several GPUs, for hangs when a call that waits for all of
                                          them, as of cudaFree, comes between the launches of a collective (JAX-Toolbox, "GPU
                                          performance"); NCCL calls it deprecated, and one process per GPU does the same
    NCCL_LAUNCH_RACE_FATAL, NCCL_COMM_BLOCKING    NCCL's and XLA's defaults already
    NCCL_DEBUG, NCCL_SOCKET_IFNAME, NCCL_IB_*     of the cluster and its administrator (docs/troubleshooting.md)
"""

import functools
import glob
import os
import pathlib
import subprocess
from collections.abc import Mapping

__all__ = ["MEMORY_FRACTION", "VISIBLE", "gpu_environment", "set_gpu_environment", "visible_gpus"]

# Of a GPU's memory; the CUDA context, NCCL's buffers and fragmentation need the rest. Users set jax's variable up to this;
# its default is 0.75, with which a step that the dry run says fits would not.
MEMORY_FRACTION = 0.92
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # jax refuses both at once; the second is old
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# NVIDIA advises one queue for these, so that kernels start in the order in which XLA schedules them (JAX-Toolbox, "GPU
# performance"; Megatron-LM requires it for its overlap), and against it from Blackwell on.
ONE_QUEUE = ("A100", "A800", "H100", "H200", "H800", "GH200")

# The kernels of one GPU's communicators start in the order in which the host launches them, which is the same on all GPUs
# (tests/collective_order.py); NCCL (from 2.26) asks for it where several communicators are in use at once, as those of sends
# between stages and of other collectives are, lest their kernels wait for each other. Others saw a large run hang with it
# and without it (marin-community/marin#7344), so it is no cure of every hang.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """This host's GPUs, as CUDA_VISIBLE_DEVICES names them, found without starting jax.

    CUDA takes the names before the first one that is not a GPU's, such as -1. Without the variable they are those that
    nvidia-smi lists, which leaves out those that the job has no access to; without that, the driver's devices.
    """
    if VISIBLE in environment:
        found = []
        for name in environment[VISIBLE].split(","):
            if not name.strip() or name.strip().startswith("-") or name.strip() == "NoDevFiles":
                break
            found.append(name.strip())
        return found
    devices = glob.glob("/dev/nvidia[0-9]*")
    count = len(_listed_gpus() or devices) if devices else 0
    return [str(index) for index in range(count)]


@functools.cache
def _listed_gpus() -> list[str]:
    """The lines of nvidia-smi about GPUs; [] if it does not run."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")] if done.returncode == 0 else []


def gpu_models() -> list[str]:
    """The names of this machine's GPUs, as NVIDIA's driver lists them; [] if it does not."""
    models = []
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        for line in pathlib.Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            models += [value.strip()] if name == "Model" else []
    return models


def gpu_environment(users: dict[str, str], models: list[str]) -> dict[str, str]:
    """The variables to set for these GPUs, without those that `users` has."""
    added = {}
    if not any(name in users for name in FRACTIONS):
        added[FRACTIONS[0]] = str(MEMORY_FRACTION)
    one_queue = bool(models) and all(any(name in model for name in ONE_QUEUE) for model in models)
    if one_queue and CONNECTIONS not in users:
        added[CONNECTIONS] = "1"
    if LAUNCH_ORDER not in users:
        added[LAUNCH_ORDER] = "1"
    return added


def set_gpu_environment() -> None:
    """Sets the variables of this machine's GPUs; call it before jax starts."""
    os.environ.update(gpu_environment(dict(os.environ), gpu_models()))
