"""A run's directory: its configuration, checkpoints, logs and traces; in an object store see checkpoint/mirror.py.

RUN_DIR/config.toml     the configuration that the run was started with; --config replays it
        checkpoints/    see checkpoint/manager.py
        tokenizer/      the tokenizer's files, if it is read from files, and the chat template
        hugging_face/   config.json and generation_config.json of the model that it has started from, if it is one of theirs
        log.jsonl       one object a session and a step
        tensorboard/    the same records
        tracker.json    the run's id in the tracker of --track
        logs/           the log lines of each process, process_0.log and so on
        profile/        traces of --profile, one directory for each process
        run.lock        the process that writes into the directory, see checkpoint/lock.py
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
from typing import Any

import jax
from rich.console import Console

import megajax
from megajax.checkpoint import reader
from megajax.checkpoint.directory import choose, complete_steps
from megajax.checkpoint.layout import StateLayout, named
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.checkpoint.metadata import run_meta
from megajax.checkpoint.mirror import Mirror, snapshot
from megajax.checkpoint.object_store import exists, is_remote, place
from megajax.checkpoint.replicated import ReplicatedState
from megajax.checkpoint.run_files import (
    CHAT_TEMPLATE,
    MODEL,
    TOKENIZER,
    copy_model,
    copy_tokenizer,
    refuse_foreign,
    tokenizer_copy,
)
from megajax.checkpoint.store_lock import lock_run
from megajax.checkpoint.writer import reason_of
from megajax.config import ConfigError, OutputConfig, RunConfig
from megajax.config.batch_ramp import batch_size, remaining_steps
from megajax.config.cli import Request
from megajax.config.stored_paths import store_paths
from megajax.config.toml import HEADER, config_tables, save_config, toml_text
from megajax.config.trust import sign_imports
from megajax.data.chat_template import template_text
from megajax.data.hugging_face import model_files
from megajax.runtime.exchange import gather_problems
from megajax.schedules.errors import counted
from megajax.train.earlier_log import keep_earlier, last_record
from megajax.train.log_file import LogFile
from megajax.train.logging import RunLog
from megajax.train.lr_schedule import describe_change
from megajax.train.optimizer import samples_trained
from megajax.train.sinks import JsonLines, Sink, TensorBoard
from megajax.train.state import TrainState, started
from megajax.train.step import Training
from megajax.train.tracking.tracker import Tracker, request_of, require_library

# Parts of a run's state that a checkpoint of other options does not have.
NOT_IN_ALL = {
    "in_flight": "no batch is in flight in this checkpoint: the first step makes no update",
    "ema": "no averaged weights are in this checkpoint: the average starts from its weights",
}


class Profiler:
    """Writes a jax.profiler trace of steps START to STOP - 1; open it with TensorBoard, XProf or Perfetto.

    The schedule's operations have their names in it (pipeline/executor.py).
    """

    def __init__(self, steps: str, directory: str | pathlib.Path, shown: Any = None):
        """`steps` is "START:STOP"; each process writes a directory of its own; `shown`: the directory in the message."""
        self.start, self.stop = map(int, steps.split(":"))
        self._shown = shown or directory
        self.directory = pathlib.Path(directory) / f"process_{jax.process_index()}"
        self.running = False

    def is_edge(self, step: int) -> bool:
        """Whether the trace starts or ends just before `step`."""
        return step in (self.start, self.stop)

    def before(self, step: int) -> None:
        """Starts the trace if `step` is the first in it."""
        if self.start <= step < self.stop and not self.running:
            jax.profiler.start_trace(str(self.directory))
            self.running = True

    def after(self, step: int) -> str | None:
        """Ends the trace if `step` was the last in it; returns a message with its path."""
        if self.running and step + 1 >= self.stop:
            return self.close()
        return None

    def close(self) -> str | None:
        """Ends the trace, if one is being recorded: a run may stop inside it."""
        if not self.running:
            return None
        self.running = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # a full disk, of which jax gives no documented error
            return f"warning: the profile of steps {self.start} to {self.stop - 1} was not written: {reason_of(error)}"
        return f"profile   steps {self.start} to {self.stop - 1} in {self._shown / self.directory.name}"


class RunDirectory:
    """The files of one run; without `run_dir` in its OutputConfig there are none but an optional log.jsonl.

    Attributes:
      place: the run directory, here or in an object store; None: there is none.
      directory: where the run's files are written on this machine: the same, or a folder that is copied to the store.
      checkpoints, profiler, replicas: for the loop; None without a directory.
      messages: lines for the start of the log.
    """

    def __init__(self, run: RunConfig, output: OutputConfig, tokenizer: Any | None, request: Request | None = None):
        """Creates and locks the directory, saves the configuration, and finds the checkpoint to resume from.

        Args:
          tokenizer: whose hash is stored in every checkpoint; None if the run reads its own batches.
          request: the command line; None: the run was configured in Python.

        Raises:
          ConfigError: the directory cannot be written, another run writes into it, or it has checkpoints although `resume`
            is "no". All processes of a run raise it.
        """
        self.run, self.output, self.request = run, output, request
        self.place = place(output.run_dir) if output.run_dir else None
        self.directory, self._mirror = self.place, None
        self._tokenizer, self._tokenizer_files = tokenizer, getattr(tokenizer, "files", ())
        if output.track and jax.process_index() == 0:
            require_library(output.track)
        self.jsonl = output.log_jsonl
        self.messages: list[str] = []
        self.checkpoints = self.profiler = self.replicas = self.lock = self._resumed_path = self._stored_data = None
        if self.place is None:
            return
        choose(self.place / "checkpoints", output.resume)  # an error here leaves no new directory behind
        refuse_foreign(self.place)
        self._lock_directory()
        self._resumed_path, message = choose(self.place / "checkpoints", output.resume)
        self.messages += [message] if message else []
        self.meta = run_meta(run, tokenizer)
        self.checkpoints = Checkpoints(self.place / "checkpoints", output, self.meta, self.lock)
        if self._mirror:
            self.checkpoints.more_messages, self.checkpoints.copy_logs = self._mirror.messages, self._mirror.copy_logs
        if self._resumed_path is None:
            self._save_config()  # else after the checkpoint has been found to be of this model and tokenizer
        self.jsonl = self.jsonl or str(self.directory / "log.jsonl")
        if output.profile:
            self.profiler = Profiler(output.profile, self.directory / "profile", self.place / "profile")
        if output.replicate_state:
            self.replicas = ReplicatedState(self.place, output.replicate_state, self.meta, self.directory)

    def _lock_directory(self) -> None:
        """Process 0 creates and locks the directory for all processes. Of a store, each then has a folder of its own."""
        problem, remote = None, is_remote(self.place)
        if jax.process_index() == 0:
            try:
                if self.output.resume != "no" and not exists(self.place):
                    self.messages.append(f"resume    {self.place} does not exist and is created")
                if not remote:
                    self.place.mkdir(parents=True, exist_ok=True)
                self.lock = lock_run(self.place, recreate=self._recreate)
            except OSError as error:
                problem = f"cannot create {self.place}: {error.strerror}; give --run-dir a writable directory"
            except ConfigError as error:
                problem = str(error)
        if problems := gather_problems("run directory/lock", problem):
            raise ConfigError(problems[0])
        if remote:
            try:
                self._mirror = Mirror(self.place, self._is_fetched)
                self.directory = self._mirror.local
            except OSError as error:
                problem = f"cannot read {self.place}: {error.strerror}"
            if problems := gather_problems("run directory/files", problem):
                self.finish()
                raise ConfigError(next(iter(problems.values())))

    @staticmethod
    def _is_fetched(name: str) -> bool:
        """Whether this process continues a file that the store has of an earlier session."""
        process = jax.process_index()
        own = name in (f"logs/process_{process}.log", "logs/tracker.log")
        return own or (process == 0 and name.partition("/")[0] not in ("tensorboard", "profile", "logs"))

    def _recreate(self) -> None:
        if self._mirror:
            self._mirror.forget()
            return
        (self.directory / "checkpoints").mkdir(exist_ok=True)
        self._save_config()

    def _tables(self) -> dict[str, dict[str, Any]]:
        """The configuration by sections, as it is stored: see `config.stored_paths`, and the copy as tokenizer."""
        tables = config_tables(self.run, self.output, self.request.others if self.request else {})
        if self.directory:
            files = self._tokenizer_files
            data = tables["data"]
            data["tokenizer"] = tokenizer_copy(data["tokenizer"], files, self.directory)
            if data.get("chat_template") is not None and files:
                folder = data["tokenizer"] if os.path.isdir(data["tokenizer"]) else self.directory / TOKENIZER
                data["chat_template"] = str(pathlib.Path(folder) / CHAT_TEMPLATE)
        return {section: store_paths(table, self.directory) for section, table in tables.items()}

    def _session(self) -> dict[str, Any]:
        """What log.jsonl says about this session of the run."""
        return {
            "megajax": megajax.__version__,
            "jax": jax.__version__,
            "processes": jax.process_count(),
            "device": jax.devices()[0].device_kind,
            "config": self._tables(),
        }

    def _save_config(self) -> None:
        """Writes config.toml and the copy of the tokenizer, by process 0."""
        if self.lock is None:
            return
        path, remedy = self.directory / "config.toml", "give --run-dir a writable directory"
        try:
            copy_tokenizer(self._tokenizer_files, self.directory, self._chat_template())
            end = self._tokenizer.end_of_document if self.run.data.sft_data else None
            copy_model(self._model_files(), self.directory, end)
        except OSError as error:
            raise ConfigError(f"cannot write {self.directory / TOKENIZER}: {error.strerror}; {remedy}") from error
        tables = self._tables()
        text = toml_text(tables, HEADER.format(path=self.place / "config.toml"))
        save_config(path, text, remedy, parents=True)
        with contextlib.suppress(OSError):  # a full disk: the directory is then read with --trust
            sign_imports(self.directory, tables["options"].get("imports", ()), os.environ)

    def _chat_template(self) -> str | None:
        given = self.run.data.chat_template
        return template_text(self._tokenizer, given) if given and self._tokenizer_files else None

    def _model_files(self) -> list[pathlib.Path]:
        """Files of the model that the weights are from: of --init-from, or of the run that is resumed."""
        if self._resumed_path is not None and is_remote(self._resumed_path):
            other = self._resumed_path.parent.parent
            return model_files(snapshot(other, lambda name: name.startswith(f"{MODEL}/")) / MODEL)
        if self._resumed_path is not None:
            return model_files(self._resumed_path.parent.parent / MODEL)
        return model_files(pathlib.Path(self.run.train.init_from)) if self.run.train.init_from else []

    def resume(self, training: Training) -> tuple[TrainState, Progress] | None:
        """The state to resume from and its progress; None for a new run.

        Raises:
          ConfigError: the checkpoint is damaged, or of another model.
        """
        found = self._restore_replicated(training)
        if found is None and self._resumed_path is None:
            return None
        state, progress, messages = found or reader.load(
            self._resumed_path, self.run, self._stored_layout(training), self.meta["tokenizer"]
        )
        is_whole = jax.tree.structure(state.params) == jax.tree.structure(training.params_sharding)
        state = started(self.run.train, state, training.only_trained(state.params) if is_whole else state.params)
        self._stored_data = self.replicas.restored_data if found else reader.read_meta(self._resumed_path).get("data")
        self.messages += messages + ([] if training.has_own_schedule else self._rate_change(state, progress))
        self._save_config()
        skipped = counted(progress.skipped, "skipped step")
        after = f"after step {progress.step}, {counted(progress.samples, 'sample')}, {skipped}"
        self.messages += [f"resume    {after}"]
        self.messages += ["resume    " + text for text in self.checkpoints.set_aside(after=progress.step)]
        return state, progress

    def connect_data(self, batches: Any, resumed: Progress | None) -> None:
        """Has every checkpoint store the state of `batches`, and restores it as it was at the progress to resume from."""
        if not hasattr(batches, "state"):
            return
        for saver in (self.checkpoints, self.replicas):
            if saver:
                saver.data_state = batches.state
        if resumed and resumed.samples:
            self.messages += batches.restore(resumed.samples, self._stored_data)

    def _stored_layout(self, training: Training) -> StateLayout:
        """The layout of the checkpoint to resume from, without what another schedule or another --ema-decay left out."""
        found = training.stored_layout
        parts = [part for part in NOT_IN_ALL if jax.tree.leaves(getattr(found.shapes, part))]
        stored = {name.partition("/")[0] for name in named(reader.arrays_in(self._resumed_path))} if parts else set()
        for part in set(parts) - stored:
            without = {"shapes": found.shapes, "shardings": found.shardings}
            without = {name: dataclasses.replace(tree, **{part: ()}) for name, tree in without.items()}
            found = dataclasses.replace(found, **without)
            self.messages.append(f"resume    {NOT_IN_ALL[part]}")
        return found

    def _rate_change(self, state: TrainState, progress: Progress) -> list[str]:
        """A line if the run's schedule is not the checkpoint's, and changes the learning rate of the next step."""
        if self._resumed_path is None:
            return []
        stored, train = reader.read_meta(self._resumed_path)["config"]["train"], self.run.train
        trained = int(samples_trained(state.optimizer_state))
        text = describe_change(stored, train, progress.step, trained, batch_size(train, progress.samples))
        return [f"resume    {text}"] if text else []

    def _restore_replicated(self, training: Training) -> tuple[TrainState, Progress, list[str]] | None:
        """The state replicated in host memory, if it is as new as the newest checkpoint and `resume` is "auto"."""
        if self.replicas is None:
            return None
        newest = complete_steps(self.place / "checkpoints")[-1:] or [0]
        at_least = newest[0] if self.output.resume == "auto" else None
        found = self.replicas.restore(self.run, training.stored_layout, at_least)
        if found:
            self.messages = [text for text in self.messages if not text.startswith("resume    ")]
        self.messages += self.replicas.messages
        return found

    def open_log(self, progress: Progress) -> RunLog:
        """The log of a run that starts at `progress`: on process 0's console, and in the directory's files."""
        sinks: list[Sink] = []
        is_first = jax.process_index() == 0
        if self.jsonl and is_first:
            if self.output.log_jsonl:
                continues = progress.step > 0 and self._resumes_itself
                self.messages += keep_earlier(self.jsonl, continues)
            sinks.append(JsonLines(self.jsonl, after=progress.step, session=self._session()))
        if self.directory and self.output.tensorboard and is_first:
            sinks.append(TensorBoard(self.directory / "tensorboard", progress.step, toml_text(self._tables(), "")))
        console = None if is_first else Console(quiet=True)
        steps = progress.step + remaining_steps(self.run.train, progress.samples)[0]
        every, file = self.run.train.log_every, self._process_log()
        tracker = self._tracker(progress) if is_first else None
        return RunLog(steps, every, console=console, sinks=sinks, file=file, tracker=tracker)

    def _tracker(self, progress: Progress) -> Tracker | None:
        if self.output.track is None:
            return None
        name = self.place.name if self.place else self.run.model.name
        request = request_of(self.output, name, self._session(), progress.step, self.directory)
        return Tracker(request, self.directory and self.directory / "logs" / "tracker.log", self.output.track_artifacts)

    @property
    def _resumes_itself(self) -> bool:
        """Whether the state to resume from is this run's own, and not that of another run directory."""
        checkpoints = self.place and self.place / "checkpoints"
        if is_remote(self.place) or is_remote(self._resumed_path):
            return self._resumed_path is None or str(self._resumed_path.parent) == str(checkpoints)
        return self._resumed_path is None or self._resumed_path.resolve().parent == checkpoints.resolve()

    def last_record(self, step: int) -> dict[str, float | None]:
        """The record of a step in the log of an earlier session; empty if it is not there."""
        return last_record(self.jsonl, step) if self.jsonl else {}

    def _process_log(self) -> LogFile | None:
        if self.directory is None:
            return None
        path = self.directory / "logs" / f"process_{jax.process_index()}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return LogFile(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; give --run-dir a writable directory") from error

    def close(self, wait: bool = True) -> list[str]:
        """Ends the trace, waits for the save in progress, and frees the lock; returns the messages of the first two.

        In an object store the lock stays until `finish`.

        `wait`: False if the save in progress cannot end, because another process of the run is gone.
        """
        traced = self.profiler.close() if self.profiler else None
        messages = [traced] if traced else []
        if wait:
            messages += self.checkpoints.close() if self.checkpoints else []
            if self.replicas:
                saved = self.checkpoints.steps()[-1:] or [-1]
                messages += self.replicas.close(clear=self.replicas.newest is None or self.replicas.newest <= saved[0])
        if self.lock and not is_remote(self.place):
            self.lock.release()
        return messages

    def finish(self) -> None:
        """Copies the last lines to an object store, and frees the lock; called after all else, on a disk without effect."""
        if not is_remote(self.place):
            return
        for text in self._mirror.close() if self._mirror else []:
            print(text, file=sys.stderr)
        if self.lock:
            self.lock.release()
        self._mirror = self.lock = None
