"""A training process's sign of life for the launcher on its host: a file that a thread rewrites twice a second.

A process that is stopped (SIGSTOP), or whose interpreter hangs, no longer writes it. Without the variable there is no file.
"""

import contextlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Mapping

VARIABLE = "MEGAJAX_HEARTBEAT_FILE"
INTERVAL = 0.5  # seconds


class Heartbeat:
    """Writes the file from a daemon thread until the process ends.

    Attributes:
      step: the step that the process has reached; set by the training.
    """

    def __init__(self, environment: Mapping[str, str]):
        """Starts the thread if the launcher has named a file."""
        path = environment.get(VARIABLE)
        self.step, self._path, self._count, self._finished = 0, path and pathlib.Path(path), 0, False
        self._writes = threading.Lock()
        if path:
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def finish(self) -> None:
        """Says that the training needs no further start: its last step has been taken, or its time is over."""
        self._finished = True
        if self._path:
            self._write()

    def _beat(self) -> None:
        while True:
            self._write()
            time.sleep(INTERVAL)

    def _write(self) -> None:
        """Replaces the file. On a full disk only its time changes; a directory that was cleaned up is made again."""
        temporary = self._path.with_name(self._path.name + ".new")
        with self._writes, contextlib.suppress(OSError):
            self._count += 1
            found = {"count": self._count, "step": self.step, "pid": os.getpid(), "finished": self._finished}
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_text(json.dumps(found))
                temporary.replace(self._path)
            except OSError:
                os.utime(self._path)
