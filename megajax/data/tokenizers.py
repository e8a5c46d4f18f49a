"""Text to token ids and back: bytes for small runs, GPT-2's byte-pair encoding for real ones."""

import functools
import gzip
import importlib.resources
import json
from typing import Protocol

import numpy as np

from megajax.config import ConfigError, near


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer.

    Attributes:
      name: as typed after --tokenizer.
      vocabulary: number of token ids, the end of a document's included.
      end_of_document: the id that is put after every document.
    """

    name: str
    vocabulary: int
    end_of_document: int

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 [tokens], without an end of document."""

    def decode(self, ids) -> str:
        """The text of ids; bytes that are no UTF-8 become the replacement character."""


class ByteTokenizer:
    """One token for each byte of UTF-8."""

    name, vocabulary, end_of_document = "byte", 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids) -> str:
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", "replace")


class GPT2Tokenizer:
    """GPT-2's byte-level BPE, run by the `tokenizers` library."""

    name, vocabulary, end_of_document = "gpt2", 50257, 50256

    def __init__(self):
        """Reads the files in the package."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        merges = [tuple(line.split()) for line in _packaged("vocab.bpe.gz").split("\n")[1:] if line.strip()]
        self._inner = Tokenizer(models.BPE(vocab=json.loads(_packaged("encoder.json.gz")), merges=merges))
        self._inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._inner.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text).ids, np.int32)

    def decode(self, ids) -> str:
        return self._inner.decode([int(token) for token in ids if token != self.end_of_document])


TOKENIZERS = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`.

    Raises:
      ConfigError: there is none.
    """
    if name not in TOKENIZERS:
        raise ConfigError(f"tokenizer = {name!r} is not known: {near(name, TOKENIZERS)} Type --tokenizer NAME.")
    return TOKENIZERS[name]()


def _packaged(name: str) -> str:
    return gzip.decompress((importlib.resources.files("megajax.data") / "gpt2" / name).read_bytes()).decode()
