"""Errors for a user's mistakes: one line of printable text, whatever value the message quotes."""

import functools
import os
import re
import reprlib
import select
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

LONGEST = 2000  # characters of a message; a legal one has less than half as many


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: 1 document, 1,234 documents. `plural` None: the noun with an "s"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


class UserError(ValueError):
    """A user's mistake. Its message is one line, which says what was given, what is legal and which option to pass."""

    def __init__(self, message: str = ""):
        """`message` is shortened and escaped by `one_line`."""
        super().__init__(one_line(str(message)))


def exit_code(command: Callable[[], int | None], stopped: str = "stopped") -> int:
    """Runs a command: its exit code, 0 for None; 2 after a user's mistake, printed as one line; 130 after Ctrl-C.

    141 if nothing reads the rest of its output, as in `command | head`, without a word. `stopped` is printed after Ctrl-C.
    """
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{stopped}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _is_closed(sys.stdout):
            raise
        # What is left in the buffer goes nowhere: Python would report it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def command(run: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Makes the `main` of a command of what it does with its arguments, sys.argv's if None; returns `exit_code`'s."""

    @functools.wraps(run)
    def main(arguments: Sequence[str] | None = None) -> int:
        return exit_code(lambda: run(arguments))

    return main


def _is_closed(stream: IO[str]) -> bool:
    """Whether the reader of a pipe has gone."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class _Short(reprlib.Repr):
    """Reprs of limited length and depth, also of integers that Python does not convert to text."""

    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 100
        self.maxlevel = 4

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 10_000:  # Python refuses to print more than 4,300 digits
            return f"a number of {x.bit_length()} bits"
        return super().repr_int(x, level)


SHORT = _Short()


def shown(value: Any) -> str:
    """The repr of any value, at most about 100 characters for each of its first elements."""
    return SHORT.repr(value)


def one_line(text: str) -> str:
    """Text as one line of printable characters: newlines become spaces, other control characters are escaped."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 800]} ... {text[-700:]}"
    text = re.sub(r"\s*[\r\n]+\s*", " ", text.strip())
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
