"""Damaged files: a result equal to the undamaged file's, or a ConfigError of one line; never another exception."""

import copy
import gzip
import json
import pathlib
import shutil

import numpy as np
import pytest
import sentencepiece
import tokenizers
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data import preprocess, tokenize_blocks
from megajax.data.bert import BertSamples, WordPieces
from megajax.data.gpt_samples import GPTSamples
from megajax.data.indexed import DTYPES, HEADER, MAGIC, IndexedDataset, IndexedWriter, pair_paths
from megajax.data.loader import Loader
from megajax.data.sources import kind_of
from megajax.data.text import TEXT_DOCUMENTS, load_documents, read_blocks
from megajax.data.tokenizers import load_tokenizer, tokenizer_hash

EXAMPLES = pytest.mark.parametrize("examples", [50, pytest.param(2000, marks=pytest.mark.slow)])
VOCABULARY = 60


def fuzz(examples: int, *strategies):
    """Runs a function on `examples` examples; a `ConfigError` of one line is a legal result."""

    def decorate(function):
        @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        @given(st.tuples(*strategies))
        def example(values):
            try:
                function(*values)
            except ConfigError as error:
                assert str(error) and "\n" not in str(error)

        example()

    return decorate


@st.composite
def damage(draw, raw: bytes) -> bytes:
    """`raw` with up to four changes: bytes replaced, removed, inserted or repeated, or the end cut off."""
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(raw)))
        other = draw(st.integers(0, len(raw)))
        kind = draw(st.sampled_from(["replace", "number", "remove", "insert", "repeat", "cut"]))
        some = draw(st.binary(min_size=1, max_size=8))
        number = draw(st.sampled_from([0, 1, 2, -1, 2**31, 2**32, 2**62, 2**63 - 1])) % 2**64
        raw = {
            "replace": raw[:place] + some + raw[place + len(some) :],
            "number": raw[:place] + number.to_bytes(8, "little") + raw[place + 8 :],
            "remove": raw[:place] + raw[other:],
            "insert": raw[:place] + some + raw[place:],
            "repeat": raw[:place] + raw[other:][:40] + raw[place:],
            "cut": raw[:place],
        }[kind]
    return raw


@st.composite
def pairs(draw) -> tuple[bytes, bytes]:
    """The bytes of .idx and .bin: small arrays of any numbers, mostly consistent, or a damaged pair."""
    code = draw(st.sampled_from(list(DTYPES)))
    size = np.dtype(DTYPES[code]).itemsize
    lengths = np.array(draw(st.lists(st.integers(0, 9), max_size=6)), np.int64)
    ends = np.cumsum(lengths) * size
    documents = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    index = HEADER.pack(MAGIC, 1, code, len(lengths), len(documents) + 2)
    index += lengths.astype("<i4").tobytes() + (ends - lengths * size).astype("<i8").tobytes()
    index += np.array([0, *documents, len(lengths)], "<i8").tobytes()
    count = int(lengths.sum())
    some = st.integers(0, VOCABULARY - 1) | st.sampled_from([VOCABULARY, -1, 2**31, 2**40])
    values = np.array(draw(st.lists(some, min_size=count, max_size=count)), np.int64)
    return (
        draw(st.just(index) | damage(index)),
        draw(st.just(values.astype(DTYPES[code]).tobytes()) | damage(values.astype(DTYPES[code]).tobytes())),
    )


def read_everything(dataset: IndexedDataset, cache: pathlib.Path) -> None:
    """Every sample of the GPT and of the BERT kind, each kind up to its first error."""
    pieces = WordPieces(1, 2, 3, 0, np.arange(VOCABULARY) % 3 == 0)
    for make in (
        lambda: Loader(GPTSamples(dataset, (0, len(dataset)), 5, 4, 1, cache), 5, 1, vocabulary=VOCABULARY).batch(0),
        lambda: BertSamples(dataset, (0, dataset.document_count), 5, 16, 1, pieces, cache=cache).sample(0),
    ):
        try:
            make()
        except ConfigError as error:
            assert "\n" not in str(error)


@EXAMPLES
def test_a_damaged_pair_is_read_or_refused(tmp_path, examples, capfd):
    prefix = tmp_path / "a"

    @fuzz(examples, pairs())
    def example(pair):
        for path, raw in zip(reversed(pair_paths(prefix)), pair, strict=True):
            path.write_bytes(raw)
        commands = ["inspect {0} --tokenizer byte", "inspect {0}", "verify {0} --tokenizer byte"]
        for command in [*commands, "merge --input {0} {0} --out {0}2 --overwrite"]:
            code = preprocess.main(command.format(prefix).split())
            error = capfd.readouterr().err
            assert (code, error.count("\n")) in ((0, 0), (2, 1)) and "Traceback" not in error
        read_everything(IndexedDataset(prefix), tmp_path / "cache")

    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


@EXAMPLES
def test_a_damaged_cache_gives_the_same_samples(tmp_path, examples):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for length in (3, 5, 0, 9, 1):
            writer.add_document(np.arange(length))
    dataset = IndexedDataset(tmp_path / "a")

    def windows() -> list[list[int]]:
        samples = GPTSamples(dataset, (0, len(dataset)), 9, 4, 1, tmp_path / "cache")
        return [samples.window(i).tolist() for i in range(samples.count)]

    right = windows()
    (entry,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    content = {path.name: path.read_bytes() for path in sorted(entry.iterdir())}

    @fuzz(
        examples, st.sampled_from(list(content)).flatmap(lambda name: st.tuples(st.just(name), damage(content[name])))
    )
    def example(change):
        (entry / change[0]).write_bytes(change[1])
        assert windows() == right
        assert {path.name: path.read_bytes() for path in entry.iterdir()} == content


def tokenizer_files(folder: pathlib.Path) -> dict[str, list[bytes]]:
    """Small tokenizer files of every format."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    pair = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")], unk_token="a"))
    pair.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Replace("c", "d")])
    pair.pre_tokenizer, pair.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("ab", -2.0), ("</s>", -3.0)], 0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    unigram.enable_truncation(5)
    word = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2, "[SEP]": 3, "[CLS]": 4}, unk_token="[UNK]")
    )
    word.normalizer, word.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    word.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits()])
    word.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 4))
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "s"),
        vocab_size=30,
        minloglevel=2,
        normalization_rule_name="identity",
    )
    return {
        ".json": [one.to_str().encode() for one in (pair, unigram, word)],
        ".model": [(folder / "s.model").read_bytes()],
        ".txt": [b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nun\n##able\nable\n"],
    }


ODD = [None, True, 0, -1, 2**31, 2**32 - 1, 2**63, 0.5, 1e308, "", "a", "(", [], {}, [[]], {"a": 1}]
ODD += [{"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "FixedLength", "length": 0}]
ODD += [{"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}, {"type": "Fuse"}]
ODD += [{"type": "Strip", "content": "a", "start": 5, "stop": 9}, {"type": "ByteFallback"}]


@st.composite
def odd_json(draw, raw: bytes) -> bytes:
    """A JSON document with up to three values replaced or removed."""
    root = {"": json.loads(raw)}
    for _ in range(draw(st.integers(1, 3))):
        holder, key = root, ""
        while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 5)):
            holder = holder[key]
            key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if holder is root or draw(st.booleans()):
            holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        else:
            del holder[key]
    return json.dumps(root[""]).encode()


@EXAMPLES
def test_a_damaged_tokenizer_is_used_or_refused(tmp_path, examples, capfd):
    files = tokenizer_files(tmp_path)
    changed = [
        st.tuples(st.just(ending), change(raw))
        for ending, raws in files.items()
        for raw in raws
        for change in ([damage, odd_json] if ending == ".json" else [damage])
    ]

    @fuzz(examples, st.one_of(changed), st.text(st.characters(exclude_categories=["Cs"])))
    def example(file, text):
        path = tmp_path / f"a{file[0]}"
        path.write_bytes(file[1])
        capfd.readouterr()
        try:
            tokenizer = load_tokenizer.__wrapped__(str(path))  # the path is the key of its cache
        finally:
            assert "panicked" not in capfd.readouterr().err
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and all(0 <= token < tokenizer.vocabulary for token in ids)
        assert [one.tolist() for one in tokenizer.encode_all([text, ""])][0] == ids.tolist()
        tokenizer.decode(ids)
        if tokenizer.vocabulary < 1000:
            tokenizer_hash(tokenizer)


LINES = b'\xef\xbb\xbf{"text": "one", "n": 1.5}\n\n{"text": ""}\r\n{"text": "tw\\u00e9\\ud83d\\ude00", "m": [{}]}\n'
PACKINGS = {"": bytes, ".gz": lambda raw: gzip.compress(raw, mtime=0), ".zst": zstandard.compress}


@st.composite
def texts(draw) -> tuple[str, bytes]:
    """The ending and the bytes of a text file, damaged before or after compression."""
    name = draw(st.sampled_from([".txt", ".jsonl", ".ndjson", ".json"]))
    packing = draw(st.sampled_from(list(PACKINGS)))
    raw = draw(st.just(LINES) | damage(LINES) | st.binary(max_size=50) | st.text(max_size=50).map(str.encode))
    packed = PACKINGS[packing](raw)
    return name + packing, draw(st.just(packed) | damage(packed))


@EXAMPLES
def test_a_damaged_text_is_read_or_refused(tmp_path, examples):
    recipes = [preprocess.Recipe("byte"), preprocess.Recipe("byte", sentences=True, append_end=False)]

    @fuzz(examples, texts(), st.sampled_from(TEXT_DOCUMENTS))
    def example(file, unit):
        path = tmp_path / f"a{file[0]}"
        path.write_bytes(file[1])
        for recipe in recipes:
            try:
                for block in read_blocks(str(path), kind_of(str(path), unit)):
                    result = tokenize_blocks.encode_block(block, recipe)
                    assert all("\n" not in str(line) for line in result.bad)
                    assert all(part.lengths.sum() == len(part.tokens) for part in result.encoded)
            except ConfigError as error:
                assert "\n" not in str(error)
        assert all(text.strip() for text in load_documents(str(path)))
