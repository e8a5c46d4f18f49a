"""Random tokenizers and texts against transformers: ids, texts, special tokens."""

import pathlib
import tempfile

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data import long_texts
from megajax.data.tokenizers import ENDS, PROBE, load_tokenizer
from tests.differential.many import FEW, many
from tests.differential.random_tokenizers import texts, tokenizers, write

TYPES = (None, "llama", "qwen2", "qwen3", "gpt2", "mistral", "bert", "olmoe")


def compare(folder: pathlib.Path, found: list[str]) -> None:
    """Raises AssertionError for the first difference."""
    try:
        judge = transformers.AutoTokenizer.from_pretrained(folder)
        judge(PROBE)
    except Exception:  # whatever it cannot read
        with pytest.raises(ConfigError):
            load_tokenizer(str(folder))
        return
    load_tokenizer.cache_clear()
    vocabulary = judge.get_vocab()
    if judge.eos_token is None and not set(ENDS) & set(vocabulary):
        with pytest.raises(ConfigError, match="to end documents with"):
            load_tokenizer(str(folder))
        return
    ours = load_tokenizer(str(folder))
    assert ours.vocabulary == max(vocabulary.values()) + 1
    assert ours.end_of_document == judge.eos_token_id or judge.eos_token is None
    assert ours.beginning == judge.bos_token_id
    whole = ours.encode_all(found)
    for text, ids, (again, offsets) in zip(found, whole, ours.encode_with_offsets(found), strict=True):
        plain = judge(text, add_special_tokens=False)["input_ids"]
        assert ids.tolist() == again.tolist() == ours.encode(text).tolist() == plain
        assert ours.encode_prompt(text).tolist() == judge(text)["input_ids"]
        assert ours.text(ids) == judge.decode(plain, skip_special_tokens=True)
        assert (offsets[:, 0] <= offsets[:, 1]).all() and (offsets <= len(text)).all()
    if found and found[0]:  # long texts are encoded in pieces
        text = (found[0] + " The fox\njumps over") * 40
        kept, long_texts.PIECE = long_texts.PIECE, 64
        try:
            pieces = ours.encode(text)
        finally:
            long_texts.PIECE = kept
        np.testing.assert_array_equal(pieces, judge(text, add_special_tokens=False)["input_ids"])


def check(tokenizer, kind, found) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder), *tokenizer, {"model_type": kind} if kind else None)
        compare(pathlib.Path(folder), found)


EXAMPLES = tokenizers(), st.sampled_from(TYPES), st.lists(texts, min_size=1, max_size=6)


@given(*EXAMPLES)
@settings(max_examples=40, **FEW)
def test_tokenizers(tokenizer, kind, found):
    check(tokenizer, kind, found)


@pytest.mark.slow
def test_many_tokenizers(capsys):
    many(check, 1000, capsys, *EXAMPLES)
