"""Rows as blocks of documents: tables (CSV, TSV) and WebDataset's tar archives, by Python's own readers.

Rows are read one at a time, so memory is a block, or a longer row. A row without a text is reported, and has no document.
"""

import csv
import io
import json
import re
import shlex
import tarfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from megajax.config import ConfigError
from megajax.data.blocks import SHOWN, BadLine, Block, Rows
from megajax.data.read_file import PART, Part, check_file, read_parts
from megajax.data.sources import Wanted
from megajax.schedules.errors import shown

__all__ = ["RowBlocks", "missing_column", "read_table", "read_tar"]

FIELD = 1 << 30  # most bytes of a table's field: a quote that is not closed would take the rest of the file
MOST_ROWS = 1 << 16  # of a block
SEPARATORS = ",\t;|"
MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # WebDataset's key and extension


class RowBlocks:
    """Collects rows, and makes blocks of PART bytes or more of them."""

    def __init__(self, path: str, keys: Sequence[str], unit: str = "row"):
        """`unit`: what the rows' numbers count."""
        self.path, self.keys, self.unit = path, keys, unit
        self._clear()

    def add(self, number: int, texts: Sequence[bytes | str | None]) -> bool:
        """Adds a row's texts, one for each key; returns whether a block is full."""
        for key, text in zip(self.keys, texts, strict=True):
            if not isinstance(text, bytes):
                return self.refuse(number, f"{key!r} is empty" if text is None else f"{key!r} is no text")
        self._numbers.append(number)
        for column, text in zip(self._columns, texts, strict=True):
            column.append(text)
            self._size += len(text)
        return self._is_full()

    def refuse(self, number: int, reason: str, start: str = "") -> bool:
        """Adds a row that has no document; returns whether a block is full."""
        self._bad.append(BadLine(self.path, number, reason, start, unit=self.unit))
        return self._is_full()

    def take(self, read: int, size: int = 0) -> Iterator[Block]:
        """The block of the rows since the last call, if there are any; `read` of `size` bytes of the source are read."""
        if not self._numbers and not self._bad:
            return
        lengths = np.array([[len(text) for text in column] for column in self._columns], np.int64)
        rows = Rows(lengths, np.array(self._numbers, np.int64), tuple(self._bad))
        content = b"".join(text for column in self._columns for text in column)
        first = self._numbers[0] if self._numbers else self._bad[0].line
        self._clear()
        yield Block(self.path, "rows", first, content, read, rows=rows, size=size)

    def _is_full(self) -> bool:
        return self._size >= PART or len(self._numbers) + len(self._bad) >= MOST_ROWS

    def _clear(self) -> None:
        self._columns: list[list[bytes]] = [[] for _ in self.keys]
        self._numbers, self._bad, self._size = [], [], 0


def missing_column(path: str, key: str, columns: Iterable[str], option: str, texts: Sequence[str] = ()) -> ConfigError:
    """The error of a source without a column; `texts`: its columns that have texts."""
    names = list(columns)
    found = ", ".join(map(shown, names[:12])) + (", ..." if len(names) > 12 else "")
    best = shlex.quote((list(texts) or names or ["COLUMN"])[0])
    command = f"python -m megajax.data.preprocess --input {path} --keys {best} --out PREFIX --tokenizer NAME"
    remedy = (
        f"pass {'--text-key' if option == '--stream' else '--keys'} {best}"
        if option != "--text"
        else f"--text reads 'text' only: tokenize another column with `{command}`, and pass --data-path PREFIX"
    )
    return ConfigError(f"{path} has no column {key!r} (columns: {found or 'none'}); {remedy}")


def read_table(path: str, kind: str, wanted: Wanted, option: str) -> Iterator[Block]:
    """The blocks of a CSV or TSV file, as Python's csv reads it; its first row names the columns.

    The separator is that of the file's ending, or of , tab ; | the one that makes the wanted columns of the first row.

    Raises:
      ConfigError: it cannot be read, has no such column, or a field of more than FIELD bytes.
    """
    stream, size = _open(path, kind, option)
    csv.field_size_limit(FIELD)
    lines = (line.decode("utf-8", "surrogateescape") for line in stream)
    first = next(lines, "").removeprefix("\ufeff")
    separator = _separator(path, first, wanted.keys)
    reader = csv.reader(_chain(first, lines), delimiter=separator)
    blocks = RowBlocks(path, wanted.keys, "line")
    try:
        header = next(reader, [])
        for key in wanted.keys:
            if key not in header:
                raise missing_column(path, key, header, option)
        places = [header.index(key) for key in wanted.keys]
        line = reader.line_num + 1
        for row in reader:
            if len(row) != len(header):
                if row:  # else a blank line
                    start = repr(separator.join(row)[:SHOWN])
                    full = blocks.refuse(line, f"{len(row)} fields, and the first row has {len(header)}", start)
                else:
                    full = False
            else:
                full = blocks.add(line, [row[place].encode("utf-8", "surrogateescape") for place in places])
            line = reader.line_num + 1
            if full:
                yield from blocks.take(stream.raw.read_so_far, size)
    except csv.Error as error:
        closing = ": is a quote not closed?" if "field limit" in str(error) else ""
        raise ConfigError(f"{path}, line {reader.line_num}: {error}{closing}; correct the table") from None
    yield from blocks.take(stream.raw.read_so_far, size)


def read_tar(path: str, kind: str, wanted: Wanted, option: str) -> Iterator[Block]:
    """The blocks of a WebDataset's shard. Files of one name but for their extensions, next to each other, are a sample.

    A key is an extension of the sample ("text" also means .txt), or a key of the JSON object that its .json is.

    Raises:
      ConfigError: it cannot be read, is damaged, or its first sample has no such key.
    """
    stream, size = _open(path, kind, option)
    blocks, known = RowBlocks(path, wanted.keys, "sample"), False
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for number, sample in enumerate(_samples(archive)):
                if not known:
                    _check_sample(path, sample, wanted.keys, option)
                    known = True
                if blocks.add(number, [_member(sample, key) for key in wanted.keys]):
                    yield from blocks.take(stream.raw.read_so_far, size)
    except tarfile.TarError as error:
        raise ConfigError(
            f"cannot read {path}: the tar archive is damaged ({error}); pass {option} a complete file"
        ) from None
    if not known:
        raise ConfigError(
            f"{path} is a tar archive without samples of WebDataset (files KEY.txt or KEY.json): unpack it with "
            f"`tar -xf {path}`, and pass the files in it"
        )
    yield from blocks.take(stream.raw.read_so_far, size)


class _Parts(io.RawIOBase):
    """Decompressed parts of a file as a stream."""

    def __init__(self, parts: Iterator[Part]):
        self._parts, self._rest, self.read_so_far = parts, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, into) -> int:
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._rest, self.read_so_far = memoryview(part.content), part.read
        count = min(len(into), len(self._rest))
        into[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _open(path: str, kind: str, option: str) -> tuple[io.BufferedReader, int]:
    """A file's content as a stream, and its bytes."""
    remedy = f"pass {option} a readable file"
    size = check_file(path, kind, remedy, option)
    return io.BufferedReader(_Parts(read_parts(path, kind, remedy, option)), PART), size


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _separator(path: str, header: str, keys: Sequence[str]) -> str:
    usual = "\t" if ".tsv" in path.lower()[-8:] else ","
    for separator in (usual, *SEPARATORS):
        if set(keys) <= set(next(csv.reader([header], delimiter=separator), [])):
            return separator
    return max((usual, *SEPARATORS), key=header.count)


def _samples(archive: tarfile.TarFile) -> Iterator[dict[str, bytes]]:
    """The samples of an archive, as WebDataset groups them: extensions in lower case, and their contents."""
    sample, current = {}, None
    for member in archive:
        archive.members = []  # which would hold all of them
        found = MEMBER.fullmatch(member.name)
        if not member.isreg() or not found:
            continue
        key, extension = found[1], found[2].lower()
        if key != current or extension in sample:
            if sample:
                yield sample
            sample, current = {}, key
        sample[extension] = archive.extractfile(member).read()
    if sample:
        yield sample


def _member(sample: dict[str, bytes], key: str) -> bytes | str | None:
    """A sample's text; None if it has none, and a str if it is not a text."""
    for extension in (key, "txt") if key == "text" else (key,):
        if extension in sample:
            return sample[extension]
    record = _record(sample)
    if key not in record:
        return None
    try:
        return record[key].encode()
    except (AttributeError, UnicodeEncodeError):
        return "not a text"


def _record(sample: dict[str, bytes]) -> dict:
    try:
        found = json.loads(sample.get("json", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_sample(path: str, sample: dict[str, bytes], keys: Sequence[str], option: str) -> None:
    record = _record(sample)
    for key in keys:
        if _member(sample, key) is None:
            texts = [name for name, value in record.items() if isinstance(value, str)]
            raise missing_column(path, key, [*sample, *record], option, texts)
