"""jax's coordination service in a process of its own, started by process 0 of a run.

jax keeps the service inside process 0. When that process dies, the C++ client of every other process sees the connection
close and aborts with jax's own messages; Python is not asked (a `missed_heartbeat_callback` written in Python ends in
`std::bad_cast`, jaxlib 0.10.2 to 0.12.0.1). A service in a process of its own outlives process 0 until the others have
found out, through `watchdog.py`, and have left with one line each.

The process listens on the coordinator's port and admits the processes of the run (`joining.py`). When all are there, it
starts jax's service on a free port. It imports neither jax nor numpy.
"""

import contextlib
import importlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from megajax.runtime.joining import JoinServer, PortInUse, Refused, own_name, reserve_port

ESTABLISHED = "01"  # a connection's state in /proc/net/tcp
PACKAGE = pathlib.Path(__file__).parents[2]  # the folder that megajax is imported from


class ServiceProcess:
    """The process, as process 0 sees it; takes the place of jax's service object.

    Attributes:
      port: of jax's service.
    """

    def __init__(
        self,
        module: str,
        function: str,
        linger: float,
        identity: Mapping[str, str],
        run: str | None,
        address: str,
        processes: int,
        **settings: Any,
    ):
        """Starts it, and waits until all processes of the run have joined.

        Args:
          module, function: start jax's service; called with an address, `processes` and `settings`.
          linger: seconds that it stays at most when this process has died.
          identity: what must be the same in all processes.
          run: the run directory, for messages; None: there is none.
          address: HOST:PORT on which the processes join.
          processes: of the run.

        Raises:
          PortInUse: something else listens on the port.
          Refused: a process of this run has other options.
          RuntimeError: it does not start; the message is the service's.
        """
        request = {
            **{"module": module, "function": function, "linger": linger, "identity": dict(identity)},
            **{"owner": own_name() | {"run": run}, "address": address, "processes": processes, "settings": settings},
        }
        paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or "{}")
        if "port" not in answer:
            self._process.wait()
            code = self._process.returncode
            problem = answer.get("problem", f"the coordination service ended with exit code {code}")
            raise {"port": PortInUse, "refused": Refused}.get(answer.get("kind"), RuntimeError)(problem)
        self.port: int = answer["port"]

    def release(self, seconds: float) -> None:
        """Lets it end when no process is connected to it, after `seconds` at the latest; does not wait."""
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()

    def shutdown(self) -> None:
        """Ends it: all processes have left it."""
        self.release(0)
        self._process.wait()


def serve(
    module: str, function: str, linger: float, address: str, processes: int, settings: dict, **run: Mapping[str, Any]
) -> None:
    """The process: starts the service, and stays until process 0 says that the run has ended, or has died.

    Then it stays while other processes are connected, but no longer than process 0 has said, or else `linger` seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to all processes of a job, which then save
        signal.signal(number, signal.SIG_IGN)
    _allow_many_connections()
    try:
        start = getattr(importlib.import_module(module), function)
        server = JoinServer(address, processes, **run)
        released: list[str] = []  # what process 0 has said; empty text: the pipe's other end has closed
        server.watch(sys.stdin.fileno(), lambda: released.append(sys.stdin.readline()))
        while not (server.complete or server.failure or released):
            server.step()
        if released:
            os._exit(0)
        if server.failure:
            server.give_up()
            raise Refused(server.failure)
        host = address.rpartition(":")[0]
        port, _reserved = reserve_port(host)
        service = start(f"{host}:{port}", processes, **settings)
    except Exception as error:
        kind = "port" if isinstance(error, PortInUse) else "refused" if isinstance(error, Refused) else "other"
        print(json.dumps({"problem": " ".join(str(error).split()), "kind": kind}), flush=True)
        os._exit(1)
    server.start(port)
    print(json.dumps({"port": port}), flush=True)
    while not released:
        server.step(seconds=60)
    server.close()  # the port is free for the next run, which may be this one's restart
    deadline = time.monotonic() + float(released[0] or linger)
    while time.monotonic() < deadline and connections(port):
        time.sleep(0.2)
    service.shutdown()
    os._exit(0)


def _allow_many_connections() -> None:
    """Two for each process of the run."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connections(port: int) -> int:
    """Number of connections of other processes to a local port."""
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in pathlib.Path(table).read_text().splitlines()[1:]]
            count += sum(row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED for row in rows)
    return count


if __name__ == "__main__":
    serve(**json.loads(sys.stdin.readline()))
