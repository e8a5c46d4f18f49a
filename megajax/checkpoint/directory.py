"""The checkpoints in a run's directory: their names, and which of them to resume from. No jax."""

import os
import pathlib

from megajax.config import ConfigError

NAME = "step_{:08d}"  # a checkpoint that is not complete has a suffix


def complete_steps(directory: str | pathlib.Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    found = pathlib.Path(directory).glob("step_*") if os.path.isdir(directory) else []
    steps = [(step_of(path), path) for path in found]
    return sorted(step for step, path in steps if step is not None and path.is_dir())


def step_of(path: pathlib.Path) -> int | None:
    """The step that a checkpoint's directory has in its name; None for another name."""
    digits = path.name.removeprefix("step_")
    is_step = digits.isascii() and digits.isdecimal() and NAME.format(int(digits)) == path.name
    return int(digits) if is_step else None


def choose(directory: str | pathlib.Path, resume: str) -> tuple[pathlib.Path | None, str]:
    """Finds the checkpoint to resume from.

    Args:
      directory: the run's checkpoints.
      resume: see OutputConfig.

    Returns:
      The checkpoint's directory, None to start from step 0; and a message, empty if there is nothing to say.

    Raises:
      ConfigError: `resume` names no checkpoint, or is "no" and the directory has checkpoints.
    """
    directory = pathlib.Path(directory).absolute()
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
    for other in (pathlib.Path(resume).absolute(), pathlib.Path(resume).absolute() / "checkpoints"):
        if steps := complete_steps(other):
            return other / NAME.format(steps[-1]), f"resume    from step {steps[-1]}, the newest in {other}"
        if os.path.isdir(other / "state"):  # False too for what may not be read
            return other, f"resume    from {other}"
    raise ConfigError(
        f"resume = {resume!r} is neither auto, nor a step, nor a directory with a checkpoint: pass --resume auto"
    )
