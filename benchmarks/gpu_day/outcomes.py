"""How a case's function says that something is wrong, slow, or not available; any other exception is an error."""

from typing import Any


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
