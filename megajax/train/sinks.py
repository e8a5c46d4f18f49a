"""The files that receive the record of every step: JSON lines and TensorBoard events.

Both begin each session of a run, its start or a resumption, with the configuration.
"""

import datetime
import json
import math
import os
import pathlib
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from megajax.config import ConfigError
from megajax.train.log_file import FULL, LogFile

SESSION = "after_step"  # the record of a session has this in place of "step"
STEP = re.compile(rb'\{"step": ([0-9]{1,12}), "time": "')  # the beginning of a step's line
LONGEST = 2**22  # bytes of a line; a longer one is damaged
Record = Mapping[str, float | list[float | None] | None]  # a list has a value for each layer, or None


class Sink(Protocol):
    """A destination of records."""

    file: LogFile

    def write(self, record: Record) -> None:
        """Writes one step's record, or drops it while `file` cannot be written."""


def to_json(record: Mapping[str, Any]) -> str:
    """One line of strict JSON; NaN and infinities become "nan", "inf", "-inf", which `float()` accepts; None is null."""

    def finite(value):
        if isinstance(value, Mapping):
            return {name: finite(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [finite(one) for one in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record), allow_nan=False)


def utc_now() -> str:
    """The time as "2026-01-31T12:00:00.123Z"."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_steps(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The records of the steps in a log.jsonl, without those of the sessions.

    Raises:
      OSError, ValueError: it cannot be read, or is not such a log.
    """
    rows = [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "step" in row or SESSION not in row]


class JsonLines:
    """A file with one JSON object for each session and for each step, written at once, so a killed run keeps its log."""

    def __init__(self, path: str | pathlib.Path, after: int = 0, session: Mapping[str, Any] | None = None):
        """Opens the file: empty, or to continue after step `after`, in which case lines of later steps are dropped.

        Args:
          path: the file.
          after: the last step that is kept.
          session: what the session's record has besides its time and `after`; None: there is none.

        Raises:
          ConfigError: the file cannot be written.
        """
        path = pathlib.Path(path)
        times = {SESSION: after, "time": utc_now()}
        line = b"" if session is None else (to_json(times | dict(session)) + "\n").encode()
        try:
            if path.is_file():
                _keep_until(path, after)
            continues = path.is_file() and path.stat().st_size > 0
            self.file = LogFile(path, line)  # also for the file that replaces one that vanishes
            if continues and line:
                self.file.append(line)
        except OSError as error:
            raise ConfigError(
                f"cannot write the log {path}: {error.strerror}; give --log-jsonl a writable path"
            ) from error

    def write(self, record: Record) -> None:
        timed = {"step": record["step"], "time": utc_now()} | record
        self.file.append((to_json(timed) + "\n").encode())


def _keep_until(path: pathlib.Path, after: int) -> None:
    """Removes the lines of steps after `after`, of sessions that began there, and damaged ones, as a kill leaves them.

    A kill or a power loss during this keeps either the old or the new content. The lines to remove are the last ones, unless
    the file is damaged: then the file is truncated, which needs no room on the disk.
    """
    kept, is_prefix, is_scattered = 0, True, False
    for line, is_kept in _lines(path, after) if after else ():
        is_prefix = is_prefix and is_kept
        is_scattered = is_scattered or (is_kept and not is_prefix)
        kept += len(line) if is_prefix else 0
    if not is_scattered:
        os.truncate(path, kept)
        return
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "wb") as file:
            file.writelines(line for line, is_kept in _lines(path, after) if is_kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        if error.errno not in FULL:
            raise
        new.unlink(missing_ok=True)  # the damaged lines stay


def _lines(path: pathlib.Path, after: int) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether it is a whole record of a step up to `after`, or of a session that began before it.

    A line that looks whole is not parsed: a long run's log has gigabytes.
    """
    with open(path, "rb") as file:
        while line := file.readline(LONGEST):
            if step := STEP.match(line):
                yield line, int(step[1]) <= after and line.endswith(b"}\n")
                continue
            try:
                record = json.loads(line) if line.endswith(b"\n") else {}
                is_kept = record["step"] <= after if "step" in record else record[SESSION] < after
            except (ValueError, KeyError, TypeError, RecursionError):
                is_kept = False
            yield line, is_kept


class TensorBoard:
    """The same records as TensorBoard scalars, by step; `samples` is one of them. A list has a tag "name/0" for each value.

    tensorboardX's SummaryWriter is not used: its thread ends at the first error, and after 1,000 more events `add_summary`
    blocks for ever.
    """

    def __init__(self, directory: str | pathlib.Path, after: int = 0, config: str = ""):
        """Opens a new event file; TensorBoard drops the older files' events of steps after `after`.

        Args:
          directory: of the event files.
          after: the last step of earlier files that is kept.
          config: the configuration as text, which TensorBoard shows under "Text" as "config"; "": none.

        Raises:
          ConfigError: the file cannot be written.
        """
        from tensorboardX.proto import event_pb2, summary_pb2  # slow to import, and not every process needs it

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        header = _framed(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if after:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            header += _framed(self._event(wall_time=time.time(), step=after + 1, session_log=start))
        if config:
            from tensorboardX.summary import text

            code = "".join(f"    {line}\n" for line in config.splitlines())  # of Markdown
            header += _framed(self._event(wall_time=time.time(), step=after, summary=text("config", code)))
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{after}"
        try:
            pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
            self.file = LogFile(pathlib.Path(directory) / name, header)
        except OSError as error:
            raise ConfigError(
                f"cannot write {directory}: {error.strerror}; give --run-dir a writable directory, or pass --no-tensorboard"
            ) from error

    def write(self, record: Record) -> None:
        # One event for all scalars: an event for each would be most of the cost of logging a step.
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in scalars(record)
            if name != "step" and value is not None
        ]
        summary = self._summary(value=values)
        self.file.append(_framed(self._event(wall_time=time.time(), step=int(record["step"]), summary=summary)))


def scalars(record: Record) -> Iterator[tuple[str, float | None]]:
    for name, value in record.items():
        if isinstance(value, list):
            yield from ((f"{name}/{index}", one) for index, one in enumerate(value))
        else:
            yield name, value


def _framed(event) -> bytes:
    """A record of an event file: its length, the length's checksum, the event, the event's checksum."""
    from tensorboardX.record_writer import masked_crc32c

    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
