"""Checksums of an indexed dataset: PREFIX.sums.json has the size and CRC-32 of PREFIX.bin and PREFIX.idx.

Preprocessing writes them. `--verify-data` reads both files and compares, for a disk or a copy that may have damaged them:
the index is checked when a pair is opened, but any bytes are legal token ids. Megatron-LM's pairs have no such file.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Iterable

from megajax.config import ConfigError
from megajax.schedules.paths import is_store

__all__ = ["SummedFile", "sums_path", "verify_known", "verify_pairs", "write_sums"]

BLOCK = 1 << 24  # bytes read at once
LONGEST = 2**16  # bytes of a file of checksums


def sums_path(prefix: str | os.PathLike) -> pathlib.Path:
    """PREFIX.sums.json."""
    return pathlib.Path(f"{os.fspath(prefix)}.sums.json")


class SummedFile:
    """A new file that is written from its beginning; `sum` has the bytes and the CRC-32 of what was written."""

    def __init__(self, path: pathlib.Path):
        self._file, self.sum = open(path, "wb"), [0, 0]
        self.flush, self.fileno, self.close = self._file.flush, self._file.fileno, self._file.close

    def write(self, data) -> int:
        self.sum = [self.sum[0] + memoryview(data).nbytes, zlib.crc32(data, self.sum[1])]
        return self._file.write(data)


def checksum(path: pathlib.Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def write_sums(prefix: str | os.PathLike, bin_sum: list[int]) -> None:
    """Writes the checksums of a complete pair, atomically; `bin_sum`: of PREFIX.bin."""
    path, idx_sum = sums_path(prefix), checksum(pathlib.Path(f"{os.fspath(prefix)}.idx"))
    temporary = path.with_name(path.name + ".unfinished")
    temporary.write_text(json.dumps({"bin": bin_sum, "idx": idx_sum}) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def verify_pairs(prefixes: Iterable[str], share: tuple[int, int] = (0, 1)) -> None:
    """Reads all files of the pairs and compares them with their checksums.

    Args:
      prefixes: of the pairs.
      share: (index, count): verifies part `index` of `count` parts of the pairs.

    Raises:
      ConfigError: a file is not as it was written, or a pair has no checksums.
    """
    index, count = share
    for prefix in sorted(set(prefixes))[index::count]:
        if is_store(prefix):
            raise ConfigError(
                f"--verify-data reads files of a disk, and {prefix} is in an object store, whose blocks have checksums of "
                "their own: omit --verify-data"
            )
        sums = _read(sums_path(prefix))
        for end, expected in sums.items():
            path = pathlib.Path(f"{prefix}.{end}")
            try:
                found = checksum(path)
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}; copy the data again") from error
            if found != expected:
                what = "its content has changed since it was written"
                if found[0] != expected[0]:
                    what = f"it has {found[0]:,} bytes, and {expected[0]:,} were written"
                raise ConfigError(f"{path} is damaged: {what}; copy it again, or preprocess the data again")


def verify_known(prefix: str) -> None:
    """As `verify_pairs` of one pair, if it has checksums."""
    if sums_path(prefix).exists():
        verify_pairs([prefix])


def _read(path: pathlib.Path) -> dict[str, list[int]]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(LONGEST))
        sums = {end: found[end] for end in ("bin", "idx")}
        legal = all(len(one) == 2 and all(type(number) is int for number in one) for one in sums.values())
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}: the data was written by Megatron-LM or an earlier megajax; omit --verify-data, or "
            "preprocess the data again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        legal = False
    if not legal:
        raise ConfigError(f"{path} has no checksums: it is damaged; copy the data again, or omit --verify-data")
    return sums
