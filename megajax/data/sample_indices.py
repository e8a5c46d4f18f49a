"""Which tokens make up sample i: the document, sample and shuffle indices of Megatron's GPTDataset, number for number.

Documents are laid end to end in a random order, epoch after epoch, and cut into samples of s + 1 tokens: s inputs, and the
same shifted by one as labels. A sample begins with the last token of the one before it. Samples are then shuffled.

    document  int32 [epochs x documents]   the documents in the order they are laid
    sample    [samples + 1, 2]             where a sample begins: the place in `document`, the token in that document
    shuffle   uint32 [samples]             the place in `sample` of the i-th sample of training

Here a "document" is a sequence of the file, as it is for Megatron: a text set has one a document.

`cached_arrays` builds the indices once and stores them; every process of every run maps them from disk.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from megajax.config import ConfigError

LAST_EPOCH_SHARE = 0.80  # of an epoch's samples: if the last epoch gives fewer, it is shuffled apart, and so comes last
LAID_AT_ONCE = 1 << 16  # documents: few enough that their ends stay in the processor's cache


class SampleIndex(NamedTuple):
    """The three arrays; see the module's text."""

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
      lengths: int32, tokens of every document of the file.
      first: where the split begins.
      last: where it ends.
      sequence_length: s.
      samples: how many are wanted; documents are repeated in whole epochs until there are at least so many. None is one
        epoch.
      seed: of the order.

    Raises:
      ConfigError: the split has no sample, or the file more documents than an int32 can number.
    """
    lengths = np.array(lengths[first:last])  # the file's own array is not aligned
    tokens = int(lengths.sum(dtype=np.int64))
    epochs = epochs_needed(tokens, sequence_length, samples)
    if last > np.iinfo(np.int32).max:
        raise ConfigError(
            f"{last:,} documents are more than Megatron's sample index can number, {np.iinfo(np.int32).max:,}: write the "
            "data as several pairs and give them all to --data-path"
        )
    apart, before_last = _last_epoch(tokens, epochs, sequence_length, samples)
    random = np.random.RandomState(seed)
    parts = (epochs - 1, 1) if apart else (epochs,)
    document = np.concatenate([_shuffled(np.tile(np.arange(first, last, dtype=np.int32), n), random) for n in parts])
    count = (epochs * tokens - 1) // sequence_length
    sample = _lay(lengths, document, first, sequence_length, count)
    kind = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
    cuts = (0, before_last, count) if apart else (0, count)
    shuffle = np.concatenate(
        [_shuffled(np.arange(begin, end, dtype=kind), random) for begin, end in zip(cuts, cuts[1:], strict=False)]
    )
    return SampleIndex(document, sample, shuffle)


def epochs_needed(tokens: int, sequence_length: int, samples: int | None) -> int:
    """Least epochs of so many tokens that give `samples` samples; 1 for None.

    Raises:
      ConfigError: an epoch has no whole sample, so that there is nothing to train or validate on.
    """
    if tokens < sequence_length + 1:
        raise ConfigError(
            f"a split has {tokens} tokens and a sample needs {sequence_length + 1}: give more data, another --split, or "
            "lower --sequence-length"
        )
    return 1 if samples is None else max(1, -(-(samples * sequence_length + 1) // tokens))


def _last_epoch(tokens: int, epochs: int, sequence_length: int, samples: int | None) -> tuple[bool, int]:
    """Whether the last epoch is shuffled apart from the others, and how many samples come before it."""
    if epochs == 1:
        return False, 0
    before = ((epochs - 1) * tokens - 1) // sequence_length
    an_epoch = (tokens - 1) // sequence_length
    return samples - before < int(LAST_EPOCH_SHARE * an_epoch), before


def _shuffled(array: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(array)
    return array


def _lay(lengths: np.ndarray, document: np.ndarray, first: int, sequence_length: int, count: int) -> np.ndarray:
    """Where each of `count` samples begins, and the last one ends: sample k at the token number k * s of all.

    That token is in the first document that ends after it, so empty documents are passed over, but for one: the first
    sample begins with the first document, empty or not, as Megatron's loop does.
    """
    kind = np.int32 if max(len(document), lengths.max()) <= np.iinfo(np.int32).max else np.int64
    index = np.zeros((count + 1, 2), kind)
    laid, tokens = 1, 0
    for start in range(0, len(document), LAID_AT_ONCE):
        part = lengths[document[start : start + LAID_AT_ONCE] - first]
        ends = tokens + np.cumsum(part, dtype=np.int64)
        tokens = int(ends[-1])
        beyond = max(laid, (tokens - 1) // sequence_length + 1)  # the first sample that begins after this part
        begins = np.arange(laid, beyond) * sequence_length
        place = np.searchsorted(ends, begins, side="right")
        index[laid:beyond, 0] = start + place
        index[laid:beyond, 1] = begins - (ends - part)[place]
        laid = beyond
    return index


def cached_arrays(
    folder: str | os.PathLike,
    description: Mapping,
    content: Iterable[np.ndarray],
    build: Callable[[], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """What `build` returns, from FOLDER/HASH if it is there, else built and stored there.

    HASH is of all that the arrays depend on, not of a path or a date: a file that was moved is found again, one that was
    replaced is not mistaken for the old one. Of several processes that ask at once, one builds and the others wait. The
    entry gets its name when it is complete; if the lock does not work, as on some network filesystems, all build, the
    first to finish wins, and the result is the same.

    Args:
      folder: of the cache; made if need be.
      description: settings that the arrays depend on; stored beside them to be read by people.
      content: arrays that they depend on.
      build: makes the arrays, by name.

    Returns:
      Read-only maps of the files.

    Raises:
      ConfigError: the folder cannot be written to.
    """
    text = json.dumps(description, sort_keys=True, indent=1)
    digest = hashlib.sha256(text.encode())
    for array in content:
        digest.update(np.ascontiguousarray(array).data)
    entry = pathlib.Path(folder) / digest.hexdigest()[:32]
    if not entry.is_dir():
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{entry}.lock"):
                if not entry.is_dir():
                    _store(entry, text, build())
        except OSError as error:
            raise ConfigError(
                f"cannot store the sample index in {folder}: {error.strerror or error}; "
                "pass --data-cache DIR with a folder that can be written to"
            ) from None
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(entry.glob("*.npy"))}


def _store(entry: pathlib.Path, text: str, arrays: Mapping[str, np.ndarray]) -> None:
    unfinished = entry.with_name(f"{entry.name}.unfinished-{os.uname().nodename}-{os.getpid()}")
    try:
        unfinished.mkdir()
        (unfinished / "description.json").write_text(text + "\n")
        for name, array in arrays.items():
            with open(unfinished / f"{name}.npy", "wb") as stream:
                np.save(stream, array)
                os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            os.rename(unfinished, entry)
    except OSError:
        if not entry.is_dir():  # somebody else's, complete: "directory not empty"
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
