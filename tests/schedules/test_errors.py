"""Exit codes of commands."""

import os
import subprocess
import sys

import pytest

from megajax.schedules.errors import exit_code

PRINTS = "import sys; from megajax.schedules.errors import exit_code; sys.exit(exit_code(lambda: print({text})))"


@pytest.mark.parametrize("text", ["'a line'", "'x' * 10**6"], ids=["in the buffer", "more than the buffer"])
def test_output_that_nobody_reads_is_no_error(text):
    """As with `command | head`, which ends before the command does."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PRINTS.format(text=text)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_pipe_that_breaks_is_an_error():
    def command():
        raise BrokenPipeError("a child's")

    with pytest.raises(BrokenPipeError, match="a child's"):
        exit_code(command)
