"""Rows as blocks of documents: Parquet, Arrow, folders of save_to_disk, and datasets of the Hugging Face Hub.

pyarrow reads the files, `datasets` those of the Hub (extra `data`). Batches of rows are read one at a time, and of columns
only the wanted ones.
"""

import contextlib
import importlib
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.data.blocks import Block
from megajax.data.file_kinds import foreign
from megajax.data.read_file import PART, check_place, first_bytes
from megajax.data.remote import is_url, open_binary, remote_errors, size_of
from megajax.data.rows import RowBlocks, missing_column
from megajax.data.sources import HUB, SPLITS, Wanted
from megajax.schedules.errors import shown

__all__ = ["read_arrow", "read_arrow_records"]

ROWS_AT_ONCE = 8192  # at most
RECORDS = 256  # rows of a block of JSON lines
NAMES = {
    "parquet": "a Parquet file",
    "arrow": "an Arrow file",
    "saved": "a dataset, written by save_to_disk",
    "hub": "a dataset of the Hugging Face Hub",
}


def read_arrow(path: str, kind: str, wanted: Wanted, option: str) -> Iterator[Block]:
    """The blocks of a source of `sources.ARROW`.

    Raises:
      ConfigError: a library is missing, the source cannot be read, or it has no such split or column of texts.
    """
    blocks, number, last = RowBlocks(path, wanted.keys), 0, (0, 0)
    for batch, *last in _batches(path, kind, wanted, option):
        texts = [_column(batch, key) for key in wanted.keys]
        for row in zip(*texts, strict=True):
            if blocks.add(number, row):
                yield from blocks.take(*last)
            number += 1
    yield from blocks.take(*last)


def read_arrow_records(path: str, kind: str, wanted: Wanted, option: str) -> Iterator[Block]:
    """The rows of a source of `read_arrow` with all their columns, as blocks of JSON lines; `wanted` has no keys.

    A value that is missing is left out: Arrow has the keys of all objects in each.
    """
    number = 0
    for batch, read, size in _batches(path, kind, wanted, option):
        rows = batch.to_pylist()
        for place in range(0, len(rows), RECORDS):
            part = rows[place : place + RECORDS]
            lines = "".join(json.dumps(_present(row), ensure_ascii=False, default=str) + "\n" for row in part)
            yield Block(path, "jsonl", number + 1, lines.encode("utf-8", "surrogatepass"), read, size=size)
            number += len(part)


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


def _batches(path: str, kind: str, wanted: Wanted, option: str) -> Iterator[tuple[Any, int, int]]:
    """Batches of rows of the wanted columns, or of all; with the bytes read and those of the source."""
    library = "datasets" if kind == "hub" else "pyarrow"
    _library(library, f"{path} is {NAMES[kind]}")
    pyarrow = _library("pyarrow", f"{path} is {NAMES[kind]}")
    remedy = f"pass {option} a complete one"
    with _errors(path, NAMES[kind], remedy), remote_errors(path, remedy):
        if kind == "hub":
            yield from _hub(path, wanted, option)
        elif kind == "saved":
            yield from _saved(path, wanted, pyarrow, option)
        else:
            _check_file(path, kind, option)
            yield from (_parquet if kind == "parquet" else _arrow)(path, wanted, pyarrow, option)


def _library(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{what}, which {name} reads ({error}): pip install 'megajax[data]'") from None


@contextlib.contextmanager
def _errors(path: str, what: str, remedy: str) -> Iterator[None]:
    """Errors of pyarrow as one line; a consumer's exceptions are not raised in here."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of pyarrow: several types, OSError among them
        text = " ".join(str(error).split())[:200]
        raise ConfigError(f"cannot read {path}: not {what} that is complete ({text}); {remedy}") from None


def _check_file(path: str, kind: str, option: str) -> None:
    """Refuses what is no file, and one that is compressed as a whole."""
    if is_url(path):
        return
    check_place(path, f"pass {option} a readable file", option)
    with open(path, "rb") as file:
        start = file.read(4)
    head = first_bytes(path)
    if not head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")) and (other := foreign(head, path, "line")):
        raise ConfigError(f"{path} is {other.what}: {other.remedy}")
    if head[:4] != start:
        raise ConfigError(f"{path} is {NAMES[kind]}, compressed as a whole: decompress it, and pass the file in it")


def _parquet(path: str, wanted: Wanted, pyarrow: ModuleType, option: str) -> Iterator[tuple[Any, int, int]]:
    """Batches of a file, with the bytes read and those of the whole file, in proportion to the rows."""
    parquet = importlib.import_module("pyarrow.parquet")
    size = size_of(path)
    with open_binary(path) as opened, parquet.ParquetFile(opened, buffer_size=PART, pre_buffer=False) as file:
        names = _check_columns(path, file.schema_arrow, wanted, option, pyarrow)
        total, done = max(1, file.metadata.num_rows), 0
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        heavy = sum(
            group.column(place).total_uncompressed_size
            for group in groups
            for place in range(group.num_columns)
            if not names or group.column(place).path_in_schema.partition(".")[0] in names
        )
        at_once = max(1, min(ROWS_AT_ONCE, int(4 * PART * total / max(1, heavy))))
        for batch in file.iter_batches(at_once, columns=list(wanted.keys) or None, use_threads=False):
            done += batch.num_rows
            yield batch, size * done // total, size


def _arrow(path: str, wanted: Wanted, pyarrow: ModuleType, option: str) -> Iterator[tuple[Any, int, int]]:
    """Batches of a file or stream of Arrow's IPC."""
    size = size_of(path)
    with contextlib.ExitStack() as stack:
        if is_url(path):
            opened = pyarrow.PythonFile(stack.enter_context(open_binary(path)), mode="r")
        else:
            opened = stack.enter_context(pyarrow.memory_map(path))
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        reader = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(opened)
        _check_columns(path, reader.schema, wanted, option, pyarrow)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else iter(reader)
        for batch in batches:
            yield batch, opened.tell() if not is_file else size, size


def _saved(path: str, wanted: Wanted, pyarrow: ModuleType, option: str) -> Iterator[tuple[Any, int, int]]:
    """Batches of a folder that save_to_disk wrote, or of a split of it."""
    folder = path.rstrip("/")
    splits = _json(f"{folder}/{SPLITS}")
    if splits is not None:
        names = [str(name) for name in splits.get("splits", [])]
        folder = f"{folder}/{_split(path, names, wanted.split)}"
    elif wanted.split is not None:
        raise ConfigError(f"--split {wanted.split}: {path} is one dataset without splits; omit the option")
    state = _json(f"{folder}/state.json") or {}
    files = [entry["filename"] for entry in state.get("_data_files") or []]
    if not files or state.get("_indices_data_files"):
        old = "it selects rows by a list of numbers, as old versions of datasets do: save it again"
        raise ConfigError(f"cannot read {path}: " + (old if files else f"{folder}/state.json names no data files"))
    files = [f"{folder}/{name}" for name in files]
    size, before = sum(map(size_of, files)), 0
    for file in files:
        for batch, read, _ in _arrow(file, wanted, pyarrow, option):
            yield batch, before + read, size
        before += size_of(file)


def _hub(path: str, wanted: Wanted, option: str) -> Iterator[tuple[Any, int, int]]:
    """Batches of a split of a dataset, which `datasets` downloads, or finds in its cache."""
    datasets = importlib.import_module("datasets")
    name = path.removeprefix(HUB)
    try:
        found = datasets.load_dataset(name, wanted.subset, split=wanted.split or "train")
    except Exception as error:  # of many types, also of its HTTP library
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"{option} {path}: datasets cannot load {name} ({text}); --split and --subset choose a part of it, and a "
            "private one needs `hf auth login`"
        ) from None
    pyarrow = importlib.import_module("pyarrow")
    _check_columns(path, found.features.arrow_schema, wanted, option, pyarrow)
    chosen = found.select_columns(list(wanted.keys)) if wanted.keys else found
    for table in chosen.with_format("arrow").iter(256):
        for batch in table.to_batches():
            yield batch, 0, 0


def _split(path: str, names: list[str], split: str | None) -> str:
    if split is None and ("train" in names or len(names) == 1):
        return "train" if "train" in names else names[0]
    if split not in names:
        problem = f"no split {shown(split)}" if split else "several splits"
        raise ConfigError(f"{path} has {problem}: pass --split {', '.join(names) or 'NAME'}")
    return split


def _json(path: str) -> dict | None:
    """The object in a file; None if there is no such file."""
    try:
        with open_binary(path) as file:
            found = json.loads(file.read())
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else {}


def _check_columns(path: str, schema: Any, wanted: Wanted, option: str, pyarrow: ModuleType) -> set[str]:
    """Refuses a source without the wanted columns, or with others than texts in them; returns their names."""
    texts = [field.name for field in schema if _is_text(field.type, pyarrow)]
    for key in wanted.keys:
        if key not in schema.names:
            raise missing_column(path, key, schema.names, option, texts)
        if key not in texts:
            others = f"pass --keys {shown(texts[0])}" if texts else "there is no column of texts"
            raise ConfigError(f"{path}: the column {key!r} is {schema.field(key).type}, not texts; {others}")
    return set(wanted.keys)


def _is_text(kind: Any, pyarrow: ModuleType) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in (*tests, types.is_null))


def _column(batch: Any, key: str) -> Iterator[bytes | None]:
    """The texts of a batch's column, as they are stored; None where there is none."""
    pyarrow = importlib.import_module("pyarrow")
    column = batch.column(batch.schema.names.index(key))
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_string_view(column.type):
        column = column.cast(pyarrow.large_string())
    column = column.cast(pyarrow.large_binary())
    empty, (_, offsets, data) = column.is_null().to_pylist(), column.buffers()
    if data is None or not len(column):
        yield from (None if missing else b"" for missing in empty)
        return
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1].tolist()
    content = memoryview(data)
    for row, missing in enumerate(empty):
        yield None if missing else bytes(content[ends[row] : ends[row + 1]])
