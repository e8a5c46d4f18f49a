"""Tokenizers: bytes, GPT-2's byte-pair encoding, small WordPieces, a file, or a directory of Hugging Face.

A file is read as Megatron-LM reads it: by the libraries `tokenizers` and `sentencepiece`. A directory with settings of
Hugging Face is read by `transformers` (data/hugging_face.py).
"""

import copy
import functools
import gzip
import hashlib
import importlib.resources
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from megajax.config import ConfigError, near
from megajax.data.hub import local_directory
from megajax.data.hugging_face import load_directory, tokenizer_files
from megajax.data.long_texts import LONGEST_WHOLE, batches, splits_at_cuts
from megajax.data.tokenizer_errors import library_errors, panics_hidden
from megajax.data.tokenizer_files import FILES, MERGES, find_file, used_files, wrong_file
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
      hugging_face: the tokenizer of transformers that it is; None: it is none.
      start: ids that stand before a text's own where the tokenizer's files say so, such as <s>.
      beginning: id of the token that begins texts (bos_token); None: there is none.
    """

    name: str
    vocabulary: int
    end_of_document: int
    longest: int | None
    files: Sequence[pathlib.Path]
    hugging_face: Any
    start: tuple[int, ...]
    beginning: int | None

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 [tokens], without special tokens and without an end of document, as for pretraining."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """Ids of a text for a model to continue, int32 [tokens], with the special tokens that the tokenizer's files add."""

    def encode_all(self, texts: Sequence[str], dtype: Any = np.int32) -> list[np.ndarray]:
        """`encode` for many texts, faster than one by one; `dtype`: of the ids."""

    def decode(self, ids) -> str:
        """The text of ids, special tokens but the end of document included; invalid UTF-8 becomes U+FFFD."""

    def text(self, ids) -> str:
        """The text of ids without special tokens, for people to read."""


class ByteTokenizer:
    """One token per byte of UTF-8."""

    name, vocabulary, end_of_document, longest = "byte", 257, 256, None
    files, hugging_face, start, beginning = (), None, (), None

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    encode_prompt = encode

    def encode_all(self, texts: Sequence[str], dtype: Any = np.int32) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(dtype) for text in texts]

    def decode(self, ids) -> str:
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", "replace")

    text = decode


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library, of transformers or from a file.

    `encode` and `encode_all` add no special tokens, do not truncate and do not pad.
    """

    def __init__(
        self,
        name: str,
        inner: Any,
        end_of_document: str | None = None,
        files: Sequence[pathlib.Path] = (),
        hugging_face: Any = None,
    ):
        """Wraps a tokenizers.Tokenizer, which `hugging_face` has if it is given.

        Args:
          end_of_document: token that ends documents; None: the first of ENDS that there is.
          files: see `Tokenizer`.

        Raises:
          ConfigError: the vocabulary has no such token, or an id that does not fit int32.
        """
        inner.no_truncation()
        inner.no_padding()
        self.name, self.inner, self.files, self.hugging_face = name, inner, files, hugging_face
        last = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 0 <= last < MAX_VOCABULARY:
            raise ConfigError(f"tokenizer {name} has {last + 1} token ids; pass one with 1 to {MAX_VOCABULARY}")
        self.vocabulary, self._whole = last + 1, True
        self.end_of_document = _end_of_document(name, end_of_document, inner.token_to_id)
        self._may_cut = splits_at_cuts(inner)
        self.beginning = getattr(hugging_face, "bos_token_id", None)

    @property
    def longest(self) -> int | None:
        """Characters of the longest text that `encode_all` takes; None: any."""
        return None if self._may_cut else LONGEST_WHOLE

    @functools.cached_property
    def start(self) -> tuple[int, ...]:
        """What the post-processor puts in front of a text."""
        plain, special = self.encode("a").tolist(), self.encode_prompt("a").tolist()
        before = next((at for at in range(len(special)) if special[at : at + len(plain)] == plain), 0)
        return tuple(special[:before])

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_prompt(self, text: str) -> np.ndarray:
        check_length(self, [text])
        with library_errors(f"tokenizer {self.name} cannot encode a text"):
            encode = self.hugging_face or (lambda text: {"input_ids": self.inner.encode(text).ids})
            return self.checked(np.array(encode(text)["input_ids"], np.int32))

    def encode_all(self, texts: Sequence[str], dtype: Any = np.int32) -> list[np.ndarray]:
        check_length(self, texts)
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        for numbers, batch in batches(texts, self._may_cut):
            with library_errors(f"tokenizer {self.name} cannot encode a text"):
                encoded = self.inner.encode_batch_fast(batch, add_special_tokens=False)  # without character offsets
            for number, one in zip(numbers, encoded, strict=True):
                parts[number].append(self.checked(np.array(one.ids, dtype)))
        return [np.concatenate(part) if len(part) > 1 else part[0] for part in parts]

    def encode_with_offsets(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each text its ids, int32 [tokens], and each token's first character and last + 1 in it, int [tokens, 2]."""
        with library_errors(f"tokenizer {self.name} cannot encode a text"):
            encoded = self._with_spaces.encode_batch(list(texts), add_special_tokens=False)
        for one in encoded:
            yield self.checked(np.array(one.ids, np.int32)), np.array(one.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids) -> str:
        ids = [int(token) for token in ids if token != self.end_of_document]
        with library_errors(f"tokenizer {self.name} cannot decode its ids"):
            return self.inner.decode(ids, skip_special_tokens=False)

    def text(self, ids) -> str:
        ids = [int(token) for token in ids if token != self.end_of_document]
        with library_errors(f"tokenizer {self.name} cannot decode its ids"):
            return (self.hugging_face or self.inner).decode(ids, skip_special_tokens=True)

    def checked(self, ids: np.ndarray) -> np.ndarray:
        """The ids; raises ConfigError if the model has none of one (`with_vocabulary`)."""
        if not self._whole and len(ids) and ids.max() >= self.vocabulary:
            token = int(ids.max())
            raise ConfigError(
                f"a text has {self.inner.id_to_token(token)!r}, id {token} of tokenizer {self.name}, and the model has ids "
                f"0 to {self.vocabulary - 1}: remove it from the text"
            )
        return ids

    @functools.cached_property
    def _with_spaces(self) -> Any:
        """A copy without post-processor, which cuts spaces off the offsets."""
        from tokenizers import processors

        inner = copy.deepcopy(self.inner)
        inner.post_processor = processors.Sequence([])
        inner.encode_special_tokens = self.inner.encode_special_tokens  # which a copy forgets
        return inner


@functools.cache  # one object for a model, by which its tokenized samples are cached
def with_vocabulary(tokenizer: HuggingFaceTokenizer, vocabulary: int) -> HuggingFaceTokenizer | None:
    """The tokenizer for a model with fewer ids, if those beyond are added tokens, such as <pad>: texts with one are refused.

    None: others, or the end of document, are beyond.
    """
    inner = tokenizer.inner
    beyond = {token for token in inner.get_vocab(with_added_tokens=True).values() if token >= vocabulary}
    if tokenizer.end_of_document in beyond or not beyond <= set(inner.get_added_tokens_decoder()):
        return None
    found = copy.copy(tokenizer)
    found.vocabulary, found._whole = vocabulary, False
    return found


class SentencePieceTokenizer:
    """A model of the `sentencepiece` library; `encode` and `encode_all` add no begin or end of sentence."""

    longest, hugging_face = LONGEST_WHOLE, None

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
        self.beginning = self.inner.bos_id() if self.inner.bos_id() >= 0 else None
        self.start = () if self.beginning is None else (self.beginning,)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_prompt(self, text: str) -> np.ndarray:
        return np.concatenate([np.array(self.start, np.int32), self.encode(text)])

    def encode_all(self, texts: Sequence[str], dtype: Any = np.int32) -> list[np.ndarray]:
        check_length(self, texts)
        found: list[np.ndarray] = []
        for _, batch in batches(texts, may_cut=False):
            with library_errors(f"tokenizer {self.name} cannot encode a text"):
                found += [np.array(ids, dtype) for ids in self.inner.encode(batch, num_threads=1)]
        return found

    def decode(self, ids) -> str:
        with library_errors(f"tokenizer {self.name} cannot decode its ids"):
            return self.inner.decode([int(token) for token in ids if token != self.end_of_document])

    def text(self, ids) -> str:
        return self.decode([token for token in map(int, ids) if not self.inner.is_control(token)])


def load_gpt2() -> HuggingFaceTokenizer:
    """GPT-2's byte-level BPE, from the package's files."""
    vocabulary = json.loads(_packaged("encoder.json.gz"))
    return HuggingFaceTokenizer("gpt2", _byte_level(vocabulary, _packaged("vocab.bpe.gz")))


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
    """Loads a tokenizer by name, from a file or from a directory.

    Args:
      name: one of TOKENIZERS, a path with an ending of FILES, or a directory of Hugging Face or of a run. A tokenizer.json
        or vocab.txt with settings of Hugging Face beside it is its directory's.
      end_of_document: token that ends documents, not for a name; None: transformers' eos_token, or one of ENDS.

    Raises:
      ConfigError: the name is unknown, the file cannot be read or used, or it has no such end of document; or the library
        transformers is needed and missing.
    """
    name = find_file(local_directory(name, "--tokenizer")) if name not in TOKENIZERS else name
    ending = pathlib.Path(name).suffix
    is_directory = os.path.isdir(name)
    if name in TOKENIZERS:
        if end_of_document is not None:
            raise ConfigError(f"tokenizer {name} has a fixed end of document: omit --end-of-document")
        return TOKENIZERS[name]()
    if ending not in FILES and not is_directory:
        raise ConfigError(
            f"tokenizer = {name!r} is not known: {near(name, TOKENIZERS)} Pass --tokenizer NAME, a directory of Hugging "
            f"Face, or a file: {', '.join(f'FILE{end}' for end in FILES)}.{hub_advice(name)}"
        )
    if not is_directory and (problem := wrong_file(name)):
        raise ConfigError(problem)
    kind = "a tokenizer that transformers reads" if is_directory else FILES[ending]
    with panics_hidden(), library_errors(f"tokenizer {name} is not {kind}"):
        tokenizer = _read_directory(name, end_of_document) if is_directory else _read(name, ending, end_of_document)
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


def _read_directory(name: str, end_of_document: str | None) -> Tokenizer:
    directory = pathlib.Path(name)
    found = load_directory(directory)
    inner = getattr(found, "backend_tokenizer", None)
    if inner is None:
        kind = type(found).__name__
        raise ConfigError(
            f"tokenizer {name} is a {kind}, which is not of the library tokenizers: write it with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(DIR) as tokenizer.json"
        )
    end = found.eos_token if end_of_document is None else end_of_document
    return HuggingFaceTokenizer(name, inner, end, tokenizer_files(directory), found)


def _read(name: str, ending: str, end_of_document: str | None) -> Tokenizer:
    if ending == ".model":
        return SentencePieceTokenizer(name, end_of_document)
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    path = pathlib.Path(name)
    if ending == ".txt":
        inner = BertWordPieceTokenizer(name, lowercase=True)._tokenizer
    elif path.name == "vocab.json":
        merges = (path.parent / MERGES).read_text(encoding="utf-8")
        inner = _byte_level(json.loads(path.read_text(encoding="utf-8")), merges)
    else:
        inner = Tokenizer.from_file(name)
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
