"""Reading checkpoints: on any mesh, schedule, number of chunks or of processes; never another model's, nor a damaged one."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from megajax.checkpoint import checksums, layout
from megajax.checkpoint.manager import FORMAT, Progress, complete_steps
from megajax.checkpoint.writer import reason_of
from megajax.config import ConfigError, RunConfig, near, padded_vocabulary
from megajax.runtime.compat import multihost_utils
from megajax.train.step import Training, TrainState

# These do not decide what the arrays mean, so a run may go on with others.
FREE_MODEL_FIELDS = ("name", "dropout", "init_deviation")


def read_meta(path: pathlib.Path) -> dict[str, Any]:
    """The JSON beside a state.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        meta = ocp.JsonCheckpointHandler().restore(path / "meta", ocp.args.JsonRestore())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a whole checkpoint: {reason_of(error)}{_instead(path)}") from error
    if meta["format"] > FORMAT:
        raise ConfigError(f"{path} was written by a newer megajax ({meta['megajax']}): install that one")
    return meta


def verify(path: pathlib.Path) -> None:
    """Raises ConfigError for a checkpoint with damaged files, on all processes alike; each looks at its share."""
    found = checksums.problems(path, (jax.process_index(), jax.process_count()))
    count = len(found)
    if jax.process_count() > 1:
        count = int(multihost_utils.process_allgather(np.int32(count)).sum())
    if count:
        first = found[0] if found else "found by another process, see its log"
        more = f" and {count - 1} more" if count > 1 else ""
        raise ConfigError(f"checkpoint {path} is damaged: {first}{more}{_instead(path)}")


def load(
    path: pathlib.Path, training: Training, tokenizer: Mapping[str, Any]
) -> tuple[TrainState, Progress, list[str]]:
    """Reads a checkpoint for a run's mesh: the state, where the run was, and what to say.

    Raises:
      ConfigError: it is damaged, or of another model or tokenizer.
    """
    meta = read_meta(path)
    said = compare(meta, training.run, tokenizer, path)
    verify(path)
    return _restore(path, training), Progress(**meta["progress"]), said


def compare(meta: Mapping[str, Any], run: RunConfig, tokenizer: Mapping[str, Any], path: pathlib.Path) -> list[str]:
    """What differs between a checkpoint and a run that is allowed to.

    Raises:
      ConfigError: what is not allowed to differ does; all of it is named.
    """
    was, now = meta["config"], dataclasses.asdict(run)
    differing = _differences(was["model"], now["model"], leave_out=FREE_MODEL_FIELDS)
    if differing:
        raise ConfigError(
            f"checkpoint {path} is of another model ({was['model']['name']}): " + ", ".join(differing) + "; give the "
            "options it was trained with, or another --run-dir"
        )
    if dict(meta["tokenizer"]) != dict(tokenizer):
        raise ConfigError(
            f"checkpoint {path} was trained with tokenizer {meta['tokenizer']['name']} (hash {meta['tokenizer']['hash']}), "
            f"and this one is {tokenizer['name']} (hash {tokenizer['hash']}): type --tokenizer {meta['tokenizer']['name']}, "
            "or give the same tokenizer files"
        )
    said = []
    for part, title in (("parallel", "laid out anew"), ("train", "trained on differently")):
        if differing := _differences(was[part], now[part]):
            said.append(f"resume    {title}: " + ", ".join(differing))
    return said


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], leave_out: Sequence[str] = ()) -> list[str]:
    plain = lambda value: tuple(value) if isinstance(value, list) else value  # noqa: E731
    return [
        f"{name} was {was.get(name)}, is {now.get(name)}"
        for name in dict.fromkeys([*was, *now])
        if name not in leave_out and plain(was.get(name)) != plain(now.get(name))
    ]


def _restore(path: pathlib.Path, training: Training) -> TrainState:
    like, shardings = training.state_shapes, training.state_sharding
    handler = ocp.PyTreeCheckpointHandler()
    stored = layout.named(arrays_in(path))
    wanted, arguments = {}, {}
    for (name, leaf), sharding in zip(layout.named(like).items(), jax.tree.leaves(shardings), strict=True):
        shape = layout.canonical_shape(name, leaf.shape)
        _check_shape(path, name, stored, shape, training.run)
        wanted[name] = 0
        arguments[name] = ocp.ArrayRestoreArgs(
            sharding=layout.canonical_sharding(name, leaf.shape, sharding),
            global_shape=shape,
            dtype=leaf.dtype,
            strict=False,  # the vocabulary's padding depends on the mesh
        )
    try:
        restore = ocp.args.PyTreeRestore(layout.nest(wanted), restore_args=layout.nest(arguments))
        copies = layout.named(handler.restore(path / "state", args=restore))
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {reason_of(error)}{_instead(path)}") from error
    return layout.from_canonical(copies, like, shardings, training.schedule.placement)


def arrays_in(path: pathlib.Path) -> Any:
    """The tree of what is stored: shape and dtype of each array."""
    try:
        return ocp.PyTreeCheckpointHandler().metadata(path / "state").tree
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {reason_of(error)}{_instead(path)}") from error


def _check_shape(path, name: str, stored: Mapping[str, Any], shape: tuple[int, ...], run: RunConfig) -> None:
    """The stored array is this one, but for the padding of the vocabulary, which depends on the mesh."""
    if name not in stored:
        raise ConfigError(f"checkpoint {path} has no {name}: {near(name, stored)}")
    vocabulary = run.model.vocabulary
    for had, have in zip(stored[name].shape, shape, strict=True):
        padding = min(had, have) >= vocabulary and have == padded_vocabulary(vocabulary, run.parallel.vocabulary_shares)
        if had != have and not padding:
            raise ConfigError(f"checkpoint {path}: {name} has shape {tuple(stored[name].shape)}, this run's {shape}")


def _instead(path: pathlib.Path) -> str:
    """The offer of the checkpoint before this one."""
    steps = complete_steps(path.parent)
    earlier = [step for step in steps if path.name.startswith("step_") and step < int(path.name[5:13])]
    return (
        f"; the one before it is of step {earlier[-1]}: type --resume {earlier[-1]}"
        if earlier
        else "; there is no other"
    )
