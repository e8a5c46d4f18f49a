"""Long texts are encoded in pieces, with the tokens of the whole text, or refused where they cannot be cut."""

import itertools

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from megajax.config import ConfigError
from megajax.data import long_texts, preprocess, tokenize_blocks
from megajax.data.blocks import Block
from megajax.data.long_texts import PATTERNS, batches, pieces, splits_at_cuts
from megajax.data.tokenizers import load_tokenizer

# What the pre-tokenizers treat differently: letters of several scripts, marks, digits, contractions, all kinds of spaces.
SCRAPS = [
    "a",
    "B",
    "word",
    "'s",
    "'LL",
    "\u00e9",
    "e\u0301",
    "\u0416",
    "\u4e2d\u6587",
    "\u00b2",
    "7",
    "1234",
    ".",
    "\u3002",
]
SCRAPS += [
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\u0301",
    "\U0001f600",
    "<|endoftext|>",
    "_",
    "-",
]
TEXTS = st.lists(st.sampled_from(SCRAPS), max_size=120).map("".join)
SPLIT = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in PATTERNS]
PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm2": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    "llama3": pre_tokenizers.Sequence([SPLIT[0], pre_tokenizers.ByteLevel(False, use_regex=False)]),
    "qwen": pre_tokenizers.Sequence([SPLIT[1], pre_tokenizers.ByteLevel(False, use_regex=False)]),
    "bert": pre_tokenizers.BertPreTokenizer(),
    "spaces": pre_tokenizers.WhitespaceSplit(),
}


def made(name: str):
    """A tokenizer whose tokens are what the pre-tokenizer splits a text into: BPE that knows no merges hides nothing."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={}, merges=[]))
    inner.pre_tokenizer = PRE_TOKENIZERS[name]
    inner.normalizer = normalizers.NFC() if name == "qwen" else None
    return inner


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@settings(max_examples=60)
@given(text=TEXTS)
def test_words_of_the_pieces_are_the_words_of_the_text(name, text):
    inner = made(name)
    assert splits_at_cuts(inner)

    def words(text):
        text = inner.normalizer.normalize_str(text) if inner.normalizer else text
        return [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "PIECE", 1)
        cut = list(pieces(text))
    assert "".join(cut) == text
    assert list(itertools.chain(*map(words, cut))) == words(text)


def test_what_cannot_be_cut():
    """Llama 2's and sentencepiece's spaces, BPE over a whole text, and tokens that take spaces with them."""
    whole = [
        (pre_tokenizers.Metaspace(), None, ()),
        (None, normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), ()),
        (pre_tokenizers.ByteLevel(False, use_regex=False), None, ()),
        (pre_tokenizers.ByteLevel(True), None, ()),
        (pre_tokenizers.Split(tokenizers.Regex(r"\w+ \w+"), "isolated"), None, ()),
        (pre_tokenizers.ByteLevel(False), normalizers.Replace("a b", "c"), ()),
        (pre_tokenizers.ByteLevel(False), None, [tokenizers.AddedToken("<two words>")]),
        (pre_tokenizers.ByteLevel(False), None, [tokenizers.AddedToken("<x>", rstrip=True)]),
    ]
    for pre_tokenizer, normalizer, added in whole:
        inner = tokenizers.Tokenizer(models.BPE())
        if pre_tokenizer:
            inner.pre_tokenizer = pre_tokenizer
        if normalizer:
            inner.normalizer = normalizer
        inner.add_tokens(list(added))
        assert not splits_at_cuts(inner)


@pytest.mark.parametrize("name", ["gpt2", "wordpiece", "byte"])
def test_a_long_text_has_the_tokens_of_the_whole(name, monkeypatch):
    tokenizer = load_tokenizer(name)
    text = (
        "The quick brown fox's 1234.5678 jumps;\tdef f(x):\n    return x**2  \n\n# na\u00efve \u0416\u4e2d\u6587\r\n"
        * 40
    )
    whole = tokenizer.encode_all([text, "", "short"], np.uint16)
    monkeypatch.setattr(long_texts, "PIECE", 50)
    monkeypatch.setattr(long_texts, "BATCH", 120)
    cut = tokenizer.encode_all([text, "", "short"], np.uint16)
    assert [ids.tolist() for ids in cut] == [ids.tolist() for ids in whole] and cut[0].dtype == np.uint16
    assert len(list(batches([text], True))) > 20 and len(list(batches([text], False))) == 1
    assert tokenizer.longest is None


def test_a_long_text_that_cannot_be_cut_is_refused_with_its_place(monkeypatch):
    tokenizer = load_tokenizer("gpt2")
    monkeypatch.setattr(type(tokenizer), "longest", 10)
    block = Block("a.jsonl", "jsonl", 7, b'{"text": "eleven char"}\n', 0)
    with pytest.raises(
        ConfigError, match=r"^a.jsonl, from line 7: a document has 11 characters, and tokenizer gpt2 enc"
    ):
        tokenize_blocks.encode_block(block, preprocess.Recipe("gpt2"))


def test_long_blocks_are_not_in_flight_together(monkeypatch):
    """A pool that runs nothing until a result is asked for: the bytes that wait."""
    waiting, most = [], []

    class Pool:
        def __init__(self, *settings):
            pass

        def submit(self, function, block, recipe):
            waiting.append(len(block.content))
            most.append(sum(waiting))
            return self

        def result(self):
            waiting.pop(0)

        def shutdown(self, **settings):
            pass

    monkeypatch.setattr(tokenize_blocks.concurrent.futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tokenize_blocks, "BYTES_AHEAD", 100)
    monkeypatch.setattr(tokenize_blocks, "PART", 10)
    blocks = [Block("f", "jsonl", 1, bytes(size), 0) for size in (10, 10, 60, 60, 300, 10, 10, 10, 10, 10, 10)]
    assert len(list(tokenize_blocks.Workers(2).encode(blocks, preprocess.Recipe("byte")))) == len(blocks)
    assert max(most) == 300 and most == [10, 20, 80, 60, 300, 10, 20, 30, 40, 50, 60]
