"""Keeps the lines of gloo, which connects CPU devices of several processes, out of a run's output.

gloo prints a line for each group of devices that it connects, "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number
of connected peer ranks is : 1", to the process's standard output, and has no setting for it. So file descriptor 1 becomes a
pipe to a process that passes on all but these lines. Python writes past it, to the original one. A process and not a
thread: it needs no GIL, and passes on what is in the pipe when this process aborts.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import BinaryIO

__all__ = ["without_gloo_lines"]

# Threads print at once, so that parts of several lines may be mixed.
PARTS = re.compile(
    rb"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : )+\s*"
)
LINE = re.compile(rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected .* is : (\d+)\s*")


@contextlib.contextmanager
def without_gloo_lines() -> Iterator[None]:
    """Inside it, the lines of gloo that report success are not printed; `sys.stdout` is another object."""
    if not _has_standard_output():
        yield
        return
    original = os.dup(1)
    read, write = os.pipe()
    command = [sys.executable, "-I", "-S", __file__]
    # A session of its own: Ctrl-C ends this process first, which may still print.
    process = subprocess.Popen(command, stdin=read, stdout=original, start_new_session=True)
    os.close(read)
    sys.stdout.flush()
    os.dup2(write, 1)
    os.close(write)
    before, sys.stdout = sys.stdout, _same_stream(sys.stdout, original)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
        os.dup2(original, 1)  # the last end of the pipe but for those of child processes
        os.close(original)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def _has_standard_output() -> bool:
    """Whether `sys.stdout` writes to file descriptor 1, which is open. In tests and notebooks it does not."""
    try:
        return sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):
        return False


def _same_stream(stream, descriptor: int):
    """A text stream like `stream` to another descriptor."""
    return open(
        descriptor,
        "w",
        buffering=1 if stream.line_buffering or stream.write_through else -1,
        encoding=stream.encoding,
        errors=stream.errors,
        closefd=False,
    )


def kept(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines without those of gloo; a line that reports fewer connections than expected is kept."""
    dropped = False
    for line in lines:
        found = LINE.fullmatch(line)
        is_part = PARTS.fullmatch(line) and not line.strip().isdigit()
        rest = dropped and (not line.strip() or line.strip().isdigit())  # of mixed lines
        dropped = bool(found[1] == found[2] if found else is_part or rest)
        if not dropped:
            yield line


def copy(source: BinaryIO, target: BinaryIO) -> None:
    """Copies lines as they come."""
    for line in kept(iter(source.readline, b"")):
        target.write(line)
        target.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when all who write to the pipe have ended
    with contextlib.suppress(BrokenPipeError):
        copy(sys.stdin.buffer, sys.stdout.buffer)
