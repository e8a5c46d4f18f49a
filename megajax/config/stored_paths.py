"""Paths in a stored configuration, so that a run can be read from any directory.

A path is stored as an absolute one, and inside the run directory relative to it: a run directory that is moved or copied
takes these along. A relative path in a configuration file means what it names in the file's directory; if there is nothing
of that name, as in files of earlier versions, it is relative to the working directory.
"""

import dataclasses
import glob
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from megajax.config.run import RunConfig
from megajax.config.sections import GROUPS
from megajax.config.validation_sets import NAMED
from megajax.schedules.paths import is_store

__all__ = ["PATH_FIELDS", "absolute_paths", "resolve_paths", "store_paths"]

PATH_FIELDS = {
    field.name
    for config in (RunConfig, *(group.config for group in GROUPS))
    for field in dataclasses.fields(config)
    if field.metadata.get("text_kind") in ("path", "store", "source")
}
WRITTEN = ("run_dir", "log_jsonl", "data_cache")  # they need not exist yet
NAMES = ("tokenizer", "schedule")  # a bare word is a name
WITH_NAMES = ("valid_data_path", "valid_sft_data")  # of validation sets, NAME=PATH


def absolute_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by field name, with the paths made absolute that name something in the working directory.

    Names of what is built in (`gpt2`, `auto`), the weights of a blend, and paths of what does not exist stay as they are.
    """

    def absolute(name: str, word: str) -> str:
        named_first = name in NAMES and not ("." in word or os.sep in word)
        exists = name in WRITTEN or (_is_path(name, word) and _exists(word))
        return os.path.abspath(word) if exists and not named_first else word

    return {name: _changed(name, value, absolute) for name, value in values.items()}


def store_paths(values: Mapping[str, Any], run_directory: pathlib.Path | None) -> dict[str, Any]:
    """The values as a run's config.toml has them: absolute, and inside the run directory relative to it."""

    def stored(name: str, word: str) -> str:
        path = pathlib.Path(word)
        inside = run_directory is not None and path.is_absolute() and path.is_relative_to(run_directory)
        return path.relative_to(run_directory).as_posix() if inside else word

    return {name: _changed(name, value, stored) for name, value in absolute_paths(values).items()}


def resolve_paths(values: Mapping[str, Any], directory: pathlib.Path) -> dict[str, Any]:
    """The values of a configuration file in `directory`, with its relative paths resolved."""

    def resolved(name: str, word: str) -> str:
        path = os.path.join(directory, word)
        return os.path.abspath(path) if _is_path(name, word) and _exists(path) else word

    return {name: _changed(name, value, resolved) for name, value in values.items()}


def _is_path(name: str, word: str) -> bool:
    """Whether a word of a field may be a path: not the weight of a blend, nor a step or word of `resume`."""
    try:
        float(word)
    except ValueError:
        return not (name == "resume" and word in ("no", "auto"))
    return False


def _exists(path: str) -> bool:
    """Whether there is such a file, the pair of such a prefix, or a file that matches such a pattern."""
    return os.path.exists(path) or os.path.exists(path + ".idx") or (glob.has_magic(path) and bool(glob.glob(path)))


def _changed(name: str, value: Any, change: Any) -> Any:
    """The value with `change(name, word)` for each word of a field that holds paths; those in object stores stay."""
    if name not in PATH_FIELDS:
        return value
    changed = lambda word: word if is_store(word) else change(name, word)  # noqa: E731
    if isinstance(value, str):
        return changed(value)
    if not isinstance(value, tuple | list) or not all(isinstance(word, str) for word in value):
        return value
    sets = [NAMED.fullmatch(word) if name in WITH_NAMES else None for word in value]
    pairs = zip(sets, value, strict=True)
    return type(value)(f"{one[1]}={changed(one[2])}" if one else changed(word) for one, word in pairs)
