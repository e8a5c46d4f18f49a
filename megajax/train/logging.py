"""The log of a run: a progress bar on a terminal or plain lines elsewhere, and each step's record in files.

A step's record contains NaN and infinite values, which are the ones to look for. Its rates are None where the step's time
includes a compilation.
"""

import collections
import contextlib
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megajax.train.expert_load import describe_load, load_record
from megajax.train.log_file import LogFile
from megajax.train.sinks import Sink


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Computes rates from the seconds of a step."""

    tokens_per_step: int
    flops_per_step: float  # model FLOPs: forward and backward once, no recompute, whole global batch
    devices: int
    peak_flops: float  # FLOP/s of one device in the run's precision

    def rates(self, seconds: float, compiled: bool = False) -> dict[str, float | None]:
        """tokens_per_second of the whole mesh; TFLOP/s and model FLOPs utilization (MFU, a fraction) of one device.

        All are None for a step that `compiled`: its seconds measure the compiler.
        """
        if compiled:
            return dict.fromkeys(("tokens_per_second", "tflops_per_device", "mfu"))
        flops_per_second = self.flops_per_step / seconds / self.devices
        return {
            "tokens_per_second": self.tokens_per_step / seconds,
            "tflops_per_device": flops_per_second / 1e12,
            "mfu": flops_per_second / self.peak_flops,
        }


def step_record(
    step: int,
    metrics: Mapping[str, Any],
    samples: int,
    seconds: float,
    throughput: Throughput,
    *,
    batch: int,
    skipped_steps: int = 0,
    bad_steps: int = 0,
    compiled: bool = False,
) -> dict[str, Any]:
    """The record of one step, with its fields in the order in which they are written.

    Args:
      step: 1 for the first step of the run.
      metrics: of `Training.train_step`: loss, grad_norm, learning_rate, loss_scale, skipped, and what experts measured.
      samples: samples consumed at the end of this step.
      seconds: wall-clock seconds of the step.
      batch: samples of this step, without padding.
      skipped_steps: steps of the run that were skipped, this one included.
      bad_steps: steps of the run whose loss was not finite, this one included.
      compiled: whether a compilation fell into the step's seconds.
    """
    return {
        "step": step,
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "loss_scale": float(metrics["loss_scale"]),
        "skipped": int(metrics["skipped"]),
        "skipped_steps": skipped_steps,
        "bad_steps": bad_steps,
        "batch": batch,
        "samples": samples,
        "step_seconds": seconds,
        "compiled": int(compiled),
        **throughput.rates(seconds, compiled),
        **load_record(metrics),
    }


class SpikeDetector:
    """Finds losses far above the preceding ones."""

    def __init__(self, deviations: float, window: int = 100, least: int = 20):
        """Compares with the mean and standard deviation of the last `window` finite losses, once there are `least`."""
        self.deviations, self.least = deviations, least
        self._losses: collections.deque[float] = collections.deque(maxlen=window)

    def flag(self, step: int, loss: float) -> str | None:
        """A warning about a step's loss; None if there is none."""
        text = None
        if math.isfinite(loss):
            if len(self._losses) >= self.least:
                mean = statistics.fmean(self._losses)
                # statistics.pstdev computes with fractions, which took a quarter of the loop's time.
                deviation = math.sqrt(statistics.fmean([(one - mean) ** 2 for one in self._losses]))
                above = (loss - mean) / max(deviation, 1e-3 * abs(mean), 1e-12)
                if above > self.deviations:
                    text = f"step {step}: loss spike: {loss:.4f} is {above:.1f} standard deviations above {mean:.4f}"
            self._losses.append(loss)
        return text


def describe_numbers(record: Mapping[str, float]) -> str:
    """The loss and the rates of a step, for a person to watch."""
    if record["compiled"]:
        return f"loss {record['loss']:.4f}  (with compilation)"
    return (
        f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"{record['tflops_per_device']:.3g} TFLOP/s and {record['mfu']:.1%} MFU per device"
    )


def describe_line(record: Mapping[str, float], steps: int) -> str:
    """One plain line with all numbers of a step."""
    return (
        f"step {record['step']}/{steps}  {describe_numbers(record)}  grad norm {record['grad_norm']:.3g}  "
        f"learning rate {record['learning_rate']:.3g}  loss scale {record['loss_scale']:g}  "
        f"batch {record['batch']}  samples {record['samples']}  {1000 * record['step_seconds']:.1f} ms  "
        f"skipped {record['skipped_steps']}  not finite {record['bad_steps']}{describe_load(record)}"
    )


def warning(record: Mapping[str, float]) -> str | None:
    """A warning for a skipped step, or for a loss or gradient that is not finite; None if there is none."""
    if record["skipped"]:
        scale = f"; loss scale {record['loss_scale']:g}" if record["loss_scale"] != 1 else ""
        loss = "" if math.isfinite(record["loss"]) else f"loss is {record['loss']}, "
        return f"step {record['step']}: {loss}gradient norm is {record['grad_norm']}, step skipped{scale}"
    broken = [name for name in ("loss", "grad_norm") if not math.isfinite(record[name])]
    if broken:
        return f"step {record['step']}: " + ", ".join(f"{name} is {record[name]}" for name in broken)
    return None


class Output:
    """A text stream that ignores write errors: a full disk or a closed pipe behind standard output does not end a run."""

    def __init__(self, stream: TextIO):
        """`stream`: receives the text."""
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As `write`, for buffered text."""
        with contextlib.suppress(OSError):
            self._stream.flush()


class RunLog:
    """Shows steps on the console and writes them to files; used as `with RunLog(...) as log`.

    On a terminal the steps are a progress bar; elsewhere plain lines, so that a redirected log can be read and grepped.
    """

    def __init__(
        self,
        steps: int,
        every: int = 1,
        console: Console | None = None,
        sinks: Sequence[Sink] = (),
        file: LogFile | None = None,
    ):
        """A log of a run.

        Args:
          steps: the number of steps of the whole run.
          every: plain lines are printed for the first and last step and for each multiple of this; the progress bar and
            the sinks have every step.
          console: of the progress bar or lines; standard output if None.
          sinks: destinations of the records; closed at the end.
          file: receives all plain lines with their time, also when the console shows a bar; closed at the end.
        """
        self.steps = steps
        self.every = every
        self.console = console or Console(file=Output(sys.stdout), highlight=False, markup=False, soft_wrap=True)
        self._sinks, self._file = sinks, file
        self._files = [sink.file for sink in sinks] + ([file] if file else [])
        self._drops = False
        self._bar: Progress | None = None
        self._shown = 0.0
        self._first: int | None = None
        self._incomplete: Mapping[str, float | None] | None = None  # a record that evaluations will add to

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception) -> None:
        self._stop_bar()
        self.complete({})  # an error may have come first
        if self._drops:
            self.message(f"warning: records dropped: {self._dropped()}")
        for file in self._files:
            file.close()

    def message(self, text: str = "") -> None:
        """Prints a line, above the progress bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._to_file(text)

    def _to_file(self, text: str) -> None:
        if self._file is not None:
            self._file.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode(errors="replace"))

    def _report_drops(self) -> None:
        """Prints one line when records start to be dropped, and one when all files are written again."""
        failing = next((file for file in self._files if file.problem), None)
        if failing and not self._drops:
            self._drops = True
            self.message(
                f"warning: cannot write {failing.path}: {failing.problem}: log records are dropped until a write succeeds"
            )
        elif self._drops and not failing:
            self._drops = False
            self.message(f"logs are written again; records dropped so far: {self._dropped()}")

    def _dropped(self) -> str:
        return ", ".join(f"{file.dropped} of {file.path.name}" for file in self._files if file.dropped)

    def compiling(self, step: int, program: str = "the first step") -> None:
        """Shows why `step` will take long."""
        if self.console.is_terminal:
            self._show(step - 1, f"compiling {program}")
        else:
            self.message(f"compiling {program}")

    def step(self, record: Mapping[str, float], incomplete: bool = False) -> None:
        """Shows and writes one step's record; an `incomplete` one is written by `complete`."""
        self._incomplete = record
        if not incomplete:
            self.complete({})
        self._shown = 0.0 if record["compiled"] else self._shown
        self._first = self._first or int(record["step"])
        is_due = record["step"] in (self._first, self.steps) or record["step"] % self.every == 0
        if self.console.is_terminal:
            self._show(int(record["step"]), describe_numbers(record))
            if is_due:
                self._to_file(describe_line(record, self.steps))
        elif is_due:
            self.message(describe_line(record, self.steps))
        if text := warning(record):
            self.message(f"warning: {text}")
        if record["step"] >= self.steps:
            self._stop_bar()

    def complete(self, values: Mapping[str, float | None]) -> None:
        """Writes the record that `step` has kept back, with the values of the evaluations after that step."""
        if self._incomplete is None:
            return
        record, self._incomplete = {**self._incomplete, **values}, None
        for sink in self._sinks:
            sink.write(record)
        self._report_drops()

    def _show(self, done: int, text: str) -> None:
        if self._bar is None:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=self.console, auto_refresh=False)
            self._bar.add_task("", total=self.steps)
            self._bar.start()
        # Drawing takes longer than all other logging of a step: ten times a second is enough.
        due = time.monotonic() - self._shown > 0.1 or done >= self.steps
        self._shown = time.monotonic() if due else self._shown
        self._bar.update(self._bar.task_ids[0], completed=done, description=text, refresh=due)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
