"""Callbacks: objects of the user's whose methods the training loop calls between its steps.

    class StopEarly(megajax.Callback):
        def on_validation(self, control, record):
            if record["validation/loss"] < 2.0:
                control.stop("the validation loss is below 2")

    Trainer(run, callbacks=[StopEarly()]).fit()

Nothing of a callback is in the compiled step, and none of them waits for the devices: what they are given is on the host
already, because the log has it.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.checkpoint.manager import Checkpoints
from megajax.config import ConfigError, RunConfig
from megajax.config.errors import near
from megajax.runtime.preemption import Preemption
from megajax.runtime.processes import is_first_process
from megajax.runtime.watchdog import Watchdog
from megajax.train.goodput import Goodput
from megajax.train.logging import RunLog
from megajax.train.step import TrainState

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      state: parameters (fp32, sharded, blocks in pipeline layout), optimizer state, loss scale.
      metrics: the record of the last step (`logging.step_record`): loss, grad_norm, samples, ...; if none was left, that of
        an earlier session's log, empty if it has none.
      stopped: why the run stopped before its last step; None if it did not.
    """

    state: TrainState
    metrics: Mapping[str, float | None]
    stopped: str | None = None


class Control:
    """What a callback may know of a run, and ask of it.

    Attributes:
      run: the configuration.
      run_dir: the run directory, or the folder of this machine that is copied to one in an object store; None: the run has
        none.
      is_first: whether this is process 0, the one that should write files and print.
    """

    def __init__(self, run: RunConfig, run_dir: Path | None, preemption: Preemption, log: RunLog):
        """Callbacks get one; nobody else needs one."""
        self.run, self.run_dir, self.is_first = run, run_dir, is_first_process()
        self._preemption, self._log = preemption, log

    def stop(self, reason: str) -> None:
        """Ends the run early, as SIGTERM does: it is saved, and `Result.stopped` has the reason.

        In a run of one process the next step is the last one, because it has begun already; several processes stop after
        the same step, within seconds. One process that asks is enough.
        """
        self._preemption.stop(reason)

    def save(self) -> None:
        """Saves a checkpoint after the next step; of several processes after the same one, within seconds.

        Raises:
          ConfigError: the run has no directory.
        """
        if self.run_dir is None:
            raise ConfigError(
                "a callback asks for a checkpoint, and the run has no directory: pass OutputConfig(run_dir=DIR)."
            )
        self._preemption.save()

    def message(self, text: str) -> None:
        """Writes a line to the log: process 0's console, and this process's file in logs/."""
        self._log.message(text)

    @property
    def save_is_due(self) -> bool:
        """For the loop: whether the checkpoint that was asked for is saved after the step that is running."""
        return self._preemption.save_due


class Callback:
    """Base class of callbacks; any object with some of these methods will do.

    Every process calls them in its main thread, between two steps, those of several callbacks in their order. The training
    waits for them, without a time limit. An exception that one raises ends the run as any other error does: with its
    traceback, after a checkpoint in progress has been written.

    A record is what log.jsonl has of a step, by name: loss, grad_norm, learning_rate, step_seconds, ...; numbers of the
    host, lists with a value for each layer, or None (`logging.step_record`). It is a copy.
    """

    def on_start(self, control: Control, step: int) -> None:
        """Before the first step of this session; `step` is the last one that was taken before it, 0 in a new run."""

    def on_step(self, control: Control, record: Record) -> None:
        """After a step: it is logged and, if that was due, its save has begun. The devices work on the next one."""

    def on_validation(self, control: Control, record: Record) -> None:
        """After the evaluations that follow a step: its record with their values, as "validation/loss"."""

    def on_save(self, control: Control, step: int, path: Path) -> None:
        """After the checkpoint of a step is complete: `path` is its directory. Later steps may have been taken."""

    def on_end(self, control: Control, result: Result) -> None:
        """After the last step, or the last one before a stop, and its checkpoint; not after an exception."""

    def on_exception(self, control: Control, error: BaseException) -> None:
        """After an exception, which is raised when all callbacks have returned. What this one raises is only logged."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises ConfigError for an object that has no method of `Callback`, or one with another name or arguments."""
    for callback in callbacks:
        name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        if isinstance(callback, type):
            raise ConfigError(f"callbacks has the class {name}: pass an object, {name}().")
        methods = [
            method for method in dir(callback) if method.startswith("on_") and callable(getattr(callback, method))
        ]
        for method in methods:
            if method not in EVENTS:
                raise ConfigError(f"callback {name} has {method}, which is never called: {near(method, EVENTS)}")
        if not methods:
            raise ConfigError(f"callback {name} has none of {', '.join(EVENTS)}.")
        for method in methods:
            try:
                inspect.signature(getattr(callback, method)).bind("control", *ARGUMENTS[method])
            except TypeError as error:
                wanted = ", ".join(("control", *ARGUMENTS[method]))
                raise ConfigError(f"callback {name}: {method} is called as {method}({wanted}): {error}.") from None
            except ValueError:  # a function of C has no signature
                continue


ARGUMENTS = {name: tuple(inspect.signature(getattr(Callback, name)).parameters)[2:] for name in EVENTS}


class Callbacks:
    """The callbacks of a run, for its loop. Empty by default."""

    def __init__(
        self,
        callbacks: Sequence[Any] = (),
        control: Control | None = None,
        goodput: Goodput | None = None,
        watchdog: Watchdog | None = None,
    ):
        """See `TrainerHooks`; without callbacks nothing else is needed."""
        self._control, self._goodput, self._watchdog = control, goodput, watchdog
        found = {name: [getattr(callback, name, None) for callback in callbacks] for name in EVENTS}
        of_base = {name: getattr(Callback, name) for name in EVENTS}
        self._methods = {
            name: [one for one in methods if one and getattr(one, "__func__", one) is not of_base[name]]
            for name, methods in found.items()
        }
        self._step = 0

    def _call(self, event: str, *arguments: Any) -> None:
        if not self._methods[event]:
            return
        if self._watchdog:
            self._watchdog.suspend(self._step)
        with self._goodput.during("callbacks") if self._goodput else contextlib.nullcontext():
            for method in self._methods[event]:
                method(self._control, *(dict(one) if isinstance(one, Mapping) else one for one in arguments))

    def start(self, step: int) -> None:
        """The first step follows `step`."""
        self._step = step
        self._call("on_start", step)

    def step(self, record: Record) -> None:
        """A step has been logged."""
        self._step = int(record["step"])
        self._call("on_step", record)

    def validated(self, record: Record) -> None:
        """Evaluations have run; `record` has their values."""
        self._call("on_validation", record)

    def saved(self, checkpoints: Checkpoints | None) -> None:
        """Passes on the checkpoints that have become complete."""
        while checkpoints and checkpoints.completed:
            self._call("on_save", *checkpoints.completed.pop(0))

    @property
    def save_is_due(self) -> bool:
        """Whether a checkpoint was asked for that is saved after the step that is running."""
        return self._control is not None and self._control.save_is_due

    def end(self, result: Result) -> None:
        """The run has ended, at its last step or early."""
        self._call("on_end", result)

    def failed(self, error: BaseException) -> list[str]:
        """The run ends with an exception; returns messages about callbacks that raise another one."""
        messages = []
        for method in self._methods["on_exception"]:
            try:
                method(self._control, error)
            except Exception as own:
                owner = type(getattr(method, "__self__", method)).__name__
                messages.append(f"warning: {owner}.on_exception: {type(own).__name__}: {own}")
        return messages


NO_CALLBACKS = Callbacks()
