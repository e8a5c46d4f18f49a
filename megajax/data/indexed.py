"""Megatron's `.bin/.idx` pair of an indexed dataset: token ids, and the offsets of its sequences and documents.

PREFIX.bin holds the ids of all sequences in one array, without a header. PREFIX.idx, all little-endian:

    byte 0         9 bytes    "MMIDIDX" and two zeros
    9              uint64     version, 1
    17             uint8      type of the ids, see DTYPES
    18             uint64     S, the number of sequences
    26             uint64     D, the number of documents + 1
    34             int32[S]   tokens of each sequence
    34 + 4S        int64[S]   offset of each sequence in .bin, in bytes
    34 + 12S       int64[D]   first sequence of each document; the last element is S
    34 + 12S + 8D  int8[S]    mode of each sequence, in multimodal datasets only; the header does not record its presence

Text has one sequence per document, or several if it is split into sentences for BERT. A document may be empty.
The files are byte for byte those of megatron-core's IndexedDatasetBuilder.
"""

import os
import pathlib
import shutil
import struct
import tempfile
from typing import BinaryIO

import numpy as np

from megajax.config import ConfigError
from megajax.data.pair_sums import SummedFile, sums_path, write_sums
from megajax.data.read_file import missing_pair
from megajax.data.remote_pair import cache_folder, map_bytes, pair_files, pair_paths

__all__ = ["DTYPES", "IndexedDataset", "IndexedWriter", "dtype_for", "pair_paths"]

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}  # 6 and 7 are in this order
AT_VERSION, AT_DTYPE, AT_SEQUENCES, AT_DOCUMENTS = 9, 17, 18, 26
REMEDY = "Copy or write the pair again."
CHECKED_AT_ONCE = 1 << 16  # elements that `check` reads at once: few enough to stay in the CPU's cache


def dtype_for(vocabulary: int) -> np.dtype:
    """The type of the ids for a vocabulary of this size, as in Megatron's preprocessing."""
    return np.dtype("<u2" if vocabulary < 65500 else "<i4")


class IndexedDataset:
    """A memory-mapped pair: opening reads a few pages regardless of its size, and nothing is copied.

    Attributes:
      prefix: path without `.bin` or `.idx`; it may be of an object store.
      dtype: of the ids.
      lengths: int32 [sequences], tokens.
      offsets: int64 [sequences], bytes in .bin.
      documents: int64 [documents + 1], sequences.
      modes: int8 [sequences], or None if the pair is not opened as multimodal.
      cache_folder: for the indices of its samples.
      tokens: all ids, [tokens].
    """

    def __init__(self, prefix: str | os.PathLike, multimodal: bool = False, cache: str | os.PathLike | None = None):
        """Opens PREFIX.bin and PREFIX.idx; checks the header, the sizes and the first and last element of every array.

        `cache`: see `cache_folder`.

        Raises:
          ConfigError: a file is missing, truncated or of another format, or the two files are not a pair. The message
            gives the byte. `check` reads the whole index.
        """
        self.prefix = os.fspath(prefix)
        self._bin, self._idx = pair_files(prefix, cache)
        self.cache_folder = cache_folder(self.prefix, cache)
        raw = self._map(self._idx)
        sequences, boundaries = self._header(raw)
        sizes = {"lengths": 4 * sequences, "offsets": 8 * sequences, "documents": 8 * boundaries}
        sizes |= {"modes": sequences} if multimodal else {}
        self._check_size(len(raw), HEADER.size + sum(sizes.values()), sequences, boundaries, multimodal)
        self.modes, at, self._starts = None, HEADER.size, {}
        for (name, size), kind in zip(sizes.items(), ("<i4", "<i8", "<i8", "i1"), strict=False):
            setattr(self, name, raw[at : at + size].view(kind))
            self._starts[name] = at
            at += size
        self.bin_bytes = self._size(self._bin)
        self._check_ends(sequences)
        self.tokens = self._map(self._bin).view(self.dtype)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.lengths)

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    def sequence(self, index: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """A view of `length` ids of sequence `index` from its id `start`; None: up to the end of the sequence."""
        first = int(self.offsets[index]) // self.dtype.itemsize
        end = first + int(self.lengths[index])
        return self.tokens[first + start : end if length is None else min(first + start + length, end)]

    def document(self, index: int) -> np.ndarray:
        """A view of all ids of document `index`, its sequences concatenated."""
        first, last = (int(self.documents[index + i]) for i in (0, 1))
        if first == last:
            return self.tokens[:0]
        begin, final = (int(self.offsets[i]) // self.dtype.itemsize for i in (first, last - 1))
        return self.tokens[begin : final + int(self.lengths[last - 1])]

    def check(self) -> None:
        """Reads the whole index: every sequence must begin at the end of the previous one, documents must be in order.

        Raises:
          ConfigError: the index is damaged; the message gives the first wrong byte.
        """
        expected = 0
        for start in range(0, len(self), CHECKED_AT_ONCE):
            span = slice(start, start + CHECKED_AT_ONCE)
            lengths, offsets = np.array(self.lengths[span], np.int64), np.array(self.offsets[span])
            self._first_bad(lengths < 0, "lengths", start, 4, "a sequence cannot have fewer than 0 tokens")
            ends = expected + np.cumsum(lengths) * self.dtype.itemsize
            begins = np.concatenate([[expected], ends[:-1]])
            self._first_bad(offsets != begins, "offsets", start, 8, "it must be the end of the previous sequence")
            expected = int(ends[-1])
        for start in range(0, len(self.documents) - 1, CHECKED_AT_ONCE):
            part = np.array(self.documents[start : start + CHECKED_AT_ONCE + 1])
            self._first_bad(np.diff(part) < 0, "documents", start + 1, 8, "documents must be in order")

    def check_tokens(self, vocabulary: int) -> None:
        """Reads every id.

        Raises:
          ConfigError: an id is negative or not below `vocabulary`; the message gives the first one.
        """
        self.check_type()
        for start in range(0, len(self.tokens), CHECKED_AT_ONCE):
            part = self.tokens[start : start + CHECKED_AT_ONCE]
            if part.max() >= vocabulary or part.min() < 0:
                token = self.describe_token(start + int(np.argmax((part >= vocabulary) | (part < 0))))
                raise ConfigError(
                    f"{token}, but the tokenizer has ids 0 to {vocabulary - 1}: it was written with another tokenizer"
                )

    def check_type(self) -> None:
        """Raises ConfigError if the file has floating-point numbers, which are not token ids."""
        if self.dtype.kind == "f":
            raise ConfigError(f"{self.prefix} has numbers of type {self.dtype.name}, which are not token ids")

    def describe_token(self, place: int) -> str:
        """The id number `place` of .bin and its byte, for messages."""
        at = place * self.dtype.itemsize
        return f"{self._bin}, byte {at}: token id {self.tokens[place]} (the file's token {place:,})"

    def _first_bad(self, wrong: np.ndarray, name: str, start: int, size: int, reason: str) -> None:
        if wrong.any():
            place = start + int(np.argmax(wrong))
            raise ConfigError(
                f"{self._idx}, byte {self._starts[name] + size * place}: {name}[{place}] is {getattr(self, name)[place]}; "
                f"{reason}. {REMEDY}"
            )

    def _header(self, raw: np.ndarray) -> tuple[int, int]:
        """Checks the first 34 bytes and sets dtype; returns (sequences, documents + 1)."""
        start = raw[: HEADER.size].tobytes()
        if start[: len(MAGIC)] != MAGIC[: len(start)]:
            old = " (the format of fairseq and of Megatron before 2020)" if start[:6] == b"TNTIDX" else ""
            raise ConfigError(
                f"{self._idx}, byte 0: begins with {start[: len(MAGIC)]!r}{old}, not with {MAGIC!r}: it is not an index of "
                "Megatron's; write one with python -m megajax.data.preprocess"
            )
        if len(start) < HEADER.size:
            raise ConfigError(
                f"{self._idx}, byte {len(start)}: the file ends inside its {HEADER.size}-byte header. {REMEDY}"
            )
        _, version, code, sequences, boundaries = HEADER.unpack(start)
        if version != VERSION:
            raise ConfigError(f"{self._idx}, byte {AT_VERSION}: version {version}; only version {VERSION} is supported")
        if code not in DTYPES:
            known = ", ".join(f"{number} {np.dtype(name).name}" for number, name in DTYPES.items())
            raise ConfigError(f"{self._idx}, byte {AT_DTYPE}: unknown type code {code}; supported: {known}")
        self.dtype = np.dtype(DTYPES[code])
        if boundaries < 1:
            raise ConfigError(f"{self._idx}, byte {AT_DOCUMENTS}: 0 document boundaries; even an empty file has one")
        return sequences, boundaries

    def _check_size(self, size: int, expected: int, sequences: int, boundaries: int, multimodal: bool) -> None:
        if size == expected:
            return
        what = f"{sequences} sequences and {boundaries - 1} documents{' with modes' if multimodal else ''}"
        if size < expected:
            raise ConfigError(
                f"{self._idx}, byte {size}: the file ends here, but its header (bytes {AT_SEQUENCES} to {HEADER.size - 1}) "
                f"gives {what}, which need {expected} bytes: it is truncated. {REMEDY}"
            )
        modes = " It may be a multimodal dataset, with a byte per sequence." * (size - expected == sequences)
        raise ConfigError(
            f"{self._idx}, byte {expected}: {size - expected} extra bytes after the {what} of its header.{modes} {REMEDY}"
        )

    def _check_ends(self, sequences: int) -> None:
        """Checks the first and last elements of the arrays: this detects the .bin of another pair at constant cost."""
        for place, legal in ((0, 0), (-1, sequences)):
            if (found := int(self.documents[place])) != legal:
                at = self._starts["documents"] + 8 * (place % len(self.documents))
                raise ConfigError(
                    f"{self._idx}, byte {at}: documents[{place}] is {found}; it must be {legal}. {REMEDY}"
                )
        if sequences and int(self.offsets[0]) != 0:
            raise ConfigError(
                f"{self._idx}, byte {self._starts['offsets']}: the first sequence begins at byte {int(self.offsets[0])} of "
                f"{self._bin.name}; it must be 0. {REMEDY}"
            )
        end = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
        if end != self.bin_bytes:
            reason = "is truncated" if self.bin_bytes < end else "has extra bytes"
            raise ConfigError(
                f"{self._bin}, byte {max(0, min(end, self.bin_bytes))}: the file has {self.bin_bytes} bytes, but "
                f"{self._idx.name} gives {end}: it {reason}, or the two files are not a pair. {REMEDY}"
            )
        if end % self.dtype.itemsize:
            raise ConfigError(f"{self._bin}, byte {end}: the file ends inside an id of {self.dtype.name}. {REMEDY}")

    def _size(self, path: pathlib.Path) -> int:
        try:
            return path.stat().st_size
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}{missing_pair(self.prefix)}") from None

    def _map(self, path: pathlib.Path) -> np.ndarray:
        """The file's bytes, uint8; an empty file cannot be mapped."""
        if self._size(path) == 0:
            return np.empty(0, np.uint8)
        try:
            return map_bytes(path)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}; pass a readable file") from None


class IndexedWriter:
    """Writes a pair in constant memory. The files are renamed to their final names when both are complete.

    with IndexedWriter("corpus", np.uint16) as writer:
        writer.add_document([5, 3, 50256])

    An exception in the block, including Ctrl-C, removes the files; a killed process leaves a `.bin.unfinished`.
    """

    def __init__(self, prefix: str | os.PathLike, dtype, multimodal: bool = False, overwrite: bool = False):
        """Creates the unfinished files.

        Args:
          prefix: path without `.bin` or `.idx`.
          dtype: type of the ids, one of DTYPES.
          multimodal: also write a mode for each sequence.
          overwrite: replace an existing pair.

        Raises:
          ConfigError: the format does not support the type, the pair exists, or its folder is not writable.
        """
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, name in DTYPES.items() if np.dtype(name) == self.dtype]
        if not codes:
            known = ", ".join(np.dtype(name).name for name in DTYPES.values())
            raise ConfigError(f"ids of type {np.dtype(dtype).name} cannot be stored; choose from {known}")
        self._prefix, self._code, self._bin_path, self._idx_path = prefix, codes[0], *pair_paths(prefix)
        for path in (self._bin_path, self._idx_path):
            if path.exists() and not overwrite:
                raise ConfigError(f"{path} already exists: pass --overwrite to replace it, or another --out")
        self.sequences, self.documents, self.tokens = 0, 0, 0
        self._unfinished = self._bin_path.with_name(self._bin_path.name + ".unfinished")
        try:
            self._bin_path.parent.mkdir(parents=True, exist_ok=True)
            self._bin = SummedFile(self._unfinished)
        except OSError as error:
            raise ConfigError(f"cannot write {self._unfinished}: {error.strerror}; pass another --out") from None
        folder = self._bin_path.parent
        self._lengths, self._boundaries = (tempfile.TemporaryFile(dir=folder) for _ in range(2))  # unnamed files
        self._modes = tempfile.TemporaryFile(dir=folder) if multimodal else None
        self._boundaries.write(bytes(8))

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def add_document(self, tokens, lengths=None, modes=None) -> None:
        """Adds a document: ids [tokens], and the lengths of its sequences. None: one sequence, or none without ids."""
        tokens = np.asarray(tokens)
        lengths = ([len(tokens)] if len(tokens) else []) if lengths is None else lengths
        self.add_documents(tokens, lengths, [len(lengths)], modes)

    def add_documents(self, tokens, lengths, sequences, modes=None) -> None:
        """Adds many documents at once.

        Args:
          tokens: concatenated ids, [tokens].
          lengths: tokens of each sequence, [sequences].
          sequences: number of sequences of each document, [documents]; 0 for an empty document.
          modes: int8 [sequences], only for multimodal datasets; None: zeros.

        Raises:
          ConfigError: an id does not fit the type of the file. (Megatron stores such an id modulo 2^16.)
        """
        tokens, lengths, sequences = np.asarray(tokens), np.asarray(lengths, np.int64), np.asarray(sequences, np.int64)
        assert lengths.sum() == len(tokens) and sequences.sum() == len(lengths)
        self._check_fit(tokens, self.dtype, "token id")
        self._check_fit(lengths, np.dtype(np.int32), "sequence length")
        self._bin.write(tokens.astype(self.dtype, copy=False).data)
        self._lengths.write(lengths.astype("<i4").data)
        self._boundaries.write((self.sequences + np.cumsum(sequences)).astype("<i8").data)
        if self._modes is not None:
            self._modes.write(np.asarray(np.zeros(len(lengths)) if modes is None else modes, np.int8).data)
        self.tokens += len(tokens)
        self.sequences += len(lengths)
        self.documents += len(sequences)

    def add_pair(self, source: IndexedDataset) -> None:
        """Adds all documents of another pair, which must have the same type of ids."""
        if source.dtype != self.dtype:
            raise ConfigError(
                f"{source.prefix} has ids of type {source.dtype.name}, the output {self.dtype.name}: only pairs of the same "
                "type can be merged; preprocess again with one tokenizer"
            )
        with open(pair_paths(source.prefix)[0], "rb") as stream:
            shutil.copyfileobj(stream, self._bin, 1 << 22)
        for start in range(0, len(source), CHECKED_AT_ONCE):
            span = slice(start, start + CHECKED_AT_ONCE)
            self._lengths.write(source.lengths[span].tobytes())
            if self._modes is not None:
                modes = np.zeros(len(source.lengths[span])) if source.modes is None else source.modes[span]
                self._modes.write(modes.astype(np.int8).tobytes())
        for start in range(1, len(source.documents), CHECKED_AT_ONCE):
            self._boundaries.write((source.documents[start : start + CHECKED_AT_ONCE] + self.sequences).tobytes())
        self.tokens += len(source.tokens)
        self.sequences += len(source)
        self.documents += source.document_count

    def finish(self) -> None:
        """Writes the index and renames both files: the old index is removed first, the new one is renamed last."""
        unfinished = self._idx_path.with_name(self._idx_path.name + ".unfinished")
        try:
            with open(unfinished, "wb") as index:
                index.write(HEADER.pack(MAGIC, VERSION, self._code, self.sequences, self.documents + 1))
                self._copy(self._lengths, index)
                self._write_offsets(index)
                self._copy(self._boundaries, index)
                if self._modes is not None:
                    self._copy(self._modes, index)
                self._flush(index)
            self._flush(self._bin)
            self._bin.close()
            for path in (self._idx_path, sums_path(self._prefix)):
                path.unlink(missing_ok=True)
            os.replace(self._unfinished, self._bin_path)
            os.replace(unfinished, self._idx_path)
            write_sums(self._prefix, self._bin.sum)  # without it a pair is complete
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes the unfinished files."""
        for stream in (self._bin, self._lengths, self._boundaries, self._modes):
            if stream is not None:
                stream.close()
        self._unfinished.unlink(missing_ok=True)

    def _write_offsets(self, index: BinaryIO) -> None:
        self._lengths.seek(0)
        begin = 0
        while part := self._lengths.read(4 * CHECKED_AT_ONCE):
            ends = begin + np.cumsum(np.frombuffer(part, "<i4"), dtype="<i8") * self.dtype.itemsize
            index.write(np.concatenate([[begin], ends[:-1]]).astype("<i8").data)
            begin = int(ends[-1])

    @staticmethod
    def _copy(source: BinaryIO, target: BinaryIO) -> None:
        source.seek(0)
        shutil.copyfileobj(source, target, 1 << 22)

    @staticmethod
    def _flush(stream: BinaryIO) -> None:
        stream.flush()
        os.fsync(stream.fileno())

    @staticmethod
    def _check_fit(values: np.ndarray, dtype: np.dtype, what: str) -> None:
        """Raises ConfigError if an integer would overflow; smaller types and floating point are not checked."""
        if not len(values) or dtype.kind == "f" or np.can_cast(values.dtype, dtype):
            return
        legal = np.iinfo(dtype)
        for value in (int(values.min()), int(values.max())):
            if not legal.min <= value <= legal.max:
                raise ConfigError(f"{what} {value} does not fit {dtype.name}, which ends at {legal.max}")
