"""Text files as documents: loaded whole for training, or read in blocks by preprocessing.

`load_documents`, `split_documents` and `tokenise` turn a text that fits in memory into token streams. `read_blocks` reads
files of any size, and what else `megajax.data.sources` knows, as blocks of whole documents.
"""

import gzip
import importlib.resources
import re
from collections.abc import Iterator

import numpy as np

from megajax.config import ConfigError
from megajax.data.arrow_rows import read_arrow, read_arrow_records
from megajax.data.blocks import SHOWN, BadLine, Block, Rows, documents_of
from megajax.data.file_kinds import is_json_lines
from megajax.data.read_file import check_file, read_parts, read_range, read_text
from megajax.data.rows import read_table, read_tar
from megajax.data.sources import ROWS, TEXTS, Wanted, source_kind
from megajax.data.spans import Span
from megajax.data.tokenizers import Tokenizer

__all__ = [
    "TEXT_DOCUMENTS",
    "check_source",
    "load_documents",
    "numbered_lines",
    "read_blocks",
    "read_records",
    "split_documents",
    "split_sentences",
    "tokenise",
]

TEXT_DOCUMENTS = ("file", "paragraph", "line")


def read_blocks(
    path: str, kind: str, option: str = "--input", wanted: Wanted = TEXTS, span: Span | None = None
) -> Iterator[Block]:
    """The blocks of a source, decompressed. Memory is one block, or more for a longer document, up to
    `wanted.longest`.

    A file that is to be one document of plain text ("file"), and has JSON objects in its lines, has the kind "jsonl".

    Args:
      path: the file, folder, URL or name.
      kind: see `source_kind`.
      option: the option that names the file, for messages.
      wanted: of sources that have rows, which texts of them; of others, the longest document.
      span: the piece of the file that is read; None: all of it.

    Raises:
      ConfigError: the file cannot be read, is damaged, or of a format that is not read; see `read_parts`.
    """
    if kind in ROWS:
        read = read_table if kind == "table" else read_tar if kind == "tar" else read_arrow
        yield from read(path, kind, wanted, option)
        return
    remedy, begins = f"pass {option} a readable file", 0
    if span is None or span.stop is None:
        parts = read_parts(path, kind, remedy, option)
    else:
        parts, kind, begins = read_range(path, span.start, span.stop, remedy), span.kind, span.start
    line, before, held, place = 1, begins, _Held(), 0
    for number, (part, place) in enumerate(parts):
        if not number and kind == "file" and is_json_lines(part):
            kind = "jsonl"
        end = _first_end(part, kind) if held.size else 0
        if held.size + end > wanted.longest:
            held.add(part[: end or len(part)], wanted.longest)
            if not end:
                continue
            yield held.report(Block(path, kind, line, b"", place, before, begins=begins), wanted.longest)
            line, before, held, part = line + held.lines, before + held.size, _Held(), part[end:]
        cut = 0 if kind == "file" else _end_of_documents(part, kind)
        if not cut:
            held.add(part, wanted.longest)
            continue
        content = b"".join([*held.parts, part[:cut]])
        yield Block(path, kind, line, content, place, before, begins=begins)
        line, before = line + content.count(b"\n"), before + len(content)
        held = _Held()
        held.add(part[cut:], wanted.longest)
    if held.dropped:
        yield held.report(Block(path, kind, line, b"", place, before, begins=begins), wanted.longest)
    elif any(held.parts):
        yield Block(path, kind, line, b"".join(held.parts), place, before, begins=begins)


class _Held:
    """The parts of a document that has not ended; without its content, once it is too long."""

    def __init__(self):
        self.parts: list[bytes] = []
        self.size = self.lines = 0
        self.dropped = False

    def add(self, part: bytes, longest: int) -> None:
        self.parts.append(part)
        self.size += len(part)
        if self.size > longest:
            self.lines += sum(one.count(b"\n") for one in self.parts[self.dropped :])
            self.parts, self.dropped = [self.parts[0][:SHOWN]], True

    def report(self, block: Block, longest: int) -> Block:
        """The document as a bad line: in place of a block without its content."""
        what = "document" if block.kind == "file" else block.kind.replace("jsonl", "line")
        reason = f"a {what} of {self.size:,} bytes, longer than {longest:,}"
        start = repr(self.parts[0].decode(errors="replace"))
        bad = BadLine(block.path, block.first_line, reason, start, unit=block.unit)
        rows = Rows(np.zeros((0, 0), np.int64), np.zeros(0, np.int64), (bad,))
        return block._replace(kind="rows", rows=rows)


def read_records(path: str, option: str) -> Iterator[Block]:
    """The blocks of a source of JSON objects: of JSON lines, or of all columns of a dataset's rows, as JSON lines.

    Raises:
      ConfigError: see `read_blocks`.
    """
    kind = source_kind(path, "jsonl")
    if kind in ("parquet", "arrow", "saved", "hub"):
        yield from read_arrow_records(path, kind, Wanted(()), option)
    else:
        yield from read_blocks(path, "jsonl", option)


def check_source(path: str, kind: str, option: str, wanted: Wanted) -> int:
    """Reads the beginning of a source; returns its bytes, 0 if they are not known.

    Raises:
      ConfigError: see `read_blocks`.
    """
    if kind not in ROWS:
        return check_file(path, kind, f"pass {option} a readable file", option)
    first = next(read_blocks(path, kind, option, wanted), None)
    return first.size if first else 0


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
      path: a file that `read_blocks` reads; None: the bundled plays and poems (megajax/data/text/SOURCE.md).

    Raises:
      ConfigError: the file cannot be read, is empty or not UTF-8, or a line is not a JSON object with a "text".
    """
    if path is None:
        packaged = importlib.resources.files("megajax.data") / "text" / "corpus.jsonl.gz"
        blocks = iter([Block("corpus.jsonl", "jsonl", 1, gzip.decompress(packaged.read_bytes()), 0)])
    else:
        blocks = read_blocks(path, source_kind(path, "file"), "--text")
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


def _first_end(part: bytes, kind: str) -> int:
    """The end of the first document that ends in `part`; 0 if none does."""
    if kind == "paragraph":
        found = re.search(rb"\n[ \t\r]*\n", part)
        return found.end() if found else 0
    return part.find(b"\n") + 1 if kind != "file" else 0


def _end_of_documents(part: bytes, kind: str) -> int:
    """The end of the last document that ends in `part`; 0 if none does."""
    if kind != "paragraph":
        return part.rfind(b"\n") + 1
    ends = [match.end() for match in re.finditer(rb"\n[ \t\r]*\n", part)]
    return ends[-1] if ends else 0
