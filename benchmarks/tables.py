"""Results in groups, and as a table of text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """The rows of each group, in the order of their first ones; `key`: of a row's group."""
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def print_table(rows: Sequence[Mapping[str, Any]], digits: str) -> None:
    """Prints rows in columns, with the names of the first one's fields; `digits`: the format of a float, such as ".3f"."""
    text = lambda value: format(value, digits) if isinstance(value, float) else str(value)  # noqa: E731
    names = list(rows[0])
    table = [names] + [[text(row.get(name, "")) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(map(str.rjust, row, widths)))
