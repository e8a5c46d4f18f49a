"""Shards of preprocessing, for many processes or hosts: the sources of each, what says that it is complete, and their merge.

python -m megajax.data.preprocess --input FILES --out corpus --tokenizer gpt2 --shard 3/64   writes corpus.00003-of-00064
python -m megajax.data.preprocess merge --shards corpus                                      all 64 into corpus

A shard has neighbouring sources, or lines of one, about the same bytes as the others (`megajax.data.spans`), so the merged
pair is the one that a single process writes. When its pairs are complete it writes PREFIX.00003-of-00064.shard.json: what
it was made of, and its counts. A shard that has this file is not made again; one without it is.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megajax.config import ConfigError
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.pair_sums import verify_pairs
from megajax.data.read_file import check_place
from megajax.data.remote import is_url, remote_errors, size_of
from megajax.data.sources import HUB
from megajax.data.spans import DIVIDED, Place, place_of_part, spans_between, units_of_lines
from megajax.schedules.errors import counted, shown

__all__ = ["Merged", "Shard", "merge_shards", "parse_shard"]

MOST = 99_999
COUNTS = ("documents", "sequences", "tokens")
NAME = re.compile(r"\.(\d{5})-of-(\d{5})\.shard\.json")
NAMED = 5  # missing shards in a message


def parse_shard(text: str) -> tuple[int, int]:
    """(index, count) of "3/64".

    Raises:
      ArgumentTypeError: it is not so.
    """
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 0 <= index < count <= MOST:
        last = f": {count} shards have the numbers 0 to {count - 1}" if found and count else ""
        raise argparse.ArgumentTypeError(f"{shown(text)} must be INDEX/COUNT, such as 0/64 to 63/64{last}")
    return index, count


class Shard:
    """One of the shards of a preprocessing.

    Attributes:
      spans: its sources, or pieces of them, perhaps none.
      suffix: of its pairs' names.
    """

    def __init__(
        self,
        index: int,
        count: int,
        out: str,
        paths: Sequence[str],
        settings: Mapping[str, Any],
        kind_of: Callable[[str], str],
    ):
        """Divides the sources.

        Args:
          index: of the shard, below `count`.
          count: of the shards.
          out: --out.
          paths: all sources, in their order.
          settings: of JSON, all that decides on the ids of a text.
          kind_of: the kind of a source, see `source_kind`.

        Raises:
          ConfigError: there are more shards than sources, none of which can be divided; or one can be read once only.
        """
        for path in paths:
            if is_url(path) or path.startswith(HUB) or os.path.isfile(path) or os.path.isdir(path):
                continue
            check_place(path, "pass --input a readable file", "--input")
            raise ConfigError(f"--shard {index}/{count}: {path} can be read once only; pass --input files")
        sizes = _sizes(paths)
        bytes_of = [1] * len(paths) if None in sizes else sizes
        units = functools.cache(lambda number: units_of_lines(paths[number], kind_of(paths[number])))
        largest = max(DIVIDED, sum(bytes_of) / count)
        is_divided = lambda number: bytes_of[number] > largest and bool(units(number))  # noqa: E731
        if count > len(paths) and not any(map(is_divided, range(len(paths)))):
            raise ConfigError(
                f"--shard {index}/{count}: --input has {counted(len(paths), 'source')}, and a shard has whole ones: pass at "
                f"most {len(paths)} shards (divided are uncompressed JSON lines, and text of --text-documents line, of more "
                f"than {DIVIDED >> 20} MB)"
            )
        first, end = (place_of_part(part, count, paths, bytes_of, is_divided) for part in (index, index + 1))
        self.spans = spans_between(first, end, paths, bytes_of, units)
        self.suffix = f".{index:05}-of-{count:05}"
        self._name, self._record = f"shard {index} of {count}", pathlib.Path(f"{out}{self.suffix}.shard.json")
        digest = hashlib.sha256(json.dumps([list(paths), sizes]).encode()).hexdigest()
        self._made_of = {"settings": dict(settings), "sources": len(paths), "digest": digest}
        self._range = {"first": first.source, "end": end.source, "first_byte": first.byte, "end_byte": end.byte}

    def is_complete(self, overwrite: bool) -> bool:
        """Whether the shard has been written before; its line is printed then.

        Args:
          overwrite: make it again.

        Raises:
          ConfigError: it has been, of other sources or in another way.
        """
        if overwrite or not self._record.exists():
            self._record.unlink(missing_ok=True)
            return False
        found = _read(self._record)
        if difference := _difference(found["made_of"], self._made_of):
            raise ConfigError(f"{self._record} was made with other {difference}: pass --overwrite, or another --out")
        names = (
            self._record.parent / f"{pair}{self.suffix}{end}" for pair in found["pairs"] for end in (".bin", ".idx")
        )
        if not all(name.exists() for name in names):
            self._record.unlink()
            return False
        tokens = sum(pair["tokens"] for pair in found["pairs"].values())
        print(f"{self._name} is complete: {counted(tokens, 'token')}; nothing was done")
        return True

    def finish(self, writers: Mapping[str, IndexedWriter], read: int, bad: int) -> None:
        """Notes that the shard's pairs are complete.

        Args:
          writers: of the pairs, by the names that they have without the shard's suffix.
          read: bytes of text.
          bad: lines that were skipped.
        """
        pairs = {name: {count: getattr(writer, count) for count in COUNTS} for name, writer in writers.items()}
        pairs = {os.path.basename(name): pair for name, pair in pairs.items()}
        record = {"made_of": self._made_of, **self._range, "pairs": pairs, "bytes": read, "bad_lines": bad}
        unfinished = self._record.with_name(self._record.name + ".unfinished")
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._record)


class Merged(NamedTuple):
    """The writers of the merged pairs, by prefix; and how many shards, sources, bytes of text and bad lines they had."""

    writers: dict[str, IndexedWriter]
    shards: int
    sources: int
    read: int
    bad: int


def merge_shards(prefix: str, out: str, overwrite: bool) -> Merged:
    """Merges all shards of PREFIX in their order, each verified by its checksums and counts.

    Args:
      prefix: --out of the shards.
      out: of the merged pairs, with the same endings as theirs.
      overwrite: replace existing pairs.

    Raises:
      ConfigError: a shard is missing, damaged, or not of the same preprocessing as the others.
    """
    records = _records(prefix)
    folder, pairs = pathlib.Path(prefix).parent, list(records[0]["pairs"])
    base, writers = os.path.basename(prefix), {}
    try:
        for pair in pairs:
            shards = [f"{folder / pair}.{index:05}-of-{len(records):05}" for index in range(len(records))]
            first = IndexedDataset(shards[0])
            name = out + pair.removeprefix(base)
            writers[name] = writer = IndexedWriter(name, first.dtype, overwrite=overwrite)
            for shard, record in zip(shards, records, strict=True):
                source = IndexedDataset(shard)
                source.check()
                verify_pairs([shard])
                _check_counts(shard, source, record["pairs"][pair])
                writer.add_pair(source)
            for count in COUNTS:
                wanted = sum(record["pairs"][pair][count] for record in records)
                if getattr(writer, count) != wanted:
                    raise ConfigError(
                        f"{name} would have {getattr(writer, count):,} {count}, and its shards have {wanted:,}: "
                        "merge them again"
                    )
        if not any(writer.tokens for writer in writers.values()):
            raise ConfigError(f"no shard of {prefix} has a document with text in it. Nothing was written.")
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.discard()
    read, bad = (sum(record[name] for record in records) for name in ("bytes", "bad_lines"))
    return Merged(writers, len(records), records[0]["made_of"]["sources"], read, bad)


def _sizes(paths: Sequence[str]) -> list[int | None]:
    """Bytes of each source; None of what is no file, and of a URL whose server does not say."""

    def size(path: str) -> int | None:
        if is_url(path):
            with remote_errors(path, "pass --input a readable file"):
                return size_of(path) or None
        return os.path.getsize(path) if os.path.isfile(path) else None

    urls = [path for path in paths if is_url(path)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        of_urls = dict(zip(urls, pool.map(size, urls), strict=True))
    return [of_urls[path] if path in of_urls else size(path) for path in paths]


def _records(prefix: str) -> list[dict[str, Any]]:
    """The records of all shards, which must be of one preprocessing."""
    path = pathlib.Path(prefix)
    found = [file for file in path.parent.glob("*.shard.json") if file.name.startswith(path.name)]
    ends = [end for file in found if (end := NAME.fullmatch(file.name.removeprefix(path.name)))]
    counts = sorted({int(end[2]) for end in ends})
    if not counts:
        raise ConfigError(f"there is no complete shard of {prefix}; pass --shards the --out of `preprocess --shard`")
    if len(counts) > 1:
        raise ConfigError(f"{prefix} has shards of {counts[0]} and of {counts[1]}: remove those that are not wanted")
    [count] = counts
    missing = sorted(set(range(count)) - {int(end[1]) for end in ends})
    if missing:
        names = ", ".join(map(str, missing[:NAMED])) + (f" and {len(missing) - NAMED} more" * (len(missing) > NAMED))
        raise ConfigError(
            f"{prefix}: shard{'s' * (len(missing) > 1)} {names} of {count} {'are' if len(missing) > 1 else 'is'} not "
            f"complete: run the same command with --shard {missing[0]}/{count}"
        )
    files = [pathlib.Path(f"{prefix}.{index:05}-of-{count:05}.shard.json") for index in range(count)]
    records = [_read(file) for file in files]
    place = Place(0, 0)
    for file, record in zip(files, records, strict=True):
        if difference := _difference(record["made_of"], records[0]["made_of"]):
            raise ConfigError(f"{file} was made with other {difference} than {files[0].name}: make it again")
        if Place(record["first"], record.get("first_byte", 0)) != place or list(record["pairs"]) != list(
            records[0]["pairs"]
        ):
            raise ConfigError(f"{file} does not begin where the shard before it ends: make both again")
        place = Place(record["end"], record.get("end_byte", 0))
    if place != (records[0]["made_of"]["sources"], 0):
        raise ConfigError(f"{files[-1]} does not end with the last source: make it again")
    return records


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = [found["first"], found["end"], found["bytes"], found["bad_lines"], found["made_of"]["sources"]]
        whole += [pair[count] for pair in found["pairs"].values() for count in COUNTS]
        if all(type(number) is int for number in whole) and found["pairs"] and found["made_of"]["settings"]:
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ConfigError(f"{path} is no record of a shard: remove it, and make the shard again")


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What two shards were made of that is not the same; "" if nothing."""
    settings = [name for name, value in other["settings"].items() if one["settings"].get(name) != value]
    if settings:
        return settings[0]
    return "" if (one["sources"], one.get("digest")) == (other["sources"], other.get("digest")) else "--input"


def _check_counts(shard: str, source: IndexedDataset, wanted: Mapping[str, int]) -> None:
    counts = {"documents": source.document_count, "sequences": len(source), "tokens": len(source.tokens)}
    for name, count in counts.items():
        if count != wanted[name]:
            raise ConfigError(f"{shard} has {count:,} {name}, and {wanted[name]:,} were written: make the shard again")
