"""What the command lines of all commands share: a parser that raises its errors, and readers of options' values."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from megajax.schedules.errors import UserError, one_line, shown

# Counts are int32 in the compiled program and in the tables of a schedule.
INT32 = 2**31
# Numbers are fp32 in the compiled program.
FLOAT32 = 3.4e38


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line; it then exits with code 2.

    Attributes:
      renamed: older names of options, which are still accepted: {"--global-batch": "--global-batch-size"}.
      synonyms: names that other tools have for options, which the error names: {"--num-microbatches": "--microbatches"}.
    """

    def __init__(self, *args, allow_abbrev: bool = False, **settings):
        """As argparse's, but no option is abbreviated, which would hide a misspelling, and a description keeps its lines."""
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter} | settings
        super().__init__(*args, allow_abbrev=allow_abbrev, **settings)
        self.renamed: dict[str, str] = {}
        self.synonyms: dict[str, str] = {}
        self._words: list[str] = []

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, which to Python 3.12.4 returns an empty list as the value of --option=--."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if word.endswith("=--"):
                self.error(f"argument {word.removesuffix('=--')}: '--' is not a value")
        own = words.index("--") if "--" in words else len(words)
        for place, word in enumerate(words[:own]):
            if new := self.renamed.get(word.partition("=")[0]):
                words[place] = renamed(word, new)
        self._words = words
        return super().parse_known_args(words, namespace)

    def parse_args(self, args=None, namespace=None):
        """As argparse's; the error of an unknown option names the option that was meant."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return known

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Ends with the error about words that belong to no option."""
        self.exit(2, f"error: {one_line(self.describe_unknown(words))}\n")

    def describe_unknown(self, words: Sequence[str]) -> str:
        """The message about words that belong to no option."""
        given = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if given is None:
            return f"{words[0]!r} is not an option: options start with --; --help lists them"
        if own := self.synonyms.get(given.replace("_", "-").lower()):
            return f"there is no option {given}: it is {own} here"
        return f"there is no option {given}: {near_hint(given, self._option_string_actions)}"

    def error(self, message: str):
        if unknown := self._unknown_with(message):
            self.refuse(unknown)
        self.exit(2, f"error: {one_line(message.removeprefix('argument '))}; --help lists every option\n")

    def _unknown_with(self, message: str) -> list[str]:
        """The unknown options, if the message is that one is missing: it may be there by another name."""
        if not message.startswith("the following arguments are required"):
            return []
        names = (word.partition("=")[0] for word in self._words if word.startswith("--"))
        return [name for name in names if name not in self._option_string_actions]


class Parser(CommandParser):
    """An argument parser that raises its errors."""

    mistake: type[UserError] = UserError

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Raises the error about words that belong to no option."""
        raise self.mistake(self.describe_unknown(words))

    def error(self, message: str):
        if unknown := self._unknown_with(message):
            self.refuse(unknown)
        raise self.mistake(f"{message.removeprefix('argument ')}; --help lists every option with its values")


def near_hint(given: str, options: Iterable[str]) -> str:
    """The part of a message about an option that is not among `options`: those that are spelled alike, if any."""
    found = near_options(given, options)
    return f"did you mean {' or '.join(found)}?" if found else "--help lists every option"


def near_options(given: str, options: Iterable[str], cutoff: float = 0.65) -> list[str]:
    """At most three options that start with a name, the shortest first, or are spelled alike.

    Names are compared without dashes. Two letters, "--lr", are like nothing. `cutoff`: difflib's ratio.
    """
    names = {name.replace("-", ""): name for name in options if name.startswith("--")}
    word = given.replace("-", "").replace("_", "").lower()
    if len(word) < 3:
        return []
    starts = sorted((name for name in names if name.startswith(word)), key=lambda name: (len(name), name))
    alike = difflib.get_close_matches(word, names, n=3, cutoff=cutoff)
    return [names[name] for name in dict.fromkeys([*starts, *alike])][:3]


def renamed(word: str, new: str) -> str:
    """A word of a command line with an option's new name in place of its older one, which a line on stderr tells of."""
    old, equals, value = word.partition("=")
    print(f"note: {old} is now called {new}", file=sys.stderr)
    return new + equals + value


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first "--", which separates a command's own options from another command."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def whole(low: int = 1, below: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers from `low` to `below` - 1; None: to the largest int32."""
    return _reader(whole_number, "a whole number", low, below, INT32)


def number(low: float | None = None, below: float | None = None) -> Callable[[str], float]:
    """A reader of finite numbers: above 0, or from `low`."""
    return _reader(real_number, "a number", low, below, FLOAT32)


def _reader(convert: Callable, kind: str, low: float | None, below: float | None, most: float) -> Callable:
    """A reader of numbers in a range; see `range_problem`."""

    def read(text: str):
        value = convert(text)
        if problem := range_problem(value, low, below, most):
            raise argparse.ArgumentTypeError(f"{shown(value)} must be {kind}, {problem}")
        return value

    return read


def whole_number(text: str) -> int:
    """An integer of any size; see `whole` for one with a range."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number") from None


def real_number(text: str) -> float:
    """A float, possibly infinite; see `number` for one with a range."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number") from None


def is_count(text: str) -> bool:
    """Whether a text is a whole number, 0 or more, of int32."""
    return text.isdecimal() and len(text) <= 10 and int(text) < INT32


def plain_text(value: str) -> str:
    """A reader of names and paths, which must not be empty."""
    problem = text_problem(value)
    if problem:
        raise argparse.ArgumentTypeError(f"{shown(value)} {problem}")
    return value


def range_problem(value: float, low: float | None, below: float | None, most: float) -> str:
    """The legal range, if `value` is outside of it or not a number; otherwise "".

    Args:
        value: of any type that compares with numbers; integers may be of any size.
        low: smallest legal value; None: values must be above 0.
        below: values must be below this; None: below `most`, which the message names only if the value exceeds it.
        most: what the program can hold: INT32 or FLOAT32.
    """
    limit = most if below is None else below
    if (value > 0 if low is None else value >= low) and value < limit:  # False for NaN
        return ""
    legal = "above 0" if low is None else f"{low} or more"
    return legal + (f" and below {limit}" if below is not None or abs(value) >= most else "")


def text_problem(value: str, may_be_empty: bool = False) -> str:
    """Why a text is not legal as a name or path; "" if it is."""
    if not value.strip() and not may_be_empty:
        return "must not be empty"
    # config.toml could not hold it. Surrogates are bytes of the command line that are not UTF-8.
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", value):
        return "has control characters, or bytes that are not UTF-8"
    # The system's limits, which pathlib meets as an OSError. A prompt, which may be empty, is not a name.
    if not may_be_empty and (len(value) > 4000 or any(len(name.encode()) > 255 for name in value.split("/"))):
        return "is longer than the name of a file can be"
    return ""
