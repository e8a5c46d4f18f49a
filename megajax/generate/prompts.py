"""Files of prompts: JSON Lines, one object for each prompt, and the chats that prompts become."""

import json
from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError
from megajax.data.text import numbered_lines

__all__ = ["messages_of", "read_prompts"]

FORMAT = 'one JSON object a line, {"prompt": TEXT}'
CHAT = '{"messages": [{"role": "user", "content": TEXT}, ...]}'


def read_prompts(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place for messages, "FILE line 3". Empty lines are skipped.

    Raises:
      ConfigError: it cannot be read, has no prompts, or a line is not an object with a text called "prompt", or a list of
        objects called "messages".
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
    if isinstance(row, dict) and "messages" in row:
        messages = row["messages"]
        if "prompt" in row:
            raise ConfigError(f'{place} has "prompt" and "messages": write one of the two.')
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise ConfigError(f'{place}: "messages" is not a list of objects: write {CHAT}.')
        return row
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ConfigError(f'{place} has no text called "prompt": write {FORMAT}, or {CHAT}.')
    return row


def messages_of(row: Mapping[str, Any], as_chat: bool, system: str | None) -> list[dict[str, Any]] | None:
    """The messages of a row; None: its prompt is a text to continue.

    Args:
      row: with "prompt" or "messages".
      as_chat: whether a prompt is what the user of a chat says.
      system: the first message of chats that have no system message.
    """
    if "messages" not in row and not as_chat:
        return None
    messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    if system is not None and messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    return messages
