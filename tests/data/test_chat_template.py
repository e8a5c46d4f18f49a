"""Chat templates against transformers: ids and masks, where the template is, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import transformers

from megajax.config import ConfigError
from megajax.data.chat_template import load_template
from megajax.data.tokenizers import load_tokenizer
from tests.data.chats import CHATML, CHATS, FOLDER, TEMPLATES, messages

TOKENIZER = load_tokenizer(str(FOLDER))
JUDGE = transformers.AutoTokenizer.from_pretrained(FOLDER)


def template(source: str, folder) -> object:
    path = folder / "given.jinja"
    path.write_text(source)
    return load_template(TOKENIZER, str(path))


def judged(name: str, chat: list[dict]) -> list[tuple[list[int], list[int]]]:
    """Ids and masks: transformers' assistant mask, or the ids that follow the prompt of a generation."""

    def ids(turns, **options):
        found = JUDGE.apply_chat_template(turns, chat_template=TEMPLATES[name], return_dict=True, **options)
        return found["input_ids"]

    if name == "generation":
        found = JUDGE.apply_chat_template(
            chat, chat_template=TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
        )
        return [(found["input_ids"], found["assistant_masks"])]
    whole, turns = ids(chat), []
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            before, after = ids(chat[:number], add_generation_prompt=True), ids(chat[: number + 1])
            assert after[: len(before)] == before, (name, chat)
            turns.append((before, after))
    if all(whole[: len(after)] == after for _, after in turns):
        mask = [0] * len(whole)
        for before, after in turns:
            mask[len(before) : len(after)] = [1] * (len(after) - len(before))
        return [(whole, mask)]
    return [(after, [0] * len(before) + [1] * (len(after) - len(before))) for before, after in turns]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_ids_and_masks_are_those_of_transformers(name, chat):
    found = load_template(TOKENIZER, str(FOLDER / f"{name}.jinja"))
    samples = [(ids.tolist(), said.astype(int).tolist()) for ids, said in found.samples(messages(chat))]
    assert samples == judged(name, messages(chat))
    prompt = messages(chat)[:-1]
    wanted = JUDGE.apply_chat_template(
        prompt, chat_template=TEMPLATES[name], add_generation_prompt=True, return_dict=True
    )
    assert found.prompt(prompt).tolist() == wanted["input_ids"]


def said(found, chat: list[dict], **options) -> list[list[str]]:
    """The parts that the assistant says, of each sample."""
    texts = []
    for ids, answers in found.samples(chat, **options):
        parts = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(answers)) + 1)
        texts.append(
            [TOKENIZER.inner.decode(ids[part], skip_special_tokens=False) for part in parts if answers[part[0]]]
        )
    return texts


def test_the_assistant_says_its_content_and_its_end_and_not_its_header(tmp_path):
    """By hand."""
    found = said(template(CHATML, tmp_path), messages("turns"))
    assert found == [["Good morrow!\n<|im_end|>\n", "  Farewell, caf\u00e9 \U0001f600<|im_end|>\n"]]
    found = said(template(TEMPLATES["generation"], tmp_path), messages("turns"))
    assert found == [["Good morrow!\n<|im_end|>", "  Farewell, caf\u00e9 \U0001f600<|im_end|>"]]


def test_a_template_that_changes_earlier_turns_gives_a_sample_for_each_turn(tmp_path):
    found = template(TEMPLATES["thoughts"], tmp_path)
    assert said(found, messages("thoughts")) == [["<think>six</think>6<|im_end|>\n"], ["<think>7</think>7<|im_end|>\n"]]
    assert "six" not in TOKENIZER.decode(found.samples(messages("thoughts"))[1][0])


@pytest.mark.parametrize("name", ["chatml", "generation"])
def test_turns_that_are_not_trained_on_are_context(name, tmp_path):
    chat = messages("turns")
    whole = said(template(TEMPLATES[name], tmp_path), chat)[0]
    found = said(template(TEMPLATES[name], tmp_path), chat, trained=[True, False, True, True])
    assert found == [whole[1:]]
    only = said(template(TEMPLATES["thoughts"], tmp_path), messages("thoughts"), trained=[True, True, True, False])
    assert only == [["<think>six</think>6<|im_end|>\n"]]


TOOL = {"type": "function", "function": {"name": "clock", "description": "d", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "clock"}}]}


def test_a_message_without_content_is_as_transformers_renders_it(tmp_path):
    """Not the text "None"."""
    calls = "{{ m.tool_calls | tojson if m.tool_calls else '' }}"
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + calls + "{% endfor %}"
    chat = [{"role": "user", "content": "when?"}, CALL]
    found = template(source + "{% if add_generation_prompt %}<assistant>{% endif %}", tmp_path)
    wanted = JUDGE.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert found.render(chat) == wanted and "None" not in wanted and "clock" in wanted


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_several_names(key, tmp_path):
    source = CHATML.replace("message['content']", "(message.reasoning_content or '') + message['content']")
    found = said(
        template(source, tmp_path), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: "t"}]
    )
    assert found == [["tb<|im_end|>\n"]]


def test_where_the_template_is(tmp_path):
    """What is passed, or what transformers finds: of several the one for tools, if there are any."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / file, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())

    def rendered(given=None, tools=None):
        load_tokenizer.cache_clear()
        chat = [{"role": "user", "content": "x"}]
        text = load_template(load_tokenizer(str(tmp_path)), given).render(chat, tools)
        if given is None or given == "rag":
            judge = transformers.AutoTokenizer.from_pretrained(tmp_path)
            assert text == judge.apply_chat_template(chat, tools=tools, chat_template=given, tokenize=False)
        return text

    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    with pytest.raises(ConfigError, match="has no chat template .*: pass --chat-template FILE"):
        rendered()
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "a{{ bos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": several}))
    assert rendered() == "a<s>" and rendered(tools=[TOOL]) == "tools"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("c{{ bos_token }}")
    assert rendered() == "c<s>" == rendered(tools=[TOOL])
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("use {{ tools[0].function.name }}")
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert rendered() == "c<s>" and rendered(tools=[TOOL]) == "use clock" and rendered("rag") == "rag"
    assert {path.name for path in load_tokenizer(str(tmp_path)).files} >= {"tool_use.jinja", "rag.jinja"}
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
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_cannot_be_used_says_why(case, tmp_path):
    source, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words) as error:
        template(source, tmp_path).samples(CHAT)
    assert "\n" not in str(error.value)
