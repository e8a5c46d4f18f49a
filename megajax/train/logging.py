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
from rich.live import Live

from megajax.config import RunConfig
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import Peak
from megajax.train.expert_load import load_record
from megajax.train.log_file import LogFile
from megajax.train.sinks import Sink
from megajax.train.step_line import StepBar, plain_line
from megajax.train.tracking.tracker import Tracker


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Computes rates from the seconds of a step."""

    tokens_per_step: int
    flops_per_step: float  # model FLOPs: forward and backward once, no recompute, whole global batch
    devices: int
    peak_flops: float | None  # FLOP/s of one device in the run's precision; None: it has none, and there is no MFU

    def rates(self, seconds: float, compiled: bool = False) -> dict[str, float | None]:
        """tokens_per_second of the whole mesh; TFLOP/s and model FLOPs utilization (MFU, a fraction) of one device.

        All are None for a step that `compiled`: its seconds measure the compiler.
        """
        flops_per_second = self.flops_per_step / seconds / self.devices
        found = {
            "tokens_per_second": self.tokens_per_step / seconds,
            "tflops_per_device": flops_per_second / 1e12,
            **({"mfu": flops_per_second / self.peak_flops} if self.peak_flops else {}),
        }
        return dict.fromkeys(found) if compiled else found


def throughput_of(run: RunConfig, peak: Peak | None, batch: int) -> Throughput:
    """Converts the times of steps of `batch` samples into tokens/s, TFLOP/s and, where there is a peak, MFU."""
    share = batch / run.train.global_batch_size
    return Throughput(
        tokens_per_step=batch * getattr(run.model, "sequence_length", 1),
        flops_per_step=share * flops_per_step(run),
        devices=run.parallel.devices,
        peak_flops=peak and peak.flops,
    )


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
      metrics: of `Training.train_step`: loss, grad_norm, learning_rate, loss_scale, what experts measured, and "model", the
        values of `PipelineModel.metrics`.
      samples: samples consumed at the end of this step.
      seconds: wall-clock seconds of the step on the devices.
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
        "skipped_steps": skipped_steps,
        "bad_steps": bad_steps,
        "batch": batch,
        "samples": samples,
        "step_seconds": seconds,
        "compiled": int(compiled),
        **throughput.rates(seconds, compiled),
        **load_record(metrics),
        **{name: float(value) for name, value in metrics.get("model", {}).items()},
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


def warning(record: Mapping[str, float], skipped: bool) -> str | None:
    """A warning for a skipped step, or for a loss or gradient that is not finite; None if there is none."""
    if skipped:
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
        tracker: Tracker | None = None,
    ):
        """A log of a run.

        Args:
          steps: the number of steps of the whole run.
          every: plain lines are printed for the first and last step and for each multiple of this; the progress bar and
            the sinks have every step.
          console: of the progress bar or lines; standard output if None.
          sinks: destinations of the records; closed at the end.
          file: receives all plain lines with their time, also when the console shows a bar; closed at the end.
          tracker: receives the records too; closed at the end.
        """
        self.steps = steps
        self.every = every
        self.console = console or Console(file=Output(sys.stdout), highlight=False, markup=False, soft_wrap=True)
        self._sinks, self._file, self.tracker = sinks, file, tracker
        self._files = [sink.file for sink in sinks] + ([file] if file else [])
        self._drops = False
        self._live: Live | None = None  # the bar's place on the terminal
        self._bar = StepBar(steps)
        self._shown = 0.0
        self._batches: set[int] = set()  # sizes of the steps so far
        self._first: int | None = None
        self._incomplete: Mapping[str, float | None] | None = None  # a record that evaluations will add to

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception) -> None:
        self._stop_bar()
        self.complete({})  # an error may have come first
        if self._drops:
            self.message(f"warning: records dropped: {self._dropped()}")
        for text in self.tracker.close() if self.tracker else []:
            self.message(text)
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
            self._bar.done, self._bar.message, self._bar.shown_rates = step - 1, f"compiling {program}", []
            self._draw()
        else:
            self.message(f"compiling {program}")

    def step(self, record: Mapping[str, float], incomplete: bool = False, skipped: bool = False) -> None:
        """Shows and writes one step's record; an `incomplete` one is written by `complete`.

        `skipped`: whether the step's update was.
        """
        self._incomplete = record
        if not incomplete:
            self.complete({})
        self._shown = 0.0 if record["compiled"] else self._shown
        self._first = self._first or int(record["step"])
        self._batches.add(record["batch"])
        is_due = record["step"] in (self._first, self.steps) or record["step"] % self.every == 0
        line = plain_line(record, self.steps, len(self._batches) > 1) if is_due else ""
        if self.console.is_terminal:
            self._bar.update(record)
            self._draw()
            if is_due:
                self._to_file(line)
        elif is_due:
            self.message(line)
        if text := warning(record, skipped):
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
        if self.tracker:
            self.tracker.write(record)
            for text in self.tracker.messages():
                self.message(text)

    def _draw(self) -> None:
        """Draws the bar, unless it was drawn in the last tenth of a second: that takes longer than all other logging."""
        if self._live is None:
            self._live = Live(self._bar, console=self.console, auto_refresh=False)
            self._live.start()
        if time.monotonic() - self._shown > 0.1 or self._bar.done >= self.steps:
            self._shown = time.monotonic()
            self._live.refresh()

    def _stop_bar(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
