"""An append-only log file. Records that cannot be written, for example to a full disk, are dropped."""

import contextlib
import errno
import os
import pathlib
import time

FULL = (errno.ENOSPC, errno.EDQUOT)
PATH_CHECK_SECONDS = 1.0


class LogFile:
    """Appends records to a file; each is written whole or not at all, and before `append` returns.

    An error closes the file, and every later record reopens it. Logging thus resumes when the disk has room again, when a
    file server has restarted, and in a new file when the old one was removed.

    Attributes:
      path: of the file.
      problem: why the last record was dropped; None if it was written.
      dropped: records dropped since the file was opened.
    """

    def __init__(self, path: str | pathlib.Path, header: bytes = b""):
        """Opens the file, or creates it.

        Args:
          path: the file; its directory is created when it vanishes later.
          header: written at the start of an empty file.

        Raises:
          OSError: the file cannot be opened for another reason than a full disk.
        """
        self.path, self.header = pathlib.Path(path), header
        self.problem: str | None = None
        self.dropped = 0
        self._descriptor: int | None = None
        self._checked = 0.0
        try:
            self._open()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._fail(error)

    def append(self, data: bytes) -> None:
        """Writes a record, or counts it as dropped."""
        try:
            if self._descriptor is None or self._was_replaced():
                self.close()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
            self._write(data)
            self.problem = None
        except OSError as error:
            self.dropped += 1
            self._fail(error)

    def close(self) -> None:
        """Closes the file; `append` opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):  # NFS reports here that earlier records could not be stored
                os.close(descriptor)

    def _fail(self, error: OSError) -> None:
        self.problem = error.strerror or type(error).__name__
        self.close()

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._checked = time.monotonic()
        if self.header and os.fstat(self._descriptor).st_size == 0:
            self._write(self.header)

    def _was_replaced(self) -> bool:
        """Whether the path has been removed or names another file; looked up once a second."""
        if time.monotonic() - self._checked < PATH_CHECK_SECONDS:
            return False
        self._checked = time.monotonic()
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True

    def _write(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        if written < len(data):
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
