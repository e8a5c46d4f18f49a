"""How processes join a run: the server of process 0 in a thread, and processes that are threads or plain sockets."""

import contextlib
import json
import socket
import threading
import time

import pytest

from megajax.runtime import joining
from megajax.runtime.joining import GREETING, JoinServer, PortInUse, Refused, join, reserve_port

SAME = {"--seed": "1", "--steps": "100"}
OWNER = {"host": "node1", "pid": 4711, "run": "/runs/a"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Served:
    """A JoinServer that a thread serves, and that starts a service on port 1 when all are there."""

    def __init__(self, processes: int, address: str | None = None):
        self.address = address or f"127.0.0.1:{free_port()}"
        self.server = JoinServer(self.address, processes, SAME, OWNER)
        self.wake, read = socket.socketpair()
        self.server.watch(read.fileno(), lambda: read.recv(1))
        self.ends, self.started = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while not self.ends.is_set():
            if self.server.failure:
                self.server.give_up()
            elif self.server.complete and not self.started.is_set():
                self.server.start(1)
                self.started.set()
            self.server.step(5)
        self.server.close()

    def close(self):
        self.ends.set()
        with contextlib.suppress(OSError):
            self.wake.send(b".")
        self.thread.join()


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(joining, "RETRY_SECONDS", 0.01)
    found = []

    def make(processes, **settings):
        found.append(Served(processes, **settings))
        return found[-1]

    yield make
    for one in found:
        one.close()


def joins(served, process, identity=SAME, run="/runs/a"):
    """Joins in a thread; returns the list that receives the result."""
    results = []

    def work():
        try:
            results.append(join(served.address, process, identity, run))
        except Refused as error:
            results.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, results


def test_all_processes_learn_the_services_port_when_all_are_there(served):
    run = served(3)
    first, found = joins(run, 2)
    assert not run.started.wait(0.05)
    address, connection = join(run.address, 1, SAME, "/runs/a")
    first.join(5)
    assert address == found[0][0] == "127.0.0.1:1" and connection.fileno() > 0


def test_a_process_of_another_run_is_refused_before_and_after_the_start(served):
    """It says whose port it is; the run itself is not disturbed."""
    run = served(2)
    for moment in ("waiting", "running"):
        with pytest.raises(
            Refused, match=r"another run uses this port, process id 4711 on node1.*/runs/a.*--coordinator"
        ):
            join(run.address, 1, SAME, "/runs/b")
        if moment == "waiting":
            member = join(run.address, 1, SAME, "/runs/a")
    assert member and run.server.complete and run.server.failure is None


def test_a_process_that_is_started_twice_is_refused(served):
    run = served(2)
    member = join(run.address, 1, SAME, "/runs/a")
    with pytest.raises(Refused, match="process 1 of 2 of this run is there already.*started twice"):
        join(run.address, 1, SAME, "/runs/a")
    assert run.server.complete
    assert member


def test_a_process_may_be_started_again_before_the_run_starts(served):
    run = served(3)
    with socket.create_connection(("127.0.0.1", int(run.address.rpartition(":")[2]))) as first:
        assert json.loads(first.recv(1000)) == GREETING
        first.sendall(json.dumps({"process": 1, "identity": SAME, "run": "/runs/a"}).encode() + b"\n")
        while 1 not in run.server._members:
            time.sleep(0.001)
    while 1 in run.server._members:
        time.sleep(0.001)
    thread, again = joins(run, 1)
    join(run.address, 2, SAME, "/runs/a")
    thread.join(5)
    assert again[0][0] == "127.0.0.1:1"


def test_a_process_that_comes_back_to_a_run_that_is_ending_waits_for_the_next_one(served):
    """The next one, on the same port, takes it."""
    run = served(2)
    _, connection = join(run.address, 1, SAME, "/runs/a")
    connection.close()
    while run.server.complete:
        time.sleep(0.001)
    thread, found = joins(run, 1)
    thread.join(0.1)
    assert not found
    run.close()
    served(2, address=run.address)
    thread.join(5)
    assert found[0][0] == "127.0.0.1:1"


def test_other_options_are_named_in_both_processes(served):
    run = served(3)
    thread, other = joins(run, 2)
    while 2 not in run.server._members:
        time.sleep(0.001)
    with pytest.raises(
        Refused, match="--seed is 2 in process 1 and 1 in process 0, --x is 3 in process 1 and not given"
    ):
        join(run.address, 1, {**SAME, "--seed": "2", "--x": "3"}, "/runs/a")
    thread.join(5)
    assert "--seed is 2 in process 1" in str(other[0]) and run.server.failure in str(other[0])


def test_a_process_beyond_the_number_is_refused(served):
    with pytest.raises(Refused, match="it is process 2, and process 0 there waits for 2 in all"):
        join(served(2).address, 2, SAME, "/runs/a")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]", "0.0.0.0"])
def test_a_port_in_use_names_the_run_that_uses_it(served, host):
    run = served(2)
    port = run.address.rpartition(":")[2]
    with pytest.raises(
        PortInUse, match=f"port {port} is in use by another run, process id 4711 on node1, whose run dir"
    ):
        JoinServer(f"{host}:{port}", 2, SAME, OWNER)


def test_a_port_of_another_program_is_refused_by_process_0_and_by_the_others(monkeypatch):
    """A server with SO_REUSEPORT that speaks first, as gRPC's, and one that says nothing."""
    monkeypatch.setattr(joining, "ANSWER_SECONDS", 0.05)
    for speaks in (True, False):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"127.0.0.1:{other.getsockname()[1]}"

            def answer(other=other, speaks=speaks):
                held = []
                with contextlib.suppress(OSError):
                    while True:
                        held.append(other.accept()[0])
                        if speaks:
                            held[-1].sendall(b"\0\0\x18\4\0\0\0\0\0\n")

            threading.Thread(target=answer, daemon=True).start()
            with pytest.raises(PortInUse, match="is in use by another program"):
                JoinServer(address, 2, SAME, OWNER)
            with pytest.raises(PortInUse, match="is in use by another program"):
                join(address, 1, SAME, "/runs/a")
            other.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n", b"{}\n", b"[1]\n", b'{"process": "1", "identity": {}}\n', b"[" * 5000 + b"\n", b""]
)
def test_a_stranger_is_dropped_and_the_run_starts(served, line):
    run = served(2)
    with socket.create_connection(("127.0.0.1", int(run.address.rpartition(":")[2]))) as stranger:
        stranger.recv(1000)
        stranger.sendall(line)
        assert join(run.address, 1, SAME, "/runs/a")


def test_many_silent_connections_do_not_keep_a_process_out(served):
    run = served(2)
    port = int(run.address.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * joining.STRANGERS)]
    assert join(run.address, 1, SAME, "/runs/a")
    assert len(run.server._strangers) <= joining.STRANGERS
    for one in silent:
        one.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]"])
def test_a_reserved_port_is_for_a_listener_with_reuseport_only(host):
    port, holder = reserve_port(host)
    with holder, socket.socket() as other:
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
