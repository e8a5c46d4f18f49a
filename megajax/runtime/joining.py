"""How the processes of a run join it: a short conversation with process 0's host, before jax connects them.

jax's coordination service ends a run when a second process 1 connects to it, whatever run that process belongs to. And
gRPC binds its port with SO_REUSEPORT: two runs of one host may listen on the same port, and the processes of both reach
either. So the port of `--coordinator` is not jax's. `JoinServer` listens there, exclusively, and tells each process of
this run, and nobody else, the port of jax's service:

    server   {"megajax": 1}                                             the greeting
    process  {"process": 1, "run": "/shared/run", "identity": {...}, "host": "node2", "pid": 4711}
    server   {"port": 41234}                                            when all processes are here
             {"refused": "process 1 of 2 runs already: ..."}            it is of another run, or started twice
             {"retry": "..."}                                           this run ends; the next one may take the process

The connection stays open while the process lives. `JoinServer` runs in the process of `coordinator.py`: standard library
only.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

GREETING = {"megajax": 1}
LONGEST = 2**20  # bytes of a line
HELLO_SECONDS = 20.0  # in which a connection must have said which process it is
STRANGERS = 64  # connections that have not said it yet, at most
ANSWER_SECONDS = 5.0  # in which a server must have greeted
RETRY_SECONDS = 0.25
HANDS_OVER_SECONDS = 3.0  # in which the server of a run that has just ended closes its port
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a lost host is noticed after 25 s
ABSENT = "not given"
SHOWN = 100  # characters of a value in a message
ANOTHER_PORT = "wait until it has ended, or pass --coordinator with another port in all processes"


class Refused(ValueError):
    """The process does not belong to the run that it tried to join."""


class PortInUse(Refused):
    """Something else listens on the port of `--coordinator`."""


class JoinServer:
    """Listens on the coordinator's port and admits the processes of one run.

    Attributes:
      failure: why this run cannot start: one of its processes has other options. None: there is no reason.
    """

    def __init__(self, address: str, processes: int, identity: Mapping[str, str], owner: Mapping[str, Any]):
        """Binds the port.

        Args:
          address: HOST:PORT, where HOST may be [::] for all interfaces.
          processes: of the run.
          identity: what must be the same in all of them, by its name for the message.
          owner: host and pid of process 0, and run, the run directory, None if there is none.

        Raises:
          PortInUse: a run or another program listens there.
          OSError: the address cannot be bound.
        """
        self.address, self.processes, self.identity, self.owner = address, processes, dict(identity), dict(owner)
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(address)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._strangers: dict[socket.socket, float] = {}  # and the deadline of each
        self._lines: dict[socket.socket, bytes] = {}
        self._members: dict[int, tuple[socket.socket, dict]] = {}  # connected processes, and what they said
        self._port: int | None = None
        self.failure: str | None = None

    @property
    def complete(self) -> bool:
        """Whether all other processes are connected."""
        return len(self._members) == self.processes - 1

    def watch(self, descriptor: int, call) -> None:
        """Calls `call()` from `step` whenever the descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, lambda _: call())

    def step(self, seconds: float = 1.0) -> None:
        """Waits for an event and deals with it."""
        for key, _ in self._selector.select(seconds):
            key.data(key.fileobj)
        now = time.monotonic()
        for connection in [one for one, deadline in self._strangers.items() if deadline < now]:
            self._drop(connection)

    def start(self, port: int) -> None:
        """Tells all processes the port of jax's service. From now on no other process is admitted."""
        self._port = port
        for connection, _ in list(self._members.values()):
            _send(connection, {"port": port})

    def give_up(self) -> None:
        """Tells all processes of the run why it does not start."""
        for connection, _ in list(self._members.values()):
            _send(connection, {"refused": self.failure})

    def close(self) -> None:
        """Frees the port and closes all connections."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            if len(self._strangers) >= STRANGERS:
                self._drop(min(self._strangers, key=self._strangers.get))
            connection.setblocking(False)
            _keep_alive(connection)
            self._strangers[connection] = time.monotonic() + HELLO_SECONDS
            self._lines[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ, self._receive)
            _send(connection, GREETING)

    def _receive(self, connection: socket.socket) -> None:
        """Bytes of a process; none: it has ended."""
        try:
            found = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        if not found or connection not in self._strangers:
            if not found:
                self._drop(connection)
            return
        self._lines[connection] += found
        line, end, _ = self._lines[connection].partition(b"\n")
        if end:
            self._hear(connection, line)
        elif len(line) > LONGEST:
            self._drop(connection)

    def _hear(self, connection: socket.socket, line: bytes) -> None:
        """What a process says of itself."""
        hello = _parse(line)
        process = hello.get("process")
        if hello.get("ask"):
            _send(connection, {"owner": self.owner})
            self._drop(connection)
        elif type(process) is not int or not isinstance(hello.get("identity"), dict):
            self._drop(connection)
        elif answer := self._objection(process, hello):
            _send(connection, answer)
            self._drop(connection)
        else:
            del self._strangers[connection]
            self._members[process] = connection, hello

    def _objection(self, process: int, hello: dict) -> dict | None:
        """Why a process is not admitted; None if it is."""
        if hello.get("run") != self.owner.get("run"):
            return {"refused": f"another run uses this port, {describe_owner(self.owner)}: {ANOTHER_PORT}"}
        if difference := describe_difference(self.identity, hello["identity"], process):
            problem = f"{difference}: run the same command in every process"
            if self._port is None:
                self.failure = problem
            return {"refused": problem}
        if not 0 < process < self.processes:
            return {"refused": f"it is process {process}, and process 0 there waits for {self.processes} in all"}
        if process in self._members:
            other = self._members[process][1]
            where = describe_owner({"pid": other.get("pid"), "host": other.get("host")})
            runs = f"process {process} of {self.processes} of this run is there already, {where}"
            return {"refused": f"{runs}: the command was started twice"}
        if self._port is not None:
            return {"retry": f"process {process} of this run has ended, and the run with it"}
        return None

    def _drop(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()
        self._strangers.pop(connection, None)
        self._lines.pop(connection, None)
        for process, (other, _) in list(self._members.items()):
            if other is connection:
                del self._members[process]


def describe_owner(owner: Mapping[str, Any]) -> str:
    """A run's process 0, or another process, in words."""
    run = f", whose run directory is {owner['run']}" if owner.get("run") else ""
    return f"process id {owner.get('pid')} on {owner.get('host')}{run}"


def describe_difference(expected: Mapping[str, str], found: Mapping[str, str], process: int) -> str:
    """What is not the same in a process as in process 0; empty if all is."""
    different = [name for name in {**expected, **found} if expected.get(name, ABSENT) != found.get(name, ABSENT)]
    values = [[texts.get(name, ABSENT)[:SHOWN] for texts in (found, expected)] for name in different[:3]]
    shown = [
        f"{name} is {own} in process {process} and {others} in process 0"
        for name, (own, others) in zip(different, values, strict=False)
    ]
    return ", ".join(shown) + (f", and {len(different) - 3} more" if len(different) > 3 else "")


def own_name() -> dict[str, Any]:
    """This process's host and process id."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def join(address: str, process: int, identity: Mapping[str, str], run: str | None) -> tuple[str, socket.socket]:
    """Joins the run whose process 0 is at `address`; waits, without a time limit, until all its processes are there.

    Args:
      address: HOST:PORT.
      process: the number of this process.
      identity: what must be the same in all processes.
      run: the run directory; None: there is none.

    Returns:
      HOST:PORT of jax's service, and a connection that must stay open while this process lives.

    Raises:
      Refused: the run there is another one, or has such a process already, or it is no run.
    """
    host, _, port = address.rpartition(":")
    hello = {"process": process, "run": run, "identity": dict(identity)} | own_name()
    while True:
        answer, connection = _converse(host.strip("[]"), int(port), hello)
        if "port" in answer:
            return f"{host}:{answer['port']}", connection
        if connection:
            connection.close()
        if "refused" in answer:
            raise Refused(f"{answer['refused']} (process 0 is at {address})")
        if "stranger" in answer:
            raise PortInUse(f"{address} is in use by another program, or by another version of megajax: {ANOTHER_PORT}")
        time.sleep(RETRY_SECONDS)


def _converse(host: str, port: int, hello: dict) -> tuple[dict, socket.socket | None]:
    """The server's answer; {} if there is none yet, {"stranger": True} if it is no such server."""
    try:
        connection = socket.create_connection((host, port), timeout=ANSWER_SECONDS)
    except (OSError, ValueError):
        return {}, None
    try:
        _keep_alive(connection)
        reader = connection.makefile("rb")
        greeting = reader.readline(LONGEST)
        if not greeting:
            return {}, connection
        if _parse(greeting) != GREETING:
            return {"stranger": True}, connection
        _send(connection, hello)
        connection.settimeout(None)
        return _parse(reader.readline(LONGEST)), connection
    except TimeoutError:  # it does not greet
        return {"stranger": True}, connection
    except OSError:
        return {}, connection


def _listen(address: str) -> socket.socket:
    """The listening socket; without SO_REUSEPORT, so that the port is this process's alone."""
    host, _, port = address.rpartition(":")
    host, deadline = host.strip("[]"), time.monotonic() + HANDS_OVER_SECONDS
    while True:
        try:
            return _bind(host, int(port))
        except OSError as error:
            problem = error
        if problem.errno != errno.EADDRINUSE:
            raise PortInUse(f"cannot listen on {address}: {problem.strerror or problem}") from problem
        answer, connection = _converse("127.0.0.1" if host in ("::", "0.0.0.0") else host, int(port), {"ask": True})
        if connection:
            connection.close()
        if owner := answer.get("owner"):
            raise PortInUse(
                f"port {port} is in use by another run, {describe_owner(owner)}: {ANOTHER_PORT}"
            ) from problem
        if answer.get("stranger") or time.monotonic() > deadline:
            raise PortInUse(f"port {port} is in use by another program: {ANOTHER_PORT}") from problem
        time.sleep(RETRY_SECONDS)  # of a run that is just ending


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens; on all interfaces, of IPv6 too where there is any, if the host is ::."""
    if host != "::":
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("0.0.0.0", port), backlog=1024)


def reserve_port(host: str) -> tuple[int, socket.socket]:
    """A free port for jax's service, and a socket that keeps it from others: gRPC shares it, as it sets SO_REUSEPORT."""
    host = host.strip("[]")
    is_ipv6 = ":" in host and socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((host if is_ipv6 or host != "::" else "0.0.0.0", 0))
    return holder.getsockname()[1], holder


def _keep_alive(connection: socket.socket) -> None:
    """The kernel finds out that the other host is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # who has gone is found by the next read
        connection.sendall(json.dumps(message).encode() + b"\n")


def _parse(line: bytes) -> dict:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
