"""Files of prompts: JSON Lines, one object for each prompt, and the chats that prompts become."""

import json
from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError
from megajax.data.sft_rows import Chat, read_question
from megajax.data.text import numbered_lines

__all__ = ["read_chat", "read_prompts"]

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
    if not isinstance(row, dict):
        raise ConfigError(f"{place} is no object: write {FORMAT}, or {CHAT}.")
    if "prompt" in row and "messages" in row:
        raise ConfigError(f'{place} has "prompt" and "messages": write one of the two.')
    if "messages" in row or isinstance(row.get("prompt"), list):
        read_chat(place, row, True, None)  # raises for messages that are wrong
    elif not isinstance(row.get("prompt"), str):
        raise ConfigError(f'{place} has no text called "prompt": write {FORMAT}, or {CHAT}.')
    return row


def read_chat(place: str, row: Mapping[str, Any], as_chat: bool, system: str | None) -> Chat | None:
    """The chat of a row; None: its prompt is a text to continue.

    Args:
      place: of the row, for messages.
      row: with "prompt", a text or messages, or with "messages".
      as_chat: whether a text is what the user of a chat says.
      system: the first message of chats that have no system message.

    Raises:
      ConfigError: a message is wrong.
    """
    found = row["messages"] if "messages" in row else row["prompt"]
    if isinstance(found, str):
        if not as_chat:
            return None
        found = [{"role": "user", "content": found}]
    chat = read_question(place, row, found)
    if system is None or chat.messages[0]["role"] in ("system", "developer"):
        return chat
    return chat._replace(messages=[{"role": "system", "content": system}, *chat.messages])
