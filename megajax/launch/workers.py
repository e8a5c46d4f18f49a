"""The training processes of one host: starts them, reads their heartbeats and exit codes, and leaves none behind."""

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from megajax.runtime.heartbeat import VARIABLE

STARTING = 4  # a process may take this many times the timeout until its first heartbeat
PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class _Worker:
    rank: int
    process: subprocess.Popen
    heartbeat: pathlib.Path
    heard: float  # time.monotonic() when the heartbeat last changed
    written: int = 0  # its modification time
    last: dict = dataclasses.field(default_factory=dict)


class Workers:
    """The processes of one generation on this host."""

    def __init__(self, commands: Mapping[int, tuple[Sequence[str], Mapping[str, str]]], directory: pathlib.Path):
        """Starts the processes, each in a session of its own.

        Args:
          commands: by rank, the words and the environment.
          directory: for the heartbeats; on this host.
        """
        self._workers = []
        for rank, (words, environment) in commands.items():
            path = directory / f"heartbeat-{rank}-{time.monotonic_ns()}"
            process = subprocess.Popen(
                words,
                env={**environment, VARIABLE: str(path)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (the agent has no threads)
            )
            self._workers.append(_Worker(rank, process, path, time.monotonic()))

    @property
    def step(self) -> int:
        """The highest step that any of them has reached."""
        return max((worker.last.get("step", 0) for worker in self._workers), default=0)

    @property
    def training(self) -> bool:
        """Whether all of them have reached a step: from then on they save and stop at a signal."""
        return bool(self._workers) and all(worker.last.get("step", 0) > 0 for worker in self._workers)

    @property
    def running(self) -> bool:
        """Whether any of them has not ended."""
        return any(worker.process.poll() is None for worker in self._workers)

    @property
    def finished(self) -> bool:
        """Whether all of them have said that the training needs no further start."""
        self.listen()
        return bool(self._workers) and all(worker.last.get("finished") for worker in self._workers)

    def codes(self) -> dict[int, int]:
        """Exit codes of those that have ended, by rank; negative: the signal that ended it."""
        found = {worker.rank: worker.process.poll() for worker in self._workers}
        return {rank: code for rank, code in found.items() if code is not None}

    def listen(self) -> None:
        """Reads the heartbeats."""
        for worker in self._workers:
            with contextlib.suppress(OSError, ValueError):
                written = worker.heartbeat.stat().st_mtime_ns
                if written != worker.written:
                    worker.heard, worker.written = time.monotonic(), written
                    worker.last = json.loads(worker.heartbeat.read_text())

    def hung(self, timeout: float) -> list[str]:
        """Kills the processes without a heartbeat for `timeout` seconds; returns a line about each."""
        messages, now = [], time.monotonic()
        for worker in self._workers:
            limit = timeout if worker.last else STARTING * timeout
            if worker.process.poll() is None and now - worker.heard > limit:
                where = f"in step {worker.last['step']}" if worker.last else "at its start"
                messages.append(f"process {worker.rank} hangs {where}: no heartbeat for {limit:g} s; it is killed")
                self._kill(worker)
        return messages

    def send(self, number: int) -> None:
        """Sends a signal to all of them."""
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def kill(self) -> None:
        """Kills all of them, and what they have started, and waits for their end."""
        for worker in self._workers:
            self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        worker.process.wait()
        worker.heartbeat.unlink(missing_ok=True)


def describe_code(rank: int, code: int, step: int) -> str:
    """A line about the end of a process."""
    if code < 0:
        return f"process {rank} was killed by {signal_name(-code)} in step {step}"
    return f"process {rank} ended with exit code {code} in step {step}"


def signal_name(number: int) -> str:
    """SIGKILL for 9; the real-time signals between SIGRTMIN and SIGRTMAX have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _die_with_parent() -> None:
    """In the new process: the kernel kills it when the agent dies, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
