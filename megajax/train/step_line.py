"""One step of a run as a line: of a terminal's width with a bar, or plain, of at most 120 columns.

A line that is too long loses its least important parts, and never its step and its loss.
"""

import collections
import re
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.text import Text

from megajax.train.expert_load import describe_load

PLAIN_WIDTH = 120
MTP = re.compile(r"mtp\d+_loss")
BAR_WIDTH, BAR_BESIDE_RATES, SHORTEST_BAR = 20, 10, 4
GAP = "  "


class Part(NamedTuple):
    """A part of a line.

    Attributes:
      text: as shown; empty: nothing is.
      rank: parts with the highest rank are left out first; those with rank 0 never.
    """

    text: str
    rank: int = 0


def rates(record: Mapping[str, float | None]) -> list[Part]:
    """tokens/s, MFU and TFLOP/s of a step; nothing if a compilation fell into it. MFU only where the device has a peak."""
    if record["compiled"]:
        return [Part("(with compilation)", 1)]
    mfu = record.get("mfu")
    return [
        Part(f"{record['tokens_per_second']:,.0f} tokens/s", 3),
        Part("" if mfu is None else f"{mfu:.1%} MFU", 7),
        Part(f"{record['tflops_per_device']:.3g} TFLOP/s", 9),
    ]


def further_losses(record: Mapping[str, float | None]) -> list[Part]:
    """The losses of multi-token prediction, which are not part of the loss; none without it."""
    return [Part(f"{name.removesuffix('_loss')} loss {record[name]:.4f}", 2) for name in record if MTP.fullmatch(name)]


def plain_line(record: Mapping[str, float | None], steps: int, batch_changes: bool = False) -> str:
    """One plain line with the numbers of a step. Usual values are left out: a loss scale of 1, nothing skipped.

    Args:
      record: see `logging.step_record`.
      steps: of the whole run.
      batch_changes: whether steps of the run have had different numbers of samples.
    """
    scale, skipped, bad = (record[name] for name in ("loss_scale", "skipped_steps", "bad_steps"))
    return fit(
        [
            Part(f"step {record['step']}/{steps}"),
            Part(f"loss {record['loss']:.4f}"),
            *further_losses(record),
            *rates(record),
            Part(f"grad norm {record['grad_norm']:.3g}", 2),
            Part(f"lr {record['learning_rate']:.3g}", 2),
            Part(f"{1000 * record['step_seconds']:.1f} ms", 8),
            Part(f"loss scale {scale:g}" if scale != 1 else "", 1),
            Part(f"batch {record['batch']}" if batch_changes else "", 1),
            Part(f"skipped {skipped}" if skipped else "", 1),
            Part(f"not finite {bad}" if bad else "", 1),
            *(Part(text, rank) for text, rank in zip(describe_load(record), (5, 6, 4, 4), strict=False)),
        ],
        PLAIN_WIDTH,
    )


def fit(parts: list[Part], width: int) -> str:
    """The parts as a line of at most `width` columns if those that may be left out suffice for it."""
    kept = [part for part in parts if part.text]
    while len(line := GAP.join(part.text for part in kept)) > width and any(part.rank for part in kept):
        last = max(range(len(kept)), key=lambda place: (kept[place].rank, place))
        del kept[last]
    return line


class StepBar:
    """The progress line of a terminal: step, bar, time left, loss and rates, as wide as the terminal.

    With less room it loses TFLOP/s, then MFU, then tokens/s; then the bar gets shorter and goes, and then the time left.

    Attributes:
      done: steps that have ended.
      message: shown in place of the loss.
      shown_rates: after it.
    """

    def __init__(self, steps: int):
        """`steps`: of the whole run."""
        self.steps, self.done, self.message = steps, 0, ""
        self.shown_rates: list[Part] = []
        self._seconds: collections.deque[float] = collections.deque(maxlen=50)

    def update(self, record: Mapping[str, float | None]) -> None:
        """Shows the numbers of a step that has ended."""
        self.done = int(record["step"])
        if not record["compiled"]:
            self._seconds.append(record["step_seconds"])
        self.message, self.shown_rates = f"loss {record['loss']:.4f}", rates(record)

    @property
    def time_left(self) -> str:
        """The remaining steps times the median of the last ones, those with a compilation apart."""
        if not self._seconds:
            return "ETA -:--:--"
        seconds = round(statistics.median(self._seconds) * (self.steps - self.done))
        days, seconds = divmod(seconds, 24 * 3600)
        if days:
            return f"ETA {days}d{seconds // 3600:02}h"
        return f"ETA {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def layout(self, width: int) -> tuple[str, int, str]:
        """(text before the bar, the bar's columns, text after it); 0 columns: there is no bar."""
        left, width = f"step {self.done}/{self.steps}", width - 1  # some terminals wrap a line that fills them
        room = width - len(left) - len(GAP)
        always = [Part(self.time_left, 1), Part(self.message)]
        if len(GAP.join(part.text for part in always)) + len(GAP) + SHORTEST_BAR > room:
            return left, 0, fit(always, room)
        right = fit([*always, *self.shown_rates], room - len(GAP) - BAR_BESIDE_RATES)
        right = right if self.time_left in right else fit(always, room)  # no rate fits
        return left, min(BAR_WIDTH, room - len(GAP) - len(right)), right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left, bar, right = self.layout(options.max_width)
        style = {"no_wrap": True, "overflow": "crop", "end": ""}
        yield Text(left + GAP, **style)
        if bar:
            drawn = list(
                ProgressBar(total=self.steps, completed=self.done, width=bar).__rich_console__(console, options)
            )
            yield from drawn
            yield Text(
                " " * (bar - sum(part.cell_length for part in drawn)) + GAP, **style
            )  # without colours it is shorter
        yield Text(right, **style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)
