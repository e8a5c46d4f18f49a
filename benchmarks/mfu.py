"""Tokens/s, TFLOP/s and MFU of the training step, over mesh shapes, schedules, microbatch sizes and recompute modes.

python -m benchmarks.mfu                          on the GPUs there are, or eight CPU devices
python -m benchmarks.mfu --pipe 4 --tensor 2      around another layout; takes every option of a training run
python -m benchmarks.mfu --blocks --peers         one GPU: the papers' blocks, compared with PyTorch and Hugging Face
python -m benchmarks.mfu --redraw benchmarks/results/mfu_cpu.json      the table and the plot of results on file

A step is forward, backward, clipping and AdamW. One option is varied at a time; the others stay as given.

  --meshes D,P,T ...           mesh shapes to try (default: all whose product is the number of devices)
  --schedules NAME[:V] ...     schedules, with chunks (default: those that fit the model and the mesh)
  --microbatch-sizes B ...     (default: 1 2 4 8)
  --recomputes MODE ...        (default: none selective full)
  --blocks [HIDDEN ...]        instead of these, one-GPU models of a few blocks (default: 2304 4096 6144 12288), for each
                               of --microbatch-sizes; as many layers as fit, up to 8, unless --layers is given
  --peers                      also a PyTorch GPT (torch.compile, flash attention) and transformers' GPT-2, on one device
  --peer-python PYTHON         the Python of a venv with torch and transformers, which runs the peers
  --rounds COUNT               times each step is timed (default: 5)
  --out FOLDER                 where the .json, .txt and .svg files are written (default: benchmarks/results)
  --redraw FILE.json           measure nothing: print results on file, and write the .txt and .svg beside them again

On a GPU the rates of a large matmul and of a copy, the ceilings, are measured first. MFU is relative to the vendor's peak;
the fraction of the measured ceiling is printed too. The time of a step is the median. On CPU devices, which share the
machine's cores, only ratios are meaningful: all programs are compiled first and then timed in turn, and the fastest counts.
"""

import argparse
import dataclasses
import importlib.metadata
import multiprocessing
import os
import pathlib
import platform
import re
import shlex
import shutil
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from benchmarks import mfu_report
from benchmarks.mfu_cases import BLOCKS, Case, blocks, sweeps
from benchmarks.peers import PEERS, run_peer
from megajax.config import ConfigError, RunConfig
from megajax.config.cli import parse
from megajax.config.options import Parser
from megajax.schedules.arguments import plain_text, whole
from megajax.schedules.errors import command

CPU_DEVICES = 8
# Eight layers and heads, so that each of eight devices can have its own.
ON_CPU = {"model": "tiny", "layers": 8, "heads": 8, "vocabulary": 512, "microbatch_size": 2, "global_batch_size": 32}
ON_GPU = {"model": "gpt3-1.3b", "microbatch_size": 4, "global_batch_size": 64}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


@command
def main(arguments: Sequence[str] | None) -> None:
    """Measures and writes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words or "-h" in words:
        print(__doc__.strip())
        return
    args = read_options(words)
    if args.redraw:
        return mfu_report.write(mfu_report.read(args.redraw), args.redraw.parent, args.redraw.stem)
    # With peers in a child process, which frees its GPU memory before they run.
    results = in_child(measure, args) if args.peers else measure(args)
    results = {"command": repeatable(words)} | results
    if args.peers:
        results["peers"] = peer_rows(args, results)
    name = "mfu_blocks" if args.blocks else "mfu"
    mfu_report.write(results, args.out, f"{name}_{slug(results['device'])}")


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options described above, and those of a training run as `words`; raises ConfigError for an invalid value."""
    parser = Parser(add_help=False)
    add = parser.add_argument
    kinds = {"meshes": plain_text, "schedules": plain_text, "microbatch-sizes": whole(), "recomputes": plain_text}
    for name, kind in kinds.items():
        add(f"--{name}", nargs="+", type=kind)
    add("--blocks", nargs="*", type=whole())
    add("--peers", action="store_true")
    add("--peer-python", type=plain_text, default=sys.executable)
    add("--rounds", type=whole(), default=5)
    add("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    add("--redraw", type=pathlib.Path)
    args, args.words = parser.parse_known_args(words)
    args.blocks = BLOCKS if args.blocks == [] else args.blocks
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"out = {args.out} is a file: pass --out FOLDER.")
    if args.peers and shutil.which(args.peer_python) is None:
        raise ConfigError(f"peer_python = {args.peer_python} is not a program: pass --peer-python VENV/bin/python.")
    return args


def repeatable(words: Sequence[str]) -> str:
    """The command that repeats the measurement, without paths of this machine."""
    text = shlex.join(["python", "-m", "benchmarks.mfu", *words])
    return re.sub(r" --out \S+", "", re.sub(r"--peer-python \S+", "--peer-python PYTHON", text))


def measure(args: argparse.Namespace) -> dict:
    """Times every case; returns "device", "versions", "ceilings" (of a GPU), "peak" and "rows".

    Raises:
      ConfigError: a run that is not legal, or no run that the peers could run too.
    """
    from megajax.estimate.gpus import device_peak
    from megajax.models.context import attention_choice
    from megajax.runtime.mesh import start_devices

    defaults = {name: value for name, value in ON_CPU.items() if not (args.blocks and name == "layers")}
    request = parse(args.words, "", defaults)
    devices = start_devices(request.devices, request.devices_needed or (1 if args.blocks else CPU_DEVICES))
    on_cpu = devices[0].platform == "cpu"
    if not on_cpu:
        request = parse(args.words, "", ON_GPU)
    run = request.run(1 if args.blocks else request.devices_needed or len(devices), "fp32" if on_cpu else "bf16")
    run = run.with_layout(attention=attention_choice(run, devices[0]).name)
    if args.blocks:
        if run.parallel.devices != 1:
            raise ConfigError(
                f"blocks run on one device, not {run.parallel.devices}: omit --data, --pipe, --tensor and --context."
            )
        limit = None if on_cpu else devices[0].memory_stats()["bytes_limit"]
        cases = blocks(run, args.blocks, args.microbatch_sizes, limit, request.given.get("layers"))
    else:
        cases = sweeps(run, args.meshes, args.schedules, args.microbatch_sizes, args.recomputes)
    for case in cases:
        case.run.validate()
    if args.peers and not any(case.run.parallel.devices == 1 for case in cases):
        raise ConfigError("peers run on one device, and no run here does: pass --blocks, or --devices cpu:1.")
    results = {"device": describe_device(devices), "versions": versions(), "ceilings": {}, "peak": None}
    if not on_cpu:
        from megajax.plan.measure import copy_rate, matmul_ceiling

        peak = device_peak(devices, run.train.precision)
        results["peak"] = {"flops": peak.flops, "source": peak.source}
        results["ceilings"] = {
            "matmul_flops": matmul_ceiling(devices[0], run.train.precision),
            "copy_bytes": copy_rate(devices[0]),
        }
    runs = list(dict.fromkeys(case.run for case in cases))
    seconds = time_interleaved(runs, devices, args.rounds) if on_cpu else time_one_by_one(runs, devices, args.rounds)
    results["rows"] = [row(case, seconds[case.run], results) for case in cases]
    return results


def time_interleaved(runs: Sequence[RunConfig], devices, rounds: int) -> dict[RunConfig, list[float]]:
    """Seconds of each step in each round; steps are timed in turn, so that a slow phase of the machine affects all."""
    from benchmarks.mfu_cases import Step

    steps = {}
    for run in runs:
        _progress(f"compiling {len(steps) + 1} of {len(runs)}")
        steps[run] = Step(run, devices)
    seconds: dict[RunConfig, list[float]] = {run: [] for run in runs}
    for number in range(rounds):
        _progress(f"timing {number + 1} of {rounds}")
        for run, step in steps.items():
            seconds[run].append(step())
    _progress("")
    return seconds


def time_one_by_one(runs: Sequence[RunConfig], devices, rounds: int) -> dict[RunConfig, list[float]]:
    """Seconds of each step in each round, one run after another: a GPU cannot hold several. Empty if it does not fit."""
    import jax

    from benchmarks.mfu_cases import Step

    seconds: dict[RunConfig, list[float]] = {}
    for number, run in enumerate(runs):
        _progress(f"run {number + 1} of {len(runs)}")
        seconds[run] = []
        try:
            step = Step(run, devices)
            seconds[run] = [step() for _ in range(rounds)]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        step = None
        jax.clear_caches()
    _progress("")
    return seconds


def row(case: Case, seconds: list[float], results: dict) -> dict:
    """The results of a case; if it did not fit, its rates are None."""
    on_cpu = results["device"]["platform"] == "cpu"
    one = (min(seconds) if on_cpu else statistics.median(seconds)) if seconds else None
    rates = {"seconds": one} | rates_of(case.run, one, results)
    return {"sweep": case.sweep, "label": case.label} | rates | {"rounds": seconds, "run": dataclasses.asdict(case.run)}


def rates_of(run: RunConfig, seconds: float | None, results: dict) -> dict[str, float | None]:
    """The rates of a step of so many seconds, each None if it is not known."""
    from megajax.estimate.flops import causal_flops_per_step, flops_per_step

    flops = flops_per_step(run) / seconds / run.parallel.devices if seconds else None
    mfu = flops / results["peak"]["flops"] if flops and results["peak"] else None
    of = lambda most: flops / most if flops and most else None  # noqa: E731
    return {
        "tokens_per_second": run.train.global_batch_size * run.model.sequence_length / seconds if seconds else None,
        "teraflops_per_device": flops / 1e12 if flops else None,
        "mfu": mfu,
        "mfu_causal": mfu and mfu * causal_flops_per_step(run) / flops_per_step(run),
        "share_of_ceiling": of(results["ceilings"].get("matmul_flops")),
    }


def peer_rows(args: argparse.Namespace, results: dict) -> list[dict]:
    """The peers on the shapes of the one-device runs; a peer that cannot run has an "error" instead of rates."""
    from benchmarks.compiled import run_from_json

    labels: dict[RunConfig, str] = {}
    for one in results["rows"]:
        if (run := run_from_json(one["run"])).parallel.devices == 1:
            labels.setdefault(run, one["label"])
    rows = []
    for name, file in PEERS.items():
        _progress(f"{name}: {len(labels)} shapes")
        answers = run_peer(file, args.peer_python, list(labels), results["device"]["platform"], args.rounds)
        for (run, label), answer in zip(labels.items(), answers, strict=True):
            rates = rates_of(run, answer["seconds"], results) if answer.get("seconds") else {}
            rows.append({"peer": name, "label": label} | answer | rates)
    _progress("")
    return rows


def in_child(function, *arguments):
    """Calls the function in a child process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise ConfigError("the measuring process crashed; its last messages are above.") from None


def describe_device(devices) -> dict:
    """The devices and the machine."""
    first = devices[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": len(devices),
        "runtime": getattr(first.client, "platform_version", "").splitlines()[0:1],
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect speed."""
    import megajax

    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "megajax": megajax.__version__} | found


def slug(device: dict) -> str:
    """A device's name for use in file names: "cpu", "nvidia_h200"."""
    return re.sub(r"\W+", "_", device["kind"].lower()).strip("_")


def _progress(text: str) -> None:
    """Prints one line of progress over the last one."""
    print(f"\r{text:<60}\r" if not text else f"\r{text:<60}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
