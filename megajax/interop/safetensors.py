"""Files in the safetensors format: reads rows of tensors, and writes rows of tensors into shards of planned sizes.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape, begin and end of its
bytes), and the bytes. The format is read and written here and not by the `safetensors` library, whose numpy interface
writes whole shards from memory (5 GB each) and reads bf16 only in its latest versions. tests/interop compares the two.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Protocol

import ml_dtypes
import numpy as np

from megajax.config import ConfigError
from megajax.schedules.errors import shown

__all__ = [
    "DTYPES",
    "EIGHT_BITS",
    "FLOATS",
    "INDEX",
    "Shards",
    "StoredTensor",
    "Tensor",
    "has_tensors",
    "open_file",
    "open_tensors",
]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
EIGHT_BITS = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
FLOATS = DTYPES | {"F64": np.dtype(np.float64), "F8_E4M3": EIGHT_BITS[0], "F8_E5M2": EIGHT_BITS[1]}
# Of scales, packed numbers, masks and position ids, which no parameter is.
OTHERS = {f"{code}{8 * size}": np.dtype(f"{code.lower()}{size}") for code in "IU" for size in (1, 2, 4, 8)}
OTHERS |= {"BOOL": np.dtype(np.bool_), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
CONVERT = "convert it with transformers' save_pretrained"
LONGEST_HEADER = 100 * 2**20


class Tensor(Protocol):
    """A tensor in a file: `StoredTensor`, one of `hugging_face.quantized`, `gguf.file.GGUFTensor`, or one of Megatron-LM's.

    Attributes:
      shape: of the whole tensor.
    """

    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
      path: the file.
      shape: of the whole tensor.
      dtype: of its elements.
      offset: of its first byte in the file.
    """

    path: pathlib.Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis; nothing else is read.

        Raises:
          ConfigError: the file ends earlier, or cannot be read.
        """
        row = math.prod(self.shape[1:])
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset + start * row * self.dtype.itemsize)
                target = memoryview(out.reshape(-1).view(np.uint8))
                while target:
                    count = file.readinto(target)
                    if not count:
                        raise ConfigError(f"{self.path} ends inside a tensor: it is truncated; download it again")
                    target = target[count:]
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}; download it again") from None
        return out


def has_tensors(directory: pathlib.Path) -> bool:
    """Whether `open_tensors` finds a file."""
    return any((directory / name).exists() for name in (INDEX, SINGLE))


def open_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """All tensors of a directory with model.safetensors, or else with shards and their index. Reads headers only.

    Raises:
      ConfigError: a file is missing, truncated, or not in the format; or the index does not fit its files.
    """
    if (directory / SINGLE).exists():
        return open_file(directory / SINGLE)
    if not (directory / INDEX).exists():
        others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in directory.glob(pattern))
        remedy = "import that file" if others[:1] and others[0].endswith("gguf") else CONVERT
        instead = f" (but {others[0]}: {remedy})" if others else ""
        raise ConfigError(f"{directory} has neither {SINGLE} nor {INDEX}{instead}; give a directory that has one")
    names = _read_index(directory / INDEX)
    files = {file: open_file(directory / file) for file in sorted(set(names.values()))}
    for name, file in names.items():
        if name not in files[file]:
            raise ConfigError(f"{directory / INDEX} says that {name} is in {file}, which does not have it")
    for file, tensors in files.items():
        for name in tensors:
            if names.get(name) != file:
                raise ConfigError(f"{directory / file} has {name}, which {INDEX} does not name there")
    return {name: files[file][name] for name, file in names.items()}


def _read_index(path: pathlib.Path) -> dict[str, str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        legal = isinstance(names, dict) and names and all(isinstance(file, str) for file in names.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        legal = False
    if not legal:
        raise ConfigError(f"{path} has no weight_map of names and files: it is damaged; download it again")
    for file in names.values():
        if pathlib.PurePath(file).name != file:
            raise ConfigError(f"{path} names the file {shown(file)}, which is not in its directory; download it again")
    return names


def open_file(path: pathlib.Path) -> dict[str, StoredTensor]:
    """All tensors of one file. Reads its header only.

    Raises:
      ConfigError: it is missing, truncated, or not in the format.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise ConfigError(f"{path} is truncated, or not in the safetensors format; download it again")
            header = json.loads(file.read(length))
        found = {name: _entry(path, length + 8, entry) for name, entry in header.items() if name != "__metadata__"}
    except ConfigError:  # is a ValueError
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; download it again") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{path} has a damaged header; download it again") from None
    _check_overlap(path, found)
    for name, tensor in found.items():
        if tensor.offset + math.prod(tensor.shape) * tensor.dtype.itemsize > size:
            raise ConfigError(f"{path} is truncated: it ends before the end of {name}; download it again")
    return found


def _check_overlap(path: pathlib.Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises ConfigError if two tensors have a byte in common: a small file could stand for any number of weights."""
    spans = sorted(
        (one.offset, one.offset + math.prod(one.shape) * one.dtype.itemsize, name) for name, one in tensors.items()
    )
    end, before = 0, ""
    for start, stop, name in spans:
        if start < end and start < stop:
            raise ConfigError(f"{path} has {before} and {name} in the same bytes: it is damaged; download it again")
        if stop > end:
            end, before = stop, name


def _entry(path: pathlib.Path, base: int, entry: Mapping) -> StoredTensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in FLOATS | OTHERS:
        raise ConfigError(f"{path} has tensors of dtype {shown(entry['dtype'])}: only {', '.join(FLOATS)} are read")
    dtype = (FLOATS | OTHERS)[entry["dtype"]]
    if not all(type(one) is int and one >= 0 for one in (*shape, begin, end)):
        raise ValueError
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError
    return StoredTensor(path, shape, dtype, base + begin)


class Shards:
    """The files of a model that is written: which tensor is where, and rows into their places.

    Attributes:
      tensors: by name, with their places in `directory`.
    """

    def __init__(self, directory: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, largest: int):
        """Plans files of at most `largest` bytes (a single tensor may be more), in the order of `shapes`."""
        self.directory, self.dtype = directory, dtype
        groups: list[dict[str, tuple[int, ...]]] = [{}]
        size = 0
        for name, shape in shapes.items():
            count = math.prod(shape) * dtype.itemsize
            if groups[-1] and size + count > largest:
                groups.append({})
                size = 0
            groups[-1][name] = shape
            size += count
        self.tensors: dict[str, StoredTensor] = {}
        self._headers: dict[pathlib.Path, tuple[bytes, int]] = {}
        for number, group in enumerate(groups, 1):
            file = directory / (SHARD.format(number, len(groups)) if len(groups) > 1 else SINGLE)
            self._plan(file, group)

    def _plan(self, file: pathlib.Path, group: Mapping[str, tuple[int, ...]]) -> None:
        entries, end = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in group.items():
            begin, end = end, end + math.prod(shape) * self.dtype.itemsize
            entries[name] = {"dtype": CODES[self.dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # so that the tensors are aligned
        for name, shape in group.items():
            offset = 8 + len(header) + entries[name]["data_offsets"][0]
            self.tensors[name] = StoredTensor(file, tuple(shape), self.dtype, offset)
        self._headers[file] = len(header).to_bytes(8, "little") + header, 8 + len(header) + end

    def create(self) -> None:
        """Creates the files in their final sizes, with their headers, and the index if there are several."""
        for file, (header, size) in self._headers.items():
            with open(file, "wb") as out:
                out.write(header)
                out.truncate(size)
        if len(self._headers) > 1:
            total = sum(math.prod(one.shape) * self.dtype.itemsize for one in self.tensors.values())
            names = {name: tensor.path.name for name, tensor in sorted(self.tensors.items())}
            index = {"metadata": {"total_size": total}, "weight_map": names}
            (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Writes rows of a tensor, rounded to the files' dtype, from row `start` on."""
        tensor = self.tensors[name]
        data = np.ascontiguousarray(rows.astype(self.dtype)).reshape(-1).view(np.uint8)
        row = math.prod(tensor.shape[1:]) * self.dtype.itemsize
        with open(tensor.path, "r+b", buffering=0) as file:
            target, place = memoryview(data), tensor.offset + start * row
            while target:
                count = os.pwrite(file.fileno(), target, place)
                target, place = target[count:], place + count
