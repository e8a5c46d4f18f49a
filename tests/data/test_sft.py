"""Samples of fine-tuning by hand: tokens, answers, packed rows; wrong lines; and that nothing leaks between samples."""

import dataclasses
import gzip
import json
import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import ConfigError, DataConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.data.loader import PADDING, RowLoader
from megajax.data.packing import PackedSamples, pack
from megajax.data.sft import Answers, load_answers
from megajax.data.source import describe, make_loaders
from megajax.data.tokenizers import ByteTokenizer, load_tokenizer
from tests import small
from tests.data.chats import FOLDER

BYTES = ByteTokenizer()
CHATS = str(FOLDER / "tokenizer.json")
END = BYTES.end_of_document


def jsonl(folder, *lines, name="data.jsonl") -> str:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def load(file, longest=100, drop=False, tokenizer=BYTES, template=None) -> Answers:
    return load_answers((file,), tokenizer, template, longest, drop)


def test_a_prompt_and_its_completion_by_hand(tmp_path):
    """The classic mistake is a mask shifted by one: the label of the prompt's last token is the answer's first."""
    found = load(jsonl(tmp_path, {"prompt": "ab", "completion": "cd"}))
    a, b, c, d = map(ord, "abcd")
    assert found.ids.tolist() == [a, b, c, d, END] and found.loss_mask.tolist() == [False, False, True, True, True]
    row = PackedSamples(found, 6, None, END).row(0)
    assert row["tokens"].tolist() == [a, b, c, d, END, END]
    assert row["labels"].tolist() == [b, c, d, END, END, END]
    assert row["weights"].tolist() == [0, 1, 1, 1, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 1]
    assert row["document"].tolist() == [0, 0, 0, 0, 1, 1]


def test_two_samples_in_a_row_by_hand(tmp_path):
    """The longer one first; it fills three places with four tokens. The last token of neither is an input."""
    found = load(jsonl(tmp_path, {"prompt": "x", "answer": "y"}, {"prompt": "ab", "response": "c"}))
    row = PackedSamples(found, 5, None, END).row(0)
    a, b, c, x, y = map(ord, "abcxy")
    assert row["tokens"].tolist() == [a, b, c, x, y]
    assert row["labels"].tolist() == [b, c, END, y, END]
    assert row["weights"].tolist() == [0, 1, 1, 1, 1]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1]
    assert row["document"].tolist() == [0, 0, 0, 1, 1]
    assert {name: (array.dtype.name, array.shape) for name, array in row.items()} == {
        name: ("float32" if name == "weights" else "int32", (5,)) for name in row
    }


@pytest.mark.parametrize("tokenizer", [CHATS, "gpt2"])
def test_a_token_with_characters_of_the_answer_belongs_to_it(tmp_path, tokenizer):
    """A BPE joins the end of a prompt and the start of an answer; the answer has the joint token."""
    read = load_tokenizer(tokenizer)
    found = load(jsonl(tmp_path, {"prompt": "To be, or not t", "completion": "o be: that is"}), tokenizer=read)
    text = [read.decode([token]) for token in found.ids[:-1]]
    assert "".join(text) == "To be, or not to be: that is" and found.ids[-1] == read.end_of_document
    loss_mask = "".join(piece for piece, learnt in zip(text, found.loss_mask, strict=False) if learnt)
    assert loss_mask in (" to be: that is", "to be: that is", "o be: that is") and loss_mask.endswith("o be: that is")


def test_other_libraries_find_the_answer_by_the_tokens_before_it(tmp_path):
    class Pairs(ByteTokenizer):
        """Two bytes a token."""

        vocabulary = 65537

        def encode_all(self, texts, dtype=np.int32):
            even = [text.encode() + b"\0" * (len(text.encode()) % 2) for text in texts]
            return [np.frombuffer(data, "<u2").astype(dtype) for data in even]

    for prompt, loss_mask in (("abcd", [0, 0, 1, 1, 1]), ("abc", [0, 1, 1, 1])):  # "c" and "e" share a token
        found = load(
            jsonl(tmp_path, {"prompt": prompt, "completion": "efg"}, name=f"{prompt}.jsonl"), tokenizer=Pairs()
        )
        assert found.loss_mask.tolist() == list(map(bool, loss_mask))


def test_long_samples_are_cut_or_dropped_and_counted(tmp_path):
    lines = [{"prompt": "a" * n, "completion": "b" * 4} for n in (3, 6, 9)]  # 8, 11 and 14 tokens
    file = jsonl(tmp_path, *lines)
    cut = load(file, longest=9)
    assert (cut.count, cut.cut, cut.dropped, cut.unanswered) == (2, 1, 0, 1)
    assert np.diff(cut.offsets).tolist() == [8, 9] and cut.loss_mask[8:].tolist() == [False] * 6 + [True] * 3
    assert cut.describe() == "3 lines, 2 samples, 8 of 17 tokens are answers, 1 cut, 1 cut before an answer"
    dropped = load(file, longest=9, drop=True)
    assert (dropped.count, dropped.cut, dropped.dropped) == (1, 0, 2)
    assert dropped.describe() == "3 lines, 1 sample, 5 of 8 tokens are answers, 2 dropped as too long"
    exact = load(file, longest=14)
    assert (exact.count, exact.cut) == (3, 0)
    with pytest.raises(ConfigError, match="has 3 samples, all longer than 5 tokens: pass"):
        load(file, longest=5, drop=True)


def test_packed_files_blank_lines_and_a_mark_of_order(tmp_path):
    line = json.dumps({"prompt": "a", "completion": "b", "other": 1})
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + f"{line}\n\n  \n{line}\n".encode()))
    assert load(str(path)).count == 2


PAIR = {"prompt": "a", "completion": "b"}
USER, SAYS = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
WRONG = {
    "not JSON": ("{", "line 2 is not JSON"),
    "not an object": ("[1]", "line 2 is a JSON list, not an object: give messages, or a prompt"),
    "not UTF-8": (b"\xff", "line 2: the text is not UTF-8"),
    "half a pair": ('{"prompt": "\\ud800", "completion": "b"}', "line 2: the text is not UTF-8"),
    "no keys": ({}, "line 2 has nothing: give messages, or a prompt and one of completion, answer, response"),
    "no answer": ({"prompt": "a", "text": "b"}, "line 2 has 'prompt', 'text': give messages, or"),
    "no prompt": ({"completion": "b"}, "line 2 has 'completion': give messages"),
    "two answers": (PAIR | {"answer": "c"}, "line 2 has 'prompt', 'completion', 'answer': give"),
    "both kinds": (PAIR | {"messages": [USER, SAYS]}, "line 2 has both messages and a prompt"),
    "prompt a number": ({"prompt": 1, "completion": "b"}, "line 2: prompt = 1 is not a text"),
    "empty answer": ({"prompt": "a", "completion": " "}, "line 2: the completion is empty"),
    "empty prompt": ({"prompt": "", "answer": "a"}, "line 2: the prompt is empty"),
    "no list": ({"messages": "hi"}, "line 2: messages = 'hi' is not a list of messages"),
    "no messages": ({"messages": []}, r"line 2: messages = \[\] is not a list"),
    "no role": ({"messages": [USER, {"content": "b"}]}, "line 2: message 2 has no role"),
    "unknown role": (
        {"messages": [USER, {"role": "bot", "content": "b"}]},
        "message 2 has the role 'bot': give one of",
    ),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, "line 2: message 2 has no content: give a text"),
    "parts": ({"messages": [{"role": "user", "content": [1]}, SAYS]}, "line 2: message 1 has no content: give a text"),
    "parts that the template does not read": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, SAYS]},
        "line 2: .* refuses the chat: .*; a content has several parts: give it as one text",
    ),
    "weight": (
        {"messages": [USER, SAYS | {"weight": 0.5}]},
        "line 2: message 2 has weight or train = 0.5: give 0 or 1",
    ),
    "train": (
        {"messages": [USER | {"train": True}, SAYS]},
        "line 2: message 1 is the user's, of which nothing is learnt",
    ),
    "untrained": (
        {"messages": [USER, SAYS | {"train": False}]},
        "line 2 has no message of the assistant that is trained",
    ),
    "tools": ({"messages": [USER, SAYS], "tools": "clock"}, "line 2: tools is a text that is not JSON"),
    "no tools": ({"messages": [USER, SAYS], "tools": [1]}, r"line 2: tools = \[1\] is not a list of objects"),
    "ShareGPT": (
        {"conversations": [{"from": "me", "value": "a"}]},
        "line 2: message 1 is from 'me': give one of human",
    ),
    "Alpaca": ({"instruction": "a", "output": ""}, "line 2: the output is empty"),
    "Alpaca's history": (
        {"instruction": "a", "output": "b", "history": ["x"]},
        "line 2: history = .* is not a list of",
    ),
    "empty message": (
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        "message 2, the assistant's, is empty",
    ),
    "no assistant": ({"messages": [USER]}, "line 2 has no message of the assistant: there is nothing to learn"),
    "refused": ({"messages": [USER, USER, SAYS]}, "line 2: .*inst.jinja refuses the chat: roles must alternate"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named(case, tmp_path):
    line, words = WRONG[case]
    path = tmp_path / "data.jsonl"
    text = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path.write_bytes(json.dumps(PAIR).encode() + b"\n" + text + b"\n")
    with pytest.raises(ConfigError) as error:
        load(str(path), tokenizer=load_tokenizer(CHATS), template=str(FOLDER / "inst.jinja"))
    assert re.search(words, str(error.value)) and "data.jsonl, line 2" in str(error.value), error.value


def test_other_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*no.jsonl: No such file.*pass --sft-data"):
        load(str(tmp_path / "no.jsonl"))
    with pytest.raises(ConfigError, match="has no samples: pass --sft-data another file"):
        load(jsonl(tmp_path, " "))
    chat = jsonl(tmp_path, {"messages": [USER, SAYS]}, name="chat.jsonl")
    with pytest.raises(ConfigError, match="tokenizer byte cannot be used for chats"):
        load(chat)
    (tmp_path / "tokenizer").mkdir()
    alone = load_tokenizer(shutil.copy(CHATS, tmp_path / "tokenizer"))
    with pytest.raises(ConfigError, match="has no chat template"):
        load(chat, tokenizer=alone)
    with pytest.raises(ConfigError, match="cannot read the chat template .*no.jinja: No such file"):
        load(chat, tokenizer=alone, template=str(tmp_path / "no.jinja"))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 30))
def test_packing_loses_nothing_and_wastes_little(lengths, capacity):
    rows = pack(np.array(lengths), capacity)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    sums = [sum(lengths[sample] for sample in row) for row in rows]
    assert max(sums) <= capacity
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // capacity) + 1 + len([n for n in lengths if 2 * n > capacity])


def some(count=23, capacity=16) -> Answers:
    draw = np.random.default_rng(0)
    lengths = np.append(capacity + 1, draw.integers(2, capacity // 2, count - 1))
    ids = draw.integers(0, 60, lengths.sum()).astype(np.int32)
    loss_mask = draw.random(len(ids)) < 0.5
    offsets = np.concatenate([[0], lengths.cumsum()])
    loss_mask[offsets[1:] - 1] = True
    return Answers("some", ids, loss_mask, offsets, count, 0, 0, 0)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    samples = PackedSamples(some(), 16, 5, 0)
    epochs = [[samples.row(place + epoch * samples.count) for place in range(samples.count)] for epoch in range(3)]
    keys = [[row["tokens"].tobytes() + row["labels"].tobytes() for row in rows] for rows in epochs]
    assert keys[0] != keys[1] != keys[2] and sorted(keys[0]) == sorted(keys[1]) == sorted(keys[2])
    again = PackedSamples(some(), 16, 5, 0)
    assert again.row(2 * samples.count + 1)["tokens"].tobytes() == epochs[2][1]["tokens"].tobytes()  # without a state
    other = PackedSamples(some(), 16, 6, 0)
    assert [other.row(place)["tokens"].tobytes() for place in range(3)] != [
        row["tokens"].tobytes() for row in epochs[0][:3]
    ]
    learnt = sum(int(row["weights"].sum()) for row in epochs[0])
    found = some()
    assert learnt == found.loss_mask.sum() - found.loss_mask[found.offsets[:-1]].sum()  # first tokens are no labels


def test_validation_reads_each_row_once():
    samples = PackedSamples(some(), 16, None, 0)
    assert samples.row(samples.count)["weights"].sum() == 0
    assert sum(samples.row(place)["weights"].sum() for place in range(3 * samples.count)) > 0


def test_batches_and_padding():
    loader = RowLoader(PackedSamples(some(), 16, 5, 0), 8, 4)
    batch = loader.batch(8)
    assert {name: array.shape for name, array in batch.items()} == {
        name: (4, 2) if name == "sample" else (4, 2, 16)
        for name in ("tokens", "labels", "weights", "padding_mask", "positions", "document", "sample")
    }
    np.testing.assert_array_equal(batch["tokens"][1, 1], loader.samples.row(8 + 3)["tokens"])
    padded = loader.resized(8, 4, 6).batch(8)
    np.testing.assert_array_equal(padded["tokens"][:4], batch["tokens"])
    assert padded["weights"][4:].sum() == 0 and (padded["sample"][4:] == PADDING).all()


def test_the_loaders_of_a_run(tmp_path):
    file = jsonl(tmp_path, *[{"prompt": "a" * n, "completion": "b"} for n in range(1, 20)])
    model = dataclasses.replace(small.LLAMA, sequence_length=24, vocabulary=257)
    data = DataConfig(sft_data=(file,), valid_sft_data=(file,))
    run = RunConfig(model, ParallelConfig(data=2), TrainConfig(global_batch_size=8, steps=10, warmup_steps=1), data)
    run.validate()
    training, validation = make_loaders(run, BYTES)
    validation = validation["validation"]
    assert (
        isinstance(training, RowLoader)
        and isinstance(training.samples, PackedSamples)
        and training.samples.seed == run.train.seed
        and validation.samples.seed is None
    )
    [line] = describe(training.samples, 80)
    assert "19 lines, 19 samples, 38 of 228 tokens are answers; packed into" in line and "epochs of them" in line
    without = dataclasses.replace(run, data=DataConfig(sft_data=(file,)))
    with pytest.raises(ConfigError, match="no validation data: pass --valid-sft-data FILE, or --validation-batches 0"):
        make_loaders(without, BYTES)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sft_data": ("a",), "text": "b"}, "--text and --sft-data exclude one another"),
        ({"sft_data": ("a",), "valid_data_path": ("b",)}, "exclude one another"),
        ({"valid_sft_data": ("b",)}, "--valid-sft-data belongs to fine-tuning, .* pass --sft-data FILE"),
        ({"chat_template": "b"}, "--chat-template belongs to fine-tuning"),
        ({"sft_data": ("a",), "long_samples": "keep"}, "long_samples = 'keep' is not known"),
    ],
)
def test_options_that_do_not_fit(fields, words):
    with pytest.raises(ConfigError, match=words):
        DataConfig(**fields).validate()


def test_padding_is_what_no_sample_fills():
    """Not what has weight 0: a prompt is real."""
    samples = PackedSamples(some(), 16, None, 0)
    lengths = np.diff(samples.answers.offsets) - 1
    used = [int(sum(lengths[n] for n in packed)) for packed in samples._rows] + [0]  # the row after the last is empty
    for place, tokens in enumerate(used):
        np.testing.assert_array_equal(samples.row(place)["padding_mask"], np.arange(16) >= tokens)
    filled = RowLoader(PackedSamples(some(), 16, 5, 0), 8, 4).resized(8, 4, 6).batch(8)["padding_mask"]
    assert filled[4:].all() and not filled[:4].all()
