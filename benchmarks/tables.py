"""Results as a table of text."""

from collections.abc import Mapping, Sequence
from typing import Any


def print_table(rows: Sequence[Mapping[str, Any]], digits: str) -> None:
    """Prints rows in columns, with the names of the first one's fields; `digits`: the format of a float, such as ".3f"."""
    text = lambda value: format(value, digits) if isinstance(value, float) else str(value)  # noqa: E731
    names = list(rows[0])
    table = [names] + [[text(row.get(name, "")) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(map(str.rjust, row, widths)))
