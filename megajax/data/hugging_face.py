"""The library `transformers`, which reads files of Hugging Face: imported where it is needed, without its messages."""

import importlib
import os
from types import ModuleType

from megajax.config import ConfigError

__all__ = ["library"]


def library(what: str) -> ModuleType:
    """The library.

    Args:
      what: that needs it, for the message: "config.json".

    Raises:
      ConfigError: it is not installed.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        logging = importlib.import_module("transformers.utils.logging")
        logging.set_verbosity_error()
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"{what} needs the library transformers ({error}): pip install 'megajax[hf]'") from None
