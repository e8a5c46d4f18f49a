"""The files of a run's directory beside its checkpoints: whose it is, and the copy of the tokenizer. No jax."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Sequence

from megajax.checkpoint.directory import complete_steps
from megajax.config import ConfigError
from megajax.config.toml_file import is_toml_with

__all__ = ["TOKENIZER", "copy_tokenizer", "refuse_foreign", "tokenizer_copy"]

TOKENIZER = "tokenizer"  # the folder of the copy
# What runs and the commands around them write, as far as a run may have been stopped before its config.toml.
OWN = {
    *("checkpoints", "log.jsonl", "tensorboard", "logs", "profile", "run.lock", "run.lock.new", "goodput.jsonl"),
    *(TOKENIZER, "hugging_face", "launch", "best.json", "config.tmp"),
}
# Files that people and schedulers put beside a run before it starts.
BESIDE = (".out", ".err", ".log", ".sh", ".toml")
SECTIONS = ("parallel", "train", "model")  # of a run's config.toml
SHOWN = 3
KINDS = {
    "a Hugging Face model": ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    "a Megatron-LM checkpoint": ("latest_checkpointed_iteration.txt",),
    "a Hugging Face data set": ("dataset_info.json", "dataset_dict.json"),
}


def refuse_foreign(directory: pathlib.Path) -> None:
    """Raises ConfigError if a directory has files and is not that of a run."""
    try:
        found = sorted(entry.name for entry in directory.iterdir())
    except OSError:  # there is none yet, or it cannot be read: whoever writes to it says why
        return
    foreign = [name for name in found if name not in OWN and not name.startswith(".") and not name.endswith(BESIDE)]
    if not foreign or complete_steps(directory / "checkpoints") or is_toml_with(directory / "config.toml", SECTIONS):
        return
    kind = next((kind for kind, files in KINDS.items() if set(files) & set(foreign)), "no run of megajax")
    shown = ", ".join(foreign[:SHOWN]) + (f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else "")
    use = f"; --init-from {directory} starts from its weights" if kind == "a Hugging Face model" else ""
    raise ConfigError(
        f"run_dir = {directory} holds {kind} ({shown}): pass --run-dir with a directory that is new or empty{use}."
    )


def tokenizer_copy(name: str, files: Sequence[pathlib.Path], directory: pathlib.Path) -> str:
    """The argument of --tokenizer that names the copy in a run directory; `name` itself if it has no files.

    Args:
      name: the tokenizer's own name: a file, or a directory.
      files: that it was read from.
      directory: of the run.
    """
    if not files or _inside(files[0], directory):
        return name
    folder = directory / TOKENIZER
    return str(folder if os.path.isdir(name) else folder / pathlib.Path(name).name)


def copy_tokenizer(files: Sequence[pathlib.Path], directory: pathlib.Path) -> None:
    """Copies a tokenizer's files into a run directory, each atomically; files that are there already stay as they are.

    Raises:
      OSError: a file cannot be written.
    """
    for file in files:
        if _inside(file, directory) or not file.is_file():
            continue
        copy = directory / TOKENIZER / file.name
        with contextlib.suppress(OSError):
            if copy.read_bytes() == file.read_bytes():
                continue
        copy.parent.mkdir(exist_ok=True)
        temporary = copy.with_name(copy.name + ".tmp")
        shutil.copyfile(file, temporary)
        os.replace(temporary, copy)


def _inside(file: pathlib.Path, directory: pathlib.Path) -> bool:
    return file.absolute().is_relative_to(directory.absolute())
