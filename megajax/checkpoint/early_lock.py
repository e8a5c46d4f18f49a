"""The lock of a run directory, looked at before anything else: before the processes join and the devices start."""

import time

from megajax.checkpoint.lock import DirectoryLock
from megajax.checkpoint.object_store import is_remote
from megajax.checkpoint.store_lock import StoreLock, has_lock
from megajax.config import ConfigError
from megajax.runtime.exchange import gather_problems


class EarlyLock:
    """The lock of a run directory that has one already: a run that is started twice is refused before it disturbs the first.

    Used as `with EarlyLock(...) as lock`.
    """

    def __init__(self, directory: str | None, patience: float = 0.0):
        """Nothing is locked yet.

        Args:
          directory: of the run; None: on a process that is not the first, or without a run directory.
          patience: seconds to wait for a process that holds the lock, as the launcher restarts a run while its last
            processes end.
        """
        self._directory, self._patience, self._lock, self._problem = directory, patience, None, None

    def __enter__(self) -> "EarlyLock":
        deadline = time.monotonic() + self._patience
        while self._directory:
            try:
                if not has_lock(self._directory):
                    return self
                self._lock = (StoreLock if is_remote(self._directory) else DirectoryLock)(self._directory)
                return self
            except ConfigError as error:
                if time.monotonic() > deadline:
                    self._problem = str(error)
                    return self
                time.sleep(1)
        return self

    def __exit__(self, *error) -> None:
        if self._lock:
            self._lock.release()

    def require(self) -> None:
        """Every process calls it when they have joined.

        Raises:
          ConfigError: another run holds the lock. All processes raise it.
        """
        if problems := gather_problems("run directory/early lock", self._problem):
            raise ConfigError(problems[0])
