"""JSON objects in files of data, and their values, checked."""

import json
from typing import Any

from megajax.config import ConfigError
from megajax.data.file_kinds import is_json_lines
from megajax.data.read_file import read_text
from megajax.schedules.errors import shown

__all__ = ["object_of_line", "read_json", "value_of"]

KINDS = {str: "a text", list: "a list", int: "a whole number", bool: "true or false"}


def value_of(place: str, item: Any, name: str, kind: type, remedy: str) -> Any:
    """The value of a key of a JSON object.

    Raises:
      ConfigError: there is none of that kind.
    """
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{place} has no {name!r} that is {KINDS[kind]}: {remedy}.")
    return value


def object_of_line(place: str, line: str, remedy: str) -> dict[str, Any]:
    """The JSON object that a line is.

    Raises:
      ConfigError: it is none.
    """
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        item = None
    if not isinstance(item, dict):
        raise ConfigError(f"{place} is not a JSON object: {remedy}.")
    return item


def read_json(path: str, remedy: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
      ConfigError: there is none.
    """
    text = read_text(path, "json", remedy)
    if not text.strip():
        raise ConfigError(f"{path} is empty: {remedy}.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = (
            " It has an object in each line."
            if is_json_lines(text[: 1 << 20].encode()) and "\n" in text.strip()
            else ""
        )
        raise ConfigError(f"cannot read {path}: not JSON ({error}); {remedy}.{lines}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has {shown(content)}, not a JSON object: {remedy}.")
    return content
