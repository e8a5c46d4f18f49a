"""One process's part of a training state, as files in host memory, and arrays assembled from the parts of several.

    step_00000040.ATTEMPT.3-of-4/   data         the elements of all pieces, one after another
                                    index.json   metadata as a checkpoint's, and name, start, shape and offset of each piece
                                    checksums/   size and CRC-32 of both (checksums.py)

A piece is a block of one array in canonical layer order (layout.py). The pieces of all processes make up the state, so a
run on any mesh can be resumed from them. A part is complete when its directory has its name.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.checkpoint import checksums

DATA, INDEX, SUMS = "data", "index.json", f"{checksums.DIRECTORY}/rest.json"
FILES = (INDEX, SUMS, DATA)
TEMPORARY = ".unfinished"
NAME = re.compile(r"step_(\d{8,})\.([0-9a-f-]+)\.(\d+)-of-(\d+)")
Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, order=True)
class PartName:
    """The name of a part: step, attempt (one start of the run's processes, later ones sort higher), process."""

    step: int
    attempt: str
    process: int
    processes: int

    def __str__(self) -> str:
        return f"step_{self.step:08d}.{self.attempt}.{self.process}-of-{self.processes}"

    @classmethod
    def parse(cls, text: str) -> "PartName | None":
        """The inverse of `str`; None for any other text."""
        found = NAME.fullmatch(text)
        return cls(int(found[1]), found[2], int(found[3]), int(found[4])) if found else None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of an array: [start, start + shape) of each axis, whose elements begin at byte `offset` of the data."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True)
class Part:
    """A part that can be read, here or on another host.

    Attributes:
      meta: the metadata, as written.
      arrays: (dtype, shape of the whole array) by name.
      pieces: by name of the array.
      read: (first byte, last byte + 1) -> these bytes of the data.
    """

    meta: Mapping[str, Any]
    arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
    pieces: Mapping[str, Sequence[Piece]]
    read: Callable[[int, int], Any]


def write_part(
    directory: pathlib.Path, name: PartName, arrays: Mapping[str, jax.Array], meta: Mapping[str, Any]
) -> int:
    """Writes this process's shards of all arrays, one copy of each; returns their bytes.

    Args:
      directory: receives the part.
      arrays: in canonical order, by name (`layout.to_canonical`).
      meta: stored as JSON.

    Raises:
      OSError: of the file system; nothing is left of the part.
    """
    pieces: dict[str, list] = {}
    offset = 0
    with new_part(directory, name) as unfinished:
        with open(unfinished / DATA, "wb", buffering=0) as file:
            for array_name, array in arrays.items():
                pieces[array_name] = []
                for shard in array.addressable_shards:
                    if shard.replica_id:
                        continue
                    data = np.ascontiguousarray(shard.data)
                    start = [index.start or 0 for index in shard.index]
                    pieces[array_name].append([start, shard.data.shape, offset])
                    _write_all(file, data)
                    offset += data.nbytes
        about = {name: [str(array.dtype), array.shape] for name, array in arrays.items()}
        (unfinished / INDEX).write_text(json.dumps({"meta": meta, "arrays": about, "pieces": pieces}))
        checksums.write_rest(unfinished)
    return offset


@contextlib.contextmanager
def new_part(directory: pathlib.Path, name: PartName) -> Iterator[pathlib.Path]:
    """The directory in which to write a part; it gets the part's name at the end, and is deleted after an exception."""
    part = directory / str(name)
    unfinished = part.with_name(part.name + TEMPORARY)
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(part, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(part)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_all(file, data: np.ndarray) -> None:
    view = memoryview(data.reshape(-1).view(np.uint8))
    while len(view):  # a raw file may write less than it is given
        view = view[file.write(view) :]


def open_part(path: pathlib.Path) -> Part:
    """A part on this host; its data are mapped, not read."""
    index = (path / INDEX).read_bytes()
    size = (path / DATA).stat().st_size
    data = np.memmap(path / DATA, np.uint8, "r") if size else np.zeros(0, np.uint8)
    return parse_part(index, lambda start, stop: data[start:stop])


def parse_part(index: bytes, read: Callable[[int, int], Any]) -> Part:
    """A part from its index.

    Raises:
      ValueError: the index is not one.
    """
    try:
        content = json.loads(index)
        arrays = {name: (np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in content["arrays"].items()}
        pieces = {
            name: [Piece(tuple(start), tuple(shape), offset) for start, shape, offset in found]
            for name, found in content["pieces"].items()
        }
        return Part(dict(content["meta"]), arrays, pieces, read)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the index of a part: {error!r}") from None


def assemble(parts: Iterable[Part], name: str, box: Box, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A block of an array, from the pieces that overlap it. Only the rows needed of each piece are read.

    Elements outside the stored array are zeros: the padding of the vocabulary depends on the mesh.

    Args:
      parts: in the order in which they are tried; once the block is complete the others are not asked.
      box: the block.
      shape: of the whole array as it is wanted.
      dtype: of the result.

    Raises:
      ValueError: the parts do not have all of it.
    """
    low = [index.start or 0 for index in box]
    high = [size if index.stop is None else index.stop for index, size in zip(box, shape, strict=True)]
    out = np.zeros([stop - start for start, stop in zip(low, high, strict=True)], dtype)
    missing: int | None = None
    for part in parts:
        if missing == 0:
            break
        if name not in part.arrays:
            continue
        stored_dtype, stored = part.arrays[name]
        if missing is None:
            missing = math.prod(
                max(0, min(stop, size) - start) for start, stop, size in zip(low, high, stored, strict=True)
            )
        for piece in part.pieces.get(name, ()):
            ends = [start + size for start, size in zip(piece.start, piece.shape, strict=True)]
            first = [max(pair) for pair in zip(low, piece.start, strict=True)]
            last = [min(pair) for pair in zip(high, ends, strict=True)]
            count = math.prod(stop - start for start, stop in zip(first, last, strict=True))
            if missing == 0 or any(stop <= start for start, stop in zip(first, last, strict=True)):
                continue
            block = _read_block(part, piece, stored_dtype, first, last)
            out[tuple(slice(a - o, b - o) for a, b, o in zip(first, last, low, strict=True))] = block
            missing -= count
    if missing != 0:
        raise ValueError(f"the parts that were found do not have all of {name}")
    return out


def _read_block(part: Part, piece: Piece, dtype: np.dtype, first: list[int], last: list[int]) -> np.ndarray:
    """[first, last) of the whole array, from one piece: its rows in that range, then the rest of the axes."""
    if not piece.shape:
        return np.frombuffer(part.read(piece.offset, piece.offset + dtype.itemsize), dtype).reshape(())
    inner = piece.shape[1:]
    row = math.prod(inner) * dtype.itemsize
    begin, end = first[0] - piece.start[0], last[0] - piece.start[0]
    data = part.read(piece.offset + begin * row, piece.offset + end * row)
    rows = np.frombuffer(data, dtype).reshape(end - begin, *inner)
    return rows[
        (slice(None), *(slice(a - s, b - s) for a, b, s in zip(first[1:], last[1:], piece.start[1:], strict=True)))
    ]
