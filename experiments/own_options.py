"""Options of an experiment of its own beside those of every training, which its run directory keeps in a file."""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from megajax.config import ConfigError, option
from megajax.config.options import Parser, add_options
from megajax.schedules.arguments import whole

__all__ = ["TRL_DEFAULTS", "describe", "keep", "split", "split_epochs"]

# TRL's defaults of DPO and GRPO: learning rate 1e-6 with a linear decay and no weight decay; 64 completions.
TRL_DEFAULTS: dict[str, Any] = {
    "model": "tiny",
    "global_batch_size": 64,
    "steps": 200,
    "learning_rate": 1e-6,
    "minimum_learning_rate": 0.0,
    "learning_rate_decay": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "clip_norm": 1.0,
    "save_every": 200,
    "validation_batches": 0,
    "new_tokens": 0,
}


def split_epochs(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """The value of --epochs, None without it, and the other words of the command line.

    Raises:
      ConfigError: it is not a whole number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--epochs", type=whole())
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"--epochs {error.message}: pass --epochs COUNT") from None
    return found.epochs, rest


def split(words: Sequence[str], config: type, name: str) -> tuple[Any, list[str]]:
    """The experiment's options, and the other words of the command line.

    Args:
      words: the command line.
      config: the options' dataclass; its `validate` is called.
      name: of the file in a run directory, whose values are used if --config names that directory's configuration.

    Raises:
      ConfigError: an option cannot be read, or is not legal.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    add_options(parser, config, "options")
    parser.add_argument("--config", dest="saved")
    found, rest = parser.parse_known_args(words)
    given = vars(found)
    saved = given.pop("saved")
    file = pathlib.Path(saved).parent / name if saved else None
    if file and file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()} | given
    own = config(**given)
    own.validate()
    return own, [*(["--config", saved] if saved else []), *rest]


def keep(own: Any, directory: pathlib.Path | None, name: str) -> None:
    """Writes the options into the run's directory, with absolute paths."""
    from megajax.runtime.processes import is_first_process

    if directory is None or not is_first_process():
        return
    values = dataclasses.asdict(own)
    for field in dataclasses.fields(own):
        if field.metadata["text_kind"] == "path" or field.metadata["metavar"] == "FILE":
            values[field.name] = _absolute(values[field.name])
    (directory / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _absolute(value: str | Sequence[str] | None) -> str | list[str] | None:
    if value is None or isinstance(value, str):
        return value and str(pathlib.Path(value).absolute())
    return [str(pathlib.Path(one).absolute()) for one in value]


def describe(config: type) -> str:
    """The options as lines of --help."""
    lines = []
    for field in dataclasses.fields(config):
        choices = "|".join(map(str, field.metadata["choices"]))
        value = choices or field.metadata["metavar"] or "VALUE"
        default = "" if field.default in ((), None) else f" (default: {field.default})"
        lines.append(f"  {option(field.name)} {value}\n      {field.metadata['help']}{default}")
    return "\n".join(lines)
