"""Files of prompts: JSON Lines, one object for each prompt."""

import json
from typing import Any

from megajax.config import ConfigError
from megajax.data.text import numbered_lines

__all__ = ["read_prompts"]

FORMAT = 'one JSON object a line, {"prompt": TEXT}'


def read_prompts(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place for messages, "FILE line 3". Empty lines are skipped.

    Raises:
      ConfigError: it cannot be read, has no prompts, or a line is not an object with a text called "prompt".
    """
    found = numbered_lines(path, f"give --prompts a file, {FORMAT}")
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
