"""Everything that a machine with GPUs can tell about megajax, in one command.

python -m benchmarks.gpu_day                          on this machine's GPUs, at most 25 minutes
python -m benchmarks.gpu_day --tiny --devices cpu:1   the same on CPU devices, with small sizes: a test of this command
python -m benchmarks.gpu_day --only losses --only "kernels: attention cudnn"

Correctness: losses of 30 steps against a CPU, for each precision, attention, schedule, ZeRO level, recompute and mesh;
kernels against numpy in fp64; greedy texts; a checkpoint across. Speed: rates of matmuls, attention, grouped matmuls and
memory; training steps measured, predicted, and against plain JAX and PyTorch. Each case is a process of its own with a
deadline: one that hangs is a result. A second start continues where the first one ended.

Writes gpu_day_DEVICE.json and .html, which says in its first lines what holds.
"""

import argparse
import datetime
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from benchmarks.gpu_day import page
from benchmarks.gpu_day.cases import MOST_JOBS, cases
from benchmarks.gpu_day.devices import described
from benchmarks.gpu_day.losses import DEVICES, FOLDER
from benchmarks.gpu_day.runner import Store, run_all
from benchmarks.mfu import in_child, slug, versions
from megajax.config import ConfigError
from megajax.config.options import Parser
from megajax.schedules.arguments import number, plain_text, whole
from megajax.schedules.errors import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 0 if every case passed or was not run, 1 otherwise."""
    return exit_code(lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> int:
    started = time.monotonic()
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiny", action="store_true", help="small sizes")
    add("--devices", type=plain_text, metavar="WHERE", help="gpu, or cpu:COUNT (default: the GPUs)")
    add("--minutes", type=number(), default=25.0, help="after which no case is started (default: %(default)s)")
    add("--only", action="append", type=plain_text, help="cases whose names begin so")
    add("--jobs", type=whole(), default=min(MOST_JOBS, max(1, (os.cpu_count() or 2) // 2)), help="cases at a time")
    add("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"), help="folder (default: %(default)s)")
    own = parser.parse_args(arguments)
    if own.out.exists() and not own.out.is_dir():
        raise ConfigError(f"out = {own.out} is a file: pass --out FOLDER.")
    own.out.mkdir(parents=True, exist_ok=True)
    device = in_child(described, own.devices)  # this process must not take the devices' memory
    chosen = [one for one in cases(device["count"], own.tiny) if not own.only or one.name.startswith(tuple(own.only))]
    if not chosen:
        raise ConfigError(f"only = {' '.join(own.only)} begins no case's name: see the names in the page.")
    path = own.out / f"gpu_day_{slug(device)}.json"
    header = {
        "command": "python -m benchmarks.gpu_day" + (" --tiny" if own.tiny else ""),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": versions(),
    }
    store = Store(path, header)
    if own.devices:
        os.environ[DEVICES] = own.devices
    os.environ.setdefault(FOLDER, str(own.out.resolve()))
    print(f"{len(chosen)} cases on {device['count']} {device['kind']}", flush=True)
    run_all(chosen, store, own.jobs, started + 60 * own.minutes, lambda line: print(line, flush=True))
    for left in own.out.glob("cpu_losses_*"):
        left.unlink()
    page.write(store.results, path.with_suffix(".html"))
    print(f"written: {path}, {path.with_suffix('.html').name}")
    return int(any(one["status"] not in ("passed", "not run") for one in store.results["cases"]))


if __name__ == "__main__":
    sys.exit(main())
