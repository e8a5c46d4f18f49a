"""Random chat templates and chats against transformers: ids, the assistant's mask, prompts of a generation."""

import re

import numpy as np
import pytest
import transformers
from hypothesis import given, settings

from megajax.config import ConfigError
from megajax.data.chat_template import load_template
from megajax.data.sft_rows import read_row
from megajax.data.tokenizers import load_tokenizer
from tests.data.chats import FOLDER
from tests.differential.many import FEW, many
from tests.differential.random_chats import chats, templates

JUDGE = transformers.AutoTokenizer.from_pretrained(FOLDER)
TOKENIZER = load_tokenizer(str(FOLDER))


def judged(template: str, chat: list, tools, **options):
    """What transformers makes of a chat; None if it refuses it."""
    try:
        return JUDGE.apply_chat_template(chat, tools=tools, chat_template=template, return_dict=True, **options)
    except Exception:
        return None


def spans(template: str, chat: list, tools) -> list[tuple[str, str]] | None:
    """For each turn of the assistant the text before it and up to its end; None where the one does not begin the other."""
    found = []
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            text = lambda turns, **options: JUDGE.apply_chat_template(  # noqa: E731
                turns, tools=tools, chat_template=template, tokenize=False, **options
            )
            try:
                before, after = text(chat[:number], add_generation_prompt=True), text(chat[: number + 1])
            except Exception:
                return None
            if not after.startswith(before) or len(after) == len(before):
                return None
            found.append((before, after))
    return found


def compare(template: str, row: dict, path) -> None:
    """Raises AssertionError for a difference."""
    path.write_text(template)
    ours = load_template(TOKENIZER, str(path))
    chat, tools = row["messages"], row["tools"]
    prompt = judged(template, chat[:-1], tools, add_generation_prompt=True)
    if prompt is None:
        with pytest.raises(ConfigError):
            ours.prompt(chat[:-1], tools)
    else:
        assert ours.prompt(chat[:-1], tools).tolist() == prompt["input_ids"]
    read = read_row("line 1", row, lambda: True)
    assert (read.messages, read.tools) == (chat, tools)
    if re.search(r"\{%-?\s*generation", template):
        wanted = judged(template, chat, tools, return_assistant_tokens_mask=True)
        if wanted is None:
            with pytest.raises(ConfigError):
                ours.samples(chat, tools)
            return
        [(ids, said)] = ours.samples(chat, tools)
        assert ids.tolist() == wanted["input_ids"] and said.astype(int).tolist() == wanted["assistant_masks"]
        return
    whole, turns = judged(template, chat, tools), spans(template, chat, tools)
    if whole is None or turns is None:
        with pytest.raises(ConfigError):
            ours.samples(chat, tools)
        return
    samples = ours.samples(chat, tools)
    text = JUDGE.apply_chat_template(chat, tools=tools, chat_template=template, tokenize=False)
    if all(text.startswith(after) for _, after in turns):
        assert samples[0][0].tolist() == whole["input_ids"] and len(samples) == 1
        wanted = [(text, [(len(before), len(after)) for before, after in turns])]
    else:
        wanted = [(after, [(len(before), len(after))]) for before, after in turns]
    for (ids, said), (text, parts) in zip(samples, wanted, strict=True):
        assert ids.tolist() == JUDGE(text, add_special_tokens=False)["input_ids"]
        plain = np.array([len(JUDGE.decode(one)) for one in ids])
        if plain.sum() == len(text):  # tokens of whole characters: where each of them is
            ends = plain.cumsum()
            mask = np.zeros(len(ids), bool)
            for begin, end in parts:
                mask |= (ends > begin) & (ends - plain < end)
            assert said.tolist() == mask.tolist()


@given(templates(), chats())
@settings(max_examples=60, **FEW)
def test_chats(tmp_path_factory, template, row):
    compare(template, row, tmp_path_factory.getbasetemp() / "template.jinja")


@pytest.mark.slow
def test_many_chats(tmp_path, capsys):
    def check(template, row):
        compare(template, row, tmp_path / "template.jinja")

    many(check, 1000, capsys, templates(), chats())
