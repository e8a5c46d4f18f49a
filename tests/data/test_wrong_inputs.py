"""What people bring as data: it is read, or named in one line with what to do. By each command that reads it, in-process."""

import contextlib
import io
import json
import os
import pathlib
import re
import sys
import threading

import pytest

from experiments import finetune, finetune_bert
from megajax.config import ConfigError
from megajax.data import preprocess
from megajax.data.classification import read_labelled
from megajax.data.indexed import IndexedDataset
from megajax.data.race import read_race
from megajax.data.sft import load_answers
from megajax.data.squad import read_squad
from megajax.data.text import load_documents
from megajax.data.tokenizers import load_tokenizer
from megajax.evaluate.tasks import make_task
from megajax.generate.prompts import read_prompts
from megajax.schedules.errors import exit_code
from tests.data.wrong_files import ARROW, CONTENTS, PLACES, READABLE, SOURCES

BYTES = load_tokenizer("byte")


@pytest.fixture
def folder(tmp_path, monkeypatch, tokenized_here):
    """An empty working directory, and preprocessing without processes of its own."""
    monkeypatch.chdir(tmp_path)
    return pathlib.Path()


def text(path):
    """--text of a training."""
    print(len(load_documents(str(path))), "documents")


def tokenized(path):
    """megajax.data.preprocess --input."""
    return preprocess.main(["--input", str(path), "--out", "pair", "--tokenizer", "byte", "--overwrite"])


def strictly(path):
    """The same with --bad-lines fail."""
    words = ["--input", str(path), "--out", "pair", "--tokenizer", "byte", "--bad-lines", "fail"]
    return preprocess.main(words)


# The other readers of files.
READERS = {
    "--sft-data": lambda path: load_answers((path,), BYTES, None, 100, False),
    "--task-data mrpc": lambda path: read_labelled("mrpc", [path]),
    "--task-data squad": lambda path: read_squad([path], "1.1"),
    "--task-data race": lambda path: read_race([path], 4),
    "--data wikitext103": lambda path: make_task("wikitext103", path, BYTES, 16),
    "--data lambada": lambda path: make_task("lambada", path, BYTES, 16),
    "--prompts": read_prompts,
}


def refused(capsys, command, path) -> str:
    """The line on standard error of a command that refuses a file."""
    code = exit_code(lambda: command(path))
    out, error = capsys.readouterr()
    assert code == 2 and not out, (code, out)
    assert error.count("\n") == 1 and error.startswith("error: ") and "Traceback" not in error, error
    return error


@pytest.mark.parametrize("command", [text, tokenized])
@pytest.mark.parametrize("name", [name for name in CONTENTS if name not in {*ARROW, *SOURCES}])
def test_a_file_that_is_no_text_is_named_with_what_to_do(name, command, folder, capsys):
    content, what, remedy = CONTENTS[name]
    (folder / name).write_bytes(content)
    if name == "latin.jsonl" and command is tokenized:  # its other lines are documents
        command = strictly
    error = refused(capsys, command, name)
    assert name in error and what in error and (remedy in error or "pass --bad-lines skip" in error)
    assert sorted(os.listdir()) == [name]


@pytest.mark.parametrize("command", [text, tokenized])
@pytest.mark.parametrize("name", [name for name in PLACES if name not in ARROW])
def test_what_is_no_file_is_named_with_what_to_do(name, command, folder, capsys):
    make, what, remedy = PLACES[name]
    path = str(make(folder))
    error = refused(capsys, command, path)
    assert path in error and what in error and remedy in error


@pytest.mark.parametrize("command", [text, tokenized])
@pytest.mark.parametrize("name", ARROW)
def test_what_pyarrow_reads_names_it_where_it_is_missing(name, command, folder, capsys, monkeypatch):
    if name in CONTENTS:
        path, what = name, CONTENTS[name][1].partition(",")[0].replace("stream", "file")
        (folder / name).write_bytes(CONTENTS[name][0])
    else:
        path, what = str(PLACES[name][0](folder)), "is a dataset, written by save_to_disk"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = refused(capsys, command, path)
    assert path in error and what in error and "pip install 'megajax[data]'" in error


@pytest.mark.parametrize("name", SOURCES)
def test_tables_and_shards_are_read(name, folder):
    (folder / name).write_bytes(CONTENTS[name][0])
    assert exit_code(lambda: text(name)) == exit_code(lambda: tokenized(name)) == 0
    assert IndexedDataset("pair").document_count == SOURCES[name] == len(load_documents(name))


@pytest.mark.parametrize("name", READABLE)
def test_other_names_line_ends_and_compressions_are_read(name, folder, capsys):
    content, documents = READABLE[name]
    (folder / name).write_bytes(content)
    assert exit_code(lambda: text(name)) == exit_code(lambda: tokenized(name)) == 0
    assert IndexedDataset("pair").document_count == documents == len(load_documents(name))


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_names_what_it_cannot_read(reader, folder, capsys, monkeypatch):
    arrow = reader == "--sft-data"  # which reads these by pyarrow
    if arrow:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.arrow", "a.zip", "shard.tar.gz", "a.pt", "utf16.txt", "pointer.jsonl", "cut.jsonl.gz"):
        content, what, remedy = CONTENTS[name]
        (folder / name).write_bytes(content)
        error = refused(capsys, READERS[reader], name)
        wanted = "pip install 'megajax[data]'" if arrow and name in ARROW else remedy
        assert name in error and what in error and (wanted in error or "truncated" in error), error
    for name in ("missing", "broken link", "device", "save_to_disk", "empty directory"):
        make, what, _ = PLACES[name]
        path = str(make(folder))
        error = refused(capsys, READERS[reader], path)
        wanted = "has no .txt file" if reader == "--task-data race" and os.path.isdir(path) else what
        assert path in error and wanted in error, error
    (folder / "empty.jsonl").write_bytes(b"")
    error = refused(capsys, READERS[reader], "empty.jsonl")
    assert re.search(r"empty.jsonl (is empty|has no (samples|question|text|prompts))", error), error
    (folder / "latin.txt").write_bytes("Voil\u00e0, un caf\u00e9.\n".encode("latin-1"))
    error = refused(capsys, READERS[reader], "latin.txt")
    assert "UTF-8 (byte 0xe0 at 4; if it is ISO-8859-1, `iconv" in error, error


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "table.txt", "array.json", "object.json"])
def test_the_proposed_command_makes_json_lines(name, folder):
    """The Python of the remedy runs as it is written, and what it prints is JSON lines with the rows."""
    content = CONTENTS[name][0]
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        READERS["--sft-data"](name)
    program = re.search(r'`python -c "(.*)" > \S+`', str(error.value))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program[1], {})
    rows = [json.loads(line) for line in printed.getvalue().splitlines()]
    assert len(rows) == {"array.json": 2, "object.json": 1}.get(name, 3)
    assert name == "object.json" or all(isinstance(row["text"], str) for row in rows)


def test_a_pipe_is_read_like_a_file(folder):
    os.mkfifo("pipe")
    content = READABLE["a.jsonl.xz"][0]
    writer = threading.Thread(target=lambda: (folder / "pipe").write_bytes(content))
    writer.start()
    assert len(load_documents("pipe")) == 40
    writer.join()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission(folder, capsys):
    (folder / "a.txt").write_text("text")
    (folder / "a.txt").chmod(0)
    assert "cannot read a.txt: Permission denied; pass --text a readable file" in refused(capsys, text, "a.txt")


def test_one_key_of_a_file_is_proposed_and_works(folder, capsys):
    (folder / "a.jsonl").write_bytes(CONTENTS["keys.jsonl"][0])
    words = ["--input", "a.jsonl", "--out", "pair", "--tokenizer", "byte"]
    assert preprocess.main(words) == 2
    assert "pass --keys content" in capsys.readouterr().err
    assert preprocess.main([*words, "--keys", "content"]) == 0


PAIRS = {  # files that are there, the prefix that is passed, and the message
    "with its ending": ("a.bin a.idx", "a.bin", "did you mean a?"),
    "without an index": ("a.bin", "a", "a pair has both files: copy or write a again"),
    "without ids": ("a.idx", "a", ""),
    "a text": (
        "a.jsonl",
        "a.jsonl",
        "a.jsonl is one file: make a pair of its text with `python -m megajax.data.preprocess",
    ),
    "a directory": ("d/b.bin d/b.idx", "d", "such as d/b"),
    "nothing": ("", "none", "pass the path without .bin and .idx"),
    "a name of the Hub": ("", "org/name", "hf download org/name"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_no_pair_of_token_ids(name, folder, capsys):
    files, prefix, message = PAIRS[name]
    for file in files.split():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"")
    error = refused(capsys, IndexedDataset, prefix)
    assert prefix in error and message in error


def chat(*turns) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ANSWERS = {  # lines for --sft-data: a part of the message
    "ShareGPT": ({"conversations": [{"from": "human", "value": "a"}]}, "no message of the assistant"),
    "Alpaca": ({"instruction": "a", "input": "", "output": 1}, "output = 1 is not a text"),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "which experiments.dpo trains on"),
    "question": ({"question": "a", "answer": "b"}, "rename question to prompt"),
    "text": ({"text": "a"}, "for --text of experiments.gpt3"),
    "empty object": ({}, "has nothing: give messages"),
    "no messages": ({"messages": []}, "is not a list of messages"),
    "roles of ShareGPT": (chat(("human", "a"), ("gpt", "b")), "has the role 'human': give one of system"),
    "no answer": (chat(("user", "a")), "no message of the assistant"),
    "empty answer": (chat(("user", "a"), ("assistant", " ")), "the assistant's, is empty"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1 has no content"),
    "a list": (["a", "b"], "is a JSON list, not an object"),
    "prompt alone": ({"prompt": "a"}, "give messages, or a prompt and one of completion, answer, response"),
    "numbers": ({"prompt": 1, "completion": 2}, "prompt = 1 is not a text"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_lines_to_fine_tune_on_are_named_by_file_and_number(name, folder, capsys):
    line, message = ANSWERS[name]
    (folder / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + json.dumps(line) + "\n")
    error = refused(capsys, READERS["--sft-data"], "a.jsonl")
    assert "a.jsonl, line 2" in error and message in error


def test_samples_that_are_all_too_long(folder, capsys):
    (folder / "a.jsonl").write_text(json.dumps({"prompt": "a" * 200, "completion": "b"}) + "\n")
    assert "1 sample, all longer than 100 tokens" in refused(capsys, READERS["--sft-data"], "a.jsonl")


def test_the_commands_of_fine_tuning_end_in_one_line(folder, capsys):
    """Before devices are started: --epochs reads the data."""
    (folder / "a.parquet").write_bytes(CONTENTS["a.parquet"][0])
    words = "--sft-data a.parquet --epochs 1 --devices cpu:1 --data 1".split()
    assert "is a Parquet file" in refused(capsys, finetune.main, words)
    words = "--task sst2 --task-data a.parquet --dev-data a.parquet --devices cpu:1".split()
    assert "is a Parquet file" in refused(capsys, finetune_bert.main, words)
