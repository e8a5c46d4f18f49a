"""What a library prints about a failed write, which the run's log has in one line."""

import logging
import sys

import pytest

from megajax.checkpoint.libraries import _is_other_message


def record(path: str, message: str, error: BaseException | None = None) -> logging.LogRecord:
    """As a library's thread logs it."""
    caught = None
    if error:
        try:
            raise error
        except type(error):
            caught = sys.exc_info()
    return logging.LogRecord("absl", logging.ERROR, path, 385, message, None, caught)


ORBAX = "/site-packages/orbax/checkpoint/_src/futures/future.py"
FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("path", "message", "error", "shown"),
    [
        # jax 0.10 and its orbax on a full disk: the message names no file
        (ORBAX, "_SignalingThread.run() raised an exception: [Errno 28] No space left on device", FULL, False),
        (ORBAX, "a write failed in run/checkpoints/step_00000010.unfinished/state", None, False),
        ("/asyncio/base_events.py", "Task exception was never retrieved", FULL, False),
        (ORBAX, "a warning of orbax", None, True),
        ("/site-packages/other/orbax.py", "an error of another library", FULL, True),
    ],
)
def test_tracebacks_of_failed_writes_are_not_shown(path, message, error, shown):
    assert _is_other_message(record(path, message, error)) == shown
