"""Tokenizers: bytes, GPT-2's byte-pair encoding, small WordPieces, or files of Hugging Face, sentencepiece or BERT."""

import contextlib
import functools
import gzip
import hashlib
import importlib.resources
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from megajax.config import ConfigError, near
from megajax.data.long_texts import LONGEST_WHOLE, batches, splits_at_cuts
from megajax.data.tokenizer_files import FILES, MERGES, find_file, read_settings, used_files, wrong_file
from megajax.schedules.paths import hub_advice

# End-of-document tokens of well-known vocabularies: GPT-2, Llama 3, Llama 2 and T5, Gemma, BERT.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

MAX_VOCABULARY = 2**31 - 1  # ids are int32

# Words, numbers, code, accents, other scripts, an emoji and odd spaces: where tokenizers differ.
PROBE = (
    "The quick brown fox's 1234.5678 jumps;\tdef f(x):\n    return x**2  "
    "# na\u00efve \u0416\u4e2d\u6587 \U0001f600\r\n\u3000end"
)


class Tokenizer(Protocol):
    """Interface of a tokenizer.

    Attributes:
      name: the argument of --tokenizer.
      vocabulary: number of token ids, including the end of document.
      end_of_document: id appended to every document.
      longest: characters of the longest text that is encoded; None: any.
      files: that it was read from, and those beside them that belong to it, which a run directory keeps a copy of.
    """

    name: str
    vocabulary: int
    end_of_document: int
    longest: int | None
    files: Sequence[pathlib.Path]

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 [tokens], without an end of document."""

    def encode_all(self, texts: Sequence[str], dtype: Any = np.int32) -> list[np.ndarray]:
        """`encode` for many texts, faster than one by one; `dtype`: of the ids."""

    def decode(self, ids) -> str:
        """The text of ids; invalid UTF-8 becomes the replacement character."""


class ByteTokenizer:
    """One token per byte of UTF-8."""

    name, vocabulary, end_of_document, longest = "byte", 257, 256, None
    files = ()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    hugging_face = beginning = None
    special = frozenset({256})

    def encode_prompt(self, text: str) -> np.ndarray:
        return self.encode(text)

    def text(self, ids) -> str:
        return self.decode(ids)

    def encode_all(self, texts: Sequence[str], dtype: Any = np.int32) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(dtype) for text in texts]

    def decode(self, ids) -> str:
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library, without added special tokens, truncation or padding."""

    def __init__(self, name: str, inner, end_of_document: str | None = None, files: Sequence[pathlib.Path] = ()):
        """Wraps a tokenizers.Tokenizer; `end_of_document` None searches for one of ENDS.

        Raises:
          ConfigError: the vocabulary has no such token, or an id that does not fit int32.
        """
        from tokenizers import processors

        inner.no_truncation()
        inner.no_padding()
        inner.post_processor = processors.Sequence([])  # it adds special tokens, and cuts spaces off the offsets
        self.name, self.inner, self.files = name, inner, files
        last = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 0 <= last < MAX_VOCABULARY:
            raise ConfigError(f"tokenizer {name} has {last + 1} token ids; pass one with 1 to {MAX_VOCABULARY}")
        self.vocabulary = last + 1
        self.end_of_document = _end_of_document(name, end_of_document, inner.token_to_id)
        self._may_cut = splits_at_cuts(inner)

    @functools.cached_property
    def hugging_face(self):
        path = pathlib.Path(self.name)
        if path.name != "tokenizer.json":
            return None
        from megajax.data.hugging_face import load_directory, load_file

        return load_directory(path.parent) if path.with_name("tokenizer_config.json").is_file() else load_file(path)

    @property
    def beginning(self):
        return self.hugging_face.bos_token_id if self.hugging_face else None

    @property
    def special(self):
        return frozenset({self.end_of_document, *(self.hugging_face.all_special_ids if self.hugging_face else ())})

    def encode_prompt(self, text: str) -> np.ndarray:
        if self.hugging_face is None:
            return self.encode(text)
        return np.array(self.hugging_face(text).input_ids, np.int32)

    def text(self, ids) -> str:
        if self.hugging_face is None:
            return self.decode(ids)
        return self.hugging_face.decode([int(token) for token in ids], skip_special_tokens=True)

    @property
    def longest(self) -> int | None:
        """Characters of the longest text that `encode_all` takes; None: any."""
        return None if self._may_cut else LONGEST_WHOLE

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str], dtype: Any = np.int32) -> list[np.ndarray]:
        check_length(self, texts)
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        for numbers, batch in batches(texts, self._may_cut):
            with _library_errors(f"tokenizer {self.name} cannot encode a text"):
                encoded = self.inner.encode_batch_fast(batch, add_special_tokens=False)  # without character offsets
            for number, one in zip(numbers, encoded, strict=True):
                parts[number].append(np.array(one.ids, dtype))
        return [np.concatenate(part) if len(part) > 1 else part[0] for part in parts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its ids, int32 [tokens], and each token's first character and last + 1 in it, int [tokens, 2]."""
        with _library_errors(f"tokenizer {self.name} cannot encode a text"):
            encoded = self.inner.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(one.ids, np.int32), np.array(one.offsets, np.int64).reshape(-1, 2)) for one in encoded]

    def decode(self, ids) -> str:
        ids = [int(token) for token in ids if token != self.end_of_document]
        with _library_errors(f"tokenizer {self.name} cannot decode its ids"):
            return self.inner.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer:
    """A model of the `sentencepiece` library, without added begin or end of sentence."""

    longest = LONGEST_WHOLE

    def __init__(self, name: str, end_of_document: str | None = None):
        """Loads the file `name`; `end_of_document` as in HuggingFaceTokenizer."""
        import sentencepiece

        self.name, self.inner = name, sentencepiece.SentencePieceProcessor(model_file=name)
        self.files = used_files(name)
        self.vocabulary = self.inner.vocab_size()
        pieces = {self.inner.id_to_piece(token): token for token in range(self.vocabulary)}
        if end_of_document is None and self.inner.eos_id() >= 0:
            self.end_of_document = self.inner.eos_id()
        else:
            self.end_of_document = _end_of_document(name, end_of_document, pieces.get)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str], dtype: Any = np.int32) -> list[np.ndarray]:
        check_length(self, texts)
        found: list[np.ndarray] = []
        for _, batch in batches(texts, may_cut=False):
            with _library_errors(f"tokenizer {self.name} cannot encode a text"):
                found += [np.array(ids, dtype) for ids in self.inner.encode(batch, num_threads=1)]
        return found

    def decode(self, ids) -> str:
        with _library_errors(f"tokenizer {self.name} cannot decode its ids"):
            return self.inner.decode([int(token) for token in ids if token != self.end_of_document])

    hugging_face = None

    @property
    def beginning(self):
        return self.inner.bos_id() if self.inner.bos_id() >= 0 else None

    @property
    def special(self):
        return frozenset({self.end_of_document})

    def encode_prompt(self, text: str) -> np.ndarray:
        start = [] if self.beginning is None else [self.beginning]
        return np.array([*start, *self.encode(text)], np.int32)

    def text(self, ids) -> str:
        return self.decode(ids)


def load_gpt2() -> HuggingFaceTokenizer:
    """GPT-2's byte-level BPE, from the package's files."""
    return HuggingFaceTokenizer(
        "gpt2", _byte_level(json.loads(_packaged("encoder.json.gz")), _packaged("vocab.bpe.gz"))
    )


def _byte_level(vocabulary: dict[str, int], merges: str):
    """A tokenizers.Tokenizer of GPT-2's kind; `merges` has a line for each, and may have a first one that is a comment."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    lines = [line for line in merges.split("\n") if line.strip() and not line.startswith("#version")]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(line.split()) for line in lines]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def load_wordpiece() -> HuggingFaceTokenizer:
    """BERT's WordPieces of the bundled text, lower case, from the package's files (megajax/data/text/SOURCE.md)."""
    from tokenizers import BertWordPieceTokenizer

    pieces = (importlib.resources.files("megajax.data") / "text" / "vocab.txt").read_text(encoding="utf-8").split()
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return HuggingFaceTokenizer("wordpiece", BertWordPieceTokenizer(vocabulary, lowercase=True)._tokenizer)


TOKENIZERS = {"byte": ByteTokenizer, "gpt2": load_gpt2, "wordpiece": load_wordpiece}


@functools.cache
def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """Loads a tokenizer by name or from a file.

    Args:
      name: one of TOKENIZERS, a path with an ending of FILES, or a directory of Hugging Face or of a run.
      end_of_document: token that ends documents, for files only; None: eos_token of tokenizer_config.json or
        special_tokens_map.json beside the file, or one of ENDS.

    Raises:
      ConfigError: the name is unknown, the file cannot be read or used, or it has no such end of document.
    """
    name = find_file(name) if name not in TOKENIZERS else name
    ending = pathlib.Path(name).suffix
    if name in TOKENIZERS or ending not in FILES:
        if name not in TOKENIZERS:
            raise ConfigError(
                f"tokenizer = {name!r} is not known: {near(name, TOKENIZERS)} Pass --tokenizer NAME, a directory of Hugging "
                f"Face, or a file: {', '.join(f'FILE{end}' for end in FILES)}.{hub_advice(name)}"
            )
        if end_of_document is not None:
            raise ConfigError(f"tokenizer {name} has a fixed end of document: omit --end-of-document")
        return TOKENIZERS[name]()
    if problem := wrong_file(name):
        raise ConfigError(problem)
    with _panics_hidden(), _library_errors(f"tokenizer {name} is not {FILES[ending]}"):
        tokenizer = _read(name, ending, end_of_document)
        tokenizer.decode(tokenizer.encode(PROBE))  # some damaged files fail only when they are used
    return tokenizer


def check_length(tokenizer: Tokenizer, texts: Sequence[str], place: str = "") -> None:
    """Raises ConfigError for a text that would take too much memory; `place`: the beginning of its message."""
    longest = max(map(len, texts), default=0)
    if tokenizer.longest is not None and longest > tokenizer.longest:
        raise ConfigError(
            f"{place}a document has {longest:,} characters, and tokenizer {tokenizer.name} encodes at most "
            f"{tokenizer.longest:,} at once, as it needs 130 bytes of memory for each: split the document"
        )


@contextlib.contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """Raises ConfigError with `message` and the reason if a tokenizer's library fails."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # Exception, RuntimeError and others; a Rust panic is a BaseException
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{message}: {reason}; pass another --tokenizer") from None


@contextlib.contextmanager
def _panics_hidden() -> Iterator[None]:
    """Withholds standard error if a ConfigError is raised: a Rust panic writes a backtrace there."""
    with tempfile.TemporaryFile() as held:
        original = os.dup(2)
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(original, 2)
            os.close(original)
            held.seek(0)
            if not failed:
                os.write(2, held.read())


def _read(name: str, ending: str, end_of_document: str | None) -> Tokenizer:
    if ending == ".model":
        return SentencePieceTokenizer(name, end_of_document)
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    settings, path = read_settings(name), pathlib.Path(name)
    if ending == ".txt":
        inner = BertWordPieceTokenizer(name, lowercase=settings.lower_case)._tokenizer
    elif path.name == "vocab.json":
        merges = (path.parent / MERGES).read_text(encoding="utf-8")
        inner = _byte_level(json.loads(path.read_text(encoding="utf-8")), merges)
    else:
        inner = Tokenizer.from_file(name)
    if end_of_document is None and settings.end is not None and inner.token_to_id(settings.end) is not None:
        end_of_document = settings.end
    return HuggingFaceTokenizer(name, inner, end_of_document, used_files(name))


def _end_of_document(name: str, wanted: str | None, token_to_id) -> int:
    for token in ENDS if wanted is None else (wanted,):
        if token_to_id(token) is not None:
            return token_to_id(token)
    missing = f"none of {', '.join(ENDS)}" if wanted is None else f"no token {wanted!r}"
    raise ConfigError(f"tokenizer {name} has {missing} to end documents with: pass --end-of-document TOKEN")


def _packaged(name: str) -> str:
    return gzip.decompress((importlib.resources.files("megajax.data") / "gpt2" / name).read_bytes()).decode()


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Sixteen hex digits that depend on the tokenizer's ids and on how it splits a text, and not on its files' names."""
    digest = hashlib.sha256(f"{tokenizer.vocabulary} {tokenizer.end_of_document}".encode())
    for token in range(tokenizer.vocabulary):
        digest.update(tokenizer.decode([token]).encode("utf-8", "replace") + b"\0")
    digest.update(str([int(token) for token in tokenizer.encode(PROBE)]).encode())
    return digest.hexdigest()[:16]
