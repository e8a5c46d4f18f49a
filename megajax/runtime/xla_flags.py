"""XLA's flags, each with its reason: those that megajax sets on GPUs and on CPU devices, and one that it refuses.

A flag that the user has in XLA_FLAGS stays as it is. XLA ends the process on a flag that it does not know, without a
traceback, and flags come and go with its versions; so before jax starts on GPUs, a child process tries them.

Not here, because the program has no use for them: the thresholds up to which XLA joins collectives (the layers of a rank
lie in one array, so a gradient's collective is gigabytes as it is), pipelined collectives (those over data are outside
all loops), and windowed einsum (XLA's own collective matmul, which `tensor_overlap` replaces).
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence

from megajax.config import ConfigError
from megajax.runtime.compat import MAKE_CPU_CLIENT

__all__ = [
    "CPU_FLAGS",
    "GPU_FLAGS",
    "NO_REMATERIALIZATION",
    "add_flags",
    "add_gpu_flags",
    "check_ring_flags",
    "unknown_flags",
]

# Fake CPU devices share few cores, so one can be minutes late at a collective; by default XLA then ends the process.
CPU_FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
)

# XLA computes matmuls again, in 2% of a step, where its estimate of memory, made before buffers are shared, is more than the
# GPU has. What is computed again is for `recompute` to say.
NO_REMATERIALIZATION = "--xla_disable_hlo_passes=rematerialization"

GPU_FLAGS = (
    # Schedules a collective's start early and its end late, with compute between. The default of late versions only.
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    # CUDA graphs take in neither the loops over ticks and blocks nor what overlaps in them; JAX's advice for pipelines.
    "--xla_gpu_enable_command_buffer=",
    # Splits sends in a loop into chains, and where several rings are one collective, loses data (openxla/xla#45222).
    "--xla_gpu_enable_pipelined_p2p=false",
    # A rank that died leaves the others waiting in a collective for ever (jax-ml/jax#38503): end the job instead.
    "--xla_gpu_nccl_termination_timeout_seconds=1800",
    NO_REMATERIALIZATION,
)
BREAKS_RINGS = "--xla_gpu_enable_pipelined_p2p"


def add_flags(flags: Sequence[str]) -> None:
    """Adds to XLA_FLAGS those flags that it does not have yet, with whatever value."""
    given = os.environ.get("XLA_FLAGS", "").split()
    names = {_name(flag) for flag in given}
    os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in flags if _name(flag) not in names)])


def add_gpu_flags() -> tuple[str, ...]:
    """Adds GPU_FLAGS to XLA_FLAGS, but for those that the installed jaxlib does not know; call it before jax starts.

    Returns:
      The flags of GPU_FLAGS that it does not know.

    Raises:
      ConfigError: it does not know a flag that the user set, or cannot read its value.
    """
    given = os.environ.get("XLA_FLAGS", "").split()
    unknown = unknown_flags([*given, *GPU_FLAGS])
    wrong = [flag for flag in given if flag in unknown]
    if wrong:
        raise ConfigError(
            f"XLA_FLAGS has {' '.join(wrong)}, which the installed jaxlib does not know: take it out of XLA_FLAGS."
        )
    add_flags([flag for flag in GPU_FLAGS if flag not in unknown])
    return tuple(flag for flag in GPU_FLAGS if flag in unknown)


def unknown_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Those of `flags` that the installed jaxlib does not know, tried in a child process.

    Raises:
      ConfigError: a value that cannot be read.
    """
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MAKE_CPU_CLIENT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        return ()
    found = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", done.stderr)
    if found is None:
        said = next((line for line in done.stderr.splitlines() if "--xla" in line), done.stderr.strip()[-200:])
        raise ConfigError(f"XLA cannot read XLA_FLAGS = {' '.join(flags)}: {said.strip()}")
    return tuple(flag for flag in flags if flag in found[1].split())


def check_ring_flags(field: str) -> None:
    """Raises ConfigError where the user's XLA_FLAGS would make `field`'s rings lose data."""
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if _name(flag) == BREAKS_RINGS and flag.partition("=")[2].lower() not in ("false", "0"):
            raise ConfigError(
                f"XLA_FLAGS has {flag}, under which XLA loses data sent round several rings at once, as {field} does "
                f"(openxla/xla#45222): take it out, or leave {field} at its default."
            )


def _name(flag: str) -> str:
    return flag.partition("=")[0]
