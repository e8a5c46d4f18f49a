"""Contexts and continuations as tokens, by the rules of lm-eval's model of type hf; the judge is in test_harness.py."""

import json
import pathlib

import pytest

from megajax.config import ConfigError
from megajax.data.tokenizers import load_tokenizer
from megajax.evaluate.harness_tokens import HarnessTokens
from tests.evaluate.test_harness import POST_PROCESSOR, START
from tests.interop.hugging_face import golden


def tokens_of(folder: pathlib.Path, settings: dict | None = None, begins: bool = False, end: str | None = None):
    """The golden words, w0 is token 2, with a tokenizer_config.json and a post-processor that adds token 0."""
    plain = json.loads((golden("llama") / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(plain | ({"post_processor": POST_PROCESSOR} if begins else {})))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
        )
        return HarnessTokens(load_tokenizer(str(folder), end))
    return HarnessTokens(load_tokenizer(str(folder / "tokenizer.json"), end))


def test_special_tokens(tmp_path):
    """By name; of a tokenizer.json alone; and of a directory."""
    named = HarnessTokens(load_tokenizer("byte"))
    assert (named.prefix, named.end, named.encode("a"), named.text([97, 256], ())) == (256, 256, [97], "a")
    alone = tokens_of(tmp_path)
    assert (alone.prefix, alone.end, alone.encode("w0")) == (0, 0, [2])
    alone = tokens_of(tmp_path, begins=True, end="w61")
    assert (alone.prefix, alone.end) == (0, 63)
    assert alone.encode("w0") == [0, 2] and alone.encode(f"{START} w0") == [1, 1, 1, 2]  # it does not know its text
    assert alone.encode("w0", False) == [2] and alone.encode_context("") == [0]
    whole = tokens_of(tmp_path, {"bos_token": "w5", "eos_token": START, "unk_token": "[UNK]"}, begins=True)
    assert (whole.prefix, whole.end, whole.end_text) == (7, 0, START)
    assert whole.encode("w5 w0") == whole.encode_context("w5 w0") == [7, 2]  # begins with bos_token
    assert whole.text([2, 0, 7, 3], ()) == "w0 w1"
    assert whole.text([2, 3, 4], ("w2", "w1")) == "w0 "


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("context", ["   ", "\n\n", "\t ", ""])
def test_a_context_of_spaces_is_the_token_before_texts(context, begins, tmp_path):
    """Without it the first token would be given, and nothing scored: the log-likelihood was -0.0."""
    tokens = tokens_of(tmp_path, {"bos_token": START, "eos_token": "w61"}, begins)
    assert tokens.encode_pair(context, "w3") == ([0], [5])
    assert tokens.encode_pair(context, f"w3 {START}") == ([0], [5, 0])
    assert tokens.encode_pair("w1" + context, " w3") == ([0] * begins + [3], [5])


@pytest.mark.parametrize(("context", "continuation"), [("", ""), ("  ", ""), ("w1", ""), ("w1 ", " "), ("", START)])
def test_a_continuation_without_tokens_is_refused(context, continuation, tmp_path):
    tokens = tokens_of(tmp_path, {"bos_token": START, "eos_token": "w61"})
    with pytest.raises(
        ConfigError, match="of the task adds no token to its context .*it needs one or more; correct the"
    ):
        tokens.encode_pair(context, continuation)


def test_chat_templates_by_name(tmp_path):
    from megajax.evaluate.__main__ import check_template

    settings = {"bos_token": START, "eos_token": "w61"}
    plain = tokens_of(tmp_path, settings).tokenizer
    assert check_template({}, plain) is None
    with pytest.raises(ConfigError, match="has no chat template: omit --apply-chat-template"):
        check_template({"apply_chat_template": True}, plain)
    load_tokenizer.cache_clear()
    one = tokens_of(tmp_path, settings | {"chat_template": "a"}).tokenizer
    assert check_template({"apply_chat_template": True}, one) is None
    with pytest.raises(ConfigError, match="has no chat template 'rag', but one without a name"):
        check_template({"apply_chat_template": "rag"}, one)
    load_tokenizer.cache_clear()
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    several = tokens_of(tmp_path, settings | {"chat_template": named}).tokenizer
    assert check_template({"apply_chat_template": "rag"}, several) == "rag"
    with pytest.raises(ConfigError, match="has no chat template 'tool', but default, rag: pass"):
        check_template({"apply_chat_template": "tool"}, several)
    load_tokenizer.cache_clear()
