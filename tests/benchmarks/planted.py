"""Functions of cases that are wrong, slow, hang or crash, for test_gpu_day.py."""

import os
import pathlib
import time

from benchmarks.gpu_day.outcomes import NotAvailable, Slow, Wrong


def passes(number: int) -> dict:
    return {"number": number}


def wrong() -> dict:
    raise Wrong("losses differ by 1.0e+00 from those of a CPU, more than 1e-03", {"difference": 1.0})


def slow() -> dict:
    row = {"label": "tiny", "implementation": "megajax", "milliseconds": 300.0, "predicted_milliseconds": 100.0}
    raise Slow("a step takes 3.0 times what its compiled program predicts", {"rows": [row]})


def lacks() -> dict:
    raise NotAvailable("torch is not installed")


def hangs(pid_file: str | None = None) -> dict:
    if pid_file:
        pathlib.Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)
    return {}


def waits_for(path: str) -> dict:
    while not pathlib.Path(path).exists() or not pathlib.Path(path).read_text():
        time.sleep(0.05)
    return {}


def crashes() -> dict:
    print("a last word")
    os._exit(7)


def raises() -> dict:
    raise ValueError("no such kernel")
