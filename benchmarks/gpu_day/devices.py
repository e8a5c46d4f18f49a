"""The devices of a case's process, and a description of them."""

import os
from typing import Any

from benchmarks.gpu_day.losses import DEVICES
from benchmarks.mfu import describe_device
from megajax.runtime.mesh import start_devices


def start():
    """Starts jax as a training run does, and returns its first device."""
    return start_devices(os.environ.get(DEVICES))[0]


def described(spec: str | None) -> dict[str, Any]:
    """The machine's devices; jax starts on them."""
    return describe_device(start_devices(spec))
