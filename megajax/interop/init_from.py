"""`--init-from DIR|ORG/NAME`: a run that starts from the weights of a Hugging Face model, on its own mesh."""

import pathlib
from typing import Any

from megajax.config import ModelConfig
from megajax.config.cli import Importer

__all__ = ["HUGGING_FACE"]

# What reads a directory is imported where it is used: most command lines have none, and it takes a while.


def _model_and_options(directory: str) -> tuple[ModelConfig, dict[str, str]]:
    """The model, and its tokenizer's options."""
    from megajax.data.hub import local_directory
    from megajax.interop.hugging_face.config import read_config, tokenizer_options

    path = pathlib.Path(local_directory(directory, "--init-from"))
    return read_config(path)[1], tokenizer_options(path)


def _initial_params(directory: str, training: Any) -> Any:
    from megajax.data.hub import local_directory
    from megajax.interop.hugging_face.read_model import initial_params

    return initial_params(local_directory(directory, "--init-from"), training)


HUGGING_FACE = Importer(_model_and_options, _initial_params)
