"""What a file holds, by its first bytes: text, or a format that megajax does not read, with what turns it into one it reads.

`foreign` is asked by every reader of text, JSON lines and tables (`megajax.data.read_file`), so a file that is none of these
is named instead of being read as one.
"""

import csv
import io
import json
import pathlib
import re
from typing import NamedTuple

__all__ = ["Foreign", "foreign", "is_json_lines", "not_utf8"]

# Column names of which one at least is in the header of a table; without this, verse with commas would look like one.
COLUMNS = frozenset(
    "text content body document sentence sentence1 sentence2 title url id idx label date source question answer prompt "
    "completion response instruction input output premise hypothesis article review comment message".split()
)
MODULES = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
UNPACK = "unpack it, and pass the files in it"
PANDAS = "`python -c \"import pandas; pandas.{reader}({path!r}).to_json({out!r}, orient='records', lines=True)\"`"
DATASETS = '`python -c "from datasets import Dataset; Dataset.from_file({path!r}).to_json({out!r})"`'
JSON = "make JSON lines of it with "
LINES = '`{first}python -c "import json{module}; [print(json.dumps(row)) for row in json.load({opened})]" > {out}`'
ONE_LINE = '`{first}python -c "import json{module}; print(json.dumps(json.load({opened})))" > {out}`'
TABLE = (
    '`{first}python -c "import csv, json{module}; csv.field_size_limit(2**30); [print(json.dumps(row)) for row in '
    'csv.DictReader({opened}{tab})]" > {out}`'
)
ICONV = "`iconv -f {encoding} -t UTF-8 {path} > {utf8}`"

# (first bytes, offset, what the file is, what to do), the longest first where one begins another.
MAGIC: tuple[tuple[bytes, int, str, str], ...] = (
    (b"PAR1", 0, "a Parquet file", JSON + PANDAS.replace("{reader}", "read_parquet")),
    (b"ARROW1", 0, "an Arrow file", JSON + PANDAS.replace("{reader}", "read_feather")),
    (b"\xff\xff\xff\xff", 0, "an Arrow stream, as the library datasets writes it", JSON + DATASETS),
    (b"ORC", 0, "an ORC file", JSON + PANDAS.replace("{reader}", "read_orc")),
    (b"Obj\x01", 0, "an Avro file", "make JSON lines of it"),
    (b"ustar", 257, "a tar archive", "unpack it with `tar -xf {path}`, and pass the files in it"),
    (b"PK\x03\x04", 0, "a zip archive", "unpack it with `unzip {path}`, and pass the files in it"),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive", UNPACK),
    (b"Rar!\x1a", 0, "a RAR archive", UNPACK),
    (b"\x04\x22\x4d\x18", 0, "compressed with lz4", "unpack it with `lz4 -d {path}`"),
    (b"\xff\x06\x00\x00sNaPpY", 0, "compressed with snappy", "unpack it"),
    (b"\x1f\x9d", 0, "compressed with compress", "unpack it with `uncompress {path}`"),
    (
        b"\x93NUMPY",
        0,
        "an array of NumPy",
        "pass the text that it was made from, or write token ids with IndexedWriter",
    ),
    (b"\x89HDF\r\n", 0, "an HDF5 file", "pass the text in it as JSON lines"),
    (b"SQLite format 3", 0, "an SQLite database", "write the text in it as JSON lines"),
    (b"GGUF", 0, "a model (GGUF)", "pass a text"),
    (b"%PDF-", 0, "a PDF", "take the text out of it, with `pdftotext {path}` for example"),
    (b"\x89PNG", 0, "a picture (PNG)", "pass a text"),
    (b"\xff\xd8\xff", 0, "a picture (JPEG)", "pass a text"),
    (b"\x7fELF", 0, "a program", "pass a text"),
    (
        b"version https://git-lfs.github.com/spec/",
        0,
        "a pointer of Git LFS, not the file",
        "fetch it with `git lfs pull`",
    ),
    (b"MMIDIDX", 0, "the index of a pair of token ids", "pass --data-path {prefix}"),
)
MODELS = {  # a zip archive that holds a name
    b"data.pkl": ("a PyTorch file", "pass the text that it was made from"),
    b".npy": ("arrays of NumPy (npz)", "pass the text that they were made from"),
    b"word/": ("a Word document", "save it as plain text"),
    b"xl/": ("an Excel workbook", "save it as CSV, and make JSON lines of that"),
}


class Foreign(NamedTuple):
    """A format that is not read: "a Parquet file", and what to do about it."""

    what: str
    remedy: str


def foreign(head: bytes, path: str, wanted: str) -> Foreign | None:
    """The kind of a file that a reader does not read; None if it may be what the reader wants.

    Args:
      head: the first bytes of its content, after decompression; 512 or more if it has as many.
      path: for its ending, and for the commands of remedies.
      wanted: "tar"; "jsonl"; "file", one document of plain text; or another form of text, whose encoding alone is checked.
    """
    if wanted == "tar" and head[257:262] == b"ustar":
        return None
    return _encoding(head, path) or _binary(head, path) or _structure(head, path, wanted)


def is_json_lines(head: bytes) -> bool:
    """Whether the first two lines that are not blank (of the whole ones) are JSON objects."""
    lines = _first_lines(head, 2)
    return bool(lines) and all(isinstance(_parsed(line), dict) for line in lines)


def not_utf8(error: UnicodeDecodeError, path: str, before: int = 0) -> str:
    """The message about bytes that are not UTF-8: where they are, and what makes them so. `before`: bytes of the file."""
    wrong = error.object[error.start]
    encoding = (
        "WINDOWS-1252" if re.search(rb"[\x80-\x9f]", error.object[error.start : error.start + 4096]) else "ISO-8859-1"
    )
    command = _fill(ICONV, path, encoding=encoding)
    return f"not UTF-8 (byte 0x{wrong:02x} at {before + error.start}; if it is {encoding}, {command})"


def _encoding(head: bytes, path: str) -> Foreign | None:
    marks = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
    name = next((name for mark, name in marks.items() if head.startswith(mark)), "")
    if not name and len(head) >= 4:
        start = head[: 4096 - len(head) % 2]
        zeros = [start[place::2].count(0) / max(1, len(start[place::2])) for place in (0, 1)]
        if max(zeros) > 0.5 > 0.05 > min(zeros):  # of every other character's bytes: Latin letters
            name = "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
    return Foreign(f"{name} text", "convert it with " + _fill(ICONV, path, encoding=name)) if name else None


def _binary(head: bytes, path: str) -> Foreign | None:
    if head[:2] == b"PK":
        for name, kind in MODELS.items():
            if name in head[:4096]:
                return Foreign(*kind)
    for magic, place, what, remedy in MAGIC:
        if head[place : place + len(magic)] == magic:
            return Foreign(what, _fill(remedy, path))
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 32:
        return Foreign("a safetensors file", "pass a text")
    if re.match(rb"\x80[\x02-\x05]", head):
        return Foreign("a pickle, as of Python or PyTorch", "write the texts in it as JSON lines")
    controls = len(re.findall(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]", head[:4096]))
    if controls > 0.02 * len(head[:4096]):
        if path.endswith(".bin") and pathlib.Path(path).with_suffix(".idx").exists():
            return Foreign("the token ids of a pair", _fill("pass --data-path {prefix}", path))
        return Foreign("a binary file", "pass a text, or JSON lines")
    return None


def _structure(head: bytes, path: str, wanted: str) -> Foreign | None:
    """A JSON array or object over several lines, or a table."""
    if wanted not in ("jsonl", "file"):
        return None
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    lines = _first_lines(head, 2)
    if _is_array(text, lines, wanted):
        return Foreign("one JSON array", _fill(JSON + LINES, path))
    if wanted == "jsonl" and text[:1] == b"{" and _parsed(text.partition(b"\n")[0]) is None and _spans_lines(text):
        return Foreign("one JSON object over several lines", _fill(JSON + ONE_LINE, path))
    if separator := _separator(text, path):
        tab = ", delimiter='\\t'" if separator == "\t" else f", delimiter='{separator}'" * (separator != ",")
        names = {",": "CSV (a table)", "\t": "TSV (a table)"}
        return Foreign(names.get(separator, "a table"), _fill(JSON + TABLE, path, tab=tab))
    return None


def _is_array(text: bytes, lines: list[bytes], wanted: str) -> bool:
    """Whether the content is a JSON array; lines that are one each are not, nor is plain text with a bracket."""
    if wanted == "file":
        return bool(re.match(rb"\[\s*\{\s*\"", text))
    return text.startswith(b"[") and (len(lines) < 2 or not all(isinstance(_parsed(line), list) for line in lines))


def _separator(text: bytes, path: str) -> str:
    """The separator of a table's columns; "" if the text is no table."""
    ending = re.sub(r"\.(gz|zst|bz2|xz)$", "", path.lower())
    rows = text[: 1 << 16].decode("utf-8", "replace")
    for separator in ",\t;|":
        header = [name.strip().strip('"').lower() for name in rows.partition("\n")[0].split(separator)]
        if len(header) < 2 or len(rows) < 2:
            continue
        if ending.endswith({",": ".csv", "\t": ".tsv"}.get(separator, "...")):
            return separator
        if COLUMNS.isdisjoint(header) or not all(re.fullmatch(r"[\w .#-]{1,40}", name) for name in header):
            continue
        try:
            found = [row for row, _ in zip(csv.reader(io.StringIO(rows), delimiter=separator), range(4), strict=False)]
        except csv.Error:
            continue
        if len(found) >= 3 and all(len(row) == len(header) for row in found[:3]):
            return separator
    return "," if ending.endswith(".csv") else "\t" if ending.endswith(".tsv") else ""


def _first_lines(head: bytes, count: int) -> list[bytes]:
    """The first lines that are not blank; a last one without an end only if it is the first, or ends the JSON that it is."""
    lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").split(b"\n", 64)[:64] if line.strip()][:count]
    return lines if len(lines) < 2 or _parsed(lines[-1]) is not None or head.endswith(b"\n") else lines[:-1]


def _spans_lines(text: bytes) -> bool:
    """Whether a JSON object begins, and its first line ends inside of it."""
    line, end, _ = text.partition(b"\n")
    line = line.strip()
    return bool(end) and (line == b"{" or bool(re.fullmatch(rb"\{\s*\"[^\"]*\"\s*:.*[,{\[]", line)))


def _parsed(line: bytes) -> object:
    """The JSON value of a line, None for anything else."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _fill(template: str, path: str, **more: str) -> str:
    plain = re.sub(r"\.(gz|zst|bz2|xz)$", "", path)
    file = pathlib.PurePath(plain)
    out, utf8 = file.with_suffix(".jsonl"), file.with_name(f"{file.stem}.utf8{file.suffix}")
    out = file.with_name(f"{file.stem}.lines.jsonl") if out == file else out
    module = MODULES.get(path[len(plain) :], "")
    opened = f"{module}.open({path!r}, 'rt')" if module else f"open({plain!r})"
    more |= {"opened": opened, "module": module and f", {module}"}
    more["first"] = f"unzstd {path} && " if path.endswith(".zst") else ""
    return template.format(path=path, out=str(out), utf8=utf8, prefix=str(file.with_suffix("")), **more)
