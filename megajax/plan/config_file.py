"""A planned run as the TOML file that `experiments.gpt3 --config` takes: tables of option names."""

import dataclasses
import json
import pathlib
from typing import Any

from megajax.config import PRESETS, ConfigError, RunConfig


def config_text(run: RunConfig, preset: str, header: str = "") -> str:
    """The tables options (the preset), model (what differs from it), parallel, and of train what the plan decides.

    What is not in the file keeps the experiment's defaults; what is typed after `--config FILE` goes first.
    """
    model = dataclasses.asdict(run.model)
    base = dataclasses.asdict(PRESETS[preset])
    tables: dict[str, dict[str, Any]] = {
        "options": {"model": preset},
        "model": {name: value for name, value in model.items() if name != "name" and value != base[name]},
        "parallel": dataclasses.asdict(run.parallel),
        "train": {"global_batch_size": run.train.global_batch_size, "precision": run.train.precision},
    }
    lines = [f"# {line}" for line in header.splitlines()]
    for section, values in tables.items():
        values = {name: value for name, value in values.items() if value is not None}
        if values:
            lines += ["", f"[{section}]", *(f"{name} = {_literal(value)}" for name, value in values.items())]
    return "\n".join(lines).strip() + "\n"


def write_config(path: str, run: RunConfig, preset: str, header: str = "") -> None:
    """Writes `config_text` to a file.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        pathlib.Path(path).write_text(config_text(run, preset, header), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"out = {path} cannot be written: {error.strerror}; pass --out with a writable path."
        ) from error


def _literal(value: Any) -> str:
    """A value as TOML; strings, booleans, numbers and arrays of them are written as JSON writes them."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
