"""Names of models on the Hugging Face Hub: their files are downloaded by huggingface_hub, or found in its cache."""

import functools
import os
import re

from megajax.config import ConfigError
from megajax.schedules.errors import shown
from megajax.schedules.paths import hub_advice

__all__ = ["local_directory"]

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TOKENIZER = ["*.json", "*.model", "*.txt", "*.jinja"]
WEIGHTS = ["*.safetensors"]
# Copies of the weights in other programs' forms, which some models have too.
OTHERS = ["*/*.safetensors", "consolidated*", "onnx/*", "original/*"]


def local_directory(name: str, option: str) -> str:
    """The directory with the files of ORG/NAME on the Hub; a path, and any other word, as it is.

    Args:
      name: a path or a name.
      option: that has it, for messages; with --tokenizer and --model no weights are downloaded.

    Raises:
      ConfigError: the Hub has no such model, it is not in the cache of an offline machine, or huggingface_hub is missing.
    """
    return name if os.path.exists(name) or not NAME.fullmatch(name) else _download(name, option)


@functools.cache  # a command asks several times
def _download(name: str, option: str) -> str:
    problem = f"{option} {name}: there is no such directory"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{problem}, and names on the Hub need huggingface_hub ({error}): pip install 'megajax[hf]'"
        ) from None
    patterns = TOKENIZER + (WEIGHTS if option not in ("--tokenizer", "--model") else [])
    try:
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=OTHERS)
    except Exception as error:  # of many types, also of its HTTP library
        reason = shown(" ".join(str(error).split()) or type(error).__name__)
        raise ConfigError(f"{problem}, and huggingface_hub has no such model ({reason}).{hub_advice(name)}") from None
