"""Blocks of whole documents, the units of work of preprocessing, and the documents in them.

A block is a piece of a text file, or the texts of some rows of a table, an archive or a dataset. `documents_of` takes either
apart, in a worker process.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megajax.data.file_kinds import not_utf8
from megajax.schedules.errors import shown

__all__ = ["Block", "BadLine", "JsonLine", "Rows", "documents_of", "json_lines"]

SHOWN = 80  # characters of a bad line that are printed
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Rows(NamedTuple):
    """The rows of a block whose content is their texts: those of the first key one after another, then those of the next.

    Attributes:
      lengths: bytes of each text, int64 [keys, rows].
      numbers: of the rows in their file, for messages, int64 [rows].
      bad: rows that have no text.
    """

    lengths: np.ndarray
    numbers: np.ndarray
    bad: tuple["BadLine", ...] = ()


class Block(NamedTuple):
    """One or more whole documents.

    Attributes:
      path: the file.
      kind: the unit of a document, "jsonl", "rows" or one of `text.TEXT_DOCUMENTS`.
      first_line: line number of the block's first line in the file, or from byte `begins` of it.
      content: decompressed bytes.
      read: bytes of the (compressed) file read so far.
      before: decompressed bytes before the block.
      rows: of the kind "rows"; None for the others.
      size: bytes of the (compressed) source, 0 if they are not known; of the kind "rows" only.
      begins: byte of the file from which lines are counted: of a file that is read in pieces, the piece's first.
    """

    path: str
    kind: str
    first_line: int
    content: bytes
    read: int
    before: int = 0
    rows: Rows | None = None
    size: int = 0
    begins: int = 0

    @property
    def unit(self) -> str:
        """What `first_line` counts, for messages."""
        return f"from byte {self.begins:,} line" if self.begins else "line"


class BadLine(NamedTuple):
    """A line that is not a document, and the reason.

    Attributes:
      start: the line's first characters.
      keys: of an object without the wanted key, the keys that have texts, the longest text's first.
      unit: what `line` counts.
    """

    path: str
    line: int
    reason: str
    start: str
    keys: tuple[str, ...] = ()
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.line}: {self.reason}" + (f": {self.start}" if self.start else "")


def documents_of(block: Block, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    """The block's documents, each with the text of every key (plain text has one), and the lines that are not documents."""
    if block.rows is not None:
        return _row_documents(block, block.rows)
    documents, bad = _line_documents(block, keys)
    return documents, [line._replace(unit=block.unit) for line in bad]


def _line_documents(block: Block, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    if block.kind == "jsonl":
        return _json_documents(block, keys)
    if block.before == 0 and block.content.startswith(BYTE_ORDER_MARK):
        block = block._replace(content=block.content[len(BYTE_ORDER_MARK) :], before=len(BYTE_ORDER_MARK))
    try:
        text = block.content.decode()
    except UnicodeDecodeError as error:
        line = block.first_line + block.content.count(b"\n", 0, error.start)
        if block.kind == "file":
            start = repr(block.content[error.start : error.start + 20])
            return [], [BadLine(block.path, line, not_utf8(error, block.path, block.before), start)]
        return _bytewise(block)
    if block.kind == "file":
        return [(text,)] if text.strip() else [], []
    parts = text.split("\n") if block.kind == "line" else re.split(r"\n[ \t\r]*\n", text)
    return [(part.strip("\r\n"),) for part in parts if part.strip()], []


class JsonLine(NamedTuple):
    """A line of JSON lines that is not blank.

    Attributes:
      number: of the line in the file.
      before: bytes of the file before the line.
      content: the line, without the file's byte order mark.
    """

    number: int
    before: int
    content: bytes


def json_lines(block: Block) -> Iterator[JsonLine]:
    """The lines of a block that are not blank."""
    start, number = 0, block.first_line
    while start < len(block.content):
        end = block.content.find(b"\n", start) + 1 or len(block.content)
        line = block.content[start:end]
        if line.strip():
            mark = len(BYTE_ORDER_MARK) * (block.before + start == 0 and line.startswith(BYTE_ORDER_MARK))
            yield JsonLine(number, block.before + start + mark, line[mark:])
        start, number = end, number + 1


def _row_documents(block: Block, rows: Rows) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    """The documents of a block of rows."""
    ends = np.cumsum(rows.lengths.reshape(-1)).reshape(rows.lengths.shape)
    documents, bad = [], list(rows.bad)
    for row, number in enumerate(rows.numbers.tolist()):
        texts = [block.content[end - size : end] for end, size in zip(ends[:, row], rows.lengths[:, row], strict=True)]
        try:
            documents.append(tuple(text.decode() for text in texts))
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start} of the text)"
            start = repr(error.object[error.start : error.start + 20])
            bad.append(BadLine(block.path, number, reason, start, unit="row"))
    return documents, bad


def _json_documents(block: Block, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    documents, bad = [], []
    for line in json_lines(block):
        record = None
        try:
            record = json.loads(line.content)
            texts = tuple(record[key] for key in keys)
            for text in texts:
                text.encode()  # fails for values that are not strings, and for half a surrogate pair
            documents.append(texts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            start = repr(line.content[:SHOWN].rstrip(b"\r\n").decode(errors="replace"))
            if isinstance(error, KeyError):
                reason, others = _missing_key(error.args[0], record)
                bad.append(BadLine(block.path, line.number, reason, start, others))
            else:
                reason = _reason(error, keys, block.path, line.before)
                bad.append(BadLine(block.path, line.number, reason, start))
    return documents, bad


def _missing_key(key: str, record: dict) -> tuple[str, tuple[str, ...]]:
    """Why an object has no document, and its keys that have texts, the longest text's first."""
    texts = sorted(
        (name for name, value in record.items() if isinstance(value, str)), key=lambda name: -len(record[name])
    )
    inner = next((name for name, value in record.items() if isinstance(value, dict) and key in value), None)
    if inner is not None:
        return f"no {key!r}, which is in {inner!r} (jq -c '.{inner}' takes it out)", ()
    found = f" (keys: {', '.join(map(shown, list(record)[:8]))})" if record else ""
    return f"no {key!r}{found}", tuple(texts)


def _reason(error: Exception, keys: Sequence[str], path: str, before: int) -> str:
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(error, path, before)
    if isinstance(error, UnicodeEncodeError):
        return "half a surrogate pair"
    if isinstance(error, json.JSONDecodeError):
        return "not JSON"
    return f"not an object with a string {' and '.join(map(repr, keys))}"


def _bytewise(block: Block) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    """Decodes a block that is not entirely UTF-8 line by line or paragraph by paragraph."""
    documents, bad, line, before = [], [], block.first_line, block.before
    separator = rb"(\n)" if block.kind == "line" else rb"(\n[ \t\r]*\n)"
    for part in re.split(separator, block.content):
        try:
            text = part.decode()
            if text.strip():
                documents.append((text.strip("\r\n"),))
        except UnicodeDecodeError as error:
            start, number = repr(part[error.start : error.start + 20]), line + part.count(b"\n", 0, error.start)
            bad.append(BadLine(block.path, number, not_utf8(error, block.path, before), start))
        line, before = line + part.count(b"\n"), before + len(part)
    return documents, bad
