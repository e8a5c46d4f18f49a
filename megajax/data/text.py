"""Text files as documents: loaded whole for training, or read in blocks by preprocessing.

`load_documents`, `split_documents` and `tokenise` turn a text that fits in memory into token streams. `read_blocks` and
`documents_of` read files of any size as blocks of whole documents, the units of work of preprocessing.
"""

import gzip
import importlib.resources
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.file_kinds import is_json_lines, not_utf8
from megajax.data.read_file import read_parts, read_text
from megajax.data.tokenizers import Tokenizer
from megajax.schedules.errors import shown

JSONL = (".jsonl", ".json", ".ndjson")
TEXT_DOCUMENTS = ("file", "paragraph", "line")
COMPRESSED = re.compile(r"\.(gz|zst|bz2|xz)$", re.IGNORECASE)
SHOWN = 80  # characters of a bad line that are printed
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """One or more whole documents.

    Attributes:
      path: the file.
      kind: the unit of a document, "jsonl" or one of TEXT_DOCUMENTS.
      first_line: line number of the block's first line in the file.
      content: decompressed bytes.
      read: bytes of the (compressed) file read so far.
      before: decompressed bytes before the block.
    """

    path: str
    kind: str
    first_line: int
    content: bytes
    read: int
    before: int = 0


class BadLine(NamedTuple):
    """A line that is not a document, and the reason.

    Attributes:
      start: the line's first characters.
      keys: of an object without the wanted key, the keys that have texts, the longest text's first.
    """

    path: str
    line: int
    reason: str
    start: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}: {self.start}"


def kind_of(path: str, text_documents: str) -> str:
    """The unit of a document in a file, by the file's name: "jsonl", or `text_documents` for any other file."""
    return "jsonl" if pathlib.Path(COMPRESSED.sub("", path)).suffix.lower() in JSONL else text_documents


def read_blocks(path: str, kind: str, option: str = "--input") -> Iterator[Block]:
    """The blocks of a file, decompressed. Memory is one block, or more for a longer document.

    A file that is to be one document of plain text ("file"), and has JSON objects in its lines, has the kind "jsonl".

    Args:
      path: the file.
      kind: the unit of a document.
      option: the option that names the file, for messages.

    Raises:
      ConfigError: the file cannot be read, is damaged, or of a format that is not read; see `read_parts`.
    """
    line, before, held, place = 1, 0, [], 0
    for number, (part, place) in enumerate(read_parts(path, kind, f"pass {option} a readable file", option)):
        if not number and kind == "file" and is_json_lines(part):
            kind = "jsonl"
        cut = 0 if kind == "file" else _end_of_documents(part, kind)
        if not cut:
            held.append(part)
            continue
        content = b"".join([*held, part[:cut]])
        held = [part[cut:]]
        yield Block(path, kind, line, content, place, before)
        line, before = line + content.count(b"\n"), before + len(content)
    if any(held):
        yield Block(path, kind, line, b"".join(held), place, before)


def documents_of(block: Block, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    """The block's documents, each with the text of every key (plain text has one), and the lines that are not documents."""
    if block.kind == "jsonl":
        return _json_documents(block, keys)
    try:
        text = block.content.decode("utf-8-sig" if block.first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = block.first_line + block.content.count(b"\n", 0, error.start)
        if block.kind == "file":
            start = repr(block.content[error.start : error.start + 20])
            return [], [BadLine(block.path, line, not_utf8(error, block.path, block.before), start)]
        return _bytewise(block)
    if block.kind == "file":
        return [(text,)] if text.strip() else [], []
    parts = text.split("\n") if block.kind == "line" else re.split(r"\n[ \t\r]*\n", text)
    return [(part.strip("\r\n"),) for part in parts if part.strip()], []


def numbered_lines(path: str, remedy: str, wanted: str = "jsonl") -> list[tuple[str, str]]:
    """The lines of a file that are not blank, each with its place for messages, "FILE line 3".

    Args:
      path: of a file that is read as a whole.
      remedy: the end of messages, "give --prompts a file".
      wanted: "jsonl", or "line" for other lines.

    Raises:
      ConfigError: the file cannot be read, is of a format that is not read, or is not UTF-8.
    """
    lines = read_text(path, wanted, remedy).split("\n")
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
        if bad and bad[0].keys and not documents + found:
            raise ConfigError(
                f"{bad[0]}; --text reads the key 'text' only: tokenize another one with `python -m megajax.data.preprocess "
                f"--input {path} --keys {bad[0].keys[0]} --out PREFIX --tokenizer NAME` and pass --data-path PREFIX"
            )
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


class JsonLine(NamedTuple):
    """A line of JSON lines that is not blank.

    Attributes:
      number: of the line in the file.
      before: bytes of the file before the line.
      content: the line, without the file's byte order mark.
    """

    number: int
    before: int
    content: bytes


def json_lines(block: Block) -> Iterator[JsonLine]:
    """The lines of a block that are not blank."""
    start, number = 0, block.first_line
    while start < len(block.content):
        end = block.content.find(b"\n", start) + 1 or len(block.content)
        line = block.content[start:end]
        if line.strip():
            mark = len(BYTE_ORDER_MARK) * (number == 1 and line.startswith(BYTE_ORDER_MARK))
            yield JsonLine(number, block.before + start + mark, line[mark:])
        start, number = end, number + 1


def _json_documents(block: Block, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    documents, bad = [], []
    for line in json_lines(block):
        record = None
        try:
            record = json.loads(line.content)
            texts = tuple(record[key] for key in keys)
            for text in texts:
                text.encode()  # fails for values that are not strings, and for half a surrogate pair
            documents.append(texts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            start = repr(line.content[:SHOWN].rstrip(b"\r\n").decode(errors="replace"))
            if isinstance(error, KeyError):
                reason, others = _missing_key(error.args[0], record)
                bad.append(BadLine(block.path, line.number, reason, start, others))
            else:
                reason = _reason(error, keys, block.path, line.before)
                bad.append(BadLine(block.path, line.number, reason, start))
    return documents, bad


def _missing_key(key: str, record: dict) -> tuple[str, tuple[str, ...]]:
    """Why an object has no document, and its keys that have texts, the longest text's first."""
    texts = sorted(
        (name for name, value in record.items() if isinstance(value, str)), key=lambda name: -len(record[name])
    )
    inner = next((name for name, value in record.items() if isinstance(value, dict) and key in value), None)
    if inner is not None:
        return f"no {key!r}, which is in {inner!r} (jq -c '.{inner}' takes it out)", ()
    found = f" (keys: {', '.join(map(shown, list(record)[:8]))})" if record else ""
    return f"no {key!r}{found}", tuple(texts)


def _reason(error: Exception, keys: Sequence[str], path: str, before: int) -> str:
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(error, path, before)
    if isinstance(error, UnicodeEncodeError):
        return "half a surrogate pair"
    if isinstance(error, json.JSONDecodeError):
        return "not JSON"
    return f"not an object with a string {' and '.join(map(repr, keys))}"


def _bytewise(block: Block) -> tuple[list[tuple[str, ...]], list[BadLine]]:
    """Decodes a block that is not entirely UTF-8 line by line or paragraph by paragraph."""
    documents, bad, line, before = [], [], block.first_line, block.before
    separator = rb"(\n)" if block.kind == "line" else rb"(\n[ \t\r]*\n)"
    for part in re.split(separator, block.content):
        try:
            text = part.decode()
            if text.strip():
                documents.append((text.strip("\r\n"),))
        except UnicodeDecodeError as error:
            start, number = repr(part[error.start : error.start + 20]), line + part.count(b"\n", 0, error.start)
            bad.append(BadLine(block.path, number, not_utf8(error, block.path, before), start))
        line, before = line + part.count(b"\n"), before + len(part)
    return documents, bad
