"""Chat templates against the golden texts, ids and masks of transformers (make_chat_golden.py)."""

import json
import shutil

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.data.chat_template import ChatTemplate, load_template
from megajax.data.sft import load_answers, tokens_and_answers
from megajax.data.tokenizers import load_tokenizer
from tests.data.make_chat_golden import CHATML, CHATS, FOLDER, TEMPLATES, messages

pytest.importorskip("jinja2")
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
TOKENIZER = str(FOLDER / "tokenizer.json")
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_texts_ids_and_masks_are_those_of_transformers(name, chat):
    template = load_template(TOKENIZER, str(FOLDER / f"{name}.jinja"))
    wanted = GOLDEN[name][chat]
    texts = template.texts(messages(chat))
    assert texts[-1].text == wanted["text"]
    found = list(tokens_and_answers(texts, load_tokenizer(TOKENIZER)))
    assert len(found) == len(wanted["samples"])
    for (ids, loss_mask), sample in zip(found, wanted["samples"], strict=True):
        assert ids.tolist() == sample["ids"]
        assert loss_mask.astype(int).tolist() == sample["mask"]


def test_the_assistant_says_its_content_and_its_end_and_not_its_header():
    """By hand, in characters."""
    [text] = ChatTemplate(CHATML, VARIABLES, "chatml").texts(messages("turns"))
    said = [text.text[begin:end] for begin, end in text.answers]
    assert said == ["Good morrow!\n<|im_end|>\n", "  Farewell, caf\u00e9 \U0001f600<|im_end|>\n"]
    [text] = ChatTemplate(TEMPLATES["generation"], VARIABLES, "marked").texts(messages("turns"))
    said = [text.text[begin:end] for begin, end in text.answers]
    assert said == ["Good morrow!\n<|im_end|>", "  Farewell, caf\u00e9 \U0001f600<|im_end|>"]


def test_a_template_that_changes_earlier_turns_gives_a_text_for_each_turn():
    texts = ChatTemplate(TEMPLATES["thoughts"], {}, "thoughts").texts(messages("thoughts"))
    said = [[text.text[begin:end] for begin, end in text.answers] for text in texts]
    assert said == [["<think>six</think>6<|im_end|>\n"], ["<think>7</think>7<|im_end|>\n"]]
    assert "six" not in texts[1].text


def test_where_the_template_is(tmp_path):
    """The file that is passed, chat_template.jinja, chat_template.json, tokenizer_config.json: in this order."""
    path = shutil.copy(TOKENIZER, tmp_path)
    rendered = lambda given=None: load_template(path, given).render([{"role": "user", "content": "x"}])  # noqa: E731
    with pytest.raises(ConfigError, match="has no chat template .*: pass --chat-template FILE"):
        rendered()
    settings = {
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "a{{ bos_token }}"}]
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": {"content": "<s>"}}))
    assert rendered() == "a<s>"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "b"}')
    assert rendered() == "b"
    (tmp_path / "chat_template.jinja").write_text("c{{ bos_token }}")
    assert rendered() == "c<s>"
    (tmp_path / "mine").write_text("d")
    assert rendered(str(tmp_path / "mine")) == "d"


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
REFUSED = {
    "syntax": ("{% for %}", "is not a Jinja template"),
    "raise_exception": ("{{ raise_exception('roles!') }}", "refuses the chat: roles!"),
    "undefined": ("{{ messages[7].content.x }}", "refuses the chat: .*has no element 7"),
    "types": ("{{ messages + 1 }}", "refuses the chat"),
    "sandbox": ("{{ messages.__class__.__mro__ }}", "refuses the chat: access to attribute '__class__'"),
    "changes the list": ("{{ messages.append(1) }}", "refuses the chat"),
    "another prompt": (
        CHATML.replace("{{ '<|im_start|>assistant\n' }}", "think:"),
        "does not continue its own prompt of a",
    ),
    "nothing": ("{{ messages[0].content }}", "does not continue its own prompt of a generation with message 2: pass"),
    "nested": ("{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}", "block inside another"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_cannot_be_used_says_why(case):
    source, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        ChatTemplate(source, {}, "the template").texts(CHAT)


def test_functions_and_filters_of_transformers():
    template = ChatTemplate(
        "{{ {'a': 'é<'} | tojson }}{{ strftime_now('%%') }}{% for x in [1, 2] %}{% break %}{% endfor %}", {}, "x"
    )
    assert template.render(CHAT) == '{"a": "é<"}%'


def test_tools_reach_the_template(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for t in tools or [] %}{{ t.name }} {% endfor %}" + CHATML)
    line = {"messages": CHAT, "tools": [{"name": "clock"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({"messages": CHAT}))
    tokenizer = load_tokenizer(TOKENIZER)
    found = load_answers((str(tmp_path / "a.jsonl"),), tokenizer, str(tmp_path / "t.jinja"), 100, False)
    first, second = np.split(found.ids, found.offsets[1:-1])
    assert tokenizer.decode(first) == "clock " + tokenizer.decode(second)
