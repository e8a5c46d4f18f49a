"""A run's configuration as a TOML file: written when the run starts, replayed with `--config`, compared at a resume."""

import dataclasses
import hashlib
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

import megajax
from megajax.config import ConfigError, DataConfig, OutputConfig, RunConfig, near

HEADER = (
    "# The complete configuration of this run. Replay: --config {path}; options on the command line take precedence.\n"
)

# Words, numbers, code, accents, other scripts, an emoji and unusual spaces, on which tokenizers differ.
PROBE = (
    "The quick brown fox's 1234.5678 jumps;\tdef f(x):\n    return x**2  "
    "# na\u00efve \u0416\u4e2d\u6587 \U0001f600\r\n\u3000end"
)


def config_text(run: RunConfig, output: OutputConfig, options: Mapping[str, Any]) -> str:
    """The TOML text with the sections model, parallel, train, data, output and options, without fields that are None.

    Args:
      options: options that are in none of the dataclasses (`Request.others`).
    """
    tables = {name: dataclasses.asdict(getattr(run, name)) for name in ("model", "parallel", "train", "data")}
    if run.train.clip_norm is None:
        tables["train"]["clip_norm"] = "none"  # TOML has no null, and an omitted name means the default
    del tables["model"]["name"]  # the preset's name, which is in the options
    tables |= {"output": dataclasses.asdict(output), "options": dict(options)}
    given = {
        section: {name: list(value) if isinstance(value, tuple) else value for name, value in table.items()}
        for section, table in tables.items()
    }
    return tomli_w.dumps(
        {section: {name: v for name, v in table.items() if v is not None} for section, table in given.items()}
    )


def save_config(path: pathlib.Path, text: str) -> None:
    """Writes the file atomically.

    Raises:
      ConfigError: the file cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(HEADER.format(path=path) + text, encoding="utf-8")
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give --run-dir a writable directory") from error


def load_config(path: str, known: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The values of a saved configuration by name, from all sections; lists become tuples.

    Args:
      known: the legal names of each section.

    Raises:
      ConfigError: the file cannot be read, is not TOML, or has an unknown section or name.
    """
    try:
        tables = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}; give --config a file") from error
    except RecursionError as error:
        raise ConfigError(f"the configuration {path} is nested too deeply; compare a run's config.toml") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not TOML: {error}; compare a run's config.toml") from error
    _map_format_1(tables)
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in known or not isinstance(table, dict):
            raise ConfigError(f"{path} has [{section}], which is not known: {near(section, known)}")
        for name, value in table.items():
            if name not in known[section]:
                raise ConfigError(f"{path}: {name} in [{section}] is not known: {near(name, known[section])}")
            values[name] = tuple(value) if isinstance(value, list) else value
    return values


# Renamed fields of format 1. The values of `offload` and `block_matmuls` changed too.
MOVED = {
    ("train", "bad_step"): ("train", "nonfinite"),
    ("train", "bad_steps_limit"): ("train", "nonfinite_limit"),
    ("train", "block_matmuls"): ("train", "matmul_dtype"),
    ("parallel", "offload"): ("parallel", "offload_activations"),
    ("output", "keep"): ("output", "max_to_keep"),
    ("options", "log_jsonl"): ("output", "log_jsonl"),
    **{("options", field.name): ("data", field.name) for field in dataclasses.fields(DataConfig)},
}
VALUES_OF_FORMAT_1 = {"offload": {"none": False, "stash": True}, "block_matmuls": {"precision": None}}


def _map_format_1(tables: dict[str, Any]) -> None:
    """Renames the fields of a file of format 1, in place."""
    for (section, old), (new_section, new) in MOVED.items():
        table = tables.get(section)
        if isinstance(table, dict) and old in table and isinstance(tables.setdefault(new_section, {}), dict):
            value = table.pop(old)
            if isinstance(value, str):
                value = VALUES_OF_FORMAT_1.get(old, {}).get(value, value)
            if value is not None:
                tables[new_section].setdefault(new, value)


def run_meta(run: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """The metadata stored as JSON in every checkpoint of a run: version, configuration, tokenizer."""
    return {
        "megajax": megajax.__version__,
        "config": dataclasses.asdict(run),
        "tokenizer": {"name": tokenizer.name, "hash": tokenizer_hash(tokenizer)},
    }


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash, sixteen hex digits, of a tokenizer's ids and of its encoding of PROBE; it does not depend on file names."""
    digest = hashlib.sha256(f"{tokenizer.vocabulary} {tokenizer.end_of_document}".encode())
    for token in range(tokenizer.vocabulary):
        digest.update(tokenizer.decode([token]).encode("utf-8", "replace") + b"\0")
    digest.update(str([int(token) for token in tokenizer.encode(PROBE)]).encode())
    return digest.hexdigest()[:16]
