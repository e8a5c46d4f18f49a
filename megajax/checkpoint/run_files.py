"""The files of a run's directory beside its checkpoints: whose it is, and copies of the tokenizer and of its model's files.

No jax.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from megajax.checkpoint.directory import complete_steps
from megajax.checkpoint.object_store import Path, children, is_remote, read
from megajax.config import ConfigError
from megajax.config.toml_file import is_toml_with, parse_toml

__all__ = ["CHAT_TEMPLATE", "MODEL", "TOKENIZER", "copy_model", "copy_tokenizer", "refuse_foreign", "tokenizer_copy"]

TOKENIZER = "tokenizer"  # the folder of the copy
MODEL = "hugging_face"  # the folder of what a directory of Hugging Face says of the model that a run has started from
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
# What runs and the commands around them write, as far as a run may have been stopped before its config.toml.
OWN = {
    *("checkpoints", "log.jsonl", "tensorboard", "logs", "profile", "run.lock", "run.lock.new", "goodput.jsonl"),
    *("tracker.json", "tracker.json.new", "wandb"),
    *(TOKENIZER, MODEL, "launch", "best.json", "config.tmp"),
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


def refuse_foreign(directory: Path) -> None:
    """Raises ConfigError if a directory has files and is not that of a run."""
    try:
        found = sorted(entry.name for entry in (children if is_remote(directory) else pathlib.Path.iterdir)(directory))
    except OSError:  # there is none yet, or it cannot be read: whoever writes to it says why
        return
    foreign = [name for name in found if name not in OWN and not name.startswith(".") and not name.endswith(BESIDE)]
    if not foreign or complete_steps(directory / "checkpoints") or _is_of_run(directory / "config.toml"):
        return
    kind = next((kind for kind, files in KINDS.items() if set(files) & set(foreign)), "no run of megajax")
    shown = ", ".join(foreign[:SHOWN]) + (f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else "")
    use = f"; --init-from {directory} starts from its weights" if kind == "a Hugging Face model" else ""
    raise ConfigError(
        f"run_dir = {directory} holds {kind} ({shown}): pass --run-dir with a directory that is new or empty{use}."
    )


def _is_of_run(config: Path) -> bool:
    if not is_remote(config):
        return is_toml_with(config, SECTIONS)
    try:
        return any(section in parse_toml(read(config)) for section in SECTIONS)
    except (OSError, ValueError):
        return False


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


def copy_tokenizer(files: Sequence[pathlib.Path], directory: pathlib.Path, template: str | None = None) -> None:
    """Copies a tokenizer's files into a run directory, each atomically; files that are there already stay as they are.

    Args:
      files: of the tokenizer, the first one in the directory that the others are in or below.
      directory: of the run.
      template: text of the chat template that is used in place of the tokenizer's.

    Raises:
      OSError: a file cannot be written.
    """
    for file in files:
        name = file.relative_to(files[0].parent)
        if _inside(file, directory) or not file.is_file() or (template is not None and file.suffix == ".jinja"):
            continue
        _write(directory / TOKENIZER / name, file.read_bytes())
    if template is not None and files:
        folder = files[0].parent if _inside(files[0], directory) else directory / TOKENIZER
        _write(folder / CHAT_TEMPLATE, template.encode())


def copy_model(files: Sequence[pathlib.Path], directory: pathlib.Path, end: int | None = None) -> None:
    """Copies a model's configuration and settings of generation, from which an export makes its own.

    Args:
      files: config.json and generation_config.json, or those of them that there are.
      directory: of the run.
      end: id of a token that the run's samples end with; it becomes one of the ends of a generated text.

    Raises:
      OSError: a file cannot be read or written.
    """
    folder = directory / MODEL
    for file in files:
        if not _inside(file, directory):
            _write(folder / file.name, file.read_bytes())
    settings = [_object(folder / name) for name in (GENERATION, "config.json")]
    found = next((one["eos_token_id"] for one in settings if one.get("eos_token_id") is not None), None)
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if files and end is not None and end not in ends:
        text = json.dumps(settings[0] | {"eos_token_id": [*ends, end] if ends else end}, indent=2)
        _write(folder / GENERATION, text.encode())


def _object(path: pathlib.Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _write(path: pathlib.Path, content: bytes) -> None:
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _inside(file: pathlib.Path, directory: pathlib.Path) -> bool:
    return file.absolute().is_relative_to(directory.absolute())
