"""Files that people bring and that are not text or JSON lines, by the name of each, for tests."""

import bz2
import gzip
import io
import json
import lzma
import os
import pathlib
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np
import zstandard

__all__ = ["ARROW", "CONTENTS", "PLACES", "READABLE", "SOURCES"]

ROW = {"text": "The quick brown fox. It jumps over the lazy dog."}
LINES = "".join(json.dumps(ROW | {"id": number}) + "\n" for number in range(40))
TABLE = 'id,text\n1,"one, two"\n2,three\n3,four\n'


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        info = tarfile.TarInfo("000.txt")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    return made.getvalue()


def _zip(name: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, b"hello")
    return made.getvalue()


def _npy(save: Callable) -> bytes:
    made = io.BytesIO()
    save(made, np.arange(4))
    return made.getvalue()


SAFETENSORS = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
# The name of a file: its content, what the message calls it, and a part of the remedy.
CONTENTS: dict[str, tuple[bytes, str, str]] = {
    "a.parquet": (b"PAR1" + bytes(range(64)) * 4 + b"PAR1", "is a Parquet file", "read_parquet"),
    "renamed.jsonl": (b"PAR1" + bytes(range(64)) * 4 + b"PAR1", "is a Parquet file", "read_parquet"),
    "a.arrow": (b"ARROW1\0\0" + bytes(64), "is an Arrow file", "read_feather"),
    "data-00000-of-00001.arrow": (b"\xff\xff\xff\xff" + bytes(64), "is an Arrow stream", "Dataset.from_file"),
    "a.csv": (TABLE.encode(), "is CSV (a table)", "csv.DictReader"),
    "a.tsv": (TABLE.replace(",", "\t").encode(), "is TSV (a table)", "delimiter='\\t'"),
    "table.txt": (TABLE.encode(), "is CSV (a table)", "csv.DictReader"),
    "a.csv.gz": (gzip.compress(TABLE.encode()), "is CSV (a table)", "csv.DictReader"),
    "array.json": (json.dumps([ROW, ROW], indent=1).encode(), "is one JSON array", "json.load("),
    "array_of_one_line.json": (json.dumps([ROW, ROW]).encode(), "is one JSON array", "json.load("),
    "object.json": (
        json.dumps({"data": [ROW]}, indent=1).encode(),
        "is one JSON object over several lines",
        "json.load(",
    ),
    "shard.tar": (_tar(), "is a tar archive", "tar -xf"),
    "shard.tar.gz": (gzip.compress(_tar()), "is a tar archive", "tar -xf"),
    "a.zip": (_zip("a.txt"), "is a zip archive", "unzip"),
    "a.docx": (_zip("word/document.xml"), "is a Word document", "plain text"),
    "a.xlsx": (_zip("xl/workbook.xml"), "is an Excel workbook", "CSV"),
    "a.pt": (_zip("archive/data.pkl"), "is a PyTorch file", "the text"),
    "a.npz": (_npy(np.savez), "is arrays of NumPy", "the text"),
    "a.npy": (_npy(np.save), "is an array of NumPy", "the text"),
    "a.pkl": (pickle.dumps(["a text"]), "is a pickle", "JSON lines"),
    "a.safetensors": (struct.pack("<Q", len(SAFETENSORS)) + SAFETENSORS + bytes(4), "is a safetensors file", "a text"),
    "a.lz4": (b"\x04\x22\x4d\x18" + bytes(30), "is compressed with lz4", "lz4 -d"),
    "a.pdf": (b"%PDF-1.7\n" + bytes(range(256)), "is a PDF", "pdftotext"),
    "pointer.jsonl": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "is a pointer of Git LFS",
        "git lfs pull",
    ),
    "noise.bin": (bytes(range(256)) * 8, "is a binary file", "a text"),
    "utf16.txt": ("Hello, world.\n".encode("utf-16"), "is UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
    "utf16_unmarked.txt": ("Hello, world.\n".encode("utf-16-le"), "is UTF-16LE text", "iconv -f UTF-16LE -t UTF-8"),
    "utf16_unmarked.jsonl": (LINES.encode("utf-16-be"), "is UTF-16BE text", "iconv -f UTF-16BE -t UTF-8"),
    "latin.txt": ("Voil\u00e0, un caf\u00e9.\n".encode("latin-1"), "not UTF-8 (byte 0xe0 at 4;", "iconv -f ISO-8859-1"),
    "latin.jsonl": (
        LINES.encode() + '{"text": "caf\u00e9"}\n'.encode("latin-1"),
        f"line 41: not UTF-8 (byte 0xe9 at {len(LINES) + 13};",
        "iconv -f ISO-8859-1",
    ),
    "windows.txt": ("\u201cquoted\u201d".encode("cp1252"), "not UTF-8 (byte 0x93 at 0;", "iconv -f WINDOWS-1252"),
    "cut.jsonl.gz": (gzip.compress(LINES.encode())[:-9], "is truncated or damaged", "a complete file"),
    "cut.jsonl.xz": (lzma.compress(LINES.encode())[:-9], "is truncated or damaged", "a complete file"),
    "cut.jsonl.zst": (zstandard.compress(LINES.encode())[:-9], "is truncated or damaged", "a complete file"),
    "keys.jsonl": (
        b'{"content": "a text of some length", "id": "1"}\n',
        "no 'text' (keys: 'content', 'id')",
        "--keys content",
    ),
    "nested.jsonl": (b'{"meta": 1, "data": {"text": "a"}}\n', "no 'text', which is in 'data'", "jq -c '.data'"),
    "number.jsonl": (b'{"text": 5}\n', "not an object with a string 'text'", "correct it"),
    "words.jsonl": (b"a text\n", "line 1: not JSON: 'a text'", "correct it"),
    "empty.txt": (b"", "", ""),
    "empty.jsonl": (b"", "", ""),
    "blank.txt": (b" \r\n\r\n", "", ""),
}
# Of these, and of PLACES, what preprocessing and --text read: the documents, and what they read with pyarrow.
SOURCES = {"a.csv": 3, "a.tsv": 3, "a.csv.gz": 3, "shard.tar": 1, "shard.tar.gz": 1}
ARROW = ("a.parquet", "renamed.jsonl", "a.arrow", "data-00000-of-00001.arrow", "save_to_disk", "splits")
# Files that are read although their names or ends of line are unusual: the documents.
READABLE: dict[str, tuple[bytes, int]] = {
    "no_ending": (LINES.encode(), 40),
    "lines.txt": (LINES.encode(), 40),
    "windows.jsonl": (LINES.replace("\n", "\r\n").encode(), 40),
    "mark.jsonl": (b"\xef\xbb\xbf" + LINES.encode(), 40),
    "gzip_without_its_ending.jsonl": (gzip.compress(LINES.encode()), 40),
    "a.jsonl.bz2": (bz2.compress(LINES.encode()), 40),
    "a.jsonl.xz": (lzma.compress(LINES.encode()), 40),
    "zstd_called_gzip.jsonl.gz": (zstandard.compress(LINES.encode()), 40),
    "plain_called_gzip.jsonl.gz": (LINES.encode(), 40),
    "one_line.jsonl": (json.dumps({"text": "word " * 100_000}).encode(), 1),
    "verse.txt": (b"Roses, violets, and thyme,\nOxlips, lilies, and rhyme,\nTulips, daisies, and time.\n" * 3, 1),
    "brackets.txt": (b"[Enter two gentlemen]\n[They speak]\nAnd so they do.\n", 1),
    "escapes.txt": (b"\x1b[1mbold\x1b[0m text of a terminal\n" * 20, 1),
}


def _directory(folder: pathlib.Path, *names: str) -> pathlib.Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def _link(folder: pathlib.Path) -> pathlib.Path:
    (folder / "link.txt").symlink_to(folder / "gone.txt")
    return folder / "link.txt"


def _token_ids(folder: pathlib.Path) -> pathlib.Path:
    for ending in (".bin", ".idx"):
        (folder / f"pair{ending}").write_bytes(bytes(range(16)) * 8)
    return folder / "pair.bin"


def _near(folder: pathlib.Path) -> pathlib.Path:
    (folder / "corpus.jsonl").write_text(LINES)
    return folder / "corpsu.jsonl"


# What is no file: made in a folder, what the message says, and a part of the remedy.
PLACES: dict[str, tuple[Callable[[pathlib.Path], pathlib.Path], str, str]] = {
    "missing": (lambda folder: folder / "none.txt", "No such file", "a readable file"),
    "misspelt": (_near, "No such file", "did you mean"),
    "broken link": (_link, "this symbolic link points", "gone.txt"),
    "save_to_disk": (
        lambda folder: _directory(folder / "set", "dataset_info.json", "state.json"),
        "a dataset, written by save_to_disk",
        "load_from_disk",
    ),
    "splits": (lambda folder: _directory(folder / "sets", "dataset_dict.json"), "the splits of a dataset", "['train']"),
    "directory of texts": (lambda folder: _directory(folder / "texts", "a.txt", "b.txt"), "a directory", "*.txt"),
    "empty directory": (lambda folder: _directory(folder / "nothing"), "an empty directory", "a readable file"),
    "device": (lambda folder: pathlib.Path(os.devnull), "a device, not a file", "a readable file"),
    "token ids": (_token_ids, "the token ids of a pair", "--data-path"),
}
