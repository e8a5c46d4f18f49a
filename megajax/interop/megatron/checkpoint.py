"""Opens a checkpoint of Megatron-LM: finds it in the directory of --save, and its format.

SAVE/latest_checkpointed_iteration.txt       the last iteration's number, or "release"
iter_0001000/ or release/
mp_rank_TT[_PPP]/model_optim_rng.pt      --ckpt-format torch: `megatron/rank_files.py`
metadata.json, .metadata, common.pt      --ckpt-format torch_dist: `megatron/torch_dist.py`
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError
from megajax.interop.megatron.rank_files import RANK, read_ranks
from megajax.interop.megatron.torch_dist import read_distributed
from megajax.interop.safetensors import Tensor
from megajax.schedules.errors import shown

__all__ = ["TRACKER", "MegatronCheckpoint", "open_checkpoint"]

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
FOLDER = "iter_{:07d}"


@dataclasses.dataclass(frozen=True)
class MegatronCheckpoint:
    """An open checkpoint.

    Attributes:
      path: of its iteration's directory.
      args: the arguments of the run that wrote it.
      tensors: merged, by the names of `megatron/tensors.py`.
    """

    path: pathlib.Path
    args: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def open_checkpoint(directory: pathlib.Path, iteration: str | None = None) -> MegatronCheckpoint:
    """Reads the arguments, and where the tensors are.

    Args:
      directory: that of --save, or of one iteration.
      iteration: a number, or "release"; None: the last one.

    Raises:
      ConfigError: torch is missing; there is no such checkpoint; a file is missing, truncated or not safe to read; or it is
        in a format that is not read.
    """
    path = _iteration(directory, iteration)
    try:
        names = {one.name for one in path.iterdir()}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a directory of Megatron-LM's --save") from None
    if "metadata.json" in names:
        _check_format(path / "metadata.json")
        args, tensors = read_distributed(path)
    elif any(RANK.fullmatch(name) for name in names):
        args, tensors = read_ranks(path)
    elif ".metadata" in names:
        raise ConfigError(
            f"{path} is in the format torch_dcp or fsdp_dtensor, which is not read: convert it to torch_dist with "
            "Megatron-LM's --ckpt-convert-format"
        )
    else:
        raise ConfigError(
            f"{path} has neither mp_rank_00 nor metadata.json: give a directory of Megatron-LM's --save, with {TRACKER}"
        )
    return MegatronCheckpoint(path, args, tensors)


def _iteration(directory: pathlib.Path, iteration: str | None) -> pathlib.Path:
    """The directory of an iteration."""
    tracker = directory / TRACKER
    if iteration is None and not tracker.exists():
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory: give that of Megatron-LM's --save")
        return directory
    word, source = iteration, "--step"
    if word is None:
        source = str(tracker)
        try:
            word = tracker.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {tracker} ({error}): pass --step NUMBER") from None
    if word != RELEASE and not (word.isascii() and word.isdecimal() and len(word) < 10):
        raise ConfigError(f"{source}: {shown(word)} is neither a number nor {RELEASE}: pass --step NUMBER")
    path = directory / (RELEASE if word == RELEASE else FOLDER.format(int(word)))
    if not path.is_dir():
        found = sorted(one.name for one in directory.glob("iter_*"))
        there = f": it has {', '.join(found[-5:])}" if found else ""
        raise ConfigError(f"{source} says {word}, and {directory} has no {path.name}{there}; pass --step NUMBER")
    return path


def _check_format(path: pathlib.Path) -> None:
    """Raises ConfigError if metadata.json names another format than torch_dist."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        backend = found["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not metadata of megatron-core ({error}): copy the checkpoint again") from None
    if backend != "torch_dist":
        raise ConfigError(
            f"{path}: sharded_backend = {shown(backend)} is not read: save the checkpoint with --ckpt-format torch_dist "
            "or torch"
        )
