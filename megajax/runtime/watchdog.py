"""Ends the job on every process when a process of the run is dead, hung or has failed, and names that process.

Each process has two threads. The first publishes a heartbeat (step, host, failure) to jax's coordination service about
once a second, and reads process 0's heartbeat and verdict. The second ends the process when there is a verdict, or when
process 0 is silent. On process 0 the first thread reads all heartbeats and the second decides which processes are missing
or behind. The service is a process of its own (`coordinator.py`), so that it answers when process 0 is dead.

In a run of one process a thread looks at the step alone: a collective of NCCL that never ends is found by nobody else, and
the launcher's heartbeat comes from a thread that goes on.

Every process prints the reason, as one line, and exits: with 2 if a process ended for a user's mistake, which a new start
would repeat; else with 3. A process that failed itself exits with its own code.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megajax.runtime.compat import coordination_service
from megajax.runtime.distributed import EXIT_PEER
from megajax.runtime.heartbeat import Heartbeat

USER_ERROR = 2  # exit code for a user's mistake
# Errors of a collective whose other side is gone; other errors are this process's own.
PEER_ERRORS = re.compile(
    "gloo|nccl|connection (reset|closed|refused)|socket closed|coordination|heartbeat|barrier", re.I
)
SLOW = 5  # in a run of one process, a step may take this many times the slowest before it, if that is more than the timeout
DEBUGGERS = (
    "pdb",
    "bdb",
    "code",
    "debugpy",
    "pydevd",
    "IPython",
)  # modules in which the main thread waits for a person
HEARTBEAT, VERDICT = "megajax/heartbeat/", "megajax/verdict"


@dataclass
class _Peer:
    """The state of another process, as seen by process 0."""

    heard: float  # time.monotonic() when its heartbeat last changed
    heartbeat: dict


class Watchdog:
    """Watches the processes of a run, or the steps of the only one."""

    def __init__(self, timeout: float, show: Callable[[str], None], heartbeat: Heartbeat | None = None):
        """Starts the threads.

        Args:
          timeout: seconds without a heartbeat, or without a new step, after which the job ends.
          show: prints the error message.
          heartbeat: the launcher's, which is told of each step.
        """
        self._heartbeat = heartbeat or Heartbeat({})
        self.timeout, self.show, self.interval = timeout, show, min(1.0, timeout / 10)
        joined = coordination_service()  # jax.process_count() would start the devices
        self._client, self._id, self._count = joined.client, joined.process_id, joined.num_processes
        self._step, self._entered, self._suspended = 0, time.monotonic(), True
        self._slowest, self._first = 0.0, 0.0  # seconds: of a step so far, and of the work before there was one
        self._partial = False  # `dispatch` has set `_entered`: the time from then to `enter` may be less than a step
        self._failure, self._failure_code = None, 0
        self._beat, self._answered = 0, time.monotonic()
        unknown = {"step": 0, "failure": None, "code": 0}
        self._peers = {process: _Peer(time.monotonic(), unknown) for process in range(self._count)}
        self._closed = threading.Event()
        self._exiting = threading.Lock()
        if self._count > 1:
            self._publish()
        threads = (self._exchange_heartbeats, self._check_deadlines) if self._count > 1 else (self._check_own_step,)
        for target in threads:
            threading.Thread(target=target, daemon=True, name=f"watchdog {target.__name__}").start()

    def enter(self, step: int) -> None:
        """The main thread starts to wait for `step`, which must end within `timeout`."""
        self._begin(step, suspended=False)

    def dispatch(self, step: int) -> None:
        """The main thread starts to dispatch `step`, which on GPUs takes about as long as a step.

        The time limit counts from the last `enter`, that of an earlier step; after a `suspend`, it counts from now.
        """
        if self._suspended:
            self._begin(step, suspended=False)
            self._partial = True
        self._step = step

    def suspend(self, step: int) -> None:
        """As `enter`, for work without a time limit: compilation, validation, a checkpoint. Heartbeats stay required."""
        self._begin(step, suspended=True)

    def _begin(self, step: int, suspended: bool) -> None:
        now, self._heartbeat.step = time.monotonic(), step
        if not (self._suspended or self._partial):
            self._slowest = max(self._slowest, now - self._entered)
        elif not self._slowest:
            self._first = max(self._first, now - self._entered)
        self._step, self._entered, self._suspended, self._partial = step, now, suspended, False

    def close(self) -> None:
        """Stops watching: the run has ended on this process."""
        self._closed.set()

    def fail(self, message: str, code: int) -> None:
        """Ends the job for an error of this process; does not return if there are other processes.

        Args:
          message: of one line.
          code: this process's exit code; the others exit with it too if it is 2, else with 3.
        """
        if self._count > 1:
            self._failure, self._failure_code = message, code
            self._publish()
            if self._id == 0:
                self._end_job(message, code)
            self._closed.wait(5 * self.interval)  # process 0 reads it
            self._exit(message, code)

    def peer_lost(self, error: BaseException) -> bool:
        """Ends the job if a collective has failed because another process is gone, naming it if it can be found.

        Returns:
          False if there are no other processes, or they are alive and the error is not one of a collective.
        """
        if self._count == 1:
            return False
        is_collective = is_peer_error(error)
        others = [process for process in self._peers if process != self._id]
        deadline = time.monotonic() + (15 if is_collective and self._id else 8) * self.interval
        silent: list[int] = []
        while time.monotonic() < deadline and not silent:
            self._closed.wait(self.interval / 2)  # a verdict ends this process meanwhile
            silent = [process for process in self._silent(time.monotonic()) if process in others]
        if not silent and not is_collective:
            return False
        if silent or self._id == 0:
            names = self._names(silent) if silent else "another process"
            verdict = f"{names} died in step {self._step}, and the others cannot continue without it"
            if self._id == 0:
                self._end_job(verdict, EXIT_PEER)
            self._exit(verdict, EXIT_PEER)
        text = " ".join(str(error).split())[:200]
        self._exit(f"process {self._id} lost contact with the others in step {self._step}: {text}", EXIT_PEER)
        return True

    def _name(self, process: int) -> str:
        host = self._peers[process].heartbeat.get("host")
        return f"process {process}" + (f" on {host}" if host else "")

    def _names(self, processes: list[int]) -> str:
        return ", ".join(map(self._name, processes))

    def _silent(self, now: float) -> list[int]:
        """Processes that have missed several heartbeats; a process other than process 0 reads that of process 0 only."""
        heard = self._peers if self._id == 0 else {0: self._peers[0]}
        return [process for process, peer in heard.items() if now - peer.heard > 4 * self.interval]

    def _publish(self) -> None:
        self._beat += 1
        heartbeat = {
            "beat": self._beat,
            "step": self._step,
            "host": socket.gethostname(),
            "failure": self._failure,
            "code": self._failure_code,
        }
        # If this cannot be sent, the next read fails too, and `_check_deadlines` acts on that.
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{HEARTBEAT}{self._id}", json.dumps(heartbeat), allow_overwrite=True)

    def _exchange_heartbeats(self) -> None:
        """The first thread. A call in it can hang when the service hangs."""
        while not self._closed.wait(self.interval):
            self._publish()
            try:
                if self._id == 0:
                    self._read(dict(self._client.key_value_dir_get(HEARTBEAT)))
                else:
                    key = f"{HEARTBEAT}0"
                    self._read({key: self._client.key_value_try_get(key)})
                    verdict = json.loads(self._client.key_value_try_get(VERDICT))
                    if self._failure is None:
                        self._exit(verdict["reason"], verdict["code"])
                    self._exit(self._failure, self._failure_code)
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
            if self._id == 0:
                if verdict := self._verdict():
                    self._end_job(*verdict)
                continue
            now = time.monotonic()
            silent = max(now - self._answered, now - self._peers[0].heard)
            if silent > self.timeout:
                address = coordination_service().coordinator_address
                self._exit(
                    f"process 0 ({address}) has not answered for {silent:.0f} s: dead, hung or disconnected", EXIT_PEER
                )

    def _check_own_step(self) -> None:
        """The thread of a run of one process."""
        before = time.monotonic()
        while not self._closed.wait(self.interval):
            now = time.monotonic()
            if now - before > 2 * self.interval + 1:  # the whole process was stopped (Ctrl-Z)
                self._entered += now - before
            before = now
            if reason := self._own_verdict(now):
                self._exit(reason, EXIT_PEER)

    def _own_verdict(self, now: float) -> str | None:
        """In a run of one process: that a step has not ended; None while it may."""
        waiting, longest = now - self._entered, max(self.timeout, SLOW * (self._slowest or self._first))
        if self._suspended or waiting <= longest:
            return None
        where = main_thread_frames()
        if any(name.partition(".")[0] in DEBUGGERS for name, _ in where):
            return None
        own = [place for name, place in where if name.startswith("megajax.")] or [place for _, place in where]
        place = f" (the main thread is at {own[0]})" if own else ""
        return (
            f"step {self._step} has not ended for {waiting:.0f} s: a device, a collective or the data hangs{place}; a step "
            f"may take {longest:.0f} s: pass a larger --peer-timeout if that is too short"
        )

    def _verdict(self) -> tuple[str, int] | None:
        """On process 0: why the job must end, and its exit code; None if it need not."""
        now, peers = time.monotonic(), dict(self._peers)
        for process, peer in peers.items():
            if peer.heartbeat["failure"] and process != 0:
                code = USER_ERROR if peer.heartbeat["code"] == USER_ERROR else EXIT_PEER
                return f"{self._name(process)} failed: {peer.heartbeat['failure']}", code
            if now - peer.heard > self.timeout:
                silent = f"{now - peer.heard:.0f} s (in step {peer.heartbeat['step']})"
                return f"{self._name(process)} has sent no heartbeat for {silent}: dead or disconnected", EXIT_PEER
        waiting = now - self._entered
        if self._suspended or waiting <= self.timeout:
            return None
        return self._explain_wait(now, waiting), EXIT_PEER

    def _explain_wait(self, now: float, waiting: float) -> str:
        """On process 0: why a step has not ended."""
        peers = dict(self._peers)
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

    def _end_job(self, reason: str, code: int) -> None:
        """On process 0: publishes why the job ends, gives the others time to read it, and exits."""
        others = USER_ERROR if code == USER_ERROR else EXIT_PEER
        with contextlib.suppress(Exception):
            verdict = json.dumps({"reason": reason, "code": others})
            self._client.key_value_set(VERDICT, verdict, allow_overwrite=True)
        with self._exiting:
            self.show(f"error: {reason}")
            time.sleep(4 * self.interval)
            coordination_service().service.release(10)
            self._leave(code)

    def _exit(self, message: str, code: int) -> None:
        """Ends this process at once: its main thread may hang in a collective for ever."""
        with self._exiting:
            self.show(f"error: {message}")
            self._leave(code)

    def _leave(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main_thread_frames() -> list[tuple[str, str]]:
    """(module, FILE:LINE) of each of the main thread's frames, the innermost first."""
    frame, found = sys._current_frames().get(threading.main_thread().ident), []
    while frame is not None:
        found.append((frame.f_globals.get("__name__") or "", f"{frame.f_code.co_filename}:{frame.f_lineno}"))
        frame = frame.f_back
    return found


def is_peer_error(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is that of a collective or barrier of several processes."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return any(PEER_ERRORS.search(str(cause)) for cause in chain)
