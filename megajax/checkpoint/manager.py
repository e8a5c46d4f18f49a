"""The checkpoints of a run: starts asynchronous saves, deletes old checkpoints, and chooses the one to resume from.

    RUN_DIR/checkpoints/step_00000040/   state/      all arrays of the training state, blocks in canonical layer order
                                         meta/       step, samples, configuration and tokenizer, as JSON
                                         checksums/  size and CRC-32 of every file

A checkpoint is atomic: until it is complete, the name of its directory ends in ".unfinished", or in an object store it has
no commit_success.txt. Weights and optimizer state
can be restored on another mesh, schedule, number of chunks or of processes. `python -m megajax.checkpoint.inspect` shows
what a checkpoint contains. writer.py says why this is not orbax's CheckpointManager.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from megajax.checkpoint import durable, layout, store_folders
from megajax.checkpoint.directory import NAME, complete_steps, step_of, steps_of
from megajax.checkpoint.layout import StateLayout
from megajax.checkpoint.lock import DirectoryLock
from megajax.checkpoint.metadata import FORMAT, Progress
from megajax.checkpoint.object_store import Path, is_remote, place
from megajax.checkpoint.store_lock import StoreLock
from megajax.checkpoint.writer import TEMPORARY, reason_of, write
from megajax.config import ConfigError, OutputConfig
from megajax.runtime.compat import multihost_utils

DELETING = ".deleting"
STALE = (TEMPORARY, DELETING)  # suffixes of the directories that killed saves and deletions leave
ASIDE = ".set-aside"


class Checkpoints:
    """The checkpoints of one run: starts saves, reports their results, and deletes old checkpoints.

    Attributes:
      output: how often to save (`save_every`, for the caller) and what to keep.
      failed: whether the last save failed.
      completed: (step, directory) of the checkpoints that have become complete; whoever reads the list empties it.
      blocked: seconds for which the last `save` kept the training waiting.
      more_messages: returns further messages about the run's directory, for `poll`.
      copy_logs: copies the lines of the run's logs up to here to its store, before a checkpoint is complete.
      data_state: returns the state of the data after that many samples, which is stored too; None: it has none.
      never_deleted: step whose checkpoint stays, besides those that `output` keeps; the caller sets it. None: no other.
    """

    def __init__(
        self,
        directory: str | Path,
        output: OutputConfig,
        meta: Mapping[str, Any],
        lock: DirectoryLock | StoreLock | None = None,
    ):
        """Creates the directory, and deletes the unfinished directories of killed saves in it.

        Args:
          directory: contains one directory for each checkpoint.
          output: see above.
          meta: stored beside each state: megajax's version, the configuration and the tokenizer.
          lock: of the directory, on process 0, which `save` and `poll` check: they raise ConfigError when another process
            has taken it over.

        Raises:
          ConfigError: the directory cannot be written.
        """
        self.directory, self.output, self.meta, self.lock = place(directory), output, dict(meta), lock
        self._remote = is_remote(self.directory)
        if jax.process_index() == 0:
            (store_folders.make_writable if self._remote else _make_writable)(self.directory)
        # The steps in an object store: between steps it is not asked, since it may not answer.
        self._stored = set(steps_of(self.directory)) if self._remote else set()
        self._writer, self._deleter = ThreadPoolExecutor(1, "save"), ThreadPoolExecutor(1, "delete")
        self._pending: tuple[int, float, Future] | None = None  # step, start time, and result of the save in progress
        self._saves, self._bytes = 0, 0
        self._arrays: dict[str, jax.Array] | None = None  # the last save's copies, where their memory is reused
        self.failed, self._failed = False, (-1, 0.0)  # the last save that has failed: step and time
        self.completed: list[tuple[int, Path]] = []
        self.blocked = 0.0
        self.never_deleted: int | None = None
        self.more_messages: Callable[[], list[str]] = list
        self.copy_logs: Callable[[], None] = lambda: None
        self.data_state: Callable[[int], str | None] = lambda samples: None

    def save(self, target: StateLayout, state: Any, progress: Progress) -> list[str]:
        """Starts a save; `state` may be donated as soon as this returns.

        Blocks for the copy to host memory and for a save that is still in progress. The writer's thread does the rest.

        Args:
          target: the state's layout. Leaves of `state` that it does not have are not stored.
          state: the training state.
          progress: its position in the run.

        Returns:
          Messages about the save before this one.
        """
        messages = self.wait() + (self.lock.check(now=True) if self.lock else [])
        path = self.directory / NAME.format(progress.step)
        if progress.step in self._stored if self._remote else path.is_dir():
            return messages
        if jax.process_index() == 0 and not self._remote and not self.directory.exists():
            messages.append(f"warning: {self.directory} has vanished, with the checkpoints in it, and is created again")
        start = time.time()
        leaves = layout.named(state, only=layout.named(target.shapes))
        arrays = layout.to_canonical(leaves, target.where, into=self._arrays)
        device = next(iter(next(iter(leaves.values())).sharding.device_set))
        self._arrays = arrays if device.platform == "cpu" else None
        meta = self.meta | {"format": FORMAT, "progress": dataclasses.asdict(progress), "time": start}
        if (data := self.data_state(progress.samples)) is not None:
            meta["data"] = data
        self._bytes = sum(leaf.nbytes for leaf in arrays.values())
        self._saves += 1
        guard = {"guard": self.lock.require} if isinstance(self.lock, StoreLock) else {}
        if self._remote and self._failed[0] == progress.step:  # requests of the save that failed may still arrive
            self._writer.submit(time.sleep, max(0.0, self._failed[1] + store_folders.SETTLES - start))
        hooks = {"copy_logs": self.copy_logs} | guard
        save = self._writer.submit(write, path, layout.nest(arrays), meta, f"{path.name}/{self._saves}", **hooks)
        self._pending = (progress.step, start, save)
        self.blocked = time.time() - start
        return messages

    def poll(self) -> list[str]:
        """Messages about the directory, and about a save that has ended since the last call; does not wait."""
        messages = self.more_messages() + (self.lock.check() if self.lock else [])
        return messages + (self.wait() if self._pending and self._pending[2].done() else [])

    def wait(self) -> list[str]:
        """Waits for the save in progress; returns messages about it."""
        if self._pending is None:
            return []
        (step, start, save), self._pending = self._pending, None
        error = save.exception()
        self.failed = error is not None
        self._failed = (step, time.time()) if error else self._failed
        self.completed += [] if error else [(step, self.directory / NAME.format(step))]
        return [self._failure(step, error) if error else self._success(step, time.time() - start)]

    def close(self) -> list[str]:
        """Waits for the save and the deletions in progress; returns messages about the save."""
        messages = self.wait()
        self._writer.shutdown()
        self._deleter.shutdown()
        return messages

    def _success(self, step: int, seconds: float) -> str:
        self._stored.add(step)
        if jax.process_index() == 0:
            for old in self._superfluous():
                if self._remote:
                    self._deleter.submit(self._delete_from_store, old)
                    continue
                with contextlib.suppress(OSError):  # it is tried again after the next save
                    renamed = old.rename(old.with_name(old.name + DELETING))
                    self._deleter.submit(shutil.rmtree, renamed, ignore_errors=True)
        size, waited = format_size(self._bytes), self.blocked
        return f"step {step}: checkpoint saved, {size} in {seconds:.1f} s (training waited {waited:.2f} s)"

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return sorted(tuple(self._stored)) if self._remote else complete_steps(self.directory)

    def _delete_from_store(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # it is tried again after the next save
            store_folders.delete(path)
            self._stored.discard(step_of(path))

    def _superfluous(self) -> list[Path]:
        every = self.output.keep_every
        steps = self.steps()[: -self.output.max_to_keep]
        return [
            self.directory / NAME.format(step)
            for step in steps
            if step != self.never_deleted and (not every or step % every)
        ]

    def _failure(self, step: int, error: BaseException) -> str:
        self._arrays = None  # a thread of orbax may still read them
        if jax.process_index() == 0 and not self._remote:
            _remove_stale(self.directory)
        steps = self.steps()
        newest = f"the newest is of step {steps[-1]}" if steps else "there is none yet"
        if self._remote:
            newest = newest if steps else "the next save tries again"
            return f"warning: step {step}: checkpoint NOT saved in {self.directory}: {reason_of(error)}; {newest}"
        return (
            f"warning: step {step}: checkpoint NOT saved in {self.directory}: {reason_of(error)} "
            f"({format_size(_free(self.directory))} free, a checkpoint takes up to {format_size(self._bytes)}); {newest}"
        )

    def set_aside(self, after: int) -> list[str]:
        """Renames the checkpoints of steps after `after`: a run that resumes from there will write those steps again.

        Raises:
          ConfigError: an object store does not answer.
        """
        try:
            return self._set_aside(after)
        except OSError as error:
            if not self._remote:
                raise
            raise ConfigError(f"cannot rename checkpoints in {self.directory}: {error.strerror}") from error

    def _set_aside(self, after: int) -> list[str]:
        messages = []
        for step in complete_steps(self.directory):
            if step > after:
                path = self.directory / NAME.format(step)
                aside = path.with_name(f"{path.name}{ASIDE}-{int(time.time())}")
                if jax.process_index() == 0 and self._remote:
                    store_folders.move(path, aside)
                elif jax.process_index() == 0:
                    path.rename(aside)
                    durable.sync(self.directory)
                messages.append(f"the checkpoint of step {step} is now called {aside.name}")
        self._stored = {step for step in self._stored if step <= after}
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints set aside")
        return messages


def _make_writable(directory: pathlib.Path) -> None:
    probe = directory / ".writable"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write checkpoints to {directory}: {error.strerror}; pass --run-dir DIR") from error
    _remove_stale(directory)


def _remove_stale(directory: pathlib.Path, attempts: int = 10) -> None:
    """Deletes the directories of failed or killed saves; orbax may write into them for some time after a failure."""
    for _ in range(attempts):
        found = [path for suffix in STALE for path in directory.glob(f"step_*{suffix}")]
        for path in found:
            shutil.rmtree(path, ignore_errors=True)
        if not any(path.exists() for path in found):
            return
        time.sleep(0.1)


def _free(directory: pathlib.Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def format_size(count: float) -> str:
    """Bytes with three digits and a decimal unit: 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
