"""Runs cases, each in a process of its own with a deadline, and stores every result at once.

A case that hangs or crashes is a result and does not end the others. A second start of the command continues: cases that
have a result are not repeated, as long as the device and the versions are the same.
"""

import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gpu_day.cases import Case
from benchmarks.gpu_day.outcomes import DEVICES, GPUS, NotAvailable, Wrong
from megajax.config.toml import save_config

CHILD = "import sys; from benchmarks.gpu_day.runner import run_in_child as run; run(*sys.argv[1:])"
OVER = "the time of the whole was over: start the command again, which continues"
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # what a case has printed when it crashes or is killed is kept
# Small models share a GPU: none takes its memory ahead, as a run alone does.
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Store:
    """The results on disk: written atomically after every case.

    Attributes:
      results: as they are written.
      logs: a folder for the output of cases that failed or hung.
    """

    def __init__(self, path: pathlib.Path, header: Mapping[str, Any]):
        """Keeps the results of an earlier start with the same device and versions."""
        self._path, self._lock, self.logs = path, threading.Lock(), path.with_suffix(".logs")
        self.results: dict[str, Any] = {**header, "cases": []}
        if path.exists():
            earlier = json.loads(path.read_text())
            if all(earlier.get(name) == header[name] for name in ("device", "versions")):
                finished = [one for one in earlier["cases"] if one["status"] != "not run"]
                self.results = {**header, "started": earlier["started"], "cases": finished}

    def has(self, name: str) -> bool:
        return any(one["name"] == name for one in self.results["cases"])

    def add(self, result: Mapping[str, Any]) -> None:
        with self._lock:
            self.results["cases"].append(dict(result))
            save_config(self._path, json.dumps(self.results, indent=1), "pass --out FOLDER")


def run_all(cases: Sequence[Case], store: Store, jobs: int, ends: float, tell: Callable[[str], None]) -> None:
    """Runs the cases that have no result: those that may share the devices `jobs` at a time, then the others in turn.

    Args:
      ends: `time.monotonic()` after which none is started.
      tell: is given a line for each case that has ended.
    """
    left, running = [case for case in cases if not store.has(case.name)], set[subprocess.Popen]()
    ended = threading.Event()

    def one(case: Case) -> None:
        result = run_case(case, ends, store.logs, running)
        if ended.is_set():
            return  # killed below: no result, so that a second start runs it
        store.add(result)
        tell(f"{result['status']:>8}  {result['seconds']:5.0f} s  {case.name}  {result['reason']}"[:220])

    pool = ThreadPoolExecutor(jobs)
    try:
        list(pool.map(one, [case for case in left if not case.alone]))
        for case in left:
            if case.alone:
                one(case)
    finally:  # after Ctrl-C too, which the processes do not get: they are in sessions of their own
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            os.killpg(process.pid, signal.SIGKILL)


def run_case(
    case: Case,
    ends: float = float("inf"),
    logs: pathlib.Path | None = None,
    running: set[subprocess.Popen] | None = None,
) -> dict[str, Any]:
    """Runs a case; returns its name, part, status, reason, seconds and result.

    Args:
      ends: `time.monotonic()` at which the case is stopped, or not started.
      logs: a folder for its output if it fails or hangs; None: not kept.
      running: has the case's process while it runs.
    """
    start, running = time.monotonic(), set() if running is None else running
    answer = {"name": case.name, "part": case.part, "status": "not run", "reason": OVER, "seconds": 0.0, "result": None}
    if start >= ends:
        return answer
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "answer.json")
        command = [sys.executable, "-c", CHILD, str(path), case.function, json.dumps(case.arguments)]
        environment = os.environ | UNBUFFERED | ({} if case.alone else SHARED) | _devices(case) | case.environment
        with open(pathlib.Path(folder, "log"), "w+") as log:
            # In a session of its own, so that its children are killed with it.
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            running.add(process)
            try:
                answer |= _result(process, path, case.deadline, ends)
            finally:
                running.discard(process)
            log.seek(0)
            text = log.read()
    if answer["status"] == "error":
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
        answer["reason"] += f": {last.strip()[:300]}"
    if logs and answer["status"] in ("error", "hang"):
        logs.mkdir(exist_ok=True)
        (logs / f"{re.sub(r'[^a-z0-9]+', '_', case.name.lower())}.log").write_text(text)
    return answer | {"seconds": round(time.monotonic() - start, 1)}


def _devices(case: Case) -> dict[str, str]:
    """The variables by which the process of a case of one device sees no other; cases are spread over the GPUs."""
    devices = os.environ.get(DEVICES, "")
    if not case.one_device:
        return {}
    if devices.startswith("cpu"):
        return {DEVICES: "cpu:1"}
    gpus = os.environ.get(GPUS, "0").split(",")
    return {VISIBLE: gpus[zlib.crc32(case.name.encode()) % len(gpus)]}


def _result(process: subprocess.Popen, path: pathlib.Path, deadline: float, ends: float) -> dict[str, Any]:
    """What the process has written to `path`, at most `deadline` seconds from now and not after `ends`."""
    left = ends - time.monotonic()
    try:
        process.wait(min(deadline, left))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if left < deadline:
            return {"status": "not run", "reason": OVER}
        return {"status": "hang", "reason": f"no result after {deadline:.0f} s: the process was killed"}
    if not path.exists():
        return {"status": "error", "reason": f"exit code {process.returncode}"}
    return json.loads(path.read_text())


def call(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The status, reason and result of a case's function, called in this process."""
    module, _, name = function.rpartition(".")
    try:
        result = getattr(importlib.import_module(module), name)(**arguments)
    except NotAvailable as error:
        return {"status": "not run", "reason": str(error)}
    except Wrong as error:
        return {"status": error.status, "reason": str(error), "result": error.result}
    return {"status": "passed", "reason": "", "result": result}


def run_in_child(path: str, function: str, arguments: str) -> None:
    """The child process: writes the answer of a case's function, called with arguments in JSON, to a file."""
    pathlib.Path(path).write_text(json.dumps(call(function, json.loads(arguments))))
