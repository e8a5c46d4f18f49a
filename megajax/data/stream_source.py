"""One source of a stream: its files again and again, tokenized and cut into windows, from any position on.

The documents of a source are one stream of ids, each document with its end. Window n has the ids n s to n s + s of it: s
inputs and, shifted by one, s labels; neighbours share an id, as in `TokenSamples`. Files come in another order in each
epoch, a function of the seed. A position is a place in a file, so a window does not depend on the workers, nor on what was
read before.
"""

import collections
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.blocks import Block
from megajax.data.remote import expanded, is_url
from megajax.data.sources import Wanted, source_kind
from megajax.data.stream_workers import Ids, Workers
from megajax.data.text import check_source, read_blocks
from megajax.schedules.errors import counted

__all__ = ["Position", "StreamSource", "Window"]

BAD_LINES_SHOWN = 10


class Position(NamedTuple):
    """Where the next window of a source starts.

    Attributes:
      epoch: epochs read.
      file: place of the file in the epoch's order.
      block: block of the file.
      offset: id of the block's documents.
      name: of the file, to recognise it.
      line: the block's first line or row, likewise.
    """

    epoch: int = 0
    file: int = 0
    block: int = 0
    offset: int = 0
    name: str = ""
    line: int = 0


class Window(NamedTuple):
    """Ids int32 [s + 1], where they start, and the position after them."""

    tokens: np.ndarray
    place: str
    after: Position


@dataclasses.dataclass
class StreamSource:
    """Files, URLs or a dataset; `number`: of the source in the stream."""

    words: Sequence[str]
    wanted: Wanted
    seed: int
    number: int

    def __post_init__(self):
        """Expands patterns, and reads the beginning of the first file, and of every one of this machine.

        Raises:
          ConfigError: one cannot be read, or is of a format that is not read.
        """
        self.paths = expanded(self.words, "--stream")
        self.kinds = [source_kind(path, "file") for path in self.paths]
        for place, (path, kind) in enumerate(zip(self.paths, self.kinds, strict=True)):
            if not place or not is_url(path):
                check_source(path, kind, "--stream", self.wanted)
        self._bad = 0

    @property
    def name(self) -> str:
        """For the log."""
        return self.words[0] if len(self.words) == 1 else f"{self.words[0]} and {len(self.words) - 1} more"

    def windows(self, position: Position, length: int, workers: Workers, ahead: int) -> Iterator[Window]:
        """The windows from a position on, without end.

        Args:
          position: of a window before, or the first.
          length: inputs of a window.
          workers: that encode the blocks.
          ahead: blocks that are encoded ahead.

        Raises:
          ConfigError: the source cannot be read, has no text, or is not the one that the position is of.
        """
        pieces: collections.deque[tuple[Position, np.ndarray]] = collections.deque()
        offset, held = position.offset, -position.offset
        blocks = self._encoded(position, workers, ahead)
        while True:
            while held < length + 1:
                place, tokens = next(blocks)
                if len(tokens):
                    pieces.append((place, tokens))
                    held += len(tokens)
                    if len(pieces) == 1 and offset >= len(tokens):
                        raise _changed(place.name)
            start = pieces[0][0]
            window, taken = [pieces[0][1][offset:]], len(pieces[0][1]) - offset
            for _, tokens in list(pieces)[1:]:
                if taken > length:
                    break
                window.append(tokens)
                taken += len(tokens)
            ids = np.concatenate(window)[: length + 1].astype(np.int32)
            offset, held = offset + length, held - length
            while offset >= len(pieces[0][1]):
                offset -= len(pieces.popleft()[1])
            yield Window(ids, f"{start.name}, from line {start.line}", pieces[0][0]._replace(offset=offset))

    def _encoded(self, position: Position, workers: Workers, ahead: int) -> Iterator[tuple[Position, np.ndarray]]:
        """The ids of every block from a position's on; `ahead` blocks are encoded meanwhile."""
        waiting: collections.deque[tuple[Position, Any]] = collections.deque()
        epoch, found = position.epoch, True
        for place, block in self._blocks(position):
            waiting.append((place, workers.submit(block)))
            while len(waiting) > ahead:
                place, future = waiting.popleft()
                ids: Ids = future.result()
                self._report(ids)
                if place.epoch != epoch:
                    if not found:
                        raise ConfigError(f"--stream {self.name}: there is no document with text in it")
                    epoch, found = place.epoch, False
                found |= bool(len(ids.tokens))
                yield place, ids.tokens

    def _blocks(self, position: Position) -> Iterator[tuple[Position, Block]]:
        """Every block of every file of every epoch from a position on."""
        epoch, first, skip = position.epoch, position.file, position.block
        if first >= len(self.paths):
            raise _changed(self.paths[0], position.name)
        while True:
            order = np.random.Generator(np.random.Philox(key=[self.seed, epoch + (self.number << 32)])).permutation(
                len(self.paths)
            )
            count = 0
            for place, file in list(enumerate(order.tolist()))[first:]:
                path = self.paths[file]
                if skip and position.name and os.path.basename(path) != position.name:
                    raise _changed(path, position.name)
                for number, block in enumerate(read_blocks(path, self.kinds[file], "--stream", self.wanted)):
                    count += 1
                    if number < skip:
                        continue
                    if number == skip and position.name and position[:3] == (epoch, place, number):
                        if (os.path.basename(path), block.first_line) != (position.name, position.line):
                            raise _changed(path, position.name)
                    yield Position(epoch, place, number, 0, os.path.basename(path), block.first_line), block
                if skip >= count and skip:
                    raise _changed(path)
                skip = 0
            if not count:
                raise ConfigError(f"--stream {self.name}: there is no document with text in it")
            epoch, first = epoch + 1, 0

    def _report(self, ids: Ids) -> None:
        """Prints the first lines that are not documents."""
        for line in ids.bad[: max(0, BAD_LINES_SHOWN - self._bad)]:
            print(f"skipped {line}", file=sys.stderr)
        before, self._bad = self._bad, self._bad + len(ids.bad)
        if before < BAD_LINES_SHOWN <= self._bad:
            print(f"skipped {counted(BAD_LINES_SHOWN, 'line')} of --stream; more are not printed", file=sys.stderr)


def _changed(path: str, was: str = "") -> ConfigError:
    before = f" (the checkpoint is at {was})" if was and was != os.path.basename(path) else ""
    return ConfigError(
        f"{path} is not what the stream of the checkpoint read{before}: pass the same --stream, with the same files, or "
        "another --run-dir"
    )
