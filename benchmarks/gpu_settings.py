"""Step time under other settings of XLA, NCCL and CUDA than megajax's own, on the GPUs there are.

    python -m benchmarks.gpu_settings --model gpt3-1.3b --tensor 2 --pipe 2 --global-batch-size 64
    python -m benchmarks.gpu_settings --setting command-buffers --rounds 5 --model gpt3-1.3b --tensor 2 --pipe 2

Options that are not its own are those of `python -m experiments.gpt3`, which runs in a process of its own for each setting,
in turns, because a machine's speed varies. Printed are the median step and its ratio to that of megajax's settings in the
same round. `megajax/runtime/gpu_environment.py` and `xla_flags.py` say why each is as it is, and docs/parallelism.md what
XLA's estimates of latencies are.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from megajax.config.options import Parser
from megajax.schedules.arguments import whole
from megajax.schedules.errors import command
from megajax.train.sinks import read_steps

OWN = "megajax's"
# name: environment variables; XLA_FLAGS is added to the user's.
SETTINGS: dict[str, dict[str, str]] = {
    "several-queues": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},  # the driver's default
    "command-buffers": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"},
    "triton-matmuls": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"},
    "nccl-user-buffers": {"XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers=true", "NCCL_NVLS_ENABLE": "1"},
    "normal-priority": {"XLA_FLAGS": "--xla_gpu_enable_highest_priority_async_stream=false"},
    "free-launch-order": {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"},  # NCCL's default
    "connected-permutes": {"XLA_FLAGS": "--xla_gpu_collective_permute_connected_components=true"},
    "one-collective": {"XLA_FLAGS": "--xla_gpu_experimental_parallel_collective_overlap_limit=1"},
}
# name: options of the run.
OPTIONS: dict[str, list[str]] = {
    name: ["--latency-estimates", name.removesuffix("-latencies")] for name in ("xla-latencies", "roofline-latencies")
}
WARM_UP = 3  # steps, the compilation among them


def environment_of(setting: Mapping[str, str], users: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run under a setting."""
    flags = " ".join(filter(None, (users.get("XLA_FLAGS"), setting.get("XLA_FLAGS"))))
    return {**users, **setting, "XLA_FLAGS": flags}


def step_seconds(options: Sequence[str], environment: Mapping[str, str], steps: int) -> float | str:
    """The median time of a step; or the last line of the run's errors, if it failed."""
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory) / "log.jsonl"
        words = ["--steps", str(steps + WARM_UP), "--log-every", "1", "--log-jsonl", str(log), "--new-tokens", "0"]
        command = [sys.executable, "-m", "experiments.gpt3", *options, *words, "--validation-batches", "0"]
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        rows = read_steps(log)
    return statistics.median(row["step_seconds"] for row in rows[WARM_UP:])


@command
def main(arguments: Sequence[str] | None) -> int:
    """The command; returns its exit code, 1 if megajax's own settings do not run."""
    parser = Parser(description=__doc__)
    names = [*SETTINGS, *OPTIONS]
    parser.add_argument("--setting", action="append", choices=names, help="one to compare with (default: all)")
    parser.add_argument("--rounds", type=whole(), default=3, help="runs of each setting (default: %(default)s)")
    help_ = f"in a run, after {WARM_UP} others (default: %(default)s)"
    parser.add_argument("--timed-steps", type=whole(), default=20, help=help_)
    own, options = parser.parse_known_args(arguments)
    chosen = {OWN: {}} | {name: SETTINGS.get(name, {}) for name in own.setting or names}
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    failed: dict[str, str] = {}
    for _ in range(own.rounds):
        base = None
        for name, setting in chosen.items():
            if name in failed:
                continue
            words = [*options, *OPTIONS.get(name, ())]
            found = step_seconds(words, environment_of(setting, os.environ), own.timed_steps)
            if isinstance(found, str):
                failed[name] = found
                print(f"{name}: {found}", file=sys.stderr, flush=True)
                if name == OWN:
                    return 1
                continue
            base = base or found
            ratios[name].append(found / base)
            print(f"{name:20} {1e3 * found:10.1f} ms {found / base:8.3f}", flush=True)
    print(f"\nmedian of the ratios to {OWN} settings, in {own.rounds} rounds; above 1 is slower:")
    for name, values in ratios.items():
        print(f"{name:20} {statistics.median(values):8.3f}" if values else f"{name:20} failed: {failed[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
