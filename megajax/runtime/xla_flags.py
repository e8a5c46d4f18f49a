"""XLA's flags, each with its reason: those that megajax sets on GPUs and on CPU devices, and one that it refuses.

A flag that the user sets in XLA_FLAGS stays as it is. XLA aborts the process on an unknown flag, without a traceback, and
flags differ between its versions; so before jax starts on GPUs, a child process tries them.

Not set, because the program does not need them: pipelined collectives (those over data are outside all loops), and windowed
einsum (XLA's own collective matmul, which `tensor_overlap` replaces).

Not set, because of open questions, and off by default in jaxlib 0.10.2 to 0.12.0.1:

    --xla_gpu_collective_permute_connected_components    a communicator of the ranks that send to one another, instead of all
                                          devices: 10 to 20 times as fast within a host (openxla/xla#40505), but hangs where
                                          two permutes leave out different devices (openxla/xla#44530)
    --xla_gpu_experimental_enable_collective_multi_streaming    several streams, so that collectives in flight run at the
                                          same time; then only XLA's scheduler prevents deadlocks (openxla/xla#40656)
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence

import jax

from megajax.config import ConfigError, ParallelConfig
from megajax.runtime.compat import MAKE_CPU_CLIENT, jaxlib_version, updates_in_place

__all__ = [
    "CPU_FLAGS",
    "GPU_FLAGS",
    "NO_REMATERIALIZATION",
    "add_flags",
    "add_gpu_flags",
    "check_ring_flags",
    "collectives_in_flight",
    "cpu_flags",
    "gpu_flags",
    "require_flag",
    "step_options",
    "unknown_flags",
]

# CPU devices of one process share few cores, so one can reach a collective minutes late; by default XLA then aborts.
CPU_FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    # With this scheduler, the default, devices of one process run a loop's independent collectives in different orders: a
    # step of ZeRO-3 with 1F1B then hung in most runs, or ended in "Id can't be larger than the number of participating
    # threads" (jaxlib 0.12.0, data 2 x pipe 2).
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
)
# GPUs of one process wait for each other when they start a program (jaxlib: 30 s, then XLA aborts) and before and after the
# first call of each collective (40 s), and one that still loads thousands of kernels or connects to other hosts is later
# than that. Limits as for CPU devices. With one process per GPU nothing waits there. If a device hangs in a later step,
# `--peer-timeout` (300 s) ends the job. The names differ: only those of first calls end in "_seconds".
GPU_TIMEOUTS = (
    "--xla_gpu_executable_warn_stuck_timeout=300",
    "--xla_gpu_executable_terminate_timeout=600",
    "--xla_gpu_first_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_gpu_first_collective_call_terminate_timeout_seconds=600",
)

# A matmul runs in one thread. With as many devices as cores its parts would only delay the other devices: a step took 1 to
# 8% longer (`python -m benchmarks.mfu --devices cpu:8` on two cores).
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"

# XLA recomputes matmuls, in 2% of a step, where its estimate of memory, made before buffers are shared, exceeds that of the
# GPU. The `recompute` option decides what is recomputed.
NO_REMATERIALIZATION = "--xla_disable_hlo_passes=rematerialization"

# For the program that jaxlib 0.12 compiles in place and with merged ticks (`pipeline.options`).
IN_PLACE_FLAGS = (
    # cuBLAS for all matmuls: it reads a block's weights, and adds to its gradients, where they are in the stacked arrays;
    # Triton's matmuls need the slice as an array of its own.
    "--xla_gpu_enable_triton_gemm=false",
    # Collectives are not combined: a merged tick's would tie its forward to its backward, so that neither could overlap the
    # other's matmuls. Others gain nothing: the layers of a rank are in one array, so a gradient has gigabytes already.
    "--xla_gpu_all_gather_combine_threshold_bytes=1",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=1",
)

GPU_FLAGS = (
    # Schedules a collective's start early and its end late, with compute between. The default in recent versions only.
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    # Its limit for temporaries, in percent of (0.8 GPU memory - arguments). By default 95, above which it saves memory and
    # hides fewer collectives: steps that fit were up to 10% slower (docs/planning.md, standing questions).
    "--xla_gpu_memory_limit_slop_factor=150",
    # CUDA graphs support neither the loops over ticks and blocks nor the overlap in them; JAX's advice for pipelines.
    "--xla_gpu_enable_command_buffer=",
    # Splits sends in a loop into chains, and loses data where one collective has several rings (openxla/xla#45222).
    "--xla_gpu_enable_pipelined_p2p=false",
    # If a rank dies or hangs, the others wait in a collective for ever, and XLA has no limit by default: end the job
    # instead. It was also seen not to fire (jax-ml/jax#38503); the watchdog's `--peer-timeout` does not depend on it.
    "--xla_gpu_nccl_termination_timeout_seconds=1800",
    *GPU_TIMEOUTS,
    NO_REMATERIALIZATION,
    *(IN_PLACE_FLAGS if jaxlib_version() >= (0, 12) else []),
)
COLLECTIVES_IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"
MERGED_MATMULS = "xla_gpu_dot_merger_threshold_mb"  # matmuls with a common operand become one, up to this size
BREAKS_RINGS = "--xla_gpu_enable_pipelined_p2p"


def add_flags(flags: Sequence[str]) -> None:
    """Adds `flags` to XLA_FLAGS, except those that it sets already, to whatever value."""
    os.environ["XLA_FLAGS"] = _with_flags(os.environ.get("XLA_FLAGS", "").split(), flags)


def require_flag(flag: str, option: str) -> None:
    """Adds a flag that `option` needs to XLA_FLAGS; call it before jax starts.

    Raises:
      ConfigError: the user set it to another value.
    """
    for given in os.environ.get("XLA_FLAGS", "").split():
        if _name(given) == _name(flag) and given != flag:
            raise ConfigError(f"{option} needs {flag}, and XLA_FLAGS has {given}: remove it from XLA_FLAGS.")
    add_flags((flag,))


def _with_flags(given: Sequence[str], flags: Sequence[str]) -> str:
    names = {_name(flag) for flag in given}
    return " ".join([*given, *(flag for flag in flags if _name(flag) not in names)])


def cpu_flags(count: int) -> tuple[str, ...]:
    """The flags of a process with `count` CPU devices."""
    return (*CPU_FLAGS, ONE_THREAD) if count >= (os.cpu_count() or 1) else CPU_FLAGS


def add_gpu_flags() -> tuple[str, ...]:
    """Adds GPU_FLAGS to XLA_FLAGS, except those unknown to the installed jaxlib; call it before jax starts.

    Returns:
      The flags of GPU_FLAGS that are unknown.

    Raises:
      ConfigError: a flag that the user set is unknown, or its value is invalid.
    """
    os.environ["XLA_FLAGS"], unknown = gpu_flags(os.environ.get("XLA_FLAGS", ""))
    return unknown


def gpu_flags(users: str) -> tuple[str, tuple[str, ...]]:
    """The XLA_FLAGS of a run on GPUs, and the flags of GPU_FLAGS that were omitted as unknown to the installed jaxlib.

    Args:
      users: XLA_FLAGS as the user set it; its flags are unchanged.

    Raises:
      ConfigError: a flag that the user set is unknown to jaxlib, or its value is invalid.
    """
    given = users.split()
    unknown = unknown_flags([*given, *GPU_FLAGS])
    wrong = [flag for flag in given if flag in unknown]
    if wrong:
        raise ConfigError(
            f"XLA_FLAGS has {' '.join(wrong)}, which the installed jaxlib does not know: remove it from XLA_FLAGS."
        )
    omitted = tuple(flag for flag in GPU_FLAGS if flag in unknown)
    return _with_flags(given, [flag for flag in GPU_FLAGS if flag not in unknown]), omitted


def collectives_in_flight(parallel: ParallelConfig, exchanges_timed: bool = False) -> int:
    """How many collectives XLA's scheduler may start before the first one ends.

    Four instead of one: in a merged tick one of a forward and one of a backward wait for matmuls at the same time, and the
    sums over replicas at a step's end overlap. With two tensor ranks each collective is so short that XLA's scheduler hides
    more of them one at a time: 77% against 69% of their time for Llama-2 7B, but 48% against 63% for GPT-3 175B with eight
    (`python -m benchmarks.compiled account`). With ZeRO-3, whose gathers take longer, one at a time takes 1 to 5% more of a
    step (Llama 3.1 8B on H100s, Qwen2.5 1.5B on RTX 4090s).

    Exchanges of rows with experts take as long as several matmuls. Where XLA knows the times of all instructions
    (`estimate.merged_ticks.exchanges_timed`), it takes two of them in flight to run at the same time, and puts both behind
    the same matmuls; one at a time has its own. Of two layers of DeepSeek-V3 on 16 H100s 95 ms of collectives are exposed,
    of 145 by XLA's own times, in a step of 1.2 s. Without the times one at a time takes 2% more of that step.

    In flight is not at the same time: XLA has one stream for them unless multi-streaming is on (openxla/xla#17749), where
    they run one after the other in the order of the program, which is the same on all devices (tests/collective_order.py).
    Only sends between stages are on a stream of their own, with any limit; `gpu_environment.LAUNCH_ORDER` is for these two.
    """
    return 1 if exchanges_timed or parallel.tensor == 2 and parallel.zero < 3 else 4


def step_options(parallel: ParallelConfig, device: jax.Device, exchanges_timed: bool = False) -> dict[str, int]:
    """XLA's options of one run's training step; a flag in XLA_FLAGS replaces each.

    With collective matmuls none are merged: XLA would compute several of a ring's matmuls as one when the last part has
    arrived, with nothing left to overlap the sends.

    Args:
      device: one of the run's.
      exchanges_timed: as of `collectives_in_flight`.
    """
    if not updates_in_place(device):
        return {}
    options = {COLLECTIVES_IN_FLIGHT: collectives_in_flight(parallel, exchanges_timed)}
    if "tensor_overlap" in parallel.rings:
        options[MERGED_MATMULS] = 0
    given = {_name(flag) for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if f"--{name}" not in given}


def unknown_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """The flags that are unknown to the installed jaxlib, found by trying them in a child process.

    Raises:
      ConfigError: a value is invalid.
    """
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MAKE_CPU_CLIENT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        return ()
    found = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", done.stderr)
    if found is None:
        message = next((line for line in done.stderr.splitlines() if "--xla" in line), done.stderr.strip()[-200:])
        raise ConfigError(f"XLA cannot read XLA_FLAGS = {' '.join(flags)}: {message.strip()}")
    return tuple(flag for flag in flags if flag in found[1].split())


def check_ring_flags(field: str) -> None:
    """Raises ConfigError if the user's XLA_FLAGS would make the rings of the option `field` lose data."""
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if _name(flag) == BREAKS_RINGS and flag.partition("=")[2].lower() not in ("false", "0"):
            raise ConfigError(
                f"XLA_FLAGS has {flag}, with which XLA loses data sent around several rings at once, as with {field} "
                f"(openxla/xla#45222): remove it, or leave {field} at its default."
            )


def _name(flag: str) -> str:
    return flag.partition("=")[0]
