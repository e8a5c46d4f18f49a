"""Runs of the commands that users run, on the GPUs and on one CPU device: losses, texts and checkpoints must be the same."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from filelock import FileLock

from benchmarks.gpu_day.outcomes import DEVICES, NotAvailable, Wrong
from megajax.train.sinks import read_steps

FOLDER = "MEGAJAX_GPU_DAY"  # a folder for the losses of CPU devices, which many cases are compared with
CPU = ("--devices", "cpu:1", "--data", "1", "--pipe", "1", "--tensor", "1", "--attention", "xla")
QUIET = ("--new-tokens", "0", "--validation-batches", "0", "--log-every", "1")
BATCH = ("--global-batch-size", "16")
RATE = ("--learning-rate", "5e-4")  # so small that rounding does not grow from step to step
PROMPTS = ("The ", "A ", "And when ", "O ")
REFUSED = 2  # the exit code of an illegal combination


def compare(
    experiment: str, model: Sequence[str], layout: Sequence[str], steps: int, limit: float, may_lack: bool
) -> dict:
    """The losses of a model on this machine's devices in a layout, and on one CPU device.

    Args:
      experiment: gpt3, moe or bert.
      model: options that both have.
      layout: options of this machine's devices.
      steps: of the run.
      limit: of the difference of each loss.
      may_lack: whether these devices may not have what the layout asks for.

    Raises:
      Wrong, NotAvailable: as their names say.
    """
    words = [*model, "--steps", str(steps), *BATCH, *RATE]
    found = _losses(experiment, [*words, *layout, *_devices()], may_lack)
    expected = _reference(experiment, words)
    return _compared(found, expected, limit) | {
        "command": _shown(experiment, [*words, *layout]),
        "reference_command": _shown(experiment, [*words, *CPU]),
    }


def generation() -> dict:
    """Greedy texts of a model that was trained on the CPU, generated on both."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(pathlib.Path(folder, "run"))
        _losses("gpt3", ["--steps", "40", "--precision", "fp32", "--run-dir", run, *BATCH, *CPU])
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        words = ["--run-dir", run, *prompts, "--temperature", "0", "--new-tokens", "64", "--precision", "fp32"]
        texts = {}
        for name, devices in (("cpu", ["--devices", "cpu:1"]), ("here", _devices())):
            out = pathlib.Path(folder, f"{name}.jsonl")
            _run(["megajax.generate", *words, "--out", str(out), *devices])
            texts[name] = [json.loads(line)["tokens"] for line in out.read_text().splitlines()]
    pairs = list(zip(texts["here"], texts["cpu"], strict=True))
    wrong = [prompt for prompt, (found, expected) in zip(PROMPTS, pairs, strict=True) if found != expected]
    result = {"texts": len(pairs), "equal": len(pairs) - len(wrong), "first_difference": wrong[0] if wrong else None}
    if wrong:
        raise Wrong(f"{len(wrong)} of {len(pairs)} greedy texts differ, the first after {wrong[0]!r}", result)
    return result


def checkpoint(limit: float = 1e-3) -> dict:
    """A run on the CPU that saves at step 10 of 20, resumed from there on this machine's devices."""
    with tempfile.TemporaryDirectory() as folder:
        run, other = pathlib.Path(folder, "run"), pathlib.Path(folder, "other")
        words = ["--steps", "20", "--precision", "fp32", *BATCH, *RATE, "--save-every", "10", "--no-tensorboard"]
        expected = _losses("gpt3", [*words, "--run-dir", str(run), *CPU])
        shutil.copytree(run, other)
        layout = ["--data", "1", "--pipe", "1", "--tensor", "1"]
        found = _losses("gpt3", [*words, *layout, "--run-dir", str(other), "--resume", "10", *_devices()])
    return _compared(found, expected[10:], limit)


def _compared(found: list[float], expected: list[float], limit: float) -> dict[str, Any]:
    """The result of two lists of losses; raises Wrong if they differ by more than the limit."""
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    result = {"losses": found, "reference": expected, "difference": difference, "limit": limit}
    if not difference <= limit:
        raise Wrong(f"losses differ by {difference:.1e} from those of a CPU, more than {limit:.0e}", result)
    return result


def _reference(experiment: str, words: Sequence[str]) -> list[float]:
    """The losses of one CPU device, which cases that share them compute once."""
    key = hashlib.sha256(json.dumps([experiment, *words]).encode()).hexdigest()[:16]
    path = pathlib.Path(os.environ.get(FOLDER, tempfile.gettempdir()), f"cpu_losses_{key}.json")
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(json.dumps(_losses(experiment, [*words, *CPU])))
    return json.loads(path.read_text())


def _losses(experiment: str, words: Sequence[str], may_lack: bool = False) -> list[float]:
    """The loss of every step of an experiment's command."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.jsonl")
        _run([f"experiments.{experiment}", *words, *QUIET, "--log-jsonl", str(log)], may_lack)
        return [row["loss"] for row in read_steps(log)]


def _run(words: Sequence[str], may_lack: bool = False) -> None:
    """Runs `python -m`; if it may lack something, options that are refused make the case unavailable."""
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message").strip()
    if done.returncode == REFUSED and may_lack:
        raise NotAvailable(last)
    if done.returncode:
        raise RuntimeError(f"python -m {words[0]} exited with code {done.returncode}: {last}")


def _devices() -> list[str]:
    return ["--devices", os.environ[DEVICES]] if DEVICES in os.environ else []


def _shown(experiment: str, words: Sequence[str]) -> str:
    return " ".join(["python -m", f"experiments.{experiment}", *words])
