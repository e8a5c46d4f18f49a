"""Tokenizers of Hugging Face as `transformers` reads them (extra `hf`; PyTorch is not needed).

Which class a directory's tokenizer has, what its settings change, which special tokens there are and what stands around a
text are rules of transformers, which change with its versions: they are asked here, not repeated.
"""

import json
import os
import pathlib
import sys
from types import ModuleType
from typing import Any

from megajax.config import ConfigError

__all__ = ["SETTINGS", "has_settings", "library", "load_directory", "load_file", "model_files", "tokenizer_files"]

# Files beside a tokenizer's own which change what transformers makes of it; config.json has the model's type.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "processor_config.json")
# The classes of vocabularies whose settings name neither a class nor a model, as old directories have them.
USUAL_CLASSES = {"vocab.txt": "BertTokenizer", "vocab.json": "GPT2Tokenizer"}
MORE_TEMPLATES = "additional_chat_templates"
MODEL = ("config.json", "generation_config.json")  # what a directory says of its model
VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.txt", "vocab.json", "merges.txt"),
)


def library(what: str) -> ModuleType:
    """The module transformers.

    Args:
      what: that needs it, for the error.

    Raises:
      ConfigError: it is not installed, or too old.
    """
    if "transformers" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice, such as that PyTorch is missing
    try:
        import transformers
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # noqa: F401 (lazy modules, which may fail)

        transformers.logging.set_verbosity_error()
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{what} needs the library transformers ({reason}): pip install 'megajax[hf]'") from None
    return transformers


def has_settings(directory: pathlib.Path) -> bool:
    """Whether the tokenizer in a directory is more than its vocabulary: it has settings of Hugging Face, or a template."""
    return (
        any((directory / name).is_file() for name in (*SETTINGS, *TEMPLATES)) or (directory / MORE_TEMPLATES).is_dir()
    )


def load_directory(directory: pathlib.Path) -> Any:
    """AutoTokenizer's tokenizer of a directory. No code of the directory is run.

    Raises:
      ConfigError: the library is missing, or a file of settings is not JSON.
      Exception: whatever transformers makes of a directory that it cannot read.
    """
    transformers = library(f"the tokenizer in {directory}")
    found = {name: _object(directory / name) for name in SETTINGS}
    kind = transformers.AutoTokenizer
    if "tokenizer_class" not in found["tokenizer_config.json"] and not found["config.json"]:
        files = (name for name in ("tokenizer.json", *USUAL_CLASSES) if (directory / name).is_file())
        kind = getattr(transformers, USUAL_CLASSES.get(next(files, ""), "AutoTokenizer"))
    return kind.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)


def load_file(path: pathlib.Path) -> Any:
    """The tokenizer of a tokenizer.json that has no settings beside it."""
    return library(f"the chat template of {path}").PreTrainedTokenizerFast(tokenizer_file=str(path))


def tokenizer_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files of a directory that its tokenizer is made from; config.json has the model's type."""
    files = [directory / name for name in (*VOCABULARIES, *SETTINGS, *TEMPLATES)]
    files += sorted((directory / MORE_TEMPLATES).glob("*.jinja"))
    return [file.absolute() for file in files if file.is_file()]


def model_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files of a directory with its model's configuration and the settings of its generation."""
    return [path for path in (directory / name for name in MODEL) if path.is_file()]


def _object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file, empty if there is no such file; raises ConfigError if it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        problem = None if isinstance(found, dict) else f"a JSON {type(found).__name__}, not an object"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not JSON"
    if problem:
        raise ConfigError(f"cannot read {path} beside the tokenizer: {problem}; download it again, or remove it")
    return found
