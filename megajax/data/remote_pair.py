"""Pairs .bin/.idx in an object store: read by ranges, and kept on this machine.

A file has a sparse copy in the cache folder, which is filled in blocks of BLOCK bytes as they are read; a thread reads the
rest meanwhile. The processes of a host share the copy. Beside it, a file has the CRC-32 of every block that is there, which
a process compares when it first reads the block: what a crash or a full disk has left is fetched again. Another version of
the object has another copy.
"""

import contextlib
import hashlib
import os
import pathlib
import random
import shutil
import threading
import time
import types
import zlib
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.data.remote import read_range, remote_errors, size_of, version_of
from megajax.schedules.paths import is_store

__all__ = ["CachedFile", "cache_folder", "map_bytes", "pair_files", "pair_paths"]

BLOCK = 1 << 20  # bytes
AT_ONCE = 8  # blocks that the thread reads in one request
TRIES = 6  # of a block, after which the training stops; the library of the store has tried several times in each
THERE = np.uint64(1 << 32)  # beside the CRC-32 of a block that is there
REMEDY = "pass --data-path another, or copy the pair to a disk"


def pair_paths(prefix: str | os.PathLike) -> tuple[pathlib.Path, pathlib.Path]:
    """(PREFIX.bin, PREFIX.idx)."""
    return pathlib.Path(f"{os.fspath(prefix)}.bin"), pathlib.Path(f"{os.fspath(prefix)}.idx")


def pair_files(prefix: str | os.PathLike, cache: str | os.PathLike | None = None) -> tuple[Any, Any]:
    """PREFIX.bin and PREFIX.idx: paths, or of an object store `CachedFile`s.

    Args:
      prefix: path without `.bin` or `.idx`.
      cache: folder of the copies; None: see `cache_folder`.

    Raises:
      ConfigError: an object cannot be read, or the copies have no room.
    """
    name = os.fspath(prefix)
    if not is_store(name):
        return pair_paths(name)
    folder = cache_folder(name, cache)
    index = CachedFile(f"{name}.idx", folder)
    return CachedFile(f"{name}.bin", folder, lazy=True), index


def cache_folder(prefix: str, cache: str | os.PathLike | None = None) -> pathlib.Path:
    """The folder for what is kept of a pair: its sample indices, and copies of a pair in an object store."""
    if cache is not None:
        return pathlib.Path(cache)
    if not is_store(prefix):
        return pathlib.Path(prefix).parent / "index_cache"
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megajax" / "data"


def map_bytes(path: Any) -> Any:
    """The bytes of a file, mapped, uint8; of a lazy `CachedFile` something with a method `view` alone."""
    if isinstance(path, CachedFile):
        return path if path.lazy else path.read(0, path.size)
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


class CachedFile:
    """An object, and its copy on this machine.

    Attributes:
      url, name: of the object.
      size: bytes.
      lazy: whether only what is read is fetched at once.
    """

    def __init__(self, url: str, folder: pathlib.Path, lazy: bool = False):
        """Looks the object up, and makes its copy.

        Raises:
          ConfigError: it cannot be read, or the copy has no room.
        """
        self.url, self.name, self.lazy = url, url.rpartition("/")[2], lazy
        with remote_errors(url, REMEDY):
            self.size, version = size_of(url), version_of(url)
        key = hashlib.sha256(f"{url} {version} {self.size}".encode()).hexdigest()[:24]
        blocks = max(1, -(-self.size // BLOCK))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path, sums = folder / f"{key}.part", folder / f"{key}.sums"
            for file, size in ((path, self.size), (sums, 8 * blocks)):
                with open(file, "ab") as opened:
                    if opened.tell() < size:
                        os.truncate(file, size)
            self._require_room(path)
            self._descriptor = os.open(path, os.O_RDWR)
            self._bytes = (
                np.memmap(path, np.uint8, mode="r", shape=(self.size,)) if self.size else np.empty(0, np.uint8)
            )
            self._sums = np.memmap(sums, np.uint64, mode="r+", shape=(blocks,))
        except OSError as error:
            raise ConfigError(
                f"cannot keep {url} in {folder}: {error.strerror or error}; pass --data-cache a folder with room"
            ) from None
        self._verified = np.zeros(blocks, bool)
        if lazy and self.size:
            threading.Thread(target=self._fill, daemon=True, name=f"read {self.name}").start()

    def __str__(self) -> str:
        return self.url

    def stat(self) -> types.SimpleNamespace:
        """With the size as `st_size`, as a path's."""
        return types.SimpleNamespace(st_size=self.size)

    def view(self, dtype: np.dtype) -> "CachedTokens":
        """The content as an array of numbers."""
        return CachedTokens(self, np.dtype(dtype))

    def _require_room(self, path: pathlib.Path) -> None:
        needed, free = self.size - path.stat().st_blocks * 512, shutil.disk_usage(path.parent).free
        if needed > free:
            raise ConfigError(
                f"{self.url} has {self.size / 1e9:.3g} GB, of which {needed / 1e9:.3g} GB are to be kept in {path.parent}, "
                f"where {free / 1e9:.3g} GB are free: pass --data-cache a folder with room, or copy the pair to a disk"
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop), uint8, a view of the copy.

        Raises:
          ConfigError: the store does not give them.
        """
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            if not self._is_there(block):
                self._fetch(block, block + 1)
        return self._bytes[start:stop]

    def _is_there(self, block: int) -> bool:
        """Whether the copy has a block; the first time its checksum is compared."""
        if not self._verified[block]:
            stored = self._sums[block]
            self._verified[block] = bool(stored) and stored == THERE | np.uint64(
                zlib.crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK])
            )
        return bool(self._verified[block])

    def _fetch(self, first: int, last: int) -> None:
        """Reads blocks [first, last) from the store into the copy."""
        start, stop = first * BLOCK, min(last * BLOCK, self.size)
        for attempt in range(TRIES):
            try:
                with remote_errors(self.url, REMEDY):
                    data = read_range(self.url, start, stop)
                    if len(data) != stop - start:
                        raise OSError(f"{len(data):,} bytes came for {stop - start:,}")
                break
            except ConfigError:
                if attempt + 1 == TRIES:
                    raise
                time.sleep(min(30.0, 2.0**attempt))
        try:
            view, at = memoryview(data), start
            while view:
                count = os.pwrite(self._descriptor, view, at)
                view, at = view[count:], at + count
        except OSError as error:
            raise ConfigError(
                f"cannot keep {self.url}: {error.strerror}; pass --data-cache a folder with room"
            ) from None
        for block in range(first, last):
            part = data[(block - first) * BLOCK : (block - first + 1) * BLOCK]
            self._sums[block] = THERE | np.uint64(zlib.crc32(part))
            self._verified[block] = True

    def _fill(self) -> None:
        """The thread: reads what is not there, from a random place on, so that several processes share the work."""
        blocks = len(self._sums)
        begin = random.Random(os.getpid()).randrange(blocks) // AT_ONCE * AT_ONCE
        for place in range(0, blocks + AT_ONCE, AT_ONCE):
            first = (begin + place) % (-(-blocks // AT_ONCE) * AT_ONCE)
            last = min(first + AT_ONCE, blocks)
            if not all(self._sums[first:last]):
                with contextlib.suppress(ConfigError):  # whoever reads the block says so
                    self._fetch(first, last)


class CachedTokens:
    """The numbers of a `CachedFile`; an array of one axis, as far as data sets need it."""

    def __init__(self, file: CachedFile, dtype: np.dtype):
        self._file, self.dtype = file, dtype

    def __len__(self) -> int:
        return self._file.size // self.dtype.itemsize

    def __getitem__(self, key: Any) -> Any:
        """A slice, without a step a view of the copy; or the elements at indices or where a mask is true."""
        size = self.dtype.itemsize
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return self[np.arange(start, stop, step)]
            return self._file.read(start * size, max(start, stop) * size).view(self.dtype)
        indices = np.asarray(key)
        if indices.dtype == bool:
            indices = np.flatnonzero(indices)
        flat = np.where(indices < 0, indices + len(self), indices).reshape(-1)
        found = np.array(
            [self._file.read(i * size, (i + 1) * size).view(self.dtype)[0] for i in flat.tolist()], self.dtype
        )
        return found.reshape(indices.shape)[()]
