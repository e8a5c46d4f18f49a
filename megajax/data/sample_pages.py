"""Samples in colour, on a terminal and as an HTML file: tokens, documents, and which of them are learnt."""

import html
import importlib.resources
import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megajax.data.sample_reader import Cell, SampleReader, cells
from megajax.data.sample_report import facts, title

__all__ = ["Shown", "page", "print_samples", "shown"]

REPEATED = 8  # equal tokens that do not count, from which on they are counted instead of shown
VISIBLE = str.maketrans({"\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d", "\0": "\u2400"})
KEY = (
    ("learnt", "a label that counts in the loss"),
    ("weighted", "one with another weight than 1"),
    ("masked", "a label of weight 0"),
    ("input", "an input that is no label"),
    ("only", "a label that is no input"),
)
TERMINAL = {"learnt": "bold green", "weighted": "bold yellow", "masked": "dim", "input": "cyan", "only": "underline"}


class Shown(NamedTuple):
    """A sample: its title, facts (names and values), and tokens."""

    title: str
    facts: list[tuple[str, str]]
    cells: list[Cell]


def shown(reader: SampleReader, numbers: Sequence[int]) -> Iterator[Shown]:
    """Samples by their numbers in the run.

    Raises:
      ConfigError: the run has no such sample, or its data cannot be read.
    """
    for number in numbers:
        row = reader.row(number)
        yield Shown(title(reader.run, number), facts(reader, number, row), cells(row, reader.tokenizer))


def print_samples(samples: Sequence[Shown], console: Any) -> None:
    """Prints samples in colour on rich's console."""
    from rich.text import Text

    for sample in samples:
        console.print(Text(sample.title, "bold"))
        for name, value in sample.facts:
            console.print(Text.assemble((f"  {name:8} ", "dim"), value), soft_wrap=True)
        text = Text("  ")
        for cell, count in _runs(sample.cells):
            style = " ".join(TERMINAL[kind] for kind in _kinds(cell))
            style += " on grey23" if cell.document % 2 else ""
            text.append(
                _text(cell) + ("\n  " if "\n" in cell.text else "") + (f"\u00d7{count} " if count > 1 else ""), style
            )
        console.print(text)
        console.print()
    names = [(f" {name}: {meaning} ", TERMINAL[name]) for name, meaning in KEY]
    console.print(Text.assemble(*names, "; neighbouring documents have different backgrounds"))


def page(samples: Sequence[Shown], heading: str, tables: str = "") -> str:
    """An HTML page of samples that needs no other file; `tables`: HTML after the heading."""
    template = (importlib.resources.files("megajax.data") / "samples.html").read_text(encoding="utf-8")
    key = "".join(f'<li><span class="{name}">{name}</span> {meaning}</li>' for name, meaning in KEY)
    texts = {
        "title": html.escape(heading),
        "key": key if samples else "",
        "tables": tables,
        "samples": "".join(map(_section, samples)),
    }
    return string.Template(template).substitute(texts)


def _section(sample: Shown) -> str:
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in sample.facts)
    spans = "".join(_span(cell, count) for cell, count in _runs(sample.cells))
    return f'<section><h2>{html.escape(sample.title)}</h2><dl>{rows}</dl><p class="text">{spans}</p></section>\n'


def _span(cell: Cell, count: int) -> str:
    weight = "no label" if cell.weight is None else f"weight {cell.weight:g}"
    part = f"token {cell.token}, document {cell.document}, {weight}{'' if cell.is_input else ', not an input'}"
    classes = " ".join([*_kinds(cell), f"d{cell.document % 2}"])
    times = f"<b>\u00d7{count}</b>" if count > 1 else ""
    end = "<br>" if "\n" in cell.text else ""
    return f'<span class="{classes}" title="{part}">{html.escape(_text(cell))}{times}</span>{end}'


def _kinds(cell: Cell) -> list[str]:
    """The names of KEY that hold for a token."""
    weight = cell.weight
    kind = "input" if weight is None else "masked" if weight == 0 else "learnt" if weight == 1 else "weighted"
    return [kind] if cell.is_input else [kind, "only"]


def _text(cell: Cell) -> str:
    text = cell.text.translate(VISIBLE) or "\u00b7"
    text = "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)
    return f"{text}\u2192{cell.wanted.strip()} " if cell.wanted is not None else text


def _runs(found: Sequence[Cell]) -> Iterator[tuple[Cell, int]]:
    """Tokens, and how often each follows; only those that do not count are joined."""
    for cell, group in itertools.groupby(found):
        count = len(list(group))
        if count >= REPEATED and not cell.weight:
            yield cell, count
        else:
            yield from ((cell, 1) for _ in range(count))


def table(head: Sequence[str], rows: Sequence[Mapping[str, str] | Sequence[str]]) -> str:
    """An HTML table."""
    line = lambda row, tag: "<tr>" + "".join(f"<{tag}>{html.escape(str(one))}</{tag}>" for one in row) + "</tr>"  # noqa: E731
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"
