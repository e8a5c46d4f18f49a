"""A run's directory: its configuration, checkpoints, logs and traces, and what of an earlier run is gone on with.

RUN_DIR/config.toml     what the run was started with; --config replays it
        checkpoints/    see manager.py
        log.jsonl       one object a step
        tensorboard/    the same
        logs/           what each process said, process_0.log and on
        profile/        traces of --profile
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console

from megajax.checkpoint import manager, reader
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.config import ConfigError, OutputConfig, RunConfig
from megajax.config.toml import config_text, run_meta, save_config
from megajax.train.logging import JsonLines, RunLog, Sink, TensorBoard
from megajax.train.lr_schedule import steps_left
from megajax.train.profile import Profile
from megajax.train.step import Training, TrainState


class Keeper:
    """What a run keeps, and where; nothing at all without a `run_dir`.

    Attributes:
      checkpoints, profile: for the loop; None if there are none.
      said: lines for the log's beginning.
    """

    def __init__(self, run: RunConfig, output: OutputConfig, tokenizer: Any, options: Mapping[str, Any]):
        """Makes the directory, saves the configuration, and finds the checkpoint to go on from.

        Raises:
          ConfigError: the directory cannot be written, or has checkpoints although `resume` is "no".
        """
        self.run, self.output, self.meta = run, output, run_meta(run, tokenizer)
        self.directory = pathlib.Path(output.run_dir).absolute() if output.run_dir else None
        self.jsonl = options.get("log_jsonl")
        text = config_text(run, output, options)
        self.said = ["config    " + line for line in _summary(text)]
        self.checkpoints = self.profile = self.path = None
        if self.directory is None:
            return
        self.path, said = manager.choose(self.directory / "checkpoints", output.resume)
        self.said += [said] if said else []
        self.checkpoints = Checkpoints(self.directory / "checkpoints", output, self.meta)
        if jax.process_index() == 0:
            save_config(self.directory / "config.toml", text)
        self.jsonl = self.jsonl or str(self.directory / "log.jsonl")
        if output.profile:
            self.profile = Profile(output.profile, self.directory / "profile")

    def begin(self, training: Training) -> tuple[TrainState, Progress] | None:
        """The state to go on from; None for a fresh one.

        Raises:
          ConfigError: the checkpoint is damaged, or of another model.
        """
        if self.path is None:
            return None
        state, at, said = reader.load(self.path, self.run, training.state_layout, self.meta["tokenizer"])
        self.said += said
        self.said += [f"resume    after step {at.step}, {at.samples:,} samples, {at.skipped} skipped steps"]
        self.said += ["resume    " + text for text in self.checkpoints.set_aside(after=at.step)]
        return state, at

    def log(self, begin: tuple[TrainState, Progress] | None) -> RunLog:
        """The run's log: on process 0's console, in files where there are to be some."""
        at = begin[1] if begin else Progress()
        sinks: list[Sink] = []
        is_first = jax.process_index() == 0
        if self.jsonl and is_first:
            sinks.append(JsonLines(self.jsonl, after=at.step))
        if self.directory and self.output.tensorboard and is_first:
            sinks.append(TensorBoard(self.directory / "tensorboard", after=at.step))
        console = None if is_first else Console(quiet=True)
        steps = at.step + steps_left(self.run, at.samples)
        return RunLog(steps, self.run.train.log_every, console=console, sinks=sinks, file=self._own_log())

    def _own_log(self):
        if self.directory is None:
            return None
        path = self.directory / "logs" / f"process_{jax.process_index()}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; give --run-dir a writable directory") from error

    def close(self, log: RunLog) -> None:
        """Ends what is under way."""
        if self.profile and (text := self.profile.close()):
            log.message(text)
        for text in self.checkpoints.close() if self.checkpoints else []:
            log.message(text)


def _summary(text: str) -> list[str]:
    """A configuration in one line a section."""
    lines = []
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            lines.append(f"{line.strip('[]')}:")
        else:
            lines[-1] += " " + " ".join(line.split()).replace(" = ", "=", 1)
    return lines
