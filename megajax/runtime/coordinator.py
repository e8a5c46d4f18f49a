"""jax's coordination service in a process of its own, started by process 0 of a run.

jax keeps the service inside process 0. When that process dies, the C++ client of every other process sees the connection
close and aborts with jax's own messages; Python is not asked (a `missed_heartbeat_callback` written in Python ends in
`std::bad_cast`, jaxlib 0.10.2 to 0.12.0.1). A service in a process of its own outlives process 0 until the others have
found out, through `watchdog.py`, and have left with one line each.

    python megajax/runtime/coordinator.py MODULE FUNCTION LINGER '["127.0.0.1:12355", 4]' '{"heartbeat_timeout": 100}'

The process imports neither jax nor numpy.
"""

import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

READY = "listening"
ESTABLISHED = "01"  # a connection's state in /proc/net/tcp


class ServiceProcess:
    """The process, as process 0 sees it; takes the place of jax's service object."""

    def __init__(self, module: str, function: str, linger: float, *arguments: Any, **settings: Any):
        """Starts it.

        Args:
          module, function: start the service; called with `arguments` and `settings`.
          linger: seconds that it stays at most when this process has died.

        Raises:
          RuntimeError: it does not start; the message is the service's.
        """
        words = [module, function, str(linger), json.dumps(arguments), json.dumps(settings)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        answer = self._process.stdout.readline().strip()
        if answer != READY:
            self._process.wait()
            raise RuntimeError(answer or f"the coordination service ended with exit code {self._process.returncode}")

    def release(self, seconds: float) -> None:
        """Lets it end when no process is connected to it, after `seconds` at the latest; does not wait."""
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()

    def shutdown(self) -> None:
        """Ends it: all processes have left it."""
        self.release(0)
        self._process.wait()


def serve(module: str, function: str, linger: float, arguments: list, settings: dict) -> None:
    """The process: starts the service, and stays until process 0 says that the run has ended, or has died.

    Then it stays while other processes are connected, but no longer than process 0 has said, or else `linger` seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to all processes of a job, which then save
        signal.signal(number, signal.SIG_IGN)
    try:
        service = getattr(importlib.import_module(module), function)(*arguments, **settings)
    except Exception as error:
        print(" ".join(str(error).split()), flush=True)
        os._exit(1)
    print(READY, flush=True)
    seconds = float(sys.stdin.readline() or linger)  # empty: the pipe's other end has closed
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and connections(int(arguments[0].rpartition(":")[2])):
        time.sleep(0.2)
    service.shutdown()
    os._exit(0)


def connections(port: int) -> int:
    """Number of connections of other processes to a local port."""
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in pathlib.Path(table).read_text().splitlines()[1:]]
            count += sum(row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED for row in rows)
    return count


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5]))
