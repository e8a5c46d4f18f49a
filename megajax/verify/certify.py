"""Runs the same steps on the reference and on the layout under test, and stops at the first step that differs."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from megajax.checkpoint.metadata import Progress
from megajax.config.batch_ramp import batch_size
from megajax.train.step import TrainState
from megajax.verify import compare
from megajax.verify.compare import Difference
from megajax.verify.locate import Side, locate
from megajax.verify.record_file import Reference
from megajax.verify.replay import Batch, Replay, StepRecord


class Batches(Protocol):
    """The data: a `Loader`, or an object of the user's."""

    def batch(self, consumed_samples: int) -> Batch:
        """The batch that starts with sample `consumed_samples`: arrays [microbatches, samples, ...]."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the steps start: the state (None: a fresh one) and its position in the run."""

    state: TrainState | None = None
    progress: Progress = Progress()


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One step of the table.

    Attributes:
      step: its number in the run.
      losses: of the reference and of the layout under test.
      largest: by part, (distance, tolerance) of the largest quotient of the two.
    """

    step: int
    losses: tuple[float, float]
    largest: dict[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result.

    Attributes:
      rows: one for each step that was compared.
      difference: the first difference; None: the layouts are equal within tolerance.
      details: what is known of it: layer's rank, microbatches, devices.
    """

    rows: Sequence[StepRow]
    difference: Difference | None
    details: Sequence[str] = ()


class LiveReference:
    """The reference layout, run step by step together with its perturbed runs.

    Attributes:
      replay: its programs.
      start_record: sketches of its first state.
      side: its latest step; None before the first.
    """

    def __init__(self, replay: Replay, batches: Batches, start: Start = Start(), exact: bool = False):  # noqa: B008
        """`exact`: nothing is perturbed, and the tolerance is 0."""
        self.replay, self.batches, self.exact = replay, batches, exact
        self._state = replay.training.init_state() if start.state is None else start.state
        self._perturbed = [] if exact else [self._state] * compare.TRIALS
        self.start_record = replay.sketch_state(self._state)
        self.side: Side | None = None

    def step(self, number: int, consumed: int) -> tuple[StepRecord, dict[str, float]]:
        """The record of step `number`, and its tolerances."""
        batch = self.batches.batch(consumed)
        record, results = self.replay.step(self._state, batch)
        self._state, self.side = results.after, Side(self.replay, results, self.replay.split(batch))
        if self.exact:
            return record, compare.EXACT
        perturbed = []
        for trial, state in enumerate(self._perturbed):
            seed = zlib.crc32(f"{number} {trial}".encode())
            other, self._perturbed[trial] = self.replay.perturbed_step(state, batch, seed)
            perturbed.append(compare.entries_of_step(record, other))
        rounding = compare.rounding_of_updates(record, self.replay.sketch_state(results.after))
        return record, compare.tolerances_of(perturbed, rounding)


class RecordedReference:
    """The reference from a file of `--record`."""

    def __init__(self, reference: Reference):
        """`reference`: as loaded."""
        self.reference, self.start_record, self.side, self.exact = reference, reference.start, None, False

    def step(self, number: int, consumed: int) -> tuple[StepRecord, dict[str, float]]:
        """As `LiveReference.step`."""
        index = number - 1 - self.reference.header["first"]
        return self.reference.steps[index], self.reference.tolerances[index]


def certify(
    reference: LiveReference | RecordedReference, replay: Replay, batches: Batches, steps: int, start: Start
) -> Verdict:
    """Compares a layout with the reference.

    Args:
      reference: what to compare with, at its start.
      replay: the layout under test.
      batches: its data.
      steps: to compare, at most.
      start: of the layout under test.
    """
    state = replay.training.init_state() if start.state is None else start.state
    first, consumed = start.progress.step, start.progress.samples
    tolerances = compare.EXACT if reference.exact else compare.tolerances_of(())
    entries = compare.entries_of_start(reference.start_record, replay.sketch_state(state))
    difference = compare.first_difference(first, entries, tolerances)
    if difference:
        return Verdict([], difference, locate(difference, None, Side(replay, None, {})))
    rows = []
    for number in range(first + 1, first + steps + 1):
        expected, tolerances = reference.step(number, consumed)
        batch = batches.batch(consumed)
        record, results = replay.step(state, batch)
        entries = compare.entries_of_step(expected, record)
        losses = expected.metrics["loss"], record.metrics["loss"]
        rows.append(StepRow(number, losses, compare.largest(entries, tolerances)))
        difference = compare.first_difference(number, entries, tolerances)
        if difference:
            side = Side(replay, results, replay.split(batch))
            return Verdict(rows, difference, locate(difference, reference.side, side))
        state, consumed = results.after, consumed + batch_size(replay.run.train, consumed)
    return Verdict(rows, None)


def record(reference: LiveReference, steps: int, progress: Progress, header: dict[str, Any]) -> Reference:
    """The records of the reference's next `steps` steps, as `--record` writes them."""
    consumed, records, tolerances = progress.samples, [], []
    for number in range(progress.step + 1, progress.step + steps + 1):
        step, allowed = reference.step(number, consumed)
        records.append(step)
        tolerances.append(allowed)
        consumed += batch_size(reference.replay.run.train, consumed)
    return Reference(header, reference.start_record, records, tolerances)
