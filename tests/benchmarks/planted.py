"""Functions of cases that are wrong, slow, hang or crash, for test_gpu_day.py."""

import os
import pathlib
import time

import jax.numpy as jnp

from benchmarks.gpu_day import kernels, steps
from benchmarks.gpu_day.outcomes import NotAvailable, Wrong
from megajax.ops import attention_kernels


def passes(number: int) -> dict:
    return {"number": number}


def wrong() -> dict:
    raise Wrong("losses differ by 1.0e+00 from those of a CPU, more than 1e-03", {"difference": 1.0})


def slow() -> dict:
    row = {"label": "tiny", "implementation": "megajax", "milliseconds": 300.0, "predicted_milliseconds": 100.0}
    return steps.checked(row)


def wrong_kernel() -> dict:
    """XLA's attention with a mask that hides one key too many."""

    def forward(query, key, value, causal, first):
        hidden = None if first is None else jnp.minimum(first + 1, jnp.arange(query.shape[1]))
        return XLA.forward(query, 1.02 * key, value, causal, hidden)

    attention_kernels.XLA, XLA = attention_kernels.XLA._replace(forward=forward), attention_kernels.XLA
    return kernels.attention("xla", tiny=True)


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
