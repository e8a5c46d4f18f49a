"""The files of a tokenizer: which one of a directory or of a run directory it is read from."""

import os
import pathlib
from collections.abc import Iterator

from megajax.config import ConfigError
from megajax.config.toml_file import read_toml
from megajax.data.hugging_face import SETTINGS, has_settings

__all__ = ["FILES", "MERGES", "find_file", "has_tokenizer", "used_files", "wrong_file"]

FILES = {
    ".json": "a tokenizer.json of Hugging Face",
    ".model": "a sentencepiece model",
    ".txt": "BERT's list of WordPieces (lower case)",
}
# A directory's tokenizer is the first of these that it has; vocab.json needs merges.txt beside it.
IN_DIRECTORY = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "vocab.json",
)
MERGES = "merges.txt"


def find_file(name: str) -> str:
    """The directory of a tokenizer with settings of Hugging Face; the tokenizer's file of another one; others as they are.

    A .model is a file as it is: Megatron-LM's users pass the one in a directory of Hugging Face.

    Raises:
      ConfigError: the directory has no tokenizer that megajax reads.
    """
    if not os.path.isdir(name):
        path = pathlib.Path(name)
        whole = path.name in IN_DIRECTORY and path.suffix != ".model" and path.is_file() and has_settings(path.parent)
        return str(path.parent) if whole else name
    directory = pathlib.Path(name)
    if file := _first_file(directory):
        return name if has_settings(directory) else str(directory / file)
    if (directory / "config.toml").is_file():
        return _of_run(directory)
    found = ", ".join(sorted(os.listdir(directory))[:5]) or "no file"
    legal = f"{', '.join(IN_DIRECTORY)} (with {MERGES})"
    raise ConfigError(
        f"tokenizer {name}: the directory has {found}, but none of {legal}: pass a directory or file with one; "
        "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(DIR) writes tokenizer.json"
    )


def has_tokenizer(directory: pathlib.Path) -> bool:
    """Whether a directory has the vocabulary of a tokenizer."""
    return _first_file(directory) is not None


def _first_file(directory: pathlib.Path) -> str | None:
    found = (file for file in IN_DIRECTORY if (directory / file).is_file())
    return next((file for file in found if file != "vocab.json" or (directory / MERGES).is_file()), None)


def _of_run(run: pathlib.Path) -> str:
    """The tokenizer of a run directory's configuration, whose relative path may be from the run directory."""
    try:
        data = read_toml(run / "config.toml").get("data", {})
        found = str(data["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"tokenizer {run}: its config.toml has no tokenizer: pass another --tokenizer") from None
    inside = run / found
    return find_file(str(inside)) if inside.exists() and not inside.samefile(run) else found


def used_files(file: str) -> list[pathlib.Path]:
    """A tokenizer's file, and the merges of a vocab.json."""
    path = pathlib.Path(file).absolute()
    return [path, path.with_name(MERGES)] if path.name == "vocab.json" else [path]


def wrong_file(name: str) -> str:
    """The message about the name of a file that is no tokenizer; "" if it may be one."""
    return next(_problems(pathlib.Path(name), name), "")


def _problems(path: pathlib.Path, name: str) -> Iterator[str]:
    if path.is_symlink() and not path.exists():
        yield f"tokenizer {name}: this symbolic link points to {os.readlink(path)}, which is not there; pass another file"
    if not path.exists():
        yield f"tokenizer {name}: no such file; pass {FILES[path.suffix]}"
    if not path.is_file():
        yield f"tokenizer {name} is no file: pass {FILES[path.suffix]}"
    if path.name in SETTINGS:
        yield f"tokenizer {name} has settings, not a tokenizer: pass the directory, --tokenizer {path.parent}"
    if path.name == MERGES:
        yield f"tokenizer {name} has the merges of a tokenizer alone: pass the directory, --tokenizer {path.parent}"
    if path.name == "vocab.json" and not (path.parent / MERGES).is_file():
        yield f"tokenizer {name} needs {MERGES} beside it: download it too, or pass a tokenizer.json"
    if path.suffix == ".model" and _is_tiktoken(path):
        yield (
            f"tokenizer {name} is tiktoken's, as Meta publishes Llama 3's: pass the tokenizer.json of the same model in "
            "Hugging Face's format"
        )


def _is_tiktoken(path: pathlib.Path) -> bool:
    """Whether the first line is a token in base64 and its rank."""
    try:
        with open(path, "rb") as file:
            words = file.readline(200).split()
    except OSError:
        return False
    return len(words) == 2 and words[1].isdigit() and words[0].isascii()
