"""The goodput account: how a run's time is spent, over all of its sessions.

    goodput = (seconds in steps that were kept) / (seconds since the run's first start)

A session is one start of the run. Its time is divided without overlap into

    start       until the first step is dispatched: imports, devices, reading the state to resume from
    steps       training steps
    compiling   tracing and compiling a step
    data        waiting for the next batch
    validation  validations
    checking    comparing replicas, and timing the processes (--check-every)
    saving      waiting for checkpoints and for replicated state
    callbacks   callbacks of the user's

and lost has the rest: steps that a later session repeated, and the time between two sessions. RUN_DIR/goodput.jsonl has
lines of JSON: one when a session starts, then its account so far, often enough that a killed session loses at most 2% of it
(and at most a minute).
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megajax.schedules.errors import counted

CATEGORIES = ("start", "steps", "compiling", "data", "validation", "checking", "saving", "callbacks")
LOST = ("redone", "between_sessions")
NAME = "goodput.jsonl"


class Goodput:
    """The account of this session, and the file of all sessions."""

    def __init__(
        self,
        started: float | None = None,
        path: pathlib.Path | None = None,
        keep: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        """Starts with category "start".

        Args:
          started: `clock()` at the start of the process; None: now.
          path: of the file; None: this session only, nothing is written.
          keep: whether the sessions in the file are this run's; False: the file is replaced.
          clock, wall: sources of the time, in seconds.
        """
        now = clock()
        self._clock, self._wall, self._path, self._keep = clock, wall, path, keep
        self._mark = now if started is None else started
        self._began = wall() - (now - self._mark)  # in seconds since the epoch
        self._category, self._step = "start", 0
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._earlier: list[dict[str, Any]] = []
        self._before = dict.fromkeys((*CATEGORIES, *LOST), 0.0)  # totals of earlier sessions
        self._written, self._begun = 0.0, False

    def begin(self, step: int) -> None:
        """The first step is dispatched next. Reads the earlier sessions.

        Args:
          step: the last step that has been taken, 0 in a new run.
        """
        self._switch("steps")
        self._step, self._begun = step, True
        if self._path is not None:
            self._earlier = read_lines(self._path) if self._keep else []
            if not self._keep:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
            start = {"event": "start", "time": self._began, "step": step}
            self._write(start)
            self._before = totals([*self._earlier, start])

    @contextlib.contextmanager
    def during(self, category: str) -> Iterator[None]:
        """Counts the time of a block for a category."""
        before = self._category
        self._switch(category)
        try:
            yield
        finally:
            self._switch(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Counts seconds for category `target` that were counted for `source`, as many as that has."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def _switch(self, category: str) -> None:
        now = self._clock()
        self.seconds[self._category] += now - self._mark
        self._mark, self._category = now, category

    def finish_step(self, step: int) -> dict[str, float]:
        """Counts a step as taken; returns the field of the step's record."""
        self._switch(self._category)
        self._step = step
        spent = sum(self.seconds.values())
        if spent - self._written >= min(60.0, max(1.0, 0.02 * spent)):
            self.write()
        return {"goodput": self.share()}

    def share(self) -> float:
        """Goodput so far, over all sessions; 0 to 1."""
        total = self.totals()
        return total["steps"] / max(sum(total.values()), 1e-9)

    def totals(self) -> dict[str, float]:
        """Seconds by category over all sessions, with `LOST`'s."""
        return {name: self._before[name] + self.seconds.get(name, 0.0) for name in self._before}

    def write(self) -> None:
        """Appends this session's account to the file, if there is one and a step has begun."""
        self._switch(self._category)
        self._written = sum(self.seconds.values())
        rounded = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        self._write({"event": "account", "time": self._wall(), "step": self._step, "seconds": rounded})

    def _write(self, line: Mapping[str, Any]) -> None:
        # A line is cumulative, so the next one makes up for one that could not be written.
        if self._path is not None and self._begun:
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def describe(self) -> str:
        """One line with the account of all sessions."""
        total = self.totals()
        wall = sum(total.values())
        if not self._begun:  # earlier sessions have not been read
            return f"goodput   no step in this session of {wall:,.1f} s, which does not count"
        lost = total["redone"] + total["between_sessions"]
        sessions = 1 + sum(line["event"] == "start" for line in self._earlier)
        categories = [name for name in sorted(CATEGORIES, key=total.get, reverse=True) if total[name] >= 0.05]
        parts = [f"{name} {total[name]:,.1f} s" for name in categories]
        detail = f" (steps repeated {total['redone']:,.1f} s, between sessions {total['between_sessions']:,.1f} s)"
        parts += [f"lost {lost:,.1f} s{detail}"] if lost else []
        return f"goodput   {self.share():.1%} of {wall:,.1f} s in {counted(sessions, 'session')}: {', '.join(parts)}"


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a goodput file, without those that a kill has truncated or that are not of this format."""
    found = []
    with contextlib.suppress(OSError):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                line = json.loads(text)
                good = line["event"] in ("start", "account") and line["time"] + line["step"] >= 0
                seconds = (
                    {name: float(line["seconds"].get(name, 0)) for name in CATEGORIES} if "seconds" in line else {}
                )
                if good and (line["event"] == "start" or seconds):
                    found.append({**line, "seconds": seconds})
    return found


def totals(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by category of all sessions but the last, and what has been lost when the last one starts.

    A session that starts after step n repeats all later steps of the sessions before it. Their seconds are interpolated
    between the lines of those sessions, and counted as "redone" instead of "steps".

    Args:
      lines: as `read_lines` returns them; the last one starts the last session.
    """
    total = dict.fromkeys((*CATEGORIES, *LOST), 0.0)
    kept: list[list[tuple[int, float]]] = []  # for each session (step, seconds in steps until then), ascending
    last: Mapping[str, Any] | None = None
    end: float | None = None
    for line in lines:
        if line["event"] == "start":
            if last is not None:
                _add(total, last)
            if end is not None:
                total["between_sessions"] += max(0.0, line["time"] - end)
            kept = [_until(points, line["step"]) for points in kept] + [[(line["step"], 0.0)]]
            last = None
        elif kept:
            kept[-1].append((line["step"], line["seconds"]["steps"]))
            last = line
        end = line["time"]
    productive = sum(points[-1][1] for points in kept)
    total["redone"] = max(0.0, total["steps"] - productive)
    total["steps"] = productive
    return total


def _add(total: dict[str, float], line: Mapping[str, Any]) -> None:
    for name, seconds in line["seconds"].items():
        total[name] += seconds


def _until(points: list[tuple[int, float]], step: int) -> list[tuple[int, float]]:
    """The points of a session up to a step, with the step itself interpolated."""
    if points[-1][0] <= step:
        return points
    before = [point for point in points if point[0] <= step]
    if not before:
        return [(step, 0.0)]
    (first, spent), (after, more) = before[-1], points[len(before)]
    return [*before, (step, spent + (more - spent) * (step - first) / (after - first))]
