"""The files of a run in an object store beside its checkpoints: written on this machine, and copied to the store.

Logs, configuration, tokenizer, TensorBoard events and traces are written in a folder of this machine as those of a run on a
disk are, and a thread copies what has changed every INTERVAL seconds. So no step waits for the store; while it does not
answer, the files grow here, and are copied when it is back. Before a checkpoint is complete, the growing files are copied
(`copy_logs`): a run that is killed and resumed from its newest checkpoint has all lines up to there. Without a checkpoint it
loses those of its last INTERVAL seconds.

What vanishes from the folder stays in the store: systems delete old files of /tmp.

An object cannot be appended to. A growing file (LOGS) is copied in parts of PART bytes, of which only the last one changes:
`log.jsonl`, `log.jsonl.part-00001`, ...; `fetch` joins them. Other files are copied whole.
"""

import contextlib
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence

from megajax.checkpoint.object_store import (
    Path,
    children,
    files_below,
    is_remote,
    place,
    read,
    remove,
    store_errors,
    write,
)
from megajax.checkpoint.run_files import MODEL, TOKENIZER
from megajax.config import ConfigError
from megajax.schedules.paths import is_store, store_path

INTERVAL = 10.0  # seconds between two looks at the files
PART = 1 << 22  # bytes
LOGS = (".jsonl", ".log")
PART_NAME = re.compile(r"(.+)\.part-([0-9]{5,})")
LEFT_OUT = re.compile(r"(^|/)(checkpoints|run\.lock)(/|$)|\.(tmp|new|unfinished)$")
GROWTH = 1.1  # a file that is copied whole is copied again when it has grown by this factor, or after LATEST seconds
LATEST = 300.0


class Mirror:
    """Copies the files of a folder of this machine to one in an object store, from construction to `close`.

    Attributes:
      local: the folder of this machine, made for this process.
      remote: the folder in the store.
    """

    def __init__(self, remote: Path, wanted: Callable[[str], bool], interval: float = INTERVAL):
        """Fetches the files that the store has, and starts the thread.

        Args:
          remote: the folder in the store.
          wanted: whether a file of this name, relative to the folder, is fetched.
          interval: see INTERVAL.

        Raises:
          OSError: the store or this machine's disk cannot be read or written.
        """
        self.remote, self.interval = remote, interval
        self.local = pathlib.Path(tempfile.mkdtemp(prefix="megajax-run-"))
        self._sent: dict[str, tuple[int, int, float, list[int]]] = {}  # size, time of change, when, checksums of parts
        fetch(remote, self.local, wanted)
        for name in files_below(self.local):
            status = (self.local / name).stat()
            self._sent[name] = (status.st_size, status.st_mtime_ns, time.monotonic(), self._sums(name))
        self._problem: str | None = None
        self._messages: list[str] = []
        self._stop, self._wake = threading.Event(), threading.Event()
        self._copying = {True: threading.Lock(), False: threading.Lock()}  # of logs, and of other files
        self._thread = threading.Thread(target=self._copy_often, daemon=True, name="copy to store")
        self._thread.start()

    def messages(self) -> list[str]:
        """Lines that say since the last call that the store does not answer, or does again."""
        found, self._messages = self._messages, []
        return found

    def wake(self) -> None:
        """Has the thread copy now."""
        self._wake.set()

    def forget(self) -> None:
        """Has the thread copy every file again: the folder in the store has vanished."""
        with self._copying[True], self._copying[False]:
            self._sent.clear()
        self.wake()

    def copy_logs(self) -> None:
        """Copies the lines of all growing files up to here; raises OSError if the store does not answer."""
        self._copy(logs=True)

    def close(self, attempts: int = 3) -> list[str]:
        """Ends the thread, copies what is left, and deletes this machine's folder; a line if that was not possible."""
        self._stop.set()
        self._wake.set()
        self._thread.join()
        for attempt in range(attempts):
            self._copy_once(last=True)
            if self._problem is None:
                shutil.rmtree(self.local, ignore_errors=True)
                return []
            time.sleep(2**attempt if attempt + 1 < attempts else 0)
        return [f"warning: {self.remote} cannot be written: {self._problem}; the logs of this run are in {self.local}"]

    def _copy_often(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self.interval)
            self._wake.clear()
            if not self._stop.is_set():
                self._copy_once()

    def _copy_once(self, last: bool = False) -> None:
        try:
            self._copy(logs=True)
            self._copy(logs=False, last=last)
        except OSError as error:
            if self._problem is None:
                self._messages.append(
                    f"warning: {self.remote} cannot be written: {error.strerror}; the training continues, its logs are kept "
                    f"in {self.local} and copied when the store answers"
                )
            self._problem = error.strerror or type(error).__name__
            return
        if self._problem is not None:
            self._messages.append(f"{self.remote} can be written again, and has all logs")
        self._problem = None

    def _copy(self, logs: bool, last: bool = False) -> None:
        """Copies what has changed of the logs, or of the other files. Raises OSError of the store."""
        with self._copying[logs]:
            for name in files_below(self.local):
                if name.endswith(LOGS) == logs and not LEFT_OUT.search(name):
                    self._copy_file(name, logs, last)

    def _copy_file(self, name: str, is_log: bool, last: bool) -> None:
        try:
            status = (self.local / name).stat()
        except FileNotFoundError:
            return
        size, changed, when, sums = self._sent.get(name, (-1, 0, 0.0, []))
        if (status.st_size, status.st_mtime_ns) == (size, changed):
            return
        grown = size < 0 or status.st_size < size or status.st_size > size * GROWTH
        if is_log:
            sums = self._copy_parts(name, sums)
        elif last or grown or status.st_size < PART or time.monotonic() - when > LATEST:
            with store_errors():
                self.remote.fs.put_file(str(self.local / name), (self.remote / name).path)
        else:
            return
        self._sent[name] = (status.st_size, status.st_mtime_ns, time.monotonic(), sums)

    def _sums(self, name: str) -> list[int]:
        return [zlib.crc32(part) for part in _parts(self.local / name)] if name.endswith(LOGS) else []

    def _copy_parts(self, name: str, before: list[int]) -> list[int]:
        sums = []
        for number, part in enumerate(_parts(self.local / name)):
            sums.append(zlib.crc32(part))
            if before[number : number + 1] != sums[-1:]:
                write(self.remote / part_name(name, number), part)
        for number in range(len(sums), len(before)):
            remove(self.remote / part_name(name, number))
        return sums


def part_name(name: str, number: int) -> str:
    """The object of part `number` of a growing file."""
    return f"{name}.part-{number:05d}" if number else name


def _parts(path: pathlib.Path):
    """The parts of a file, which may grow meanwhile; an empty file has one."""
    with open(path, "rb") as file:
        part = file.read(PART)
        yield part
        while len(part) == PART and (part := file.read(PART)):
            yield part


def fetch(remote: Path, local: pathlib.Path, wanted: Callable[[str], bool]) -> None:
    """Copies the files of a run but for its checkpoints to a folder of this machine, the parts of each joined.

    Args:
      remote: a run directory in an object store.
      local: exists.
      wanted: whether a file of this name is copied.

    Raises:
      OSError: the store or the disk cannot be read or written.
    """
    names: list[str] = []
    for child in children(remote):
        if not LEFT_OUT.search(child.name):
            below = [f"{child.name}/{name}" for name in files_below(child)]
            names += below or [child.name]
    parts: dict[str, list[str]] = {}
    for name in names:
        found = PART_NAME.fullmatch(name)
        whole = found[1] if found and found[1].endswith(LOGS) else name
        parts.setdefault(whole, []).append(name)
    for whole, found in parts.items():
        if not wanted(whole) or whole not in found:
            continue
        path = local / whole
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for number, name in enumerate([whole, *sorted(set(found) - {whole})]):
                if name != part_name(whole, number):
                    break  # a part is missing: what follows is of an older, longer file
                with contextlib.suppress(FileNotFoundError):
                    file.write(read(remote / name))


def local_files(directory: Path) -> pathlib.Path:
    """Where a run's configuration, tokenizer and model's files are on this machine: its directory, or a copy of a store's.

    Raises:
      ConfigError: the store cannot be read.
    """
    if not is_remote(directory):
        return directory
    try:
        return snapshot(directory, lambda name: name.partition("/")[0] in ("config.toml", TOKENIZER, MODEL))
    except OSError as error:
        raise ConfigError(f"cannot read {directory}: {error.strerror}") from error


def with_local_config(words: Sequence[str] | None) -> Sequence[str] | None:
    """The words of a command line, with the path of a copy for --config of a file in an object store; None: the process's.

    Raises:
      ConfigError: there is no such file, or it cannot be read.
    """
    found = list(sys.argv[1:] if words is None else words)
    for index, word in enumerate(found):
        flag, equals, given = word.partition("=")
        given = given if equals else "".join(found[index + 1 : index + 2])
        if flag != "--config" or not is_store(given):
            continue
        path = place(store_path(given))
        local = local_files(path.parent) / "config.toml"
        if path.name != "config.toml" or not local.is_file():
            raise ConfigError(f"there is no {given}: give --config the config.toml of a run directory")
        found[index : index + (1 if equals else 2)] = ["--config", str(local)]
        return found
    return words


def snapshot(remote: Path, wanted: Callable[[str], bool] = lambda name: True) -> pathlib.Path:
    """A temporary folder of this machine with the files of a run, deleted when the process ends.

    Raises:
      OSError: the store or the disk cannot be read or written.
    """
    folder = tempfile.TemporaryDirectory(prefix="megajax-run-", ignore_cleanup_errors=True)
    _folders.append(folder)
    local = pathlib.Path(os.path.realpath(folder.name))
    fetch(remote, local, wanted)
    return local


_folders: list[tempfile.TemporaryDirectory] = []  # until the process ends
