"""Checkpoints: written beside the training (writing.py), whole or not at all, and read on any mesh (restore.py).

    RUN_DIR/checkpoints/step_00000040/   state/    every array of the state, blocks in canonical layer order
                                         meta/     step, samples, configuration, tokenizer, as JSON
                                         digests/  a sum of every file

A checkpoint has its name only when all of it is on the disk; until then the name ends in what STALE lists. Weights and
optimizer state are read back on another mesh, schedule, number of chunks or of processes.

    python -m megajax.checkpoint.manager inspect DIR [--verify] [--arrays]
"""

import dataclasses
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from megajax.checkpoint import layout
from megajax.checkpoint.writer import TEMPORARY, hush, reason_of, write
from megajax.config import ConfigError, OutputConfig
from megajax.runtime.compat import multihost_utils
from megajax.train.step import Training, TrainState

FORMAT = 1
NAME = "step_{:08d}"
STALE = (TEMPORARY, ".deleting")  # what may be left of a save or a deletion that was killed
ASIDE = ".set-aside"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is: what is not in the arrays."""

    step: int = 0  # steps taken, skipped ones included
    samples: int = 0  # samples consumed, those of skipped steps included: the whole state of the loader
    skipped: int = 0  # steps skipped
    bad: int = 0  # steps whose loss was not finite


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
        hush()
        self._writer, self._deleter = ThreadPoolExecutor(1, "save"), ThreadPoolExecutor(1, "delete")
        self._pending: tuple[int, float, Future] | None = None  # step, when its save began, the save
        self._saves, self._arrays = 0, None  # how many there were; what the last one wrote, if its memory is used again
        self.failed = False  # whether the last save failed
        self.blocked = 0.0  # seconds that the last save kept the training waiting

    def save(self, training: Training, state: TrainState, progress: Progress) -> list[str]:
        """Starts a save; the state may be used up as soon as this returns. Returns what there is to say.

        What blocks is the copy to the hosts' memory, and a save that has not ended yet. All else is the writer's.
        """
        said = self.wait()
        path = self.directory / NAME.format(progress.step)
        if path.exists():
            return said
        start = time.time()
        carried = dataclasses.replace(state, in_flight=())
        arrays = layout.to_canonical(carried, training.schedule.placement, into=self._arrays)
        self._arrays = arrays if training.mesh.devices.flat[0].platform == "cpu" else None
        meta = self.meta | {"format": FORMAT, "progress": dataclasses.asdict(progress), "time": start}
        self._bytes = sum(leaf.nbytes for leaf in arrays.values())
        self._saves += 1
        save = self._writer.submit(write, path, layout.nest(arrays), meta, f"{path.name}/{self._saves}")
        self._pending = (progress.step, start, save)
        self.blocked = time.time() - start
        return said

    def poll(self) -> list[str]:
        """What there is to say of a save that has ended since the last call; does not wait."""
        return self.wait() if self._pending and self._pending[2].done() else []

    def wait(self) -> list[str]:
        """Waits for the save that is under way. Returns what there is to say of it."""
        if self._pending is None:
            return []
        (step, start, save), self._pending = self._pending, None
        error = save.exception()
        self.failed = error is not None
        return [self._failure(step, error) if error else self._success(step, time.time() - start)]

    def close(self) -> list[str]:
        """Waits for all that is under way."""
        said = self.wait()
        self._writer.shutdown()
        self._deleter.shutdown()
        return said

    def _success(self, step: int, seconds: float) -> str:
        if jax.process_index() == 0:
            for old in self._superfluous():
                gone = old.rename(old.with_name(old.name + STALE[1]))
                self._deleter.submit(shutil.rmtree, gone, ignore_errors=True)
        size, waited = format_size(self._bytes), self.blocked
        return f"step {step}: checkpoint saved, {size} in {seconds:.1f} s (training waited {waited:.2f} s)"

    def _superfluous(self) -> list[pathlib.Path]:
        every = self.output.keep_every
        steps = complete_steps(self.directory)[: -self.output.max_to_keep]
        return [self.directory / NAME.format(step) for step in steps if not every or step % every]

    def _failure(self, step: int, error: BaseException) -> str:
        self._arrays = None  # a thread of orbax may still be at them
        if jax.process_index() == 0:
            _remove_stale(self.directory)
        steps = complete_steps(self.directory)
        before = f"the newest is of step {steps[-1]}" if steps else "there is none yet"
        return (
            f"warning: step {step}: checkpoint NOT saved in {self.directory}: {reason_of(error)} "
            f"({format_size(_free(self.directory))} free, a checkpoint takes up to {format_size(self._bytes)}); {before}"
        )

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
    from megajax.checkpoint.inspect import main

    sys.exit(main())
