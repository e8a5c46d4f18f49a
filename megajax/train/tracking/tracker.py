"""`Tracker`: passes the records of a run to a process of their own, in which the tracker's library runs.

    training, process 0                                 megajax.train.tracking.process
    RunLog.complete -> queue of at most QUEUE -> thread -> pipe -> reader -> wandb, mlflow or trackio
                       messages, counts       <- thread <- pipe <-

The training never waits for it: a record that finds the queue full is dropped and counted. A library that fails, is slow,
blocks for ever or kills its process costs records and a line of the log. Only the end of the run waits, for at most
`track_wait` seconds; then the process is killed. Without the training's process its own marks the run as failed and ends.
"""

import collections
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import megajax
from megajax.config import ConfigError, OutputConfig

QUEUE = 1000  # records that wait for the thread; with those in the pipe a megabyte or two
INTERVAL = (
    0.5  # seconds after which the thread sends what waits; to wake it for each record would interrupt the training
)
PACKAGE = pathlib.Path(megajax.__file__).parents[1]
PROCESS = "megajax.train.tracking.process"
ID_FILE = "tracker.json"  # in the run directory


def require_library(library: str) -> None:
    """Raises ConfigError if a tracker's library is not installed; nothing is imported."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:  # a directory `wandb` of offline runs looks like a package
        raise ConfigError(
            f"track = {library} needs {library}, which is not installed: pip install 'megajax[{library}]'"
        )


def request_of(
    output: OutputConfig, name: str, config: Mapping[str, Any], after: int, directory: pathlib.Path | None = None
) -> dict[str, Any]:
    """What the process is told at its start, as JSON.

    Args:
      output: of the run.
      name: the run's name, unless `output` has one.
      config: the run's configuration by sections.
      directory: of the run's files on this machine; None: that of `output`, if it has one.
      after: the last step before this session; 0 in a new run.
    """
    if directory is None and output.run_dir:
        directory = pathlib.Path(output.run_dir).absolute()
    return {
        "library": output.track,
        "project": output.track_project,
        "name": output.track_name or name,
        "directory": directory and str(directory),
        "id_file": directory and str(directory / ID_FILE),
        "resumes": output.resume != "no",
        "after": after,
        "config": config,
        "wait": output.track_wait,
    }


class Tracker:
    """A run in a tracker. It receives records like a sink and the rest like a callback, and raises nothing.

    Attributes:
      name: of the library.
      dropped: records that were not logged, so far as is known.
    """

    def __init__(self, request: Mapping[str, Any], log: pathlib.Path | None = None, artifacts: str = "none"):
        """Starts the process and waits for nothing.

        Args:
          request: see `request_of`.
          log: file for what the library prints; None: it is discarded.
          artifacts: which checkpoints are logged as artifacts: "none", "last" or "all".
        """
        self.name, self.dropped = request["library"], 0
        self._wait, self._artifacts, self._log = request["wait"], artifacts, log
        self._queue: collections.deque[dict] = collections.deque()
        self._closing = threading.Event()
        self._answers: collections.deque[str] = collections.deque()  # lines for the log
        self._end: dict[str, Any] = {"state": "failed", "reason": None}
        self._last: pathlib.Path | None = None  # the newest checkpoint
        self._given, self._answered, self._full = 0, 0, False  # records
        self._ended, self._fails = False, False  # the process has ended; its library has failed
        paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
        output: Any = subprocess.DEVNULL
        with contextlib.suppress(OSError):
            output = open(log, "ab") if log else output  # noqa: SIM115
        try:
            self._process: subprocess.Popen | None = subprocess.Popen(
                [sys.executable, "-P", "-m", PROCESS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C is for the training; and `close` kills the library's own processes too
            )
        except OSError as error:
            self._process, self._ended = None, True
            self._answers.append(f"warning: {self.name} cannot be started: {error.strerror}; training continues")
            return
        finally:
            if output is not subprocess.DEVNULL:
                output.close()
        first = json.dumps(dict(request)).encode() + b"\n"
        threading.Thread(target=self._send, args=(first,), daemon=True, name="tracker queue").start()
        self._reader = threading.Thread(target=self._receive, daemon=True, name="tracker answers")
        self._reader.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Passes on the record of a step, or drops it if too many wait."""
        self._given += 1
        if not self._put({"record": dict(record)}):
            self.dropped += 1
            if not self._full and not self._ended:
                self._full = True
                self._answers.append(
                    f"warning: {self.name} is too slow: records of steps are dropped; training continues"
                )

    def _put(self, message: dict) -> bool:
        if self._ended or len(self._queue) >= QUEUE:
            return False
        self._queue.append(message)
        return True

    def messages(self) -> list[str]:
        """Lines for the log since the last call."""
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def on_save(self, control: Any, step: int, path: pathlib.Path) -> None:
        """A checkpoint is complete (see `Callback`)."""
        self._last = path
        if self._artifacts == "all":
            self._artifact(path)

    def on_end(self, control: Any, result: Any) -> None:
        """The run has ended, at its last step or early."""
        self._end = {"state": "stopped" if result.stopped else "finished", "reason": result.stopped}
        if self._artifacts == "last" and self._last:
            self._artifact(self._last)

    def on_exception(self, control: Any, error: BaseException) -> None:
        """The run ends with an error."""
        self._end = {"state": "failed", "reason": f"{type(error).__name__}: {error}"[:1000]}

    def _artifact(self, path: pathlib.Path) -> None:
        if not self._put({"artifact": str(path)}) and not self._ended:
            self._answers.append(f"warning: {self.name} is too slow: {path.name} is not logged as an artifact")

    def close(self) -> list[str]:
        """Ends the run in the tracker; waits for at most `track_wait` seconds; returns lines for the log."""
        if self._process is None:
            return self.messages()
        self._queue.append({"end": self._end})
        self._closing.set()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._wait)
        late = self._process.poll() is None
        if late:
            os.killpg(self._process.pid, signal.SIGKILL)  # and the library's own processes
            self._process.wait()
        self._reader.join(1.0)
        lost = self._given - self._answered
        found = self.messages()
        if late:
            found.append(
                f"warning: {self.name} had not ended {self._wait:g} s after the run and was killed: what it had not stored "
                "is lost; --track-wait is that time"
            )
        if lost:
            found.append(f"warning: {self.name}: {lost} of {self._given} records of steps were not logged")
        return found

    def _send(self, first: bytes) -> None:
        """The thread that writes to the process; a pipe that is full blocks it alone."""
        pipe = self._process.stdin
        with contextlib.suppress(OSError, ValueError):  # the process has ended, which `_receive` sees
            pipe.write(first)
            pipe.flush()
            closing = False
            while not closing:
                closing = self._closing.wait(INTERVAL)  # the end is in the queue, as the last message
                while self._queue:
                    pipe.write(json.dumps(self._queue.popleft(), default=str).encode() + b"\n")
                pipe.flush()
        with contextlib.suppress(OSError, ValueError):
            pipe.close()

    def _receive(self) -> None:
        """The thread that reads what the process says."""
        ended = False
        for line in self._process.stdout:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that a kill has cut
                answer = json.loads(line)
                self._answered += answer.get("logged", 0)
                ended = ended or answer.get("ended", False)
                if text := answer.get("message"):
                    self._answers.append(f"track     {self.name}: {text}")
                if text := answer.get("problem"):
                    self._report(text)
        self._ended = True
        if not ended and not self._fails and self._process.wait() >= 0:
            self._report(f"its process ended with exit code {self._process.returncode}")

    def _report(self, problem: str) -> None:
        if not self._fails:
            self._fails = True
            more = f" ({self._log})" if self._log else ""
            self._answers.append(f"warning: {self.name} fails: {problem}; training continues{more}")
