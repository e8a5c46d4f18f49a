"""What is done with a file of --log-jsonl that exists: it is never emptied."""

import itertools
import json
import os
import pathlib

from megajax.config import ConfigError
from megajax.train.sinks import SESSION

LONGEST = 2**24  # bytes of a line: a session's has the whole configuration
TAIL = 2**20  # bytes at the end of a log in which its last record is


def keep_earlier(path: str | pathlib.Path, continues: bool) -> list[str]:
    """Renames the log of an earlier run, if there is one at `path`; a run that continues the log needs no renaming.

    Returns:
      A message with the new name, if there is one.

    Raises:
      ConfigError: the file is no log, or cannot be renamed.
    """
    path = pathlib.Path(path)
    try:
        if not path.is_file() or path.stat().st_size == 0:
            return []
        if not _is_log(path):
            raise ConfigError(
                f"log_jsonl = {path} exists and is not a log of megajax: pass --log-jsonl with the name of a new file"
            )
        if continues:
            return []
        names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        path.rename(aside)
    except OSError as error:
        raise ConfigError(
            f"cannot rename the log {path} of an earlier run: {error.strerror}; pass --log-jsonl with another name"
        ) from error
    return [f"log       {path} is of an earlier run, and is now called {aside.name}"]


def _is_log(path: pathlib.Path) -> bool:
    """Whether the file begins with a session's or a step's record."""
    with open(path, "rb") as file:
        try:
            first = json.loads(file.readline(LONGEST))
        except (ValueError, RecursionError):
            return False
    return isinstance(first, dict) and ("step" in first or SESSION in first)


def last_record(path: str | pathlib.Path, step: int) -> dict[str, float | None]:
    """The numbers of a step in a log's last lines; none if they are not there."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read(TAIL).splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
            if record["step"] == step:
                return {name: _number(value) for name, value in record.items() if name != "time"}
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return {}


def _number(value):
    """As the record had it before it was JSON, which has no NaN and no infinities."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    return float(value) if isinstance(value, str) else value
