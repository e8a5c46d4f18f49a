"""Text files as documents: loaded whole for training, or read in blocks by preprocessing.

`load_documents`, `split_documents` and `tokenise` turn a text that fits in memory into token streams. `read_blocks` and
`documents_of` read files of any size as blocks of whole documents, the units of work of preprocessing.
"""

import gzip
import importlib.resources
import json
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.tokenizers import Tokenizer

BLOCK = 1 << 20  # bytes of text in a block, extended to the end of its last document
JSONL = (".jsonl", ".json", ".ndjson")
TEXT_DOCUMENTS = ("file", "paragraph", "line")
SHOWN = 80  # characters of a bad line that are printed


class Block(NamedTuple):
    """One or more whole documents.

    Attributes:
      path: the file.
      kind: the unit of a document, "jsonl" or one of TEXT_DOCUMENTS.
      first_line: line number of the block's first line in the file.
      content: decompressed bytes.
      read: bytes of the (compressed) file read so far.
    """

    path: str
    kind: str
    first_line: int
    content: bytes
    read: int


class BadLine(NamedTuple):
    """A line that is not a document, and the reason."""

    path: str
    line: int
    reason: str
    start: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}: {self.start}"


def kind_of(path: str, text_documents: str) -> str:
    """The unit of a document in a file, by the file's name: "jsonl", or `text_documents` for any other file."""
    return "jsonl" if pathlib.Path(re.sub(r"\.(gz|zst)$", "", path)).suffix.lower() in JSONL else text_documents


def read_blocks(path: str, kind: str, option: str = "--input") -> Iterator[Block]:
    """The blocks of a file; .gz and .zst are decompressed. Memory is one block, or more for a longer document.

    Args:
      path: the file.
      kind: the unit of a document.
      option: the option that names the file, for messages.

    Raises:
      ConfigError: the file cannot be read, or is damaged.
    """
    try:
        with open(path, "rb") as packed:
            line, held = 1, []
            for part in _unpacked(path, packed):
                cut = 0 if kind == "file" else _end_of_documents(part, kind)
                if not cut:
                    held.append(part)
                    continue
                content = b"".join([*held, part[:cut]])
                yield Block(path, kind, line, content, _place(packed))
                line, held = line + content.count(b"\n"), [part[cut:]]
            if any(held):
                yield Block(path, kind, line, b"".join(held), _place(packed))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; pass {option} a readable file") from None
    except (EOFError, zlib.error):
        raise ConfigError(
            f"cannot read {path}: the compressed file is truncated or damaged; pass {option} a complete file"
        ) from None


def documents_of(block: Block, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    """The block's documents, each with the text of every key (plain text has one), and the lines that are not documents."""
    if block.kind == "jsonl":
        return _json_documents(block, keys)
    try:
        text = block.content.decode("utf-8-sig" if block.first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = block.first_line + block.content.count(b"\n", 0, error.start)
        if block.kind == "file":
            return [], [BadLine(block.path, line, "not UTF-8", repr(block.content[error.start : error.start + 20]))]
        return _bytewise(block)
    if block.kind == "file":
        return [(text,)] if text.strip() else [], []
    parts = text.split("\n") if block.kind == "line" else re.split(r"\n[ \t\r]*\n", text)
    return [(part.strip("\r\n"),) for part in parts if part.strip()], []


def numbered_lines(path: str, remedy: str) -> list[tuple[str, str]]:
    """The lines of a file that are not blank, each with its place for messages, "FILE line 3".

    Args:
      path: of a file that is read as a whole.
      remedy: the end of messages, "give --prompts a file".

    Raises:
      ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {remedy}.") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path} line {line} is not UTF-8: {remedy}.") from error
    return [(f"{path} line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def split_sentences(text: str) -> list[str]:
    """Splits a text after . ! or ? (and closing quotes) before a space and a capital or a digit, and at line ends.

    This is a single regular expression without a list of abbreviations. BERT's sentence pairs do not need exact sentences.
    """
    cut = re.sub(r"""([.!?]["'”’)\]]*)\s+(?=["'“‘(\[]*[^\W_a-z])""", r"\1\n", text)
    return [piece.strip() for piece in cut.split("\n") if piece.strip()]


def load_documents(path: str | None = None) -> list[str]:
    """The documents of a file that are not blank, read as by preprocessing, except that a bad line is an error.

    Args:
      path: a file, which may be a .gz or .zst; None: the bundled plays and poems (megajax/data/text/SOURCE.md).

    Raises:
      ConfigError: the file cannot be read, is empty or not UTF-8, or a line is not a JSON object with a "text".
    """
    if path is None:
        packaged = importlib.resources.files("megajax.data") / "text" / "corpus.jsonl.gz"
        blocks = iter([Block("corpus.jsonl", "jsonl", 1, gzip.decompress(packaged.read_bytes()), 0)])
    else:
        blocks = read_blocks(path, kind_of(path, "file"), "--text")
    documents = []
    for block in blocks:
        found, bad = documents_of(block, ("text",))
        if bad:
            raise ConfigError(f"{bad[0]}; correct it, or pass another --text")
        documents += [text for (text,) in found if text.strip()]
    if not documents:
        raise ConfigError(f"the text {path} is empty; pass --text a file with text")
    return documents


def split_documents(documents: list[str], validation_share: float = 0.05) -> tuple[list[str], list[str]]:
    """Splits whole documents into (training, validation).

    Validation takes documents from the end until it has at least `validation_share` (above 0) of the characters. If it
    would then have more than half of them, as with a single document, the last document taken is split so that
    validation has exactly its share.
    """
    total = sum(map(len, documents))
    wanted, count, size = validation_share * total, 0, 0
    while size < wanted:
        count += 1
        size += len(documents[-count])
    training, validation = documents[:-count], documents[-count:]
    if size > total / 2:
        cut = int(size - wanted)
        training, validation = [*training, validation[0][:cut]], [validation[0][cut:], *validation[1:]]
    return training, validation


def tokenise(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Concatenated ids of all documents, int32 [tokens], with an end of document after each."""
    end = np.array([tokenizer.end_of_document], np.int32)
    return np.concatenate([part for document in documents for part in (tokenizer.encode(document), end)])


def _end_of_documents(part: bytes, kind: str) -> int:
    """The end of the last document that ends in `part`; 0 if none does."""
    if kind != "paragraph":
        return part.rfind(b"\n") + 1
    ends = [match.end() for match in re.finditer(rb"\n[ \t\r]*\n", part)]
    return ends[-1] if ends else 0


def _place(packed: BinaryIO) -> int:
    return packed.tell() if packed.seekable() else 0  # a pipe has no position


def _unpacked(path: str, packed: BinaryIO) -> Iterator[bytes]:
    if path.endswith(".zst"):
        yield from _unpacked_zst(packed)
        return
    stream = gzip.open(packed) if path.endswith(".gz") else packed
    while part := stream.read(BLOCK):
        yield part


def _unpacked_zst(packed: BinaryIO) -> Iterator[bytes]:
    """Decompresses frame by frame: the library's stream reader reports no error for a truncated file."""
    import zstandard

    frame, rest = None, b""
    try:
        while packing := rest or packed.read(BLOCK // 16):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packing)
            rest = frame.unused_data
            frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from None
    if frame is not None:
        raise EOFError


def json_lines(block: Block) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, content, and content without the file's byte order mark of each line that is not blank."""
    for number, line in enumerate(block.content.split(b"\n"), block.first_line):
        if line.strip():
            yield number, line, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _json_documents(block: Block, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    documents, bad = [], []
    for number, line, unmarked in json_lines(block):
        try:
            record = json.loads(unmarked)
            texts = tuple(record[key] for key in keys)
            for text in texts:
                text.encode()  # fails for values that are not strings, and for half a surrogate pair
            documents.append(texts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            bad.append(BadLine(block.path, number, _reason(error, keys), repr(line[:SHOWN].decode(errors="replace"))))
    return documents, bad


def _reason(error: Exception, keys: Sequence[str]) -> str:
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r}"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return "half a surrogate pair"
    if isinstance(error, json.JSONDecodeError):
        return "not JSON"
    return f"not an object with a string {' and '.join(map(repr, keys))}"


def _bytewise(block: Block) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    """Decodes a block that is not entirely UTF-8 line by line or paragraph by paragraph."""
    documents, bad, line = [], [], block.first_line
    separator = rb"(\n)" if block.kind == "line" else rb"(\n[ \t\r]*\n)"
    for part in re.split(separator, block.content):
        try:
            text = part.decode()
            if text.strip():
                documents.append((text.strip("\r\n"),))
        except UnicodeDecodeError as error:
            start = repr(part[error.start : error.start + 20])
            bad.append(BadLine(block.path, line + part.count(b"\n", 0, error.start), "not UTF-8", start))
        line += part.count(b"\n")
    return documents, bad
