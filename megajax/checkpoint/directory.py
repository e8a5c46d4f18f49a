"""The checkpoints in a run's directory: their names, and which of them to resume from. No jax.

On a disk a checkpoint that is not complete has a suffix. An object store renames nothing: there a checkpoint is complete
when it has the object COMMITTED, which is written last and deleted first.
"""

import os
import pathlib

from megajax.checkpoint.object_store import Path, children, exists, is_remote, place
from megajax.config import ConfigError

NAME = "step_{:08d}"
COMMITTED = "commit_success.txt"  # orbax's name for it

PROBE = ".writable"  # a file that is written to see whether that is possible


def complete_steps(directory: str | Path) -> list[int]:
    """Steps with a complete checkpoint, ascending.

    Raises:
      OSError: an object store does not answer.
    """
    if is_remote(directory):
        folders = [path for path in children(place(directory)) if step_of(path) is not None]
        return sorted(step_of(path) for path in folders if exists(path / COMMITTED))
    found = pathlib.Path(directory).glob("step_*") if os.path.isdir(directory) else []
    steps = [(step_of(path), path) for path in found]
    return sorted(step for step, path in steps if step is not None and path.is_dir())


def steps_of(directory: str | Path) -> list[int]:
    """`complete_steps` for a command that ends where a store does not answer. Raises ConfigError."""
    try:
        return complete_steps(directory)
    except OSError as error:
        raise ConfigError(f"cannot read {directory}: {error.strerror}") from error


def is_complete(path: Path) -> bool:
    """Whether a checkpoint's directory is there, and complete; False too for what may not be read, or does not answer."""
    try:
        return exists(path / COMMITTED) if is_remote(path) else path.is_dir()
    except OSError:
        return False


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's directory has in its name; None for another name."""
    digits = path.name.removeprefix("step_")
    is_step = digits.isascii() and digits.isdecimal() and NAME.format(int(digits)) == path.name
    return int(digits) if is_step else None


def choose(directory: str | Path, resume: str) -> tuple[Path | None, str]:
    """Finds the checkpoint to resume from.

    Args:
      directory: the run's checkpoints.
      resume: see OutputConfig.

    Returns:
      The checkpoint's directory, None to start from step 0; and a message, empty if there is nothing to say.

    Raises:
      ConfigError: `resume` names no checkpoint, or is "no" and the directory has checkpoints; or a store does not answer.
    """
    try:
        return _choose(place(directory), resume)
    except OSError as error:
        if not is_remote(directory) and not is_remote(resume):
            raise
        where = resume if is_remote(resume) else directory
        raise ConfigError(f"cannot read {where}: {error.strerror}") from error


def _choose(directory: Path, resume: str) -> tuple[Path | None, str]:
    steps = complete_steps(directory)
    shown = ", ".join(map(str, steps[-5:]))
    if resume == "no":
        if steps:
            raise ConfigError(
                f"{directory} has checkpoints already (steps {shown}): pass --resume auto to resume from step "
                f"{steps[-1]}, or another --run-dir to start from step 0"
            )
        return None, ""
    if resume == "auto":
        if not steps:
            return None, f"resume    no checkpoint in {directory} yet: starting from step 0"
        return directory / NAME.format(steps[-1]), f"resume    from step {steps[-1]}, the newest in {directory}"
    if resume.isdecimal():
        if int(resume) not in steps:
            there = f"there are those of steps {shown}" if steps else "there are none"
            raise ConfigError(f"no checkpoint of step {resume} in {directory}: {there}; pass --resume auto")
        return directory / NAME.format(int(resume)), f"resume    from step {resume} in {directory}"
    for other in (place(resume), place(resume) / "checkpoints"):
        if steps := complete_steps(other):
            return other / NAME.format(steps[-1]), f"resume    from step {steps[-1]}, the newest in {other}"
        if exists(other / COMMITTED) if is_remote(other) else os.path.isdir(other / "state"):  # or may not be read
            return other, f"resume    from {other}"
    raise ConfigError(
        f"resume = {resume!r} is neither auto, nor a step, nor a directory with a checkpoint: pass --resume auto"
    )
