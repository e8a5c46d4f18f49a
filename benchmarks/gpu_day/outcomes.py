"""How a case's function says that something is wrong, slow, or not available; any other exception is an error.

And the variables by which the cases' processes are told where to run.
"""

from typing import Any

# Instead of the machine's devices, as of --devices.
DEVICES = "MEGAJAX_GPU_DAY_DEVICES"
# CUDA's numbers of this machine's GPUs, of which a case of one device gets one.
GPUS = "MEGAJAX_GPU_DAY_GPUS"
# NAME:COUNT of GPUs that cases are compiled for; nothing is run.
TARGET = "MEGAJAX_GPU_DAY_TARGET"


class NotAvailable(Exception):
    """What the case needs is not installed, or this device does not have it; the message says what."""


class Wrong(Exception):
    """A number differs from its reference by more than its limit."""

    status = "wrong"

    def __init__(self, reason: str, result: Any):
        """`result`: the case's result, with the numbers."""
        super().__init__(reason)
        self.result = result


class Slow(Wrong):
    """A step took much longer than predicted."""

    status = "slow"


class Refused(Wrong):
    """The compiler refuses a program."""

    status = "error"
