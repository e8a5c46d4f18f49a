"""Files of prompts: JSON Lines, one object for each prompt."""

import json
import pathlib
from typing import Any

from megajax.config import ConfigError

__all__ = ["read_prompts"]

FORMAT = 'one JSON object a line, {"prompt": TEXT}'


def read_prompts(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place for messages, "FILE line 3". Empty lines are skipped.

    Raises:
      ConfigError: it cannot be read, has no prompts, or a line is not an object with a text called "prompt".
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give --prompts a file, {FORMAT}.") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path} line {line} is not UTF-8: give --prompts a file, {FORMAT}.") from error
    found = [(f"{path} line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{path} has no prompts: write {FORMAT}.")
    return [(place, _read_line(place, line)) for place, line in found]


def _read_line(place: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or "it cannot be decoded"
        raise ConfigError(f"{place} is not JSON ({reason}): write {FORMAT}.") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ConfigError(f'{place} has no text called "prompt": write {FORMAT}.')
    return row
