"""The devices of a case's process, and a description of them."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.gpu_day.losses import DEVICES
from benchmarks.mfu import describe_device
from megajax.runtime.mesh import start_devices


def start():
    """Starts jax as a training run does, and returns its first device."""
    return start_devices(os.environ.get(DEVICES))[0]


def described_in_child(spec: str | None) -> dict[str, Any]:
    """The machine's devices, found in a process of its own: this one must not take their memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_described, spec).result()


def _described(spec: str | None) -> dict[str, Any]:
    return describe_device(start_devices(spec))
