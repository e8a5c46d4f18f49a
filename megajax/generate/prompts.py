"""Files of prompts and of texts: JSON Lines, one object for each prompt."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from megajax.config import ConfigError

__all__ = ["OutputFile", "read_prompts"]

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


class OutputFile:
    """A file that appears complete or not at all."""

    def __init__(self, path: str):
        """Creates and deletes the unfinished file beside it, so that a wrong path is found before the work.

        Raises:
          ConfigError: it cannot be written.
        """
        self.path = pathlib.Path(path)
        self.unfinished = self.path.with_name(self.path.name + ".unfinished")
        try:
            if self.path.is_dir():
                raise IsADirectoryError(21, "Is a directory")
            self.unfinished.write_text("")
            self.unfinished.unlink()
        except (OSError, ValueError) as error:
            raise self._problem(error) from error

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes one object a line, and renames the file to its name."""
        try:
            with self.unfinished.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            os.replace(self.unfinished, self.path)
        except OSError as error:
            raise self._problem(error) from error
        finally:
            self.unfinished.unlink(missing_ok=True)

    def _problem(self, error: Exception) -> ConfigError:
        reason = getattr(error, "strerror", None) or error
        return ConfigError(f"cannot write {self.path}: {reason}; give --out the path of a file.")
