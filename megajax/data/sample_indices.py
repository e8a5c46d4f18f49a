"""The document, sample and shuffle indices of Megatron's GPTDataset: the tokens of sample i.

The documents are concatenated in random order for several epochs, and split into samples of s + 1 tokens: s inputs and,
shifted by one, s labels. A sample begins with the last token of the previous one. The samples are then shuffled.

    document  int32 [epochs x documents]   the documents in shuffled order
    sample    [samples + 1, 2]             start of each sample: position in `document`, and token in that document
    shuffle   uint32 [samples]             row of `sample` of the i-th training sample

A "document" here is a sequence of the file, as in Megatron: text has one sequence per document.

`cached_arrays` builds the indices once and stores them; every process of every run memory-maps them.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from megajax.config import ConfigError

LAST_EPOCH_SHARE = 0.80  # if fewer of the last epoch's samples are needed, it is shuffled separately and comes last
CHECKSUM = "checksum"  # file of a cache entry
DOCUMENTS_AT_ONCE = 1 << 16  # few enough that their ends stay in the CPU's cache


class SampleIndex(NamedTuple):
    """The three arrays; see the module's docstring."""

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray

    @property
    def count(self) -> int:
        return len(self.shuffle)


def build_sample_index(
    lengths: np.ndarray, first: int, last: int, sequence_length: int, samples: int | None, seed: int
) -> SampleIndex:
    """The indices over documents first to last - 1.

    Args:
      lengths: int32 [documents], tokens of every document of the file.
      first: first document of the split.
      last: last document of the split + 1.
      sequence_length: s, the input tokens of a sample.
      samples: minimum number of samples; the documents are repeated for whole epochs. None: one epoch.
      seed: seed of the order.

    Raises:
      ConfigError: the split has no sample, or more documents than int32 can number.
    """
    lengths = np.array(lengths[first:last])  # the file's own array is not aligned
    tokens = int(lengths.sum(dtype=np.int64))
    epochs = epochs_needed(tokens, sequence_length, samples)
    if last > np.iinfo(np.int32).max:
        raise ConfigError(
            f"{last:,} documents are more than Megatron's sample index can number, {np.iinfo(np.int32).max:,}: write the "
            "data as several pairs and pass them all to --data-path"
        )
    apart, before_last = _last_epoch(tokens, epochs, sequence_length, samples)
    random = np.random.RandomState(seed)
    parts = (epochs - 1, 1) if apart else (epochs,)
    document = np.concatenate([_shuffled(np.tile(np.arange(first, last, dtype=np.int32), n), random) for n in parts])
    count = (epochs * tokens - 1) // sequence_length
    sample = _sample_starts(lengths, document, first, sequence_length, count)
    kind = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
    cuts = (0, before_last, count) if apart else (0, count)
    shuffle = np.concatenate(
        [_shuffled(np.arange(begin, end, dtype=kind), random) for begin, end in zip(cuts, cuts[1:], strict=False)]
    )
    return SampleIndex(document, sample, shuffle)


def epochs_needed(tokens: int, sequence_length: int, samples: int | None) -> int:
    """The smallest number of epochs of `tokens` tokens that gives `samples` samples; 1 for None.

    Raises:
      ConfigError: an epoch has no token, or `samples` is None and it is shorter than one sample.
    """
    if tokens < 1:
        raise ConfigError("a split has 0 tokens: pass more data, or another --split")
    if samples is None and tokens < sequence_length + 1:
        raise ConfigError(
            f"a split has {tokens} tokens, a sample needs {sequence_length + 1}, and a blend without weights does not "
            "repeat its datasets: pass weights in --data-path, or omit this dataset"
        )
    return 1 if samples is None else max(1, -(-(samples * sequence_length + 1) // tokens))


def _last_epoch(tokens: int, epochs: int, sequence_length: int, samples: int | None) -> tuple[bool, int]:
    """Whether the last epoch is shuffled separately, and the number of samples before it."""
    if epochs == 1:
        return False, 0
    before = ((epochs - 1) * tokens - 1) // sequence_length
    an_epoch = (tokens - 1) // sequence_length
    return samples - before < int(LAST_EPOCH_SHARE * an_epoch), before


def _shuffled(array: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(array)
    return array


def _sample_starts(
    lengths: np.ndarray, document: np.ndarray, first: int, sequence_length: int, count: int
) -> np.ndarray:
    """The `sample` array: row k is the position of token k * s in the concatenated documents.

    That token is in the first document that ends after it, so empty documents are skipped, except that the first sample
    begins with the first document, empty or not, as in Megatron's loop.
    """
    kind = np.int32 if max(len(document), lengths.max()) <= np.iinfo(np.int32).max else np.int64
    index = np.zeros((count + 1, 2), kind)
    done, tokens = 1, 0
    for start in range(0, len(document), DOCUMENTS_AT_ONCE):
        part = lengths[document[start : start + DOCUMENTS_AT_ONCE] - first]
        ends = tokens + np.cumsum(part, dtype=np.int64)
        tokens = int(ends[-1])
        beyond = max(done, (tokens - 1) // sequence_length + 1)  # the first sample that begins after this part
        begins = np.arange(done, beyond) * sequence_length
        place = np.searchsorted(ends, begins, side="right")
        index[done:beyond, 0] = start + place
        index[done:beyond, 1] = begins - (ends - part)[place]
        done = beyond
    return index


def cached_arrays(
    folder: str | os.PathLike,
    description: Mapping,
    content: Iterable[np.ndarray],
    build: Callable[[], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Loads arrays from FOLDER/HASH, or builds and stores them there.

    HASH covers all inputs of the arrays but no path or date: a dataset that was moved has the same entry, one that was
    replaced another. Of several concurrent processes, one builds and the others wait. The entry is renamed to
    its final name when it is complete. If the lock does not work, as on some network filesystems, every process builds,
    the first to finish stores its arrays, and the result is the same. An entry with a wrong checksum is built again.

    Args:
      folder: the cache, created if missing.
      description: settings that the arrays depend on; also stored as JSON.
      content: arrays that they depend on.
      build: returns the arrays by name.

    Returns:
      Read-only memory maps of the files.

    Raises:
      ConfigError: the folder is not writable, or a damaged entry cannot be replaced.
    """
    text = json.dumps(description, sort_keys=True, indent=1)
    digest = hashlib.sha256(text.encode())
    for array in content:
        digest.update(np.ascontiguousarray(array).data)
    entry = pathlib.Path(folder) / digest.hexdigest()[:32]
    arrays = _load(entry)
    if arrays is None:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{entry}.lock"):
                arrays = _load(entry)
                if arrays is None:
                    _store(entry, text, build())
                    arrays = _load(entry)
        except OSError as error:
            raise ConfigError(
                f"cannot store the sample index in {folder}: {error.strerror or error}; "
                "pass --data-cache DIR with a writable folder"
            ) from None
    if arrays is None:
        raise ConfigError(f"the sample index {entry} is damaged and cannot be replaced: pass --data-cache DIR")
    return arrays


def _load(entry: pathlib.Path) -> dict[str, np.ndarray] | None:
    """The arrays of an entry; None if it does not exist or is damaged."""
    try:
        if (entry / CHECKSUM).read_bytes() != _checksum(entry):
            return None
        return {path.stem: np.load(path, mmap_mode="r") for path in sorted(entry.glob("*.npy"))}
    except OSError:  # another process may also be replacing it
        return None


def _checksum(entry: pathlib.Path) -> bytes:
    """SHA-256 of the names and contents of an entry's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in entry.iterdir() if path.name != CHECKSUM):
        with open(path, "rb") as stream:
            digest.update(f"{path.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest().encode()


def _store(entry: pathlib.Path, text: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an entry in a folder of its own, and renames it; a damaged entry is removed first."""
    owner = f"{os.uname().nodename}-{os.getpid()}"
    unfinished, damaged = (entry.with_name(f"{entry.name}.{state}-{owner}") for state in ("unfinished", "damaged"))
    try:
        unfinished.mkdir()
        (unfinished / "description.json").write_text(text + "\n")
        for name, array in arrays.items():
            with open(unfinished / f"{name}.npy", "wb") as stream:
                np.save(stream, array)
                os.fsync(stream.fileno())
        (unfinished / CHECKSUM).write_bytes(_checksum(unfinished))
        if entry.exists() and _load(entry) is None:
            print(
                f"the cached sample index {entry} is damaged or of an older version: it is built again", file=sys.stderr
            )
            os.rename(entry, damaged)
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            os.rename(unfinished, entry)
    except OSError:
        if not entry.is_dir():  # if it is, another process has stored the arrays ("directory not empty")
            raise
    finally:
        for folder in (unfinished, damaged):
            shutil.rmtree(folder, ignore_errors=True)
