"""Parquet, Arrow, folders of save_to_disk, the Hub and WebDataset: the documents that their own libraries read."""

import gzip
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.data.blocks import documents_of
from megajax.data.indexed import IndexedDataset
from megajax.data.sft import load_answers
from megajax.data.sources import Wanted, source_kind
from megajax.data.text import read_blocks, read_records
from megajax.data.tokenizers import load_tokenizer
from tests.data.test_sources import plain_loop, read, shard, tokens

pytestmark = pytest.mark.slow
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"Text {number}: \u00e9t\u00e9, \u4e16\u754c.\n" * (number % 9) for number in range(3000)]
TITLES = [f"title {number}" for number in range(3000)]


def table(texts=TEXTS, kind=None):
    column = pyarrow.array(texts, kind or pyarrow.string())
    return pyarrow.table({"id": list(range(len(texts))), "text": column, "title": TITLES[: len(texts)]})


KINDS = [
    pyarrow.string(),
    pyarrow.large_string(),
    pyarrow.string_view(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    pyarrow.binary(),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["none", "snappy", "zstd", "file", "stream"])
def test_a_file_is_read_as_by_pyarrow(tmp_path, kind, form, monkeypatch):
    path = str(tmp_path / "a")
    if form in ("file", "stream"):
        opener = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
        with opener(path, table(kind=kind).schema) as writer:
            writer.write_table(table(kind=kind), max_chunksize=700)
    else:
        if kind == pyarrow.string_view():
            pytest.skip("not written by all versions of pyarrow")
        parquet.write_table(table(kind=kind), path, row_group_size=800, compression=form)
        assert parquet.read_table(path)["text"].to_pylist()[1] in (TEXTS[1], TEXTS[1].encode())
    assert read(path, ("title", "text")) == (list(zip(TITLES, TEXTS, strict=True)), [])
    assert tokens(["--input", path], tmp_path, monkeypatch).tolist() == plain_loop(TEXTS).tolist()


def test_rows_without_a_text_and_slices(tmp_path):
    texts = ["a", None, "", "b\u00e9", None]
    parquet.write_table(table(texts), tmp_path / "a.parquet")
    documents, bad = read(tmp_path / "a.parquet")
    assert documents == [("a",), ("",), ("b\u00e9",)]
    assert [str(one).rpartition("/")[2] for one in bad] == [
        "a.parquet, row 1: 'text' is empty",
        "a.parquet, row 4: 'text' is empty",
    ]
    with pyarrow.ipc.new_stream(str(tmp_path / "b.arrow"), table().schema) as writer:
        for batch in table().slice(11, 40).to_batches():
            writer.write_batch(batch)
    assert read(tmp_path / "b.arrow") == ([(text,) for text in TEXTS[11:51]], [])


def test_folders_of_save_to_disk(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": TEXTS, "title": TITLES}).shuffle(seed=1)
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(tmp_path / "two")
    for name, split in (("one", None), ("two", None), ("two", "test")):
        judge = datasets.load_from_disk(tmp_path / name)
        judge = judge if name == "one" else judge[split or "train"]
        words = ["--input", str(tmp_path / name), *(["--split", split] if split else [])]
        assert tokens(words, tmp_path, monkeypatch).tolist() == plain_loop(judge["text"]).tolist()
    with pytest.raises(ConfigError, match="has no split 'dev': pass --split train, test"):
        list(read_blocks(str(tmp_path / "two"), "saved", "--input", Wanted(split="dev")))


def test_a_name_of_the_hub_is_found_in_the_cache(tmp_path):
    """`datasets` itself writes the cache, from a file, and is offline when the name is read."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS[:500]}).to_parquet(str(tmp_path / "a.parquet"))
    home = tmp_path / "home"
    datasets.load_dataset("parquet", data_files={"test": str(tmp_path / "a.parquet")}, cache_dir=str(home / "datasets"))
    made = next(path for path in (home / "datasets" / "parquet").glob("*/*/*") if path.is_dir())
    place = home / "datasets" / "org___name" / "default" / "0.0.0" / ("0" * 40)
    place.parent.mkdir(parents=True)
    made.rename(place)
    for file in place.glob("*.arrow"):
        file.rename(place / file.name.replace("parquet", "name"))
    info = json.loads((place / "dataset_info.json").read_text())
    info |= {"dataset_name": "name", "config_name": "default", "version": "0.0.0"}
    (place / "dataset_info.json").write_text(json.dumps(info))
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "megajax.data.preprocess", "--out", "o", "--tokenizer", "gpt2", "--workers", "1"]

    def run(*words):
        return subprocess.run([*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert run("--input", "hub:org/name", "--split", "test").returncode == 0
    assert np.array(IndexedDataset(tmp_path / "o").tokens).tolist() == plain_loop(TEXTS[:500]).tolist()
    for words, message in {"hub:org/name --split dev": "--split and --subset", "hub:org/other": "cannot load"}.items():
        failed = run("--input", *words.split(), "--overwrite")
        assert failed.returncode == 2
        last = failed.stderr.splitlines()[-1]
        assert last.startswith("error: --input hub:org/") and message in last


def test_a_shard_is_read_as_by_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    files = [
        (f"d/{number // 2:04}.{'Txt' if number % 2 else 'json'}", f'{{"n": {number}}}'.encode()) for number in range(99)
    ]
    (tmp_path / "a.tar").write_bytes(
        shard([*files, ("d/skipped", b"x"), ("e/a.b.txt", b"other"), ("e/c.txt", b"last")])
    )
    judge = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    wanted = [(sample["txt"].decode(),) for sample in judge if "txt" in sample]
    assert read(tmp_path / "a.tar", ("txt",))[0] == wanted


def test_a_table_is_read_as_by_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS[1:9], "id": list(range(8))}).to_csv(str(tmp_path / "a.csv"))
    judge = datasets.load_dataset("csv", data_files=str(tmp_path / "a.csv"), split="train", cache_dir=str(tmp_path))
    assert read(tmp_path / "a.csv") == ([(text,) for text in judge["text"]], [])


@pytest.mark.parametrize("form", ["parquet", "arrow", "saved"])
def test_rows_to_fine_tune_on_are_those_of_json_lines(tmp_path, form):
    """Chats and pairs with keys that some rows do not have; datasets' own JSON lines are the judge."""
    datasets = pytest.importorskip("datasets")
    pairs = [{"prompt": f"p {n}", "completion": f" c {n}"} for n in range(300)]
    found = {}
    made = datasets.Dataset.from_list(pairs)
    path = str(tmp_path / f"a.{form}")
    if form == "parquet":
        made.to_parquet(path)
    elif form == "saved":
        made.save_to_disk(path)
    else:
        with pyarrow.ipc.new_stream(path, made.data.schema) as writer:
            writer.write_table(made.data.table)
    made.to_json(str(tmp_path / "a.jsonl"))
    for name in (path, str(tmp_path / "a.jsonl")):
        found[name] = load_answers((name,), load_tokenizer("byte"), None, 100, False)
    one, other = found.values()
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "c"}]
    rows = [{"messages": chat, "n": 1}, {"n": 2}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    (block,) = read_records(str(tmp_path / "b.parquet"), "--sft-data")
    assert [json.loads(line) for line in block.content.splitlines()] == rows


def test_memory_is_bounded_whatever_a_file_holds(tmp_path):
    """200 MB in one row group: pyarrow holds a few batches."""
    rows = 50_000
    column = pyarrow.array([f"{number:08}" * 512 for number in range(rows)])
    parquet.write_table(
        pyarrow.table({"text": column}), tmp_path / "a.parquet", row_group_size=rows, use_dictionary=False
    )
    del column
    program = (
        "import sys, pyarrow\nfrom megajax.data.text import read_blocks\nfrom megajax.data.sources import TEXTS\n"
        "count = size = longest = 0\n"
        "for block in read_blocks(sys.argv[1], 'parquet', '--input', TEXTS):\n"
        "    count += len(block.rows.numbers); size += len(block.content); longest = max(longest, len(block.content))\n"
        "print(count, size, longest, pyarrow.default_memory_pool().max_memory())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    words = [sys.executable, "-c", program, str(tmp_path / "a.parquet")]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    count, size, longest, most = map(int, run.stdout.split())
    assert (count, size) == (rows, rows * 4096)
    assert longest < 2 << 20 and most < 48 << 20, (longest, most)


def _damaged(folder: pathlib.Path) -> dict[str, str]:
    made = io.BytesIO()
    parquet.write_table(table(), made)
    (folder / "cut.parquet").write_bytes(made.getvalue()[:-100])
    whole = made.getvalue()
    (folder / "zeros.parquet").write_bytes(whole[:4] + bytes(len(whole) - 4004) + whole[-4000:])
    (folder / "named.parquet").write_text("a text")
    (folder / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (folder / "numbers.parquet").write_bytes(made.getvalue())
    with pyarrow.ipc.new_file(str(folder / "whole.arrow"), table().schema) as writer:
        writer.write_table(table())
    (folder / "cut.arrow").write_bytes((folder / "whole.arrow").read_bytes()[:-300])
    (folder / "b.parquet.gz").write_bytes(gzip.compress(made.getvalue()))
    return {
        "cut.parquet": "not a Parquet file that is complete",
        "zeros.parquet": "not a Parquet file that is complete",
        "numbers.parquet --keys id": "the column 'id' is int64, not texts; pass --keys 'text'",
        "numbers.parquet --keys words": r"no column 'words' \(columns: 'id', 'text', 'title'\); pass --keys text",
        "cut.arrow": "not an Arrow file that is complete",
        "b.parquet.gz": "compressed as a whole",
        "named.parquet": "not a Parquet file that is complete",
        "pointer.parquet": "is a pointer of Git LFS",
    }


def test_damaged_files_are_one_line(tmp_path):
    for words, message in _damaged(tmp_path).items():
        name, *keys = words.split()
        wanted = Wanted(tuple(keys[1:]) or ("text",))
        with pytest.raises(ConfigError, match=message) as error:
            path = str(tmp_path / name)
            for block in read_blocks(path, source_kind(path, "file"), "--input", wanted):
                documents_of(block, wanted.keys)
        assert "\n" not in str(error.value) and re.search(name, str(error.value))
