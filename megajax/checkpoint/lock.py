"""The lock of a run directory: one run at a time may write into it.

RUN_DIR/run.lock names the process that holds the lock. It is filelock's `SoftFileLease`: the file is created exclusively,
which NFS supports, and the holder refreshes its modification time every HEARTBEAT seconds. The lock of a dead process is
taken over: at once on the same host, where the process can be looked up, and otherwise after LEASE seconds without a
refresh, measured by the clock of the process that waits. A holder that was suspended for so long stops in `check`, before it
writes a checkpoint.
"""

import os
import pathlib
import time
from collections.abc import Callable

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from megajax.config import ConfigError

NAME = "run.lock"
LEASE = 20.0  # seconds without a refresh, after which a lock may be taken over
HEARTBEAT = 2.0  # seconds between two refreshes


class DirectoryLock:
    """Holds the lock of a directory from construction to `release`."""

    def __init__(
        self,
        directory: str | pathlib.Path,
        recreate: Callable[[], None] = lambda: None,
        lease: float = LEASE,
        heartbeat: float = HEARTBEAT,
    ):
        """Takes the lock; waits where only time can tell whether its holder is alive.

        Within one process the lock may be taken several times, and is free after as many releases.

        Args:
          directory: exists.
          recreate: writes the files that the directory needs, after it has vanished and has been created again.
          lease, heartbeat: see LEASE and HEARTBEAT; all processes must agree on `lease`.

        Raises:
          ConfigError: another process holds the lock, or the directory cannot be written.
        """
        self.directory, self.recreate, self.heartbeat = pathlib.Path(directory).absolute(), recreate, heartbeat
        self._lease = SoftFileLease(
            self.directory / NAME,
            lease_duration=lease,
            heartbeat_interval=heartbeat,
            timeout=0,
            thread_local=False,
            is_singleton=True,
        )
        self._checked = time.monotonic()
        try:
            self._acquire()
        except OSError as error:
            raise ConfigError(
                f"cannot lock the run directory {self.directory}: {error.strerror}; pass --run-dir DIR"
            ) from error

    def _acquire(self) -> None:
        """Takes the lock. A holder that refreshes it is alive; one that does not for `lease` seconds is superseded."""
        start, seen = time.monotonic(), None
        while True:
            try:
                self._lease.acquire()
                return
            except (Timeout, LeaseSettingsMismatch):
                found = self._refreshed()
            seen = seen or found
            if found == seen and time.monotonic() - start > self._lease.lease_duration and self._remove_empty(seen):
                continue
            if found != seen or time.monotonic() - start > self._lease.lease_duration + 5 * self.heartbeat:
                raise ConfigError(self._held_by_another()) from None
            time.sleep(self.heartbeat / 10)

    def _remove_empty(self, seen: tuple[int, int] | None) -> bool:
        """Removes the file if it is the one that was seen, and is empty: a full disk, or a kill, as it was created."""
        aside = self.directory / f"{NAME}.empty-{os.getpid()}"
        try:
            os.rename(self.directory / NAME, aside)
            status = os.stat(aside)
            if status.st_size or (status.st_ino, status.st_mtime_ns) != seen:
                os.rename(aside, self.directory / NAME)  # another process was faster
                return False
            os.unlink(aside)
        except OSError:
            return False
        return True

    def _refreshed(self) -> tuple[int, int] | None:
        """Changes whenever the lock's holder refreshes it. The file is opened, so that NFS asks the server."""
        try:
            with open(self.directory / NAME, "rb") as file:
                status = os.fstat(file.fileno())
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _held_by_another(self) -> str:
        owner = self._lease.owner
        # filelock appends the namespace of process ids to the name of a container's host.
        holder = f"process {owner.pid} on {owner.hostname.partition('?')[0]}" if owner else "another process"
        return (
            f"run directory {self.directory} is in use by {holder}: wait until it has ended, or pass another --run-dir"
        )

    def check(self, now: bool = False) -> list[str]:
        """Verifies that this process still holds the lock; call it between steps.

        Args:
          now: verify even if the last time was less than HEARTBEAT seconds ago.

        Returns:
          A message if the lock or its directory had vanished and was created again.

        Raises:
          ConfigError: another process has taken the lock over.
        """
        if not now and time.monotonic() - self._checked < self.heartbeat:
            return []
        self._checked = time.monotonic()
        try:
            os.lstat(self.directory / NAME)
        except FileNotFoundError:
            return self._retake()
        except OSError:
            return []  # a file server that does not answer: the next check will tell
        owner = self._lease.owner
        if owner is not None and owner.token != self._lease.token:
            raise ConfigError(f"{self._held_by_another()}. It took over because this process was suspended")
        if owner is None or self._lease.compromise is not None:  # damaged, or no longer refreshed after errors
            return self._retake()
        return []

    def _retake(self) -> list[str]:
        """Takes the lock again."""
        vanished = not self.directory.exists()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lease.release(force=True)
            self._acquire()
            if vanished:
                self.recreate()
        except OSError as error:
            return [f"warning: cannot write the run directory {self.directory}: {error.strerror}"]
        if vanished:
            return [
                f"warning: the run directory {self.directory} has vanished and is created again: its checkpoints and logs "
                "up to here are lost"
            ]
        return [f"warning: {self.directory / NAME} was removed or could not be refreshed, and is created again"]

    def release(self) -> None:
        """Frees the lock."""
        self._lease.release()
