"""What a run says: a progress bar on a terminal or plain lines elsewhere, and one JSON object a step in a file.

A step's record never leaves a number out because it is NaN or infinite: those are the numbers one looks for.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megajax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What turns a step's seconds into rates."""

    tokens_per_step: int
    flops_per_step: float  # model FLOPs: forward and backward once, no recompute, whole global batch
    devices: int
    peak_flops: float  # FLOP/s of one device in the run's precision

    def rates(self, seconds: float) -> dict[str, float]:
        """tokens_per_second of the whole mesh; TFLOP/s and model FLOPs utilization (MFU, a fraction) of one device."""
        flops_per_second = self.flops_per_step / seconds / self.devices
        return {
            "tokens_per_second": self.tokens_per_step / seconds,
            "tflops_per_device": flops_per_second / 1e12,
            "mfu": flops_per_second / self.peak_flops,
        }


def step_record(
    step: int, metrics: Mapping[str, Any], samples: int, seconds: float, throughput: Throughput
) -> dict[str, float]:
    """The record of one step, in the order in which it is written.

    Args:
      step: 1 for the first step of the run.
      metrics: scalars of `Training.train_step`: loss, grad_norm, learning_rate, loss_scale, skipped.
      samples: samples consumed at the end of this step.
      seconds: wall-clock seconds of the step; the first of a process includes compilation.
    """
    return {
        "step": step,
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "loss_scale": float(metrics["loss_scale"]),
        "skipped": int(metrics["skipped"]),
        "samples": samples,
        "step_seconds": seconds,
        **throughput.rates(seconds),
    }


def to_json(record: Mapping[str, float]) -> str:
    """One line of strict JSON; NaN and infinities become "nan", "inf", "-inf", which `float()` reads back."""
    finite = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False)


class JsonLines:
    """A file with one JSON object a step, written through at once so that a killed run keeps its log."""

    def __init__(self, path: str | pathlib.Path):
        """Opens the file anew.

        Raises:
          ConfigError: the file cannot be written.
        """
        try:
            self._file = open(path, "w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"cannot write the log {path}: {error.strerror}; give --log-jsonl a writable path"
            ) from error

    def write(self, record: Mapping[str, float]) -> None:
        self._file.write(to_json(record) + "\n")

    def close(self) -> None:
        self._file.close()


def describe_numbers(record: Mapping[str, float]) -> str:
    """The loss and the rates of a step in words: what a person watches."""
    return (
        f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"{record['tflops_per_device']:.3g} TFLOP/s and {record['mfu']:.1%} MFU per device"
    )


def describe_line(record: Mapping[str, float], steps: int) -> str:
    """One plain line for a step, all of its numbers in it."""
    return (
        f"step {record['step']}/{steps}  {describe_numbers(record)}  grad norm {record['grad_norm']:.3g}  "
        f"learning rate {record['learning_rate']:.3g}  loss scale {record['loss_scale']:g}  "
        f"{record['step_seconds']:.3g} s"
    )


def warning(record: Mapping[str, float]) -> str | None:
    """What must not pass unseen in a step: a skipped step, or a loss or gradient that is not finite."""
    if record["skipped"]:
        scale = f"; loss scale {record['loss_scale']:g}" if record["loss_scale"] != 1 else ""
        return f"step {record['step']}: gradient norm is {record['grad_norm']}, step skipped{scale}"
    broken = [name for name in ("loss", "grad_norm") if not math.isfinite(record[name])]
    if broken:
        return f"step {record['step']}: " + ", ".join(f"{name} is {record[name]}" for name in broken)
    return None


class RunLog:
    """Shows steps on the console and writes them to a file; used as `with RunLog(...) as log`.

    On a terminal the steps are a progress bar; elsewhere plain lines, so that a redirected log can be read and grepped.
    """

    def __init__(self, steps: int, every: int = 1, console: Console | None = None, jsonl: JsonLines | None = None):
        """A log of a run.

        Args:
          steps: the number of steps of the whole run.
          every: plain lines are printed for the first and last step and for each multiple of this; the progress bar and
            the file have every step.
          console: where to show; standard output if None.
          jsonl: where to write records, if anywhere; closed at the end.
        """
        self.steps = steps
        self.every = every
        self.console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._jsonl = jsonl
        self._bar: Progress | None = None
        self._compiling = False

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception) -> None:
        self._stop_bar()
        if self._jsonl:
            self._jsonl.close()

    def message(self, text: str = "") -> None:
        """Prints a line, above the progress bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def compiling(self) -> None:
        """Says why the first step takes long; its rates will be marked as what they are."""
        self._compiling = True
        if self.console.is_terminal:
            self._show(0, "compiling the first step")
        else:
            self.message("compiling the first step")

    def step(self, record: Mapping[str, float]) -> None:
        """Shows and writes one step's record."""
        if self._jsonl:
            self._jsonl.write(record)
        note, self._compiling = "  (with compilation)" if self._compiling else "", False
        if self.console.is_terminal:
            self._show(int(record["step"]), describe_numbers(record) + note)
        elif record["step"] in (1, self.steps) or record["step"] % self.every == 0:
            self.message(describe_line(record, self.steps) + note)
        if text := warning(record):
            self.message(f"warning: {text}")
        if record["step"] >= self.steps:
            self._stop_bar()

    def _show(self, done: int, text: str) -> None:
        if self._bar is None:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=self.console)
            self._bar.add_task("", total=self.steps)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, description=text, refresh=True)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
