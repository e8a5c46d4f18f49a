"""From text to batches: examples by hand, and properties for any size."""

import gzip
import json

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data.blocks import documents_of
from megajax.data.loader import Loader, TokenSamples
from megajax.data.sources import kind_of
from megajax.data.text import load_documents, read_blocks, split_documents, tokenise
from megajax.data.tokenizers import load_tokenizer


def test_the_bundled_text_matches_source_md():
    documents = load_documents()
    assert len(documents) == 48
    assert 6.2e6 < sum(map(len, documents)) < 6.4e6
    assert any("To be, or not to be" in document for document in documents)
    training, validation = split_documents(documents)
    assert training + validation == documents
    assert 0.05 <= sum(map(len, validation)) / sum(map(len, documents)) < 0.08


def test_plain_and_compressed_files_are_read(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "b.jsonl.gz"
    plain.write_text("Ünï")
    packed.write_bytes(gzip.compress(b"\n".join(json.dumps({"text": t}).encode() for t in ("one", "two"))))
    assert load_documents(str(plain)) == ["Ünï"]
    assert load_documents(str(packed)) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "No such file"),
        ("empty.txt", b"", "is empty"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        (
            "bad.jsonl",
            b'{"text": "a"}\n{"txt": 1}',
            "bad.jsonl, line 2: no 'text' .keys: 'txt'.: '{\"txt\": 1}'; correct it",
        ),
        ("array.json", b'[\n{"text": "a"}\n]', "array.json is one JSON array: make JSON lines of it with"),
        ("deep.json", b"[" * 100_000, "deep.json is one JSON array"),
        ("cut.txt.gz", gzip.compress(b"hello" * 99, mtime=0)[:20], "truncated"),
        ("damaged.txt.gz", gzip.compress(b"hello" * 99, mtime=0)[:10] + b"\xff" * 20, "damaged"),
        ("number.jsonl", b'{"text": 5}', "line 1: not an object with a string 'text'"),
        ("surrogate.jsonl", b'{"text": "\\ud800"}', "line 1: half a surrogate pair"),
        (
            "cut.jsonl.zst",
            zstandard.compress(b'{"text": "a"}')[:-3],
            "truncated or damaged; pass --text a complete file",
        ),
        ("blank.txt", b" \n ", "is empty"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        load_documents(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", [".json", ".ndjson", ".jsonl", ".JSON"])
def test_every_json_ending_is_read_line_by_line_as_in_preprocessing(tmp_path, ending, packing):
    path, content = tmp_path / f"a{ending}{packing}", b'{"text": "one"}\n{"text": "two"}\n'
    path.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}.get(packing, bytes)(content))
    assert load_documents(str(path)) == ["one", "two"]
    assert kind_of(str(path), "file") == "jsonl"
    blocks = read_blocks(str(path), "jsonl")
    assert [text for block in blocks for (text,) in documents_of(block, ["text"])[0]] == ["one", "two"]


def test_line_separators_blank_lines_and_a_byte_order_mark_are_read(tmp_path):
    lines, marked = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_bytes('{"text": "one\u2028\x85more"}\r\n\n{"text": "two"}\n'.encode())
    marked.write_bytes("\ufeffthree".encode())
    assert load_documents(str(lines)) == ["one\u2028\x85more", "two"]
    assert load_documents(str(marked)) == ["three"]


@pytest.mark.parametrize(
    ("documents", "training", "validation"),
    [
        (["a" * 100], ["a" * 90], ["a" * 10]),
        (["a" * 10, "b" * 90], ["a" * 10, "b" * 80], ["b" * 10]),  # validation would take nine tenths
        (["a" * 60, "b" * 35, "c" * 5], ["a" * 60], ["b" * 35, "c" * 5]),
        (["a" * 92, "c" * 8], ["a" * 90], ["a" * 2, "c" * 8]),
    ],
)
def test_documents_are_split_from_the_end(documents, training, validation):
    assert split_documents(documents, 0.1) == (training, validation)


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1), min_size=1), st.floats(0.01, 0.5))
def test_splitting_loses_nothing(documents, share):
    training, validation = split_documents(documents, share)
    assert "".join(training + validation) == "".join(documents)
    assert share * len("".join(documents)) <= len("".join(validation)) <= max(1 + len("".join(documents)) / 2, 1)


def test_the_byte_tokenizer_encodes_utf8():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode([97, 195, 169, 256, 195]) == "aé\ufffd"
    assert tokenise(["a", "b"], tokenizer).tolist() == [97, 256, 98, 256]


def test_the_gpt2_tokenizer_equals_openais():
    """The ids of OpenAI's encoder."""
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.end_of_document == 50256


@given(st.text())
def test_decoding_undoes_encoding(text):
    for name in ("byte", "gpt2"):
        tokenizer = load_tokenizer(name)
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert not (ids == tokenizer.end_of_document).any()
        assert tokenizer.decode(ids) == text


def test_a_batch_by_hand():
    """Four windows of two tokens in the order of the text; the batch that starts at sample 3 continues in epoch 2."""
    batch = Loader(TokenSamples(np.arange(9), 2, seed=None), global_batch_size=4, microbatches=2).batch(3)
    assert batch["tokens"].tolist() == [[[6, 7], [0, 1]], [[2, 3], [4, 5]]]
    assert batch["labels"].tolist() == [[[7, 8], [1, 2]], [[3, 4], [5, 6]]]
    assert batch["sample"].tolist() == [[3, 4], [5, 6]]
    assert batch["weights"].tolist() == [[[1, 1], [1, 1]], [[1, 1], [1, 1]]]
    assert [batch[name].dtype for name in ("tokens", "labels", "weights", "sample")] == ["i4", "i4", "f4", "u4"]


def test_every_epoch_has_its_own_order():
    samples = TokenSamples(np.arange(1001), 10, seed=0)
    first, second = ([int(samples.window(epoch * 100 + i)[0]) for i in range(100)] for epoch in range(2))
    assert first != second


def test_an_unknown_tokenizer_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean gpt2"):
        load_tokenizer("gpt-2")


def test_windows_overlap_by_one_token():
    samples = TokenSamples(np.arange(10), 3, seed=None)
    assert samples.count == 3
    assert [samples.window(i).tolist() for i in range(3)] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_a_text_shorter_than_a_sample_is_refused():
    with pytest.raises(ConfigError, match="3 tokens and a sample needs 4"):
        TokenSamples(np.arange(3), 3, seed=0)


@given(st.integers(2, 200), st.integers(1, 9), st.integers(0, 2**31))
def test_an_epoch_has_every_window_once(tokens, length, seed):
    if tokens <= length:
        return
    samples = TokenSamples(np.arange(tokens), length, seed)
    for epoch in range(2):
        starts = [int(samples.window(epoch * samples.count + i)[0]) for i in range(samples.count)]
        assert sorted(starts) == [i * length for i in range(samples.count)]


@given(st.integers(0, 1000), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_batches_do_not_depend_on_microbatches_or_on_where_they_start(consumed, microbatches):
    samples = TokenSamples(np.arange(500), 4, seed=3)
    whole = Loader(samples, 12, 1).batch(consumed)
    cut = Loader(samples, 12, microbatches).batch(consumed)
    for name, array in whole.items():
        np.testing.assert_array_equal(array[0], cut[name].reshape(array[0].shape))
    later = Loader(TokenSamples(np.arange(500), 4, seed=3), 6, 1).batch(consumed + 6)
    np.testing.assert_array_equal(whole["tokens"][0, 6:], later["tokens"][0])
    assert whole["sample"][0].tolist() == list(range(consumed, consumed + 12))


def test_the_order_is_a_fixed_function_of_the_seed():
    """It must not change between versions, because a resumed run would get other samples."""
    samples = TokenSamples(np.arange(1001), 10, seed=1234)
    order = [int(samples.window(i)[0]) // 10 for i in range(8)]
    assert order == [90, 92, 45, 93, 13, 75, 84, 53]
