"""Sources of preprocessing: the same documents as a plain loop with the library that wrote them, from disks and URLs.

Parquet, Arrow, folders of save_to_disk and the Hub: tests/data/test_arrow_sources.py.
"""

import csv
import gzip
import io
import json
import sys
import tarfile

import fsspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data import preprocess, read_file
from megajax.data.blocks import documents_of
from megajax.data.indexed import IndexedDataset
from megajax.data.remote import expanded
from megajax.data.sources import Wanted, source_kind
from megajax.data.text import load_documents, read_blocks
from megajax.data.tokenize_blocks import Workers, encode_block
from megajax.data.tokenizers import load_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"))


def read(path, keys=("text",)):
    """All documents of a source, and its bad rows."""
    found, bad = [], []
    for block in read_blocks(str(path), source_kind(str(path), "file"), "--input", Wanted(tuple(keys))):
        documents, wrong = documents_of(block, keys)
        found += documents
        bad += wrong
    return found, bad


def tokens(words, tmp_path, monkeypatch):
    """The ids that preprocessing writes, without processes of its own."""
    monkeypatch.setattr(Workers, "__enter__", lambda workers: workers)
    monkeypatch.setattr(Workers, "encode", lambda _, blocks, recipe: (encode_block(one, recipe) for one in blocks))
    assert preprocess.main([*words, "--out", str(tmp_path / "pair"), "--tokenizer", "gpt2", "--overwrite"]) == 0
    return np.array(IndexedDataset(tmp_path / "pair").tokens)


def plain_loop(texts):
    tokenizer = load_tokenizer("gpt2")
    return np.concatenate([[*tokenizer.encode(text), tokenizer.end_of_document] for text in texts if text])


def shard(samples) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in samples:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1), st.sampled_from([(".csv", ","), (".tsv", "\t"), (".csv", ";")]))
def test_a_table_is_read_as_by_csv(tmp_path_factory, rows, form):
    ending, separator = form
    path = tmp_path_factory.mktemp("table") / f"a{ending}"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([["text", "the title"], *rows])
    with open(path, newline="", encoding="utf-8") as file:
        wanted = [(row["the title"], row["text"]) for row in csv.DictReader(file, delimiter=separator)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megajax.data.rows.PART", 20)
        assert read(path, ("the title", "text")) == (wanted, [])


def test_rows_of_a_table_that_have_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,text\n1,a\n2,b,c\n\n3,"d\ne"\n4\n5,\xff\n6,f\n')
    documents, bad = read(tmp_path / "a.csv")
    assert documents == [("a",), ("d\ne",), ("f",)]
    assert [(one.line, one.reason.partition(" (")[0]) for one in bad] == [
        (3, "3 fields, and the first row has 2"),
        (7, "1 fields, and the first row has 2"),
        (8, "not UTF-8"),
    ]
    with pytest.raises(ConfigError, match=r"a.csv has no column 'words' \(columns: 'id', 'text'\); pass --keys id"):
        read(tmp_path / "a.csv", ("words",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megajax.data.rows.FIELD", 1000)
        (tmp_path / "a.csv").write_text('id,text\n1,"a\n' + "2,b\n" * 1000)
        with pytest.raises(ConfigError, match="line 25.*field larger than field limit.*is a quote not closed"):
            read(tmp_path / "a.csv")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_a_shard_of_webdataset(tmp_path, pack):
    samples = [(f"set/{number:03}", f"text {number}\n" * number, {"caption": f"c {number}"}) for number in range(30)]
    files = [
        (f"{name}.{ending}", content)
        for name, text, record in samples
        for ending, content in (("txt", text.encode()), ("json", json.dumps(record).encode()))
    ]
    (tmp_path / "a.tar").write_bytes(pack(shard([*files, ("set", b"no extension")])))
    assert read(tmp_path / "a.tar") == ([(text,) for _, text, _ in samples], [])
    both = read(tmp_path / "a.tar", ("caption", "txt"))
    assert both == ([(record["caption"], text) for _, text, record in samples], [])
    with pytest.raises(ConfigError, match="no column 'title'.*'txt', 'json', 'caption'.*pass --keys caption"):
        read(tmp_path / "a.tar", ("title",))


def test_samples_of_a_shard_without_a_text(tmp_path):
    files = [("a.txt", b"one"), ("b.json", b"{}"), ("c.json", b'{"text": 5}'), ("d.txt", b"\xff"), ("e.json", b"{")]
    (tmp_path / "a.tar").write_bytes(shard([*files, ("f.json", b'{"text": "two"}')]))
    documents, bad = read(tmp_path / "a.tar")
    assert documents == [("one",), ("two",)]
    assert [str(one).rpartition("/")[2] for one in bad] == [
        "a.tar, sample 1: 'text' is empty",
        "a.tar, sample 2: 'text' is no text",
        "a.tar, sample 4: 'text' is empty",
        "a.tar, row 3: not UTF-8 (byte 0xff at 0 of the text): b'\\xff'",
    ]


def test_the_token_stream_of_several_sources_is_that_of_a_plain_loop(tmp_path, monkeypatch):
    texts = [f"Text {number}, with words.\n" * (1 + number % 7) for number in range(200)]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts[:50])])
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress("\n".join(json.dumps({"text": text}) for text in texts[50:100]).encode())
    )
    (tmp_path / "c.tar").write_bytes(
        shard([(f"{number:05}.txt", texts[number].encode()) for number in range(100, 150)])
    )
    memory = fsspec.filesystem("memory")
    for number in range(150, 200, 10):
        content = "\n".join(json.dumps({"text": text}) for text in texts[number : number + 10]).encode()
        memory.pipe(f"/corpus/{number}.jsonl.zst", zstandard.compress(content))
    paths = [str(tmp_path / "*.*[vzr]"), "memory://corpus/*.zst"]
    found = tokens(["--input", *paths], tmp_path, monkeypatch)
    assert found.tolist() == plain_loop(texts).tolist()
    assert expanded(paths, "--input")[:2] == [str(tmp_path / "a.csv"), str(tmp_path / "b.jsonl.gz")]


def test_lines_of_any_length_are_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(read_file, "PART", 100)
    long = "word " * 100_000
    (tmp_path / "a.tsv").write_text(f"text\n{long}\nshort\n")
    assert read(tmp_path / "a.tsv") == ([(long,), ("short",)], [])
    assert load_documents(str(tmp_path / "a.tsv")) == [long, "short"]


WRONG = {  # words after --input: the message
    "memory://none.jsonl": "cannot read memory://none.jsonl: there is no such file",
    "memory://none/*.jsonl": "memory://none/*.jsonl: no file has such a name",
    "{0}/*.jsonl": "*.jsonl: no file has such a name",
    "nothing://bucket/a.jsonl": "fsspec knows no nothing://",
    "s3://": "'s3://' names no file",
    "s3://key:secret@bucket/a.jsonl": "names a user before its host",
    "s3:/bucket/a.jsonl": "is in an object store",
    "user@host:a.jsonl": "is on another host",
    "hub:a/b/c": "is no name of a dataset on the Hub",
    "hub:org/name": "hub:org/name is a dataset of the Hugging Face Hub, which datasets reads",
    "memory://bad.parquet": "memory://bad.parquet is a Parquet file, which pyarrow reads",
    "memory://cut.jsonl.gz": "the compressed file is truncated or damaged",
    "{0}/a.csv --keys title": "has no column 'title' (columns: 'id', 'text')",
    "{0}/a.csv --keys text text": "a key is named twice",
    "{0}/a.csv --split train": "no source is a dataset that has one",
    "{0}/a.csv --subset en": "no source is a dataset that has one",
    "{0}/cut.tar": "is damaged",
    "{0}/empty.tar": "without samples of WebDataset",
    "{0}/nobody.tar": "has no column 'text' (columns: 'cls')",
    "{0}/page.csv --bad-lines fail": "line 2: 3 fields, and the first row has 2",
    "{0}/empty.csv": "has no column 'text' (columns: none)",
    "{0}/letters.csv": "not UTF-8",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_sources_are_one_line(words, tmp_path, capsys, monkeypatch):
    for library in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(Workers, "__enter__", lambda workers: workers)
    monkeypatch.setattr(Workers, "encode", lambda _, blocks, recipe: (encode_block(one, recipe) for one in blocks))
    memory = fsspec.filesystem("memory")
    memory.pipe("/bad.parquet", b"PAR1")
    memory.pipe("/cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100)[:-9])
    (tmp_path / "a.csv").write_text("id,text\n1,a\n")
    (tmp_path / "page.csv").write_text("id,text\n1,a,b\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "letters.csv").write_bytes(b"text\n\xff\n")
    (tmp_path / "cut.tar").write_bytes(shard([("a.txt", b"x" * 2000)])[:1000])
    (tmp_path / "empty.tar").write_bytes(shard([("README", b"text")]))
    (tmp_path / "nobody.tar").write_bytes(shard([("a.cls", b"1")]))
    before = sorted(tmp_path.iterdir())
    line = ["--input", *words.format(tmp_path).split(), "--out", str(tmp_path / "o"), "--tokenizer", "byte"]
    assert preprocess.main(line) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == error.count("\n") == 1 and WRONG[words] in error, error
    assert sorted(tmp_path.iterdir()) == before


def test_fsspec_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"is a URL, which fsspec reads.*pip install 'megajax\[data\]'"):
        load_documents("s3://bucket/a.jsonl")
