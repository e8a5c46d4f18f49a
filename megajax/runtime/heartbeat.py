"""A training process's sign of life for the launcher on its host: a file that a thread rewrites twice a second.

A process that is stopped (SIGSTOP), or whose interpreter hangs, no longer writes it. Without the variable there is no file.
"""

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
        self.step, path = 0, environment.get(VARIABLE)
        if path:
            threading.Thread(target=self._write, args=[pathlib.Path(path)], daemon=True, name="heartbeat").start()

    def _write(self, path: pathlib.Path) -> None:
        temporary, count = path.with_name(path.name + ".new"), 0
        while True:
            count += 1
            try:
                temporary.write_text(json.dumps({"count": count, "step": self.step, "pid": os.getpid()}))
                temporary.replace(path)
            except OSError:
                return  # the launcher has ended
            time.sleep(INTERVAL)
