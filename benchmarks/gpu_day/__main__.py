"""Everything that a machine with GPUs can tell about megajax, in one command.

python -m benchmarks.gpu_day                          on this machine's GPUs, at most 25 minutes
python -m benchmarks.gpu_day --tiny                   the same on eight CPU devices, small: a test of this command
python -m benchmarks.gpu_day --compile-only b200      without a GPU: compiles every case's programs for eight of these
python -m benchmarks.gpu_day --only losses --only "kernels: attention cudnn"

Correctness: losses of 30 steps against a CPU, for each precision, attention, schedule, ZeRO level, recompute and mesh;
kernels against numpy in fp64; greedy texts; a checkpoint across. Speed: rates of matmuls, attention, grouped matmuls and
memory; training steps measured, predicted, and against plain JAX and PyTorch; the table of --calibrate. Each case is a
process of its own with a deadline: one that hangs is a result. A second start continues where the first one ended.

Writes gpu_day_DEVICE.json and .html, which says in its first lines what holds.
"""

import argparse
import datetime
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_day import page
from benchmarks.gpu_day.cases import MOST_JOBS, Case, cases
from benchmarks.gpu_day.compiling import compiled_case
from benchmarks.gpu_day.losses import FOLDER
from benchmarks.gpu_day.outcomes import DEVICES, GPUS
from benchmarks.gpu_day.programs import described
from benchmarks.gpu_day.runner import VISIBLE, Store, run_all
from benchmarks.gpu_day.values import COMPILER
from benchmarks.mfu import in_child, slug, versions
from megajax.config import ConfigError
from megajax.config.options import Parser
from megajax.estimate import gpus
from megajax.plan.compiler import MISSING_PLUGIN, check_vendor, has_compiler
from megajax.schedules.arguments import number, plain_text, whole
from megajax.schedules.errors import exit_code

COMPILED_FOR = 8  # GPUs of --compile-only
TINY_DEVICES = "cpu:8"
MINUTES = 25.0
CACHE = "JAX_COMPILATION_CACHE_DIR"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 0 if every case passed or was not run, 1 otherwise."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit ends the cases' processes, as Ctrl-C does
    return exit_code(lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> int:
    started = time.monotonic()
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiny", action="store_true", help="fewer cases, of small sizes")
    add("--devices", type=plain_text, metavar="WHERE", help="gpu, or cpu:COUNT (default: the GPUs; with --tiny cpu:8)")
    add("--compile-only", type=plain_text, choices=gpus.GPUS, metavar="GPU", help="of eight of these; nothing is run")
    add("--minutes", type=number(), help=f"after which cases end (default: {MINUTES:g}; of --compile-only none)")
    add("--only", action="append", type=plain_text, help="cases whose names begin so")
    add("--jobs", type=whole(), help="cases at a time (default: one for two cores, or if no GPU runs one for each)")
    add("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"), help="folder (default: %(default)s)")
    own = parser.parse_args(arguments)
    if own.out.exists() and not own.out.is_dir():
        raise ConfigError(f"out = {own.out} is a file: pass --out FOLDER.")
    own.out.mkdir(parents=True, exist_ok=True)
    if own.compile_only:
        device, chosen = _compiled(own)
    else:
        own.devices = own.devices or (TINY_DEVICES if own.tiny else None)
        device = in_child(described, own.devices)  # this process must not take the devices' memory
        chosen = cases(device["count"], own.tiny)
    chosen = [one for one in chosen if not own.only or one.name.startswith(tuple(own.only))]
    if not chosen:
        raise ConfigError(f"only = {' '.join(own.only)} begins no case's name: see the names in the page.")
    path = own.out / f"gpu_day_{'compiled_' if own.compile_only else ''}{slug(device)}.json"
    header = {
        "command": " ".join(["python -m benchmarks.gpu_day", *(sys.argv[1:] if arguments is None else arguments)]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": versions(),
    }
    store = Store(path, header)
    if own.devices:
        os.environ[DEVICES] = own.devices
    os.environ.setdefault(GPUS, os.environ.get(VISIBLE, ",".join(map(str, range(device["count"])))))
    os.environ.setdefault(FOLDER, str(own.out.resolve()))
    cores = os.cpu_count() or 2
    jobs = own.jobs or min(MOST_JOBS, cores if own.tiny or own.compile_only else max(1, cores // 2))
    on = "compiled for" if own.compile_only else "on"
    print(f"{len(chosen)} cases {on} {device['count']} {device['kind']}", flush=True)
    minutes = own.minutes or (float("inf") if own.compile_only else MINUTES)
    with tempfile.TemporaryDirectory() as folder:
        if own.tiny:  # a case's program for CPU devices is often that of its reference, too
            os.environ.setdefault(CACHE, folder)
        run_all(chosen, store, jobs, started + 60 * minutes, lambda line: print(line, flush=True))
    for left in own.out.glob("cpu_losses_*"):
        left.unlink()
    page.write(store.results, path.with_suffix(".html"))
    print(f"written: {path}, {path.with_suffix('.html').name}")
    return int(any(one["status"] not in ("passed", "not run") for one in store.results["cases"]))


def _compiled(own: argparse.Namespace) -> tuple[dict[str, Any], list[Case]]:
    """The device of --compile-only, and the cases."""
    if not has_compiler():
        raise ConfigError(f"{MISSING_PLUGIN}.")
    gpu = gpus.find_gpu(own.compile_only)
    check_vendor(gpu)
    device = {"platform": COMPILER, "kind": gpu.name, "count": COMPILED_FOR}
    return device, [compiled_case(one, gpu.name, COMPILED_FOR) for one in cases(COMPILED_FOR, own.tiny)]


if __name__ == "__main__":
    sys.exit(main())
