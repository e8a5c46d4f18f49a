"""The scores of an evaluation that has not ended, in a file that the next one resumes from."""

import contextlib
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError
from megajax.evaluate.scorer import Batch, Score
from megajax.interop.output_file import unwritable
from megajax.schedules.errors import shown

__all__ = ["PartialScores", "describe_numbers", "fingerprint"]


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Sixteen hex digits of all settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def describe_numbers(results: Mapping[str, Any]) -> str:
    """The finite numbers of a task's results: "perplexity 21.5, loss 3.07"."""
    numbers = {name: value for name, value in results.items() if isinstance(value, int | float) and name != "seconds"}
    return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items() if math.isfinite(value))


class PartialScores:
    """Scores of the batches that are done, appended to a file beside the output: OUT.partial.

    The first line has the settings and their fingerprint, each other line the scores of a batch. A line that is cut off,
    because the process was killed, is dropped with all that follows.

    Attributes:
      done: scores by number of the request.
    """

    def __init__(self, out: pathlib.Path, settings: Mapping[str, Any]):
        """Opens the file, or creates it.

        Raises:
          ConfigError: it cannot be written, or is of other settings.
        """
        self.settings, self.path = settings, out.with_name(out.name + ".partial")
        self.done: dict[int, Score] = {}
        try:
            self._file = open(self.path, "a+b")  # noqa: SIM115 (closed by `close`)
        except (OSError, ValueError) as error:
            raise unwritable(self.path, error) from None
        self._read()

    def _read(self) -> None:
        self._file.seek(0)
        kept = 0
        for line in self._file:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            if kept == 0:
                self._check(row)
            else:
                self.done |= {number: Score(*score) for number, *score in row["scores"]}
            kept += len(line)
        self._file.truncate(kept)
        if not kept:
            self._append({"fingerprint": fingerprint(self.settings), "settings": self.settings})

    def _check(self, row: Any) -> None:
        if not isinstance(row, dict) or not isinstance(row.get("settings"), dict):
            raise ConfigError(f"{self.path} is no file of partial scores: give --out another path, or remove it.")
        if row.get("fingerprint") == fingerprint(self.settings):
            return
        stored, own = row["settings"], json.loads(json.dumps(self.settings))
        names = [name for name in own | stored if own.get(name) != stored.get(name)]
        name = names[0] if names else "fingerprint"
        raise ConfigError(
            f"{self.path} has the scores of an evaluation with {name} = {shown(stored.get(name))}, and this one has "
            f"{shown(own.get(name))}: give --out another path, or remove that file to start again."
        )

    def add(self, batch: Batch, scores: list[Score]) -> None:
        """Appends the scores of a batch.

        Raises:
          ConfigError: the file cannot be written, for example to a full disk.
        """
        self.done |= dict(zip(batch.numbers, scores, strict=True))
        self._append({"scores": [[number, *score] for number, score in zip(batch.numbers, scores, strict=True)]})

    def _append(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from None

    def close(self) -> None:
        """Closes the file; removes it if it has no scores."""
        with contextlib.suppress(OSError):
            self._file.close()
        if not self.done:
            self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Deletes the file: the results are written."""
        self.done.clear()
        self.close()
