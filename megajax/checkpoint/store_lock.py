"""The lock of a run directory in an object store: one run at a time may write into it.

RUN_DIR/run.lock/ has one object for each holder there has been, 00000001, 00000002, ...; the highest number is the lock's.
Whoever wants the lock creates the next number on condition that there is no such object (`If-None-Match: *` on S3,
generation 0 on GCS), which succeeds once. The holder rewrites its object every HEARTBEAT seconds. A lock is free when its
object says so, when its process is dead on the same machine, or when the object has not changed for LEASE seconds, by the
clock of the process that waits. A holder that finds a higher number than its own stops before it completes a checkpoint.
"""

import contextlib
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from megajax.checkpoint.lock import DirectoryLock
from megajax.checkpoint.object_store import Path, children, create, is_remote, place, read, remove, write
from megajax.config import ConfigError

NAME = "run.lock"
LEASE = 30.0  # seconds without a change, after which a lock may be taken over
HEARTBEAT = 5.0  # seconds between two writes of the holder

_leases: dict[str, "_Lease"] = {}  # of this process
_leases_lock = threading.Lock()


def lock_run(directory: str | Path, recreate: Callable[[], None] = lambda: None) -> "DirectoryLock | StoreLock":
    """The lock of a run directory, on a disk or in an object store; see `DirectoryLock`."""
    return (StoreLock if is_remote(directory) else DirectoryLock)(directory, recreate)


def has_lock(directory: str | Path) -> bool:
    """Whether a run directory has a lock that may be held."""
    if not is_remote(directory):
        return os.path.lexists(os.path.join(directory, NAME))
    try:
        return bool(children(place(directory) / NAME))
    except OSError as error:
        raise ConfigError(f"cannot read {directory}: {error.strerror}") from error


class StoreLock:
    """Holds the lock of a folder in an object store from construction to `release`."""

    def __init__(
        self,
        directory: str | Path,
        recreate: Callable[[], None] = lambda: None,
        lease: float = LEASE,
        heartbeat: float = HEARTBEAT,
    ):
        """Takes the lock; waits where only time can tell whether its holder is alive.

        Within one process the lock may be taken several times, and is free after as many releases.

        Args:
          directory: the folder.
          recreate: writes the objects that the run needs, after they have vanished.
          lease, heartbeat: see LEASE and HEARTBEAT; all processes must agree on `lease`.

        Raises:
          ConfigError: another process holds the lock, the store cannot be written, or it ignores conditions.
        """
        self.directory, self.recreate = place(directory), recreate
        with _leases_lock:
            self._lease = _leases.get(str(self.directory)) or _Lease(self.directory, lease, heartbeat)
            _leases[str(self.directory)] = self._lease
            self._lease.holders += 1

    def check(self, now: bool = False) -> list[str]:
        """Says what the thread has found since the last call; does not wait, and does not ask the store.

        Args:
          now: without effect: a save calls `require` before it changes an object.

        Returns:
          A message if the lock had vanished and was created again.

        Raises:
          ConfigError: another process has taken the lock over.
        """
        self._lease.require()
        if not self._lease.vanished:
            return []
        self._lease.vanished = False
        with contextlib.suppress(OSError):
            self.recreate()
        return [f"warning: {self.directory} has vanished and is created again: its checkpoints up to here are lost"]

    def require(self) -> None:
        """Asks the store whether this process holds the lock; raises ConfigError if not, OSError if it does not answer."""
        self._lease.refresh()
        self._lease.require()

    def release(self) -> None:
        """Frees the lock."""
        with _leases_lock:
            self._lease.holders -= 1
            if self._lease.holders:
                return
            _leases.pop(str(self.directory), None)
        self._lease.release()


class _Lease:
    """The lock of one folder, as this process holds it.

    Attributes:
      holders: `StoreLock`s of it.
      vanished: whether its object was gone and was written again.
    """

    def __init__(self, directory: Path, lease: float, heartbeat: float):
        self.directory, self.lease, self.heartbeat = directory, lease, heartbeat
        self.holders, self.vanished, self._taken_by = 0, False, None
        self._count, self._number, self._token = 0, 0, secrets.token_hex(8)
        self._stop, self._writes = threading.Event(), threading.Lock()
        try:
            self._acquire()
        except OSError as error:
            raise ConfigError(
                f"cannot lock the run directory {directory}: {error.strerror}; pass --run-dir a folder of a bucket that "
                "can be written"
            ) from error
        self._thread = threading.Thread(target=self._refresh_often, daemon=True, name="run lock")
        self._thread.start()

    def _path(self, number: int) -> Path:
        return self.directory / NAME / f"{number:08d}"

    def _record(self, released: bool = False) -> bytes:
        own = {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine(), "token": self._token}
        return json.dumps(own | {"count": self._count, "released": released}).encode()

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """The highest number and what its object says; 0 if there is none."""
        number = max(self._numbers(), default=0)
        if not number:
            return 0, {"released": True}
        try:
            found = json.loads(read(self._path(number)))
        except (FileNotFoundError, ValueError, RecursionError):
            found = None
        return number, found if isinstance(found, dict) else {}

    def _numbers(self) -> list[int]:
        return [int(path.name) for path in children(self.directory / NAME) if path.name.isdecimal()]

    def _acquire(self) -> None:
        """Takes the lock. A holder that changes its object is alive; one that does not for `lease` seconds is superseded."""
        seen, since = None, time.monotonic()
        while True:
            number, holder = self._newest()
            if seen is None:
                seen, since = (number, holder), time.monotonic()
            elif seen != (number, holder) and not holder.get("released"):
                raise ConfigError(self._held_by(holder))
            expired = time.monotonic() - since > self.lease
            if (holder.get("released") or _is_dead(holder) or expired) and self._create(number + 1):
                break
            time.sleep(self.heartbeat / 10)
        self._number = number + 1
        if create(self._path(self._number), self._record()):
            raise ConfigError(
                f"the store of {self.directory} overwrites an object that was to be created only if there is none: two "
                "runs could write into one directory; pass --run-dir a place in another store"
            )
        for earlier in range(max(1, number - 100), self._number):
            with contextlib.suppress(OSError):
                remove(self._path(earlier))

    def _create(self, number: int) -> bool:
        """Creates the object of a number; True also if an earlier try was done, and only its answer was lost."""
        if create(self._path(number), self._record()):
            return True
        found, holder = self._newest()
        return found == number and holder.get("token") == self._token

    def _held_by(self, holder: dict[str, Any]) -> str:
        named = (
            f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "another process"
        )
        return (
            f"run directory {self.directory} is in use by {named}: wait until it has ended, or pass another --run-dir"
        )

    def _refresh_often(self) -> None:
        while not self._stop.wait(self.heartbeat):
            with contextlib.suppress(OSError):
                self.refresh()

    def refresh(self) -> None:
        """Writes this holder's object, if the store has none of a later one. Raises OSError of the store."""
        with self._writes:
            if self._stop.is_set():
                return
            numbers = self._numbers()
            if max(numbers, default=0) > self._number:
                self._taken_by = self._newest()[1]
                return
            self._count += 1
            if self._number not in numbers and create(self._path(self._number), self._record()):
                self.vanished = True
            else:
                write(self._path(self._number), self._record())

    def require(self) -> None:
        """Raises ConfigError if another process has the lock."""
        if self._taken_by is not None:
            raise ConfigError(f"{self._held_by(self._taken_by)}. It took over because this process was suspended")

    def release(self) -> None:
        """Says in the object that the lock is free. It stays, so that an earlier holder that wakes up finds it."""
        self._stop.set()
        with self._writes, contextlib.suppress(OSError):
            if self._taken_by is None:
                write(self._path(self._number), self._record(released=True))


def _machine() -> str:
    """The boot of this machine and the namespace of its process ids: where a process can be looked up."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the holder is a process of this machine that has ended."""
    pid = holder.get("pid")
    if not _machine() or holder.get("machine") != _machine() or type(pid) is not int or pid == os.getpid():
        return False
    return not os.path.exists(f"/proc/{pid}")
