"""The configuration of a run as a TOML file: saved when the run starts, written by the planner, read by `--config`."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import tomli_w

from megajax.config import ConfigError, DataConfig, OutputConfig, RunConfig, near
from megajax.config.toml_file import read_toml
from megajax.schedules.errors import shown

HEADER = "The complete configuration of this run. Replay: --config {path}; options on the command line take precedence."


def config_tables(run: RunConfig, output: OutputConfig, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The complete configuration as sections: model, parallel, train, data, output and options.

    Args:
      run: the configuration; its `imports` are written to the section options.
      output: the files that the run writes.
      options: the options that are in none of the dataclasses (`Request.others`).
    """
    tables = {name: dataclasses.asdict(part) for name, part in run.parts.items()}
    del tables["model"]["name"]  # it is the preset's, which is in the options
    imports = {"imports": run.imports} if run.imports else {}
    return tables | {"output": dataclasses.asdict(output), "options": {**options, **imports}}


def toml_text(tables: Mapping[str, Mapping[str, Any]], header: str) -> str:
    """Sections as TOML, after the header's lines as comments; values that are None and empty sections are left out."""
    given = {
        section: {name: list(value) if isinstance(value, tuple) else value for name, value in table.items()}
        for section, table in tables.items()
    }
    if "train" in given and given["train"].get("clip_norm", 0) is None:
        given["train"]["clip_norm"] = "none"  # TOML has no null, and a name that is left out has its default
    given = {section: {name: v for name, v in table.items() if v is not None} for section, table in given.items()}
    comments = "".join(f"# {line}\n" for line in header.splitlines())
    return comments + tomli_w.dumps({section: table for section, table in given.items() if table})


def save_config(path: pathlib.Path, text: str, remedy: str, parents: bool = False) -> None:
    """Writes the file atomically; `parents`: creates its directory if there is none.

    Raises:
      ConfigError: it cannot be written; the message ends with `remedy`.
    """
    temporary = path.with_suffix(".tmp")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; {remedy}") from error


def load_config(path: str, known: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Reads a saved configuration: the values of all sections by name, with lists as tuples and clip_norm "none" as None.

    Args:
      path: the file, of this version's format or of format 1.
      known: the legal names of each section.

    Raises:
      ConfigError: the file cannot be read, is not TOML, or has an unknown section or name.
    """
    try:
        tables = read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}; give --config a file") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, or a number of more than 4,300 digits
        raise ConfigError(f"the configuration {path} is not TOML: {error}; compare a run's config.toml") from error
    _map_format_1(tables)
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in known:
            raise ConfigError(f"{path} has [{section}], which is not known: {near(section, known)}")
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {section} = {shown(table)} must be a section: write [{section}] and its fields."
            )
        for name, value in table.items():
            if name not in known[section]:
                raise ConfigError(f"{path}: {name} in [{section}] is not known: {near(name, known[section])}")
            values[name] = tuple(value) if isinstance(value, list) else value
    if values.get("clip_norm") == "none":
        values["clip_norm"] = None
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
# Fields of earlier versions that changed no result and are gone.
REMOVED = (("parallel", "unroll_blocks"),)
VALUES_OF_FORMAT_1 = {"offload": {"none": False, "stash": True}, "block_matmuls": {"precision": None}}


def _map_format_1(tables: dict[str, Any]) -> None:
    """Renames the fields of a file of format 1, and drops those that are gone, in place."""
    for section, name in REMOVED:
        if isinstance(tables.get(section), dict):
            tables[section].pop(name, None)
    for (section, old), (new_section, new) in MOVED.items():
        table = tables.get(section)
        if isinstance(table, dict) and old in table and isinstance(tables.setdefault(new_section, {}), dict):
            value = table.pop(old)
            if isinstance(value, str):
                value = VALUES_OF_FORMAT_1.get(old, {}).get(value, value)
            if value is not None:
                tables[new_section].setdefault(new, value)
