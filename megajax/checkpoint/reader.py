"""Restores checkpoints on any mesh, schedule, number of chunks or of processes; refuses damaged ones and other models'."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from megajax.checkpoint import checksums, layout, metadata
from megajax.checkpoint.directory import NAME, complete_steps, step_of
from megajax.checkpoint.layout import StateLayout
from megajax.checkpoint.metadata import Progress
from megajax.checkpoint.object_store import Path, errors_of
from megajax.checkpoint.shapes import shape_problem
from megajax.checkpoint.store_drivers import orbax_path
from megajax.checkpoint.writer import reason_of
from megajax.config import ConfigError, RunConfig
from megajax.runtime.compat import multihost_utils

Tree = Any


def read_meta(path: Path) -> dict[str, Any]:
    """The metadata beside a checkpoint's arrays, as `metadata.parse` returns it.

    Raises:
      ConfigError: it cannot be read, is not megajax's, or is of a newer format.
    """
    try:
        with errors_of(path):
            stored = ocp.JsonCheckpointHandler().restore(orbax_path(path / "meta"), ocp.args.JsonRestore())
        return metadata.parse(stored)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a complete megajax checkpoint: {reason_of(error)}{_earlier(path)}") from error


def verify(path: Path, below: str = "") -> None:
    """Raises ConfigError on all processes if any file is damaged; each process verifies its share of the files.

    Args:
      path: the checkpoint's directory.
      below: verifies only the files in this directory of the checkpoint; "": all.
    """
    found = checksums.problems(path, (jax.process_index(), jax.process_count()), below)
    count = len(found)
    if jax.process_count() > 1:
        count = int(multihost_utils.process_allgather(np.int32(count)).sum())
    if count:
        first = found[0] if found else "found by another process, see its log"
        more = f" and {count - 1} more" if count > 1 else ""
        raise ConfigError(f"checkpoint {path} is damaged: {first}{more}{_earlier(path)}")


def load(
    path: Path, run: RunConfig, target: StateLayout, tokenizer: Mapping[str, Any]
) -> tuple[Tree, Progress, list[str]]:
    """Restores a checkpoint for a run.

    Args:
      path: the checkpoint's directory.
      run: the configuration of the run that resumes.
      target: the layout of its state, or of a part of it: {"params": ...} does not read the optimizer's state.
      tokenizer: name and hash of its tokenizer.

    Returns:
      The state, the position in the run, and messages that say what differs from the run that wrote it.

    Raises:
      ConfigError: it is damaged, or of another model or tokenizer.
    """
    verify(path, "meta/")  # so that a damaged configuration is not taken for that of another model
    meta = read_meta(path)
    messages = compare(meta, run, tokenizer, path)
    if step_of(path) not in (None, meta["progress"].step):
        name = NAME.format(meta["progress"].step)
        raise ConfigError(f"checkpoint {path} is of step {meta['progress'].step}: rename its directory to {name}")
    verify(path)
    return _restore(path, run, target), meta["progress"], messages


def compare(meta: Mapping[str, Any], run: RunConfig, tokenizer: Mapping[str, Any], path: Path) -> list[str]:
    """`metadata.differences`, with the checkpoint's path in its errors."""
    try:
        return metadata.differences(meta, run, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {path} {error}") from None


def _restore(path: Path, run: RunConfig, target: StateLayout) -> Tree:
    stored = {name: tuple(array.shape) for name, array in layout.named(arrays_in(path)).items()}
    wanted, arguments = {}, {}
    for (name, leaf), sharding in zip(
        layout.named(target.shapes).items(), jax.tree.leaves(target.shardings), strict=True
    ):
        shape = layout.canonical_shape(name, leaf.shape, target.where)
        if problem := shape_problem(name, stored, shape, run):
            raise ConfigError(f"checkpoint {path}: {problem}")
        wanted[name] = 0
        arguments[name] = ocp.ArrayRestoreArgs(
            sharding=layout.canonical_sharding(name, leaf.shape, sharding, target.where),
            global_shape=shape,
            dtype=leaf.dtype,
            strict=False,  # see `shape_problem`
        )
    try:
        part = wanted.keys() != stored.keys()
        restore = ocp.args.PyTreeRestore(layout.nest(wanted), restore_args=layout.nest(arguments), partial_restore=part)
        with errors_of(path):
            copies = layout.named(ocp.PyTreeCheckpointHandler().restore(orbax_path(path / "state"), args=restore))
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {reason_of(error)}{_earlier(path)}") from error
    return layout.from_canonical(copies, target)


def arrays_in(path: Path) -> Tree:
    """The nested dictionary of the stored arrays' shapes and dtypes.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        return ocp.PyTreeCheckpointHandler().metadata(orbax_path(path / "state")).tree
    except Exception as error:  # whatever orbax makes of a damaged file, which has not been verified in every command
        raise ConfigError(f"checkpoint {path} cannot be read: {reason_of(error)}{_earlier(path)}") from error


def _earlier(path: Path) -> str:
    """The end of an error message that names the checkpoint before this one."""
    try:
        steps, own = complete_steps(path.parent), step_of(path)
    except OSError:
        return ""
    earlier = [step for step in steps if own is not None and step < own]
    if not earlier:
        return "; there is no earlier checkpoint"
    return f"; the one before it is of step {earlier[-1]}: pass --resume {earlier[-1]}"
