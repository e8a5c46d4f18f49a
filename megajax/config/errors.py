"""ConfigError, and helpers for its messages, which name the given value, the legal values and the option to pass."""

import difflib
import math
from collections.abc import Iterable

from megajax.schedules.arguments import INT32
from megajax.schedules.errors import UserError


class ConfigError(UserError):
    """An invalid configuration. The message names the given value, the legal values and the option to pass."""


def option(name: str) -> str:
    """The command-line option of a field: "--global-batch-size" for "global_batch_size"."""
    return "--" + name.replace("_", "-")


def near(given: str, names: Iterable[str]) -> str:
    """The part of a message about a name that is not among `names`: at most three near matches, or all of them.

    Near are those that begin with it, if it has three letters or more, and those that are spelled alike.
    """
    names, start = tuple(names), given.lower()
    longer = [name for name in names if len(given) > 2 and name.lower().startswith(start)]
    alike = difflib.get_close_matches(given, names, n=3, cutoff=0.6)
    matches = list(dict.fromkeys([*longer, *alike]))[:3]
    return f"did you mean {' or '.join(matches)}?" if matches else f"choose from {', '.join(names)}."


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def multiples(step: int, value: int) -> list[int]:
    """The multiples of `step` (positive) just below and just above `value` that are legal counts."""
    below = value // step * step
    return [n for n in (below, below + step) if 0 < n < INT32]


def one_of(name: str, legal: Iterable[int], value: int) -> str:
    """A field's option with those of the legal values that are nearest to `value`: "--data 1 or 2"; "" without any."""
    legal = [n for n in legal if 0 < n < INT32]
    return f"{option(name)} {some(legal, value)}" if legal else ""


def either(*remedies: str) -> str:
    """The remedies that are not empty, as a list in prose: "--data 1 or 2, or --pipe 4"."""
    return ", or ".join(filter(None, remedies))


def some(legal: list[int], value: int) -> str:
    """At most four of the legal values, those nearest to `value`, as a list in prose: "1, 2 or 4"."""
    nearest = sorted(sorted(legal, key=lambda n: abs(n - value))[:4])
    return " or ".join(filter(None, [", ".join(map(str, nearest[:-1])), str(nearest[-1])]))
