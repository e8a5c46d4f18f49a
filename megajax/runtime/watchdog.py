"""Ends the job on every process when a process of the run is dead, hung or has failed, and names that process.

Each process has two threads. The first publishes a heartbeat (step, host, failure) to jax's coordination service about
once a second and reads process 0's verdict. The second ends the process when there is a verdict, or when process 0 no longer
answers. On process 0 the first thread reads all heartbeats and the second decides which processes are missing or behind.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megajax.runtime.compat import coordination_service

EXIT_PEER = 3  # a process's exit code when another process ended the run
HEARTBEAT, VERDICT = "megajax/heartbeat/", "megajax/verdict"


@dataclass
class _Peer:
    """The state of another process, as seen by process 0."""

    heard: float  # time.monotonic() when its heartbeat last changed
    heartbeat: dict


class Watchdog:
    """Watches the processes of a run; inactive in a run of one process."""

    def __init__(self, timeout: float, show: Callable[[str], None]):
        """Starts the threads.

        Args:
          timeout: seconds without a heartbeat, or without a new step, after which the job ends.
          show: prints the error message.
        """
        self.timeout, self.show, self.interval = timeout, show, min(1.0, timeout / 10)
        joined = coordination_service()  # jax.process_count() would start the devices
        self._client, self._id, self._count = joined.client, joined.process_id, joined.num_processes
        self._step, self._entered, self._suspended, self._failure = 0, time.monotonic(), True, None
        self._beat, self._answered = 0, time.monotonic()
        unknown = {"step": 0, "failure": None}
        self._peers = {process: _Peer(time.monotonic(), unknown) for process in range(self._count)}
        self._closed = threading.Event()
        self._exiting = threading.Lock()
        if self._count > 1:
            self._publish()
            for target in (self._exchange_heartbeats, self._check_deadlines):
                threading.Thread(target=target, daemon=True, name=f"watchdog {target.__name__}").start()

    def enter(self, step: int) -> None:
        """The main thread starts to wait for `step`, which must end within `timeout`."""
        self._step, self._entered, self._suspended = step, time.monotonic(), False

    def suspend(self, step: int) -> None:
        """As `enter`, for work without a time limit: compilation, validation, a checkpoint. Heartbeats stay required."""
        self._step, self._entered, self._suspended = step, time.monotonic(), True

    def close(self) -> None:
        """Stops watching: the run has ended on this process."""
        self._closed.set()

    def fail(self, message: str, code: int) -> None:
        """Ends the job for an error of this process; does not return if there are other processes."""
        if self._count > 1:
            self._failure = message
            self._publish()
            if self._id == 0:
                self._end_job(message, code)
            time.sleep(5 * self.interval)  # process 0's verdict, which has this message, should come first
            self._exit(message, code)

    def peer_lost(self, error: Exception) -> None:
        """Ends the job after a collective has failed because another process is gone, naming it if it can be found."""
        if self._count == 1:
            return
        if self._id != 0:
            self._closed.wait(15 * self.interval)
            text = " ".join(str(error).split())[:200]
            self._exit(f"process {self._id} lost contact with the others in step {self._step}: {text}", EXIT_PEER)
        deadline = time.monotonic() + 8 * self.interval
        while time.monotonic() < deadline:
            if silent := self._silent(time.monotonic()):
                break
            time.sleep(self.interval / 2)
        names = self._names(silent) if silent else "another process"
        self._end_job(f"{names} died in step {self._step}, and the others cannot continue without it", EXIT_PEER)

    def _name(self, process: int) -> str:
        host = self._peers[process].heartbeat.get("host")
        return f"process {process}" + (f" on {host}" if host else "")

    def _names(self, processes: list[int]) -> str:
        return ", ".join(map(self._name, processes))

    def _silent(self, now: float) -> list[int]:
        """Processes that have missed several heartbeats."""
        return [process for process, peer in self._peers.items() if now - peer.heard > 4 * self.interval]

    def _publish(self) -> None:
        self._beat += 1
        heartbeat = {"beat": self._beat, "step": self._step, "host": socket.gethostname(), "failure": self._failure}
        # If this cannot be sent, the next read fails too, and `_check_deadlines` acts on that.
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{HEARTBEAT}{self._id}", json.dumps(heartbeat), allow_overwrite=True)

    def _exchange_heartbeats(self) -> None:
        """The first thread. A call in it can hang when process 0 hangs."""
        while not self._closed.wait(self.interval):
            self._publish()
            try:
                if self._id == 0:
                    self._read(dict(self._client.key_value_dir_get(HEARTBEAT)))
                else:
                    self._client.key_value_try_get(VERDICT)
                    self._exit(None, EXIT_PEER)  # process 0 has printed the verdict
            except Exception as error:
                if "NOT_FOUND" not in str(error):  # NOT_FOUND is an answer: there is no verdict
                    continue
            self._answered = time.monotonic()

    def _read(self, heartbeats: dict[str, str]) -> None:
        now = time.monotonic()
        for key, value in heartbeats.items():
            process, heartbeat = int(key.rsplit("/", 1)[1]), json.loads(value)
            if self._peers[process].heartbeat != heartbeat:
                self._peers[process] = _Peer(now, heartbeat)

    def _check_deadlines(self) -> None:
        """The second thread."""
        while not self._closed.wait(self.interval):
            if self._id != 0:
                silent = time.monotonic() - self._answered
                if silent > self.timeout:
                    address = coordination_service().coordinator_address
                    self._exit(
                        f"process 0 ({address}) has not answered for {silent:.0f} s: dead, hung or disconnected",
                        EXIT_PEER,
                    )
            elif verdict := self._verdict():
                self._end_job(verdict, EXIT_PEER)

    def _verdict(self) -> str | None:
        """On process 0: why the job must end; None if it need not."""
        now, peers = time.monotonic(), dict(self._peers)
        for process, peer in peers.items():
            if peer.heartbeat["failure"] and process != 0:
                return f"{self._name(process)} failed: {peer.heartbeat['failure']}"
            if now - peer.heard > self.timeout:
                silent = f"{now - peer.heard:.0f} s (in step {peer.heartbeat['step']})"
                return f"{self._name(process)} has sent no heartbeat for {silent}: dead or disconnected"
        waiting = now - self._entered
        if self._suspended or waiting <= self.timeout:
            return None
        if silent := self._silent(now):
            return (
                f"{self._names(silent)} has sent no heartbeat, and step {self._step} waits for it for {waiting:.0f} s"
            )
        steps = {process: peer.heartbeat["step"] for process, peer in peers.items()} | {0: self._step}
        behind = [process for process, step in steps.items() if step < max(steps.values())]
        if behind:
            return (
                f"{self._names(behind)} hangs before step {max(steps.values())}, in which the others have waited for "
                f"{waiting:.0f} s"
            )
        return f"step {self._step} has not ended for {waiting:.0f} s, and all processes are in it: a network or device hangs"

    def _end_job(self, verdict: str, code: int) -> None:
        """Publishes why the job ends, gives the others time to read it, and exits."""
        with contextlib.suppress(Exception):
            self._client.key_value_set(VERDICT, verdict, allow_overwrite=True)
        self.show(f"error: {verdict}")
        # The coordination service ends with this process: the others must have exited by then.
        time.sleep(4 * self.interval)
        self._exit(None, code)

    def _exit(self, message: str | None, code: int) -> None:
        """Ends this process at once: its main thread may hang in a collective for ever."""
        with self._exiting:
            if message is not None:
                self.show(f"error: {message}")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
