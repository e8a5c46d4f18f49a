"""The files of a tokenizer: those in a directory of Hugging Face or in a run directory, and the settings beside them."""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from megajax.config import ConfigError
from megajax.config.toml_file import read_toml

__all__ = ["FILES", "MERGES", "Settings", "find_file", "read_settings", "used_files", "wrong_file"]

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
BYTE_LEVEL = ("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer")  # whose vocab.json and merges.txt are GPT-2's kind
# Files beside a tokenizer's own that Hugging Face stores with it: special tokens and the template of chats.
COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", MERGES),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


class Settings(NamedTuple):
    """What tokenizer_config.json and special_tokens_map.json beside a tokenizer's file say.

    Attributes:
      end: the text of eos_token; None: there is none.
      lower_case: do_lower_case, of WordPieces.
    """

    end: str | None
    lower_case: bool


def find_file(name: str) -> str:
    """The tokenizer's file of a directory; any other name as it is.

    Raises:
      ConfigError: the directory has no tokenizer that megajax reads.
    """
    if not os.path.isdir(name):
        return name
    directory = pathlib.Path(name)
    for file in IN_DIRECTORY:
        if (directory / file).is_file() and (file != "vocab.json" or (directory / MERGES).is_file()):
            return str(directory / file)
    if (directory / "config.toml").is_file():
        return _of_run(directory)
    found = ", ".join(sorted(os.listdir(directory))[:5]) or "no file"
    legal = f"{', '.join(IN_DIRECTORY)} (with {MERGES})"
    raise ConfigError(
        f"tokenizer {name}: the directory has {found}, but none of {legal}: pass a directory or file with one; "
        "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(DIR) writes tokenizer.json"
    )


def _of_run(run: pathlib.Path) -> str:
    """The tokenizer of a run directory's configuration, whose relative path may be from the run directory."""
    try:
        data = read_toml(run / "config.toml").get("data", {})
        found = str(data["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"tokenizer {run}: its config.toml has no tokenizer: pass another --tokenizer") from None
    inside = run / found
    return find_file(str(inside)) if inside.exists() and not inside.samefile(run) else found


def read_settings(file: str) -> Settings:
    """The settings of a tokenizer's file; Hugging Face's are read, others have none.

    Raises:
      ConfigError: a file of settings cannot be read or is not JSON.
    """
    folder = pathlib.Path(file).parent
    config, special = (_object(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    ends = [
        one.get("content") if isinstance(one, dict) else one
        for one in (config.get("eos_token"), special.get("eos_token"))
    ]
    end = next((end for end in ends if isinstance(end, str) and end), None)
    return Settings(end, config.get("do_lower_case") is not False)


def _object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise ConfigError(
            f"cannot read {path} beside the tokenizer: {reason}; download it again, or remove it"
        ) from None
    return found if isinstance(found, dict) else {}


def used_files(file: str) -> list[pathlib.Path]:
    """A tokenizer's file, and the files beside it that belong to it, such as its chat template."""
    path = pathlib.Path(file).absolute()
    return [path, *(path.parent / name for name in COMPANIONS if (path.parent / name).is_file())]


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
    if path.name in (*COMPANIONS, "config.json") and path.name != MERGES:
        yield f"tokenizer {name} has settings, not a tokenizer: pass the directory, --tokenizer {path.parent}"
    if path.name == MERGES:
        yield f"tokenizer {name} has the merges of a tokenizer alone: pass the directory, --tokenizer {path.parent}"
    if path.name == "vocab.json":
        kind = str(_object(path.parent / "tokenizer_config.json").get("tokenizer_class", BYTE_LEVEL[0])).removesuffix(
            "Fast"
        )
        if not (path.parent / MERGES).is_file():
            yield f"tokenizer {name} needs {MERGES} beside it: download it too, or pass a tokenizer.json"
        if kind not in BYTE_LEVEL:
            yield (
                f"tokenizer {name} is of a {kind}, which is read from a tokenizer.json only: write it with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(DIR)"
            )
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
