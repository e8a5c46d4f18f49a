"""Preprocessing: units of documents, bad lines, tokenizers from files, commands, and interrupted runs."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data import read_file
from megajax.data.blocks import Block, documents_of
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.preprocess import Recipe, main
from megajax.data.text import read_blocks, split_sentences
from megajax.data.tokenize_blocks import encode_block
from megajax.data.tokenizers import load_tokenizer

LINES = b'{"text": "one", "title": "A"}\n\n{"text": ""}\n{"text": "two\\u2028", "title": "B"}'


def texts(path, kind, keys=("text",)):
    documents, bad = [], []
    for block in read_blocks(str(path), kind):
        found, wrong = documents_of(block, keys)
        documents += found
        bad += wrong
    return documents, bad


@pytest.mark.parametrize("pack", [lambda raw: raw, gzip.compress, zstandard.compress])
def test_compressed_files_with_several_frames_are_read(tmp_path, pack):
    ending = {gzip.compress: ".gz", zstandard.compress: ".zst"}.get(pack, "")
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(LINES[:40]) + pack(LINES[40:]))
    assert texts(path, "jsonl") == ([("one",), ("",), ("two\u2028",)], [])
    if ending:
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(ConfigError, match="truncated or damaged"):
            texts(path, "jsonl")


def test_a_document_is_a_file_a_line_or_a_paragraph(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\ntwo\r\n \n\nthree\n".encode())
    assert texts(tmp_path / "a.txt", "file")[0] == [("one\ntwo\r\n \n\nthree\n",)]
    assert texts(tmp_path / "a.txt", "line")[0] == [("one",), ("two",), ("three",)]
    assert texts(tmp_path / "a.txt", "paragraph")[0] == [("one\ntwo",), ("three",)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1)), st.integers(1, 40))
def test_blocks_hold_whole_documents(tmp_path_factory, wanted, size):
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in wanted))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_file, "PART", size)
        patch.setattr(read_file, "HEAD", size)
        blocks = list(read_blocks(str(path), "jsonl"))
        assert texts(path, "jsonl") == ([(text,) for text in wanted], [])
    content = path.read_bytes()
    assert b"".join(block.content for block in blocks) == content
    for number, block in enumerate(blocks):
        before = sum(len(other.content) for other in blocks[:number])
        assert block.first_line == 1 + content.count(b"\n", 0, before)


def test_bad_lines_are_reported_with_number_and_reason():
    lines = [b'{"text": "a"}', b"{", b'{"tex": 1}', b'{"text": 5}', b"[1]", b'{"text": "\\ud800"}', b'{"text": "\xff"}']
    documents, bad = documents_of(Block("f", "jsonl", 10, b"\n".join(lines), 0), ["text"])
    assert documents == [("a",)]
    reasons = ["not JSON", "no 'text'", "not an object", "not an object", "surrogate", "not UTF-8"]
    assert [line.line for line in bad] == list(range(11, 17))
    for line, reason in zip(bad, reasons, strict=True):
        assert reason in line.reason
    documents, bad = documents_of(Block("f", "line", 5, b"good\nb\xffd\ngood", 0), ["text"])
    assert (documents, bad[0].line) == ([("good",), ("good",)], 6)


def test_text_is_split_into_sentences():
    text = 'He said "no." Then Ann left!\nWhat? 5 of them, e.g. this one'
    assert split_sentences(text) == ['He said "no."', "Then Ann left!", "What?", "5 of them, e.g. this one"]


def test_encoding_a_block_by_hand():
    block = Block("f", "jsonl", 1, b'{"text": "ab"}\n{"text": ""}\n{"text": "A. B."}', 0)
    (plain,) = encode_block(block, Recipe("byte")).encoded
    assert plain.tokens.tolist() == [97, 98, 256, 65, 46, 32, 66, 46, 256]
    assert (plain.lengths.tolist(), plain.sequences.tolist()) == ([3, 6], [1, 0, 1])  # Megatron keeps an empty document
    (cut,) = encode_block(block, Recipe("byte", sentences=True)).encoded
    assert cut.tokens.tolist() == [97, 98, 256, 65, 46, 66, 46, 256]
    assert (cut.lengths.tolist(), cut.sequences.tolist()) == ([3, 2, 3], [1, 0, 2])
    (bare,) = encode_block(block, Recipe("byte", append_end=False)).encoded
    assert bare.tokens.tolist() == [97, 98, 65, 46, 32, 66, 46]


def test_a_run_merge_inspect_and_verify(tmp_path, capsys):
    path, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    documents = [f"document {i} " * (i % 50) for i in range(300)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents[:200]) + "\nnonsense\n")
    packed.write_bytes(gzip.compress("\n".join(json.dumps({"text": text}) for text in documents[200:]).encode()))
    prefix = str(tmp_path / "out" / "all")
    assert main(["--input", str(path), str(packed), "--out", prefix, "--tokenizer", "gpt2", "--workers", "2"]) == 0
    captured = capsys.readouterr()
    assert "300 documents" in captured.out and "1 bad lines skipped" in captured.out
    assert "line 201: not JSON: 'nonsense'" in captured.err.replace("\n", "")
    dataset, tokenizer = IndexedDataset(prefix), load_tokenizer("gpt2")
    assert [tokenizer.decode(dataset.document(i)) for i in range(300)] == documents
    assert sorted(os.listdir(tmp_path / "out")) == ["all.bin", "all.idx", "all.sums.json"]

    assert main(["verify", prefix, "--tokenizer", "gpt2"]) == 0
    assert "294 of the documents end with" in capsys.readouterr().out  # every 50th is empty
    assert main(["verify", prefix, "--tokenizer", "byte"]) == 2
    assert "ids 0 to 256: it was written with another tokenizer" in capsys.readouterr().err
    assert main(["merge", "--input", prefix, prefix, "--out", f"{prefix}2"]) == 0
    assert "600 documents" in capsys.readouterr().out
    assert main(["inspect", f"{prefix}2", "--tokenizer", "gpt2", "--documents", "2"]) == 0
    assert "document 1: 4 tokens, including the end of document\n'document 1 '" in capsys.readouterr().out
    assert main(["inspect", f"{prefix}2", "--tokenizer", "byte", "--documents", "2"]) == 0
    assert "22897 352 220 50256 (ids outside the 257 of the tokenizer)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--input {0}/none.txt --out {0}/o --tokenizer byte", "cannot read .*No such file"),
        ("--input {0}/bad.jsonl --out {0}/o --tokenizer byte --bad-lines fail", "line 2: not JSON.*Nothing was"),
        ("--input {0}/bad.jsonl --out {0}/o --tokenizer gpt3", "did you mean gpt2"),
        ("--input {0}/bad.jsonl --out {0}/o --tokenizer {0}/no.json", "no such file"),
        ("--input {0}/bad.jsonl --out {0}/o --tokenizer {0}/bad.json", "not a tokenizer.json of Hugging Face"),
        ("--input {0}/bad.jsonl --out {0}/o --tokenizer {0}/bad.model", "not a sentencepiece model"),
        (
            "--input {0}/bad.jsonl --out {0}/o --tokenizer byte --workers 0",
            "--workers: 0 must be a whole number",
        ),
        ("--input {0}/bad.jsonl --out {0}/bad.json/o --tokenizer byte", "cannot write"),
        ("--input {0}/bad.json --out {0}/o --tokenizer byte", "no document in"),
        ("--input {0}/a.txt --out {0}/o --tokenizer byte --keys a b", "is not a .jsonl file and has no keys"),
        ("--out {0}/o --tokenizer byte", "required: --input"),
        ("inspect {0}/none", "cannot read"),
        ("merge --input {0}/none --out {0}/o", "cannot read"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnonsense\n')
    (tmp_path / "bad.json").write_text("nonsense")
    (tmp_path / "bad.model").write_text("nonsense")
    (tmp_path / "a.txt").write_text("text")
    before = sorted(os.listdir(tmp_path))
    assert main(words.format(tmp_path).split()) == 2
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert last.startswith("error: ")
    import re

    assert re.search(message, last), last
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_files(tmp_path, sent):
    """Nothing half-written under the names of a pair; and but for SIGKILL, nothing at all."""
    os.mkfifo(tmp_path / "endless.jsonl")
    command = ["--input", "endless.jsonl", "--out", "o", "--tokenizer", "byte", "--workers", "1"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    run = subprocess.Popen(
        [sys.executable, "-m", "megajax.data.preprocess", *command],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # a test in the background ignores it
    )
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    with open(tmp_path / "endless.jsonl", "wb", buffering=0) as fifo:
        fifo.write(line * 5000)
        deadline = time.monotonic() + 60
        while not (tmp_path / "o.bin.unfinished").exists() or not os.path.getsize(tmp_path / "o.bin.unfinished"):
            assert run.poll() is None and time.monotonic() < deadline
            fifo.write(line * 500)
        run.send_signal(sent)
        try:
            while run.poll() is None:
                fifo.write(line)
        except BrokenPipeError:
            pass
    assert run.wait(60) != 0
    left = sorted(os.listdir(tmp_path))
    assert left == ["endless.jsonl"] + ["o.bin.unfinished"] * (sent == signal.SIGKILL)


def test_workers_start_before_the_tokenizer_is_loaded(tmp_path, monkeypatch, capsys):
    """transformers' import, and the start of processes for a first block, overlap; a wrong tokenizer ends them."""
    (tmp_path / "a.txt").write_text("text")
    started = []

    def load(recipe):
        started.extend(multiprocessing.active_children())
        raise ConfigError("no tokenizer")

    monkeypatch.setattr(Recipe, "load", load)
    words = f"--input {tmp_path}/a.txt --out {tmp_path}/o --tokenizer x --workers 2"
    assert main(words.split()) == 2
    assert capsys.readouterr().err == "error: no tokenizer\n"
    assert len(started) == 1 and not any(one.is_alive() for one in started)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_tokenizers_are_loaded_from_files(tmp_path):
    import sentencepiece
    from tokenizers import Tokenizer

    gpt2 = load_tokenizer("gpt2")
    gpt2.inner.save(str(tmp_path / "gpt2.json"))
    text = "Hello world, naïve 世界"
    ours = load_tokenizer(str(tmp_path / "gpt2.json"))
    assert ours.encode(text).tolist() == gpt2.encode(text).tolist() == Tokenizer.from_file(ours.name).encode(text).ids
    assert (ours.vocabulary, ours.end_of_document) == (50257, 50256)
    named = load_tokenizer(str(tmp_path / "gpt2.json"), "Hello")
    assert named.end_of_document == 15496
    with pytest.raises(ConfigError, match="no token 'nope' to end documents with"):
        load_tokenizer(str(tmp_path / "gpt2.json"), "nope")
    with pytest.raises(ConfigError, match="byte has a fixed end"):
        load_tokenizer("byte", "x")

    sentences = ["the quick brown fox jumps over the lazy dog"] * 20 + ["pack my box with five dozen liquor jugs"] * 20
    (tmp_path / "s.txt.raw").write_text("\n".join(sentences))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "s.txt.raw"), model_prefix=str(tmp_path / "s"), vocab_size=38, minloglevel=2
    )
    piece = load_tokenizer(str(tmp_path / "s.model"))
    assert (piece.vocabulary, piece.end_of_document) == (38, 2)
    assert piece.decode(piece.encode("the brown fox")) == "the brown fox"
    batch = piece.encode_all(["the fox", "", "lazy"])
    assert [part.tolist() for part in batch] == [piece.encode(one).tolist() for one in ("the fox", "", "lazy")]

    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##able", "able"])
    )
    bert = load_tokenizer(str(tmp_path / "vocab.txt"))
    assert (bert.encode("Unable able").tolist(), bert.end_of_document) == ([5, 6, 7], 3)


WORD_PIECE = {"type": "WordPiece", "vocab": {"a": 0, "</s>": 1}, "unk_token": "[UNK]"}
WORD_PIECE |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (
            "model",
            WORD_PIECE,
            "cannot encode.*Missing .UNK",
        ),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "cannot encode a text: chunk size must be non-zero"),
        (
            "model",
            {"type": "WordLevel", "vocab": {"a": 0, "</s>": 2**32 - 1}, "unk_token": "a"},
            "has 4294967296 token ids",
        ),
        ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "a"}, "has 0 token ids"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "Cannot parse precompiled_charsmap"),
    ],
)
def test_tokenizers_that_load_and_cannot_be_used_are_one_line(tmp_path, capfd, part, value, message):
    """Some of these are panics of the Rust library, which writes a backtrace and raises a BaseException."""
    file = {"model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}} | {part: value}
    (tmp_path / "a.json").write_text(json.dumps({"version": "1.0", "added_tokens": []} | file))
    with pytest.raises(ConfigError, match=message) as error:
        load_tokenizer(str(tmp_path / "a.json"))
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_encoding_many_texts_equals_encoding_each(documents):
    for name in ("byte", "gpt2"):
        tokenizer = load_tokenizer(name)
        together = tokenizer.encode_all(documents)
        assert [part.tolist() for part in together] == [tokenizer.encode(text).tolist() for text in documents]


def test_each_key_is_written_to_its_own_pair(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES.replace(b'{"text": ""}', b'{"text": "x", "title": ""}'))
    words = ["--input", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "o"), "--tokenizer", "byte"]
    assert main([*words, "--keys", "text", "title", "--workers", "1"]) == 0
    title = IndexedDataset(tmp_path / "o_title")
    assert [title.document(i).tolist() for i in range(3)] == [[65, 256], [], [66, 256]]
    assert IndexedDataset(tmp_path / "o_text").document_count == 3


def test_an_old_pair_is_kept_until_the_new_one_is_complete(tmp_path):
    with IndexedWriter(tmp_path / "o", np.uint16) as writer:
        writer.add_document([5])
    (tmp_path / "bad.jsonl").write_text("nonsense")
    words = [
        "--input",
        str(tmp_path / "bad.jsonl"),
        "--out",
        str(tmp_path / "o"),
        "--tokenizer",
        "byte",
        "--workers",
        "1",
    ]
    assert main(words) == 2
    assert main([*words, "--overwrite"]) == 2
    assert IndexedDataset(tmp_path / "o").document(0).tolist() == [5]
