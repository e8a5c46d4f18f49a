"""Checkpoints: written beside the training by orbax, whole or not at all, and read on any mesh.

    RUN_DIR/checkpoints/step_00000040/   state/    every array of the state, blocks in canonical layer order
                                         meta/     step, samples, configuration, tokenizer, as JSON
                                         digests/  a sum of every file

A checkpoint has its name only when all of it is on the disk; until then the name ends in what STALE lists. Weights and
optimizer state are read back (restore.py) on another mesh, schedule, number of chunks or of processes.

    python -m megajax.train.checkpoint inspect DIR [--verify] [--arrays]
"""

import dataclasses
import logging
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from megajax.config import ConfigError, OutputConfig
from megajax.train import canonical, digests
from megajax.train.step import Training, TrainState

FORMAT = 1
NAME = "step_{:08d}"
STALE = (digests.TEMPORARY, ".deleting")  # what may be left of a save or a deletion that was killed
ASIDE = ".set-aside"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is: what is not in the arrays."""

    step: int = 0  # steps taken, skipped ones included
    samples: int = 0  # samples consumed, those of skipped steps included: the whole state of the loader
    skipped: int = 0  # steps skipped
    bad: int = 0  # steps whose loss was not finite


class _Handler(ocp.CompositeCheckpointHandler):
    """Orbax's, with sums of the files: each process sums its own when they are written, all before the final name."""

    async def async_save(self, directory, args):
        futures = await super().async_save(directory, args) or []
        return [_ThenSum(futures, directory)]

    def finalize(self, directory):
        super().finalize(directory)
        digests.write_rest(pathlib.Path(directory))


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Arguments(ocp.args.Composite):
    pass


class _ThenSum(ocp.future.Future):
    """Waits for a process's writes, then sums the files."""

    def __init__(self, futures: Sequence[Any], directory):
        self._futures, self._directory = futures, directory

    def result(self, timeout: int | None = None) -> None:
        for future in self._futures:
            future.result(timeout)
        directory = getattr(self._directory, "path", self._directory)
        digests.write_own(pathlib.Path(directory), jax.process_index())


class Checkpoints:
    """The checkpoints of one run: starts saves, says how they ended, and deletes the old ones."""

    def __init__(self, directory: str | pathlib.Path, output: OutputConfig, meta: Mapping[str, Any]):
        """Prepares the directory.

        Args:
          directory: holds one directory a checkpoint; made if need be.
          meta: what is stored beside each state: the configuration and the tokenizer.

        Raises:
          ConfigError: the directory cannot be written.
        """
        self.directory, self.output, self.meta = pathlib.Path(directory).absolute(), output, dict(meta)
        if jax.process_index() == 0:
            _make_writable(self.directory)
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_no_echo)
        items = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._writer = ocp.AsyncCheckpointer(_Handler(**items))
        self._deleter = ThreadPoolExecutor(1)
        self._pending: tuple[int, float] | None = None  # step, when its save began
        self.failed = False  # whether the last save failed
        self.blocked = 0.0  # seconds that the last save kept the training waiting

    def save(self, training: Training, state: TrainState, progress: Progress) -> list[str]:
        """Starts a save; the state may be used up as soon as this returns. Returns what there is to say.

        What blocks is the copy from the devices to the hosts' memory, and a save that has not ended yet.
        """
        said = self.wait()
        path = self.directory / NAME.format(progress.step)
        if path.exists():
            return said
        start = time.time()
        arrays = canonical.nest(
            canonical.to_canonical(dataclasses.replace(state, in_flight=()), training.schedule.placement)
        )
        meta = self.meta | {"format": FORMAT, "progress": dataclasses.asdict(progress), "time": start}
        self._bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
        self._pending = (progress.step, start)
        arguments = _Arguments(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta))
        try:
            self._writer.save(path, args=arguments)
        except Exception as error:  # whatever a file system, a library or another process makes of a failed write
            said += self._fail(error)
        self.blocked = time.time() - start
        return said

    def poll(self) -> list[str]:
        """What there is to say of a save that has ended since the last call; does not wait."""
        if self._pending is None:
            return []
        try:
            self._writer.check_for_errors()
        except Exception as error:
            return self._fail(error)
        return self._done() if (self.directory / NAME.format(self._pending[0])).exists() else []

    def wait(self) -> list[str]:
        """Waits for the save that is under way. Returns what there is to say of it."""
        if self._pending is None:
            return []
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            return self._fail(error)
        return self._done()

    def close(self) -> list[str]:
        """Waits for all that is under way."""
        said = self.wait()
        self._deleter.shutdown()
        return said

    def _done(self) -> list[str]:
        (step, start), self._pending, self.failed = self._pending, None, False
        if jax.process_index() == 0:
            for old in self._superfluous():
                gone = old.rename(old.with_name(old.name + STALE[1]))
                self._deleter.submit(shutil.rmtree, gone, ignore_errors=True)
        took, waited = time.time() - start, self.blocked
        return [
            f"step {step}: checkpoint saved, {format_size(self._bytes)} in {took:.1f} s (training waited {waited:.2f} s)"
        ]

    def _superfluous(self) -> list[pathlib.Path]:
        every = self.output.keep_every
        steps = complete_steps(self.directory)[: -self.output.keep]
        return [self.directory / NAME.format(step) for step in steps if not every or step % every]

    def _fail(self, error: Exception) -> list[str]:
        (step, _), self._pending, self.failed = self._pending, None, True
        if jax.process_index() == 0:
            _remove_stale(self.directory)
        steps = complete_steps(self.directory)
        before = f"the newest is of step {steps[-1]}" if steps else "there is none yet"
        return [
            f"warning: step {step}: checkpoint NOT saved in {self.directory}: {reason_of(error)} "
            f"({format_size(_free(self.directory))} free, a checkpoint takes up to {format_size(self._bytes)}); {before}"
        ]

    def set_aside(self, after: int) -> list[str]:
        """Renames the checkpoints of steps after `after`: a run that goes on from there will write them anew."""
        said = []
        for step in complete_steps(self.directory):
            if step > after:
                path = self.directory / NAME.format(step)
                aside = path.with_name(f"{path.name}{ASIDE}-{int(time.time())}")
                if jax.process_index() == 0:
                    path.rename(aside)
                said.append(f"the checkpoint of step {step} is now called {aside.name}")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints set aside")
        return said


def complete_steps(directory: str | pathlib.Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    found = pathlib.Path(directory).glob("step_*") if pathlib.Path(directory).is_dir() else []
    return sorted(int(path.name[5:]) for path in found if path.name[5:].isdecimal())


def choose(directory: str | pathlib.Path, resume: str) -> tuple[pathlib.Path | None, str]:
    """The checkpoint that `resume` (see OutputConfig) names, None to begin anew; and what to say of it.

    Raises:
      ConfigError: there is none of that name, or `resume` is "no" and a run has left some.
    """
    directory = pathlib.Path(directory).absolute()
    steps = complete_steps(directory)
    shown = ", ".join(map(str, steps[-5:]))
    if resume == "no":
        if steps:
            raise ConfigError(
                f"{directory} has checkpoints already (steps {shown}): type --resume auto to go on from step "
                f"{steps[-1]}, or another --run-dir to begin anew"
            )
        return None, ""
    if resume == "auto":
        if not steps:
            return None, f"resume    no checkpoint in {directory} yet: from the beginning"
        return directory / NAME.format(steps[-1]), f"resume    from step {steps[-1]}, the newest in {directory}"
    if resume.isdecimal():
        if int(resume) not in steps:
            there = f"there are those of steps {shown}" if steps else "there are none"
            raise ConfigError(f"no checkpoint of step {resume} in {directory}: {there}; type --resume auto")
        return directory / NAME.format(int(resume)), f"resume    from step {resume} in {directory}"
    for other in (pathlib.Path(resume).absolute(), pathlib.Path(resume).absolute() / "checkpoints"):
        if steps := complete_steps(other):
            return other / NAME.format(steps[-1]), f"resume    from step {steps[-1]}, the newest in {other}"
        if (other / "state").is_dir():
            return other, f"resume    from {other}"
    raise ConfigError(
        f"resume = {resume!r} is neither auto, nor a step, nor a directory with a checkpoint: type --resume auto"
    )


def _is_no_echo(record: logging.LogRecord) -> bool:
    """False for what libraries log of a failed save, a traceback for each array: `_fail` says it in one line."""
    error = record.exc_info[1] if record.exc_info else ""
    text = f"{record.getMessage()} {error}"
    return digests.TEMPORARY not in text and "exception was never retrieved" not in text


def _make_writable(directory: pathlib.Path) -> None:
    probe = directory / ".writable"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write checkpoints to {directory}: {error.strerror}; type --run-dir DIR") from error
    _remove_stale(directory)


def _remove_stale(directory: pathlib.Path) -> None:
    for suffix in STALE:
        for path in directory.glob(f"step_*{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def reason_of(error: BaseException) -> str:
    """The end of a library's message, where what happened stands, on one line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    text = text.split(" [os_error_code=")[0].rsplit('": ', 1)[-1]
    return text if len(text) <= 300 else "..." + text[-300:]


def _free(directory: pathlib.Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def format_size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


if __name__ == "__main__":
    from megajax.train.inspect_checkpoint import main

    sys.exit(main())
