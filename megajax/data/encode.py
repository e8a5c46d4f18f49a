"""Blocks of text to blocks of ids, on all cores, in order."""

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.corpus import BadLine, Block, documents_of, split_sentences
from megajax.data.indexed import dtype_for
from megajax.data.tokenizers import Tokenizer, load_tokenizer

AHEAD = 3  # blocks in the works for each worker: none waits, and memory stays bounded


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How documents become ids.

    Attributes:
      tokenizer: its name; each worker loads its own.
      end_of_document: see `load_tokenizer`.
      keys: of the JSON objects; each makes a dataset of its own.
      append_end: whether the end of document is put after each that is not empty.
      sentences: whether documents are cut into sentences, each a sequence.
    """

    tokenizer: str
    end_of_document: str | None = None
    keys: tuple[str, ...] = ("text",)
    append_end: bool = True
    sentences: bool = False

    def load(self) -> Tokenizer:
        """The tokenizer."""
        return load_tokenizer(self.tokenizer, self.end_of_document)


class Encoded(NamedTuple):
    """The ids of some documents, in the form that IndexedWriter.add_documents takes."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray


class Result(NamedTuple):
    """What became of a block.

    Attributes:
      encoded: of each key.
      bad: lines that are no documents.
      characters: bytes of text in the block, unpacked.
      path: of the file.
      read: bytes of the file read so far.
    """

    encoded: list[Encoded]
    bad: list[BadLine]
    characters: int
    path: str
    read: int


def encode_block(block: Block, recipe: Recipe) -> Result:
    """Reads and encodes one block."""
    tokenizer = recipe.load()
    documents, bad = documents_of(block, recipe.keys)
    columns = [list(texts) for texts in zip(*documents, strict=True)] or [[] for _ in recipe.keys]
    encoded = [_encode(texts, recipe, tokenizer) for texts in columns]
    return Result(encoded, bad, len(block.content), block.path, block.read)


def encode_blocks(blocks: Iterable[Block], recipe: Recipe, workers: int) -> Iterator[Result]:
    """Encodes on `workers` processes; results come in the order of the blocks, whoever finishes first.

    Raises:
      ConfigError: a worker was killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start)
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(encode_block, block, recipe))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ConfigError(
            "a worker process was killed, probably for want of memory: type fewer --workers, or cut very long documents"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode(texts: list[str], recipe: Recipe, tokenizer: Tokenizer) -> Encoded:
    if recipe.sentences:
        parts = [split_sentences(text) for text in texts]
        ids = tokenizer.encode_all([sentence for part in parts for sentence in part])
        owner = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
    else:
        ids, owner = tokenizer.encode_all(texts), np.arange(len(texts))
    kept = [number for number, part in enumerate(ids) if len(part)]
    ids, owner = [ids[number] for number in kept], owner[kept]
    lengths = np.array([len(part) for part in ids], np.int64)
    tokens = np.concatenate(ids, dtype=np.int32) if ids else np.empty(0, np.int32)
    if recipe.append_end and len(ids):
        lasts = np.flatnonzero(np.append(owner[1:] != owner[:-1], True))
        tokens = np.insert(tokens, np.cumsum(lengths)[lasts], tokenizer.end_of_document)
        lengths[lasts] += 1
    return Encoded(tokens.astype(dtype_for(tokenizer.vocabulary)), lengths, np.bincount(owner, minlength=len(texts)))


def _start() -> None:
    """Readies a worker: Ctrl-C is the parent's to handle, and one core is one worker's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
