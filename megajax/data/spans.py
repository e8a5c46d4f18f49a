"""Parts of equal bytes of a list of sources: whole sources, and of large files of lines also their pieces.

A piece has the lines whose first byte is in it, so every line is in exactly one piece, whatever ends it. Divided are
uncompressed files of lines on a disk or at a URL, and only those that have more bytes than a part.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megajax.data.file_kinds import is_json_lines
from megajax.data.read_file import is_compressed, read_parts, read_range

__all__ = ["DIVIDED", "Place", "Span", "place_of_part", "spans_between", "units_of_lines"]

DIVIDED = 1 << 20  # bytes; smaller files are never divided
REMEDY = "pass --input a readable file"
LINES = ("jsonl", "line")  # kinds


class Place(NamedTuple):
    """A place in a list of sources: before the byte `byte` of source `source`."""

    source: int
    byte: int


class Span(NamedTuple):
    """A source, or a piece of one.

    Attributes:
      path: of the source.
      start, stop: its first byte, and the one after its last, at line ends. `stop` None: the whole source.
      kind: of a piece, the unit of a document, one of LINES; "" for a whole source.
    """

    path: str
    start: int = 0
    stop: int | None = None
    kind: str = ""


def units_of_lines(path: str, kind: str) -> str:
    """The kind of a file if its lines are documents that can be read from anywhere; else "".

    Args:
      path: a file on a disk, or a URL, not empty.
      kind: see `source_kind`.

    Raises:
      ConfigError: the file cannot be read.
    """
    if kind not in (*LINES, "file") or is_compressed(path, REMEDY):
        return ""
    if kind != "file":
        return kind
    first = next(read_parts(path, kind, REMEDY, "--input"), None)
    return "jsonl" if first and is_json_lines(first.content) else ""


def place_of_part(
    index: int,
    count: int,
    paths: Sequence[str],
    sizes: Sequence[int],
    is_divided: Callable[[int], bool] = lambda source: False,
) -> Place:
    """Where part `index` of `count` begins; part `count` begins at the end.

    In a file that is divided it is at the first line that begins in the part. Of other sources, those belong to the part
    whose middle byte is in it.

    Args:
      paths, sizes: of the sources: bytes, or 1 of each.
      is_divided: whether the source of that number is; asked only for those that a part begins in.

    Raises:
      ConfigError: a file that is divided cannot be read.
    """
    total, start = max(1, sum(sizes)), 0
    if not 0 < index < count:
        return Place(len(sizes) if index else 0, 0)
    for number, size in enumerate(sizes):
        begin = index * total // count - start  # of the part, in this source
        if 0 < begin < size and is_divided(number):
            line = _line_start(paths[number], begin, size)
            return Place(number, line) if line < size else Place(number + 1, 0)
        if (2 * start + size) * count >= 2 * index * total:
            return Place(number, 0)
        start += size
    return Place(len(sizes), 0)


def spans_between(
    first: Place, end: Place, paths: Sequence[str], sizes: Sequence[int], kind_of: Callable[[int], str]
) -> list[Span]:
    """The sources from one place to another.

    Args:
      first, end: see `place_of_part`.
      paths, sizes: of the sources.
      kind_of: the kind of the source of that number, if it is divided; see `units_of_lines`.
    """
    spans = []
    for number in range(first.source, end.source + (end.byte > 0)):
        start = first.byte if number == first.source else 0
        stop = end.byte if number == end.source else None
        if not start and stop is None:
            spans.append(Span(paths[number]))
        elif stop is None or start < stop:
            spans.append(Span(paths[number], start, sizes[number] if stop is None else stop, kind_of(number)))
    return spans


def _line_start(path: str, place: int, size: int) -> int:
    """The first byte of the first line that begins at `place` or after it; `size` if none does."""
    begin = place - 1
    for part in read_range(path, begin, size, REMEDY):
        if (found := part.content.find(b"\n")) >= 0:
            return begin + found + 1
        begin += len(part.content)
    return size
