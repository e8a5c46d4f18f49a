"""Tokenizes blocks of text, in worker processes."""

import collections
import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.blocks import BadLine, Block, documents_of
from megajax.data.indexed import dtype_for
from megajax.data.read_file import PART
from megajax.data.recipe import Recipe
from megajax.data.text import split_sentences
from megajax.data.tokenizers import Tokenizer, check_length

__all__ = ["Encoded", "Result", "Workers", "encode_block"]

AHEAD = 3  # blocks in flight per worker: workers do not idle, and memory stays bounded
BYTES_AHEAD = 1 << 26  # text in flight, unless a single block is longer


class Encoded(NamedTuple):
    """Ids of several documents: the arguments of IndexedWriter.add_documents."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray


class Result(NamedTuple):
    """The result of a block.

    Attributes:
      encoded: ids, for each key.
      bad: lines that are not documents.
      characters: decompressed bytes of the block.
      path: the file.
      read: bytes of the file read so far.
    """

    encoded: list[Encoded]
    bad: list[BadLine]
    characters: int
    path: str
    read: int


def encode_block(block: Block, recipe: Recipe) -> Result:
    """Parses and tokenizes one block."""
    tokenizer = recipe.load()
    documents, bad = documents_of(block, recipe.keys)
    place = f"{block.path}, {block.unit if block.begins else 'from line'} {block.first_line}: "
    check_length(tokenizer, [text for texts in documents for text in texts], place)
    columns = [list(texts) for texts in zip(*documents, strict=True)] or [[] for _ in recipe.keys]
    encoded = [_encode(texts, recipe, tokenizer) for texts in columns]
    return Result(encoded, bad, len(block.content), block.path, block.read)


class Workers:
    """A context manager: a pool of processes that tokenize; they start in the background."""

    def __init__(self, count: int, size: int = 0):
        """`count` processes; `size`: bytes of the texts, whose blocks limit how many processes start at once."""
        self._at_once, self._starting = min(count, 1 + size // PART), list[concurrent.futures.Future]()
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
        self._count, self._pool = count, concurrent.futures.ProcessPoolExecutor(count, context, _start_worker)

    def __enter__(self) -> "Workers":
        """Starts them without Ctrl-C, which this process handles: they inherit the mask of signals."""
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._starting = [self._pool.submit(int) for _ in range(self._at_once)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return self

    def __exit__(self, *error) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def encode(self, blocks: Iterable[Block], recipe: Recipe) -> Iterator[Result]:
        """Tokenizes; yields results in the order of the blocks.

        Raises:
          ConfigError: a worker was killed.
        """
        waiting: collections.deque[tuple[int, concurrent.futures.Future]] = collections.deque()
        try:
            for block in blocks:
                concurrent.futures.wait(self._starting)  # the pool starts another process while none is idle
                size = len(block.content)
                most = max(BYTES_AHEAD, AHEAD * self._count * PART)
                while waiting and (len(waiting) >= AHEAD * self._count or size + sum(one for one, _ in waiting) > most):
                    yield waiting.popleft()[1].result()
                waiting.append((size, self._pool.submit(encode_block, block, recipe)))
                del block
            while waiting:
                yield waiting.popleft()[1].result()
        except BrokenProcessPool:
            raise ConfigError(
                "a worker process was killed, probably out of memory: pass fewer --workers, or split very long documents"
            ) from None


def _encode(texts: list[str], recipe: Recipe, tokenizer: Tokenizer) -> Encoded:
    dtype = dtype_for(tokenizer.vocabulary)
    if recipe.sentences:
        parts = [split_sentences(text) for text in texts]
        ids = tokenizer.encode_all([sentence for part in parts for sentence in part], dtype)
        owner = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
    else:
        ids, owner = tokenizer.encode_all(texts, dtype), np.arange(len(texts))
    kept = [number for number, part in enumerate(ids) if len(part)]
    ids, owner = [ids[number] for number in kept], owner[kept]
    lengths = np.array([len(part) for part in ids], np.int64)
    if recipe.append_end and len(ids):
        is_last = np.append(owner[1:] != owner[:-1], True)
        end = np.array([tokenizer.end_of_document], dtype)
        ids = [part for number, one in enumerate(ids) for part in ((one, end) if is_last[number] else (one,))]
        lengths += is_last
    tokens = np.concatenate(ids) if ids else np.empty(0, dtype)
    return Encoded(tokens, lengths, np.bincount(owner, minlength=len(texts)))


def _start_worker() -> None:
    """Limits the tokenizer to one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
