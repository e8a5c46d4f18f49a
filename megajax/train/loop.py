"""The training loop: read `Loop.run` top to bottom.

Step N + 1 is dispatched before the metrics of step N are read, so the devices never wait for the host:

    host      dispatch 1 | dispatch 2 | read 1, log 1 | dispatch 3 | read 2, log 2 | ...
    devices              | step 1 ------------------- | step 2 ------------------- | ...

On GPUs, dispatching a step may return only when the step has almost ended, and step N's metrics are then read about one
step late. So `step_clock` times the steps, and the watchdog's time limit applies to a dispatch too.

Where something needs the state after step N itself (validation, a checkpoint, the last step, an edge of the profiled
steps, the compilation of a new program), step N + 1 is dispatched only after that. When step N is not finite, the
compiled step N + 1 leaves the state unchanged (`hold` of `Training.train_step`), and is dispatched again after the host
has dealt with step N: results are those of a loop that reads each step's metrics at once.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import jax

from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.checkpoint.replicated import ReplicatedState
from megajax.checkpoint.writer import reason_of
from megajax.config import ConfigError
from megajax.config.batch_ramp import batch_size
from megajax.data.prefetch import Prefetch
from megajax.estimate.gpus import Peak
from megajax.runtime.preemption import Preemption
from megajax.runtime.watchdog import Watchdog
from megajax.train import diagnose
from megajax.train.callbacks import NO_CALLBACKS, Callbacks
from megajax.train.compilations import CompilationCounter
from megajax.train.goodput import Goodput
from megajax.train.logging import RunLog, SpikeDetector, step_record, throughput_of
from megajax.train.replica_check import Checks, ReplicasDiffer
from megajax.train.run_directory import Profiler
from megajax.train.step import Training, TrainState
from megajax.train.step_clock import StepClock
from megajax.train.validation import Evaluation, Validation

Batch = Mapping[str, Any]


class Batches(Protocol):
    """The training data: `data.prefetch.Prefetch`, a `Loader`, or an object of the user's."""

    def batch(self, consumed_samples: int) -> Batch:
        """The batch that starts with sample `consumed_samples`: arrays [microbatches, samples, ...]."""


@dataclasses.dataclass(frozen=True)
class TrainerHooks:
    """Optional companions of a training loop; None for each that a run does without.

    Attributes:
      evaluations: what is measured besides the loss of the validation sets.
      callbacks: of the user's.
    """

    checkpoints: Checkpoints | None = None
    preemption: Preemption | None = None
    profiler: Profiler | None = None
    watchdog: Watchdog | None = None
    checks: Checks | None = None
    replicas: ReplicatedState | None = None
    evaluations: Sequence[Evaluation] = ()
    callbacks: Callbacks = NO_CALLBACKS

    def suspend_watchdog(self, step: int) -> None:
        """The work that follows has no time limit."""
        if self.watchdog:
            self.watchdog.suspend(step)


NO_HOOKS = TrainerHooks()


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    """A step that the devices execute or have executed, and whose metrics the host has not read."""

    number: int
    size: int  # samples, without padding
    samples: int  # consumed at its end
    batch: Batch
    metrics: Mapping[str, jax.Array]
    seconds: Future[float]  # see `StepClock.watch`
    is_new: bool  # the first with a batch of this shape: dispatching it compiled a program


def train(
    training: Training,
    batches: Batches,
    validation: Mapping[str, Any],
    log: RunLog,
    peak: Peak | None,
    *,
    resume: tuple[TrainState, Progress] | None = None,
    hooks: TrainerHooks = NO_HOOKS,
    goodput: Goodput | None = None,
    explain: Callable[..., str] = diagnose.explain,
) -> tuple[TrainState, dict[str, float | None]]:
    """Runs all steps, with a validation every `validation_every` of them and after the last, and `hooks.evaluations`.

    Saves a checkpoint every `save_every` steps, at the end, and where the run stops early: `hooks.preemption.reason` says
    why it did.

    Args:
      validation: a `Loader` of validation batches for each set, by name; empty: no validation.
      peak: of a device, to which MFU refers; None: MFU is not logged.
      resume: the state to resume from and its progress; None: initialise a new one.
      goodput: the account of the run's time; None: a new one, of this call alone.
      explain: (training, params, batch, loss scale) -> why a step is not finite.

    Returns:
      The state after the last step, and that step's record (see `logging.step_record`).

    Raises:
      ConfigError: the loss or a gradient was not finite and `nonfinite` is "stop" (in fp16 an overflow is a normal part
        of the search for a loss scale: the step is skipped), or was not finite in `nonfinite_limit` steps in a row.
      ReplicasDiffer: `hooks.checks` found copies of the state that differ; nothing is saved.
    """
    loop = Loop(training, batches, validation, log, peak, hooks, goodput or Goodput(), explain)
    with loop.compilations, loop.clock:
        return loop.run(resume)


class Loop:
    """The state of the loop between steps."""

    def __init__(self, training, batches, validation, log, peak, hooks: TrainerHooks, goodput: Goodput, explain):
        """See `train`."""
        self.training, self.run_config, self.batches = training, training.run, batches
        validates = validation and training.run.train.validation_batches
        self.evaluations = [*([Validation(training, validation)] if validates else []), *hooks.evaluations]
        self.log, self.hooks, self.goodput, self.explain = log, hooks, goodput, explain
        self.total_samples = training.run.total_samples
        self.compilations, self.clock = CompilationCounter(), StepClock()
        self.throughput = functools.cache(functools.partial(throughput_of, training.run, peak))
        self.spikes = SpikeDetector(training.run.train.spike_deviations)
        self.state: TrainState | None = None  # after all dispatched steps
        self.progress = Progress()  # after all steps whose metrics have been read
        self.record: dict[str, float | None] = {}
        self.skipped_in_a_row = 0
        self.shapes: set[tuple] = set()  # of the batches that a program has been compiled for
        self.compiled_before = 0  # programs, at the end of the last step whose metrics have been read

    def run(self, resume: tuple[TrainState, Progress] | None) -> tuple[TrainState, dict[str, float | None]]:
        """All steps."""
        self.state, self.progress = resume or (self.training.init_state(), Progress())
        self.hooks.callbacks.start(self.progress.step)
        if self.progress.samples >= self.total_samples:
            return self.state, self.record
        self.goodput.begin(self.progress.step)
        self.state = self.training.refilled(self.state, self._batch, self.progress.samples)
        batch, step = self._batch(self.progress.samples), None
        while True:
            if step is None:
                self.compiled_before = self.compilations.count
                step = self._dispatch(batch, self.progress.step + 1, self.progress.samples, None)
            is_last = step.samples >= self.total_samples
            stop = None if is_last or not self.hooks.preemption else self.hooks.preemption.after(step.number)
            following, ahead = None, None
            if not (is_last or stop):
                following = self._batch_after(step)
                ahead = self._dispatch_ahead(step, following)
            if not self._finish(step):
                ahead = None  # it has left the state unchanged
            # First: a callback or an evaluation that fails loses no checkpoint.
            self._check_and_save(step, is_last or stop, stop)
            self.hooks.callbacks.step(self.record)
            self._evaluate(step)
            if is_last or stop:
                return self.state, self.record
            batch, step = following, ahead

    def _batch(self, consumed_samples: int) -> Batch:
        """The batch that starts with that sample; waits for the data."""
        start = time.perf_counter()
        with self.goodput.during("data"):
            batch = self.batches.batch(consumed_samples)
        if self.hooks.checks:
            self.hooks.checks.stragglers.add_data(time.perf_counter() - start)
        return batch

    def _batch_after(self, step: DispatchedStep) -> Batch:
        """The next batch; waits for the data while `step` runs.

        If there is none, whatever the reason, `step` is logged and saved: of several processes only if a save is due, in
        which the others take part.
        """
        try:
            return self._batch(step.samples)
        except Exception as error:
            self._finish(step)
            self.log.message(f"warning: step {step.number}: no batch for the next step ({reason_of(error)})")
            with contextlib.suppress(ConfigError):  # the save failed, which has been logged
                self._check_and_save(step, ends=jax.process_count() == 1, stop=None)
            raise

    def _dispatch_ahead(self, step: DispatchedStep, following: Batch) -> DispatchedStep | None:
        """The step after `step`, dispatched while that runs; None where it must not be."""
        if not self._may_dispatch_after(step, following):
            return None
        try:
            return self._dispatch(following, step.number + 1, step.samples, step.metrics["skipped"])
        except Exception:
            self._finish(step)
            raise

    def _may_dispatch_after(self, step: DispatchedStep, following: Batch) -> bool:
        """Whether the next step may be dispatched while `step` runs."""
        edge = self.hooks.profiler and self.hooks.profiler.is_edge(step.number + 1)
        due = (self._evaluations_due, self._save_due, self._check_due, self._replication_due)
        needs_state = edge or any(is_due(step) for is_due in due)
        return self.training.takes_hold and not needs_state and shapes_of(following) in self.shapes

    def _evaluations_due(self, step: DispatchedStep) -> list[Evaluation]:
        """Those that run after the step: all after the last one."""
        is_last = step.samples >= self.total_samples
        return [one for one in self.evaluations if one.due(step.number) or is_last]

    def _save_due(self, step: DispatchedStep) -> bool:
        due = self.hooks.checkpoints and step.number % self.hooks.checkpoints.output.save_every == 0
        return bool(due or (self.hooks.checkpoints and self.hooks.callbacks.save_is_due))

    def _check_due(self, step: DispatchedStep) -> bool:
        return bool(self.hooks.checks) and step.number % self.hooks.checks.every == 0

    def _replication_due(self, step: DispatchedStep) -> bool:
        return bool(self.hooks.replicas) and step.number % self.hooks.replicas.every == 0

    def _dispatch(self, batch: Batch, number: int, consumed: int, hold) -> DispatchedStep:
        """Gives the devices a step; may return before they have executed it."""
        shapes, size = shapes_of(batch), batch_size(self.run_config.train, consumed)
        is_new = shapes not in self.shapes
        if is_new:
            self.hooks.suspend_watchdog(number)
            self.log.compiling(number, f"a step of {size} samples" if self.shapes else "the first step")
            self.shapes.add(shapes)
        elif self.hooks.watchdog:
            self.hooks.watchdog.dispatch(number)
        if self.hooks.profiler:
            self.hooks.profiler.before(number)
        dispatched = time.perf_counter()
        arguments = (hold,) if self.training.takes_hold else ()
        with (
            jax.profiler.StepTraceAnnotation("train", step_num=number),
            self.goodput.during("compiling" if is_new else "steps"),
        ):
            self.state, metrics = self.training.train_step(self.state, batch, *arguments)
        if is_new:  # after the compilation, the dispatch may have waited for the step
            self.goodput.move(time.perf_counter() - max(dispatched, self.compilations.last), "compiling", "steps")
        seconds = self.clock.watch(metrics, dispatched)
        return DispatchedStep(number, size, consumed + size, batch, metrics, seconds, is_new)

    def _finish(self, step: DispatchedStep) -> bool:
        """Waits for the end of a step, logs it, and deals with it if it was skipped; returns whether it was not."""
        if self.hooks.watchdog:
            (self.hooks.watchdog.suspend if step.is_new else self.hooks.watchdog.enter)(step.number)
        metrics = jax.device_get(dict(step.metrics))
        seconds, before = step.seconds.result(), self.progress
        compiled, self.compiled_before = self.compilations.count > self.compiled_before, self.compilations.count
        skipped, loss = int(metrics["skipped"]), float(metrics["loss"])
        bad = before.nonfinite + (not math.isfinite(loss))
        self.progress = Progress(step.number, step.samples, before.skipped + skipped, bad)
        self.record = step_record(
            step.number,
            metrics,
            step.samples,
            seconds,
            self.throughput(step.size),
            batch=step.size,
            skipped_steps=self.progress.skipped,
            bad_steps=bad,
            compiled=compiled,
        )
        self.record |= self.goodput.finish_step(step.number)
        self.log.step(self.record, incomplete=bool(self._evaluations_due(step)), skipped=bool(skipped))
        if self.hooks.profiler and (text := self.hooks.profiler.after(step.number)):
            self.log.message(text)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self._explain_or_stop(step, metrics, before)
        if text := self.spikes.flag(step.number, loss):
            self.log.message(f"warning: {text}")
        return not skipped

    def _explain_or_stop(self, step: DispatchedStep, metrics: Mapping[str, Any], before: Progress) -> None:
        """Logs why a step was skipped; stops the run if `nonfinite` says so, or if it happens again and again.

        An overflow in fp16, a normal part of its search for a loss scale, needs no explanation.
        """
        config, too_often = self.run_config.train, self.skipped_in_a_row >= self.run_config.train.nonfinite_limit
        if config.precision == "fp16" and math.isfinite(metrics["loss"]) and not too_often:
            return
        self.hooks.suspend_watchdog(step.number)
        if self.hooks.checks:
            self._check(step)
        reason = self.explain(self.training, self.state.params, step.batch, float(metrics["loss_scale"]))
        self.log.message(f"warning: step {step.number}: {reason}")
        if not too_often and (config.nonfinite == "skip" or config.precision == "fp16"):
            return
        self._save(before, wait=True)
        why = f"{self.skipped_in_a_row} steps in a row" if too_often else "training stops before it spoils the weights"
        raise ConfigError(
            f"step {step.number}: loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}: not finite ({reason}); "
            f"{why}. Try a lower --learning-rate or a lower --clip-norm, or --nonfinite skip to skip such batches."
        )

    def _evaluate(self, step: DispatchedStep) -> None:
        """The validation and other evaluations, where they are due."""
        if not (due := self._evaluations_due(step)):
            return
        self.hooks.suspend_watchdog(step.number)
        values: dict[str, float | None] = {}
        for one in due:
            with self.goodput.during("validation"):
                scores = one.run(self.state, step.number)
            values |= scores.values
            for text in scores.lines:
                self.log.message(f"step {step.number}: {text}")
        self.log.complete(values)
        self.hooks.callbacks.validated({**self.record, **values})

    def _check_and_save(self, step: DispatchedStep, ends: Any, stop: str | None) -> None:
        """Between two steps: messages of saves that have ended, and a check and a checkpoint where they are due."""
        for text in self.hooks.checkpoints.poll() if self.hooks.checkpoints else []:
            self.log.message(text)
        self.hooks.callbacks.saved(self.hooks.checkpoints)
        saves = self.hooks.checkpoints and (ends or self._save_due(step))
        replicates = self._replication_due(step) and not ends
        if self._check_due(step) or (self.hooks.checks and (saves or replicates)):  # what is saved has been checked
            self._check(step)
        if stop:
            self.log.message(f"step {step.number}: {stop}: saving a checkpoint and stopping")
        if saves:
            self.hooks.suspend_watchdog(step.number)
            self._save(self.progress, wait=bool(ends))
        if replicates:
            self.hooks.suspend_watchdog(step.number)
            with self.goodput.during("saving"):
                messages = self.hooks.replicas.save(*self.training.stored(self.state), self.progress)
            for text in messages:
                self.log.message(text)

    def _check(self, step: DispatchedStep) -> None:
        """Compares the replicas, and times this process."""
        self.hooks.suspend_watchdog(step.number)
        try:
            with self.goodput.during("checking"):
                messages = self.hooks.checks.run(self.state, step.number)
        except ReplicasDiffer:
            for saves in (self.hooks.checkpoints, self.hooks.replicas):  # of an earlier state, which has been checked
                for text in saves.wait() if saves else []:
                    self.log.message(text)
            raise
        for text in messages:
            self.log.message(text)

    def _save(self, progress: Progress, *, wait: bool) -> None:
        """Starts a save, and waits for its end if no step follows.

        Raises:
          ConfigError: the run's last save failed.
        """
        checkpoints = self.hooks.checkpoints
        if checkpoints is None:
            return
        with self.goodput.during("saving"):
            messages = checkpoints.save(*self.training.stored(self.state), progress)
            messages += checkpoints.wait() if wait else []
        for text in [
            *messages,
            *(self.batches.progress(progress.samples) if isinstance(self.batches, Prefetch) else []),
        ]:
            self.log.message(text)
        self.hooks.callbacks.saved(checkpoints)
        if wait and checkpoints.failed:
            raise ConfigError(messages[-1].removeprefix("warning: "))


def shapes_of(batch: Batch) -> tuple:
    """A step is compiled once for each value of this."""
    return tuple((name, array.shape) for name, array in batch.items())
