"""Rows of public data sets as chats or pairs, by hand; and as tokens with the tokenizer's template."""

import json

import pytest

from megajax.data.sft import load_answers
from megajax.data.sft_rows import Chat, Pair, read_row
from megajax.data.tokenizers import ByteTokenizer, load_tokenizer
from tests.data.chats import FOLDER

USER, SAYS = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOL = {"type": "function", "function": {"name": "clock"}}


def read(row, template=True):
    return read_row("FILE, line 1", row, lambda: template)


def human(text):
    return {"from": "human", "value": text}


ROWS = {
    "messages": ({"messages": [USER, SAYS], "id": 7}, [USER, SAYS], [1, 1]),
    "a prompt beside them": ({"messages": [USER, SAYS], "prompt": "a", "prompt_id": "x"}, [USER, SAYS], [1, 1]),
    "weight": ({"messages": [USER, SAYS | {"weight": 0}, USER, SAYS]}, [USER, SAYS, USER, SAYS], [1, 0, 1, 1]),
    "train": (
        {"messages": [USER, SAYS | {"train": True}, USER, SAYS | {"train": False}]},
        [USER, SAYS] * 2,
        [1, 1, 1, 0],
    ),
    "TRL": ({"prompt": [USER, SAYS, USER], "completion": [SAYS]}, [USER, SAYS, USER, SAYS], [0, 0, 0, 1]),
    "ShareGPT": ({"conversations": [human("a"), {"from": "gpt", "value": "b"}]}, [USER, SAYS], [1, 1]),
    "ShareGPT's system": (
        {"conversations": [human("a"), {"from": "gpt", "value": "b", "weight": 1}], "system": "s"},
        [{"role": "system", "content": "s"}, USER, SAYS],
        [1, 1, 1],
    ),
    "ShareGPT's calls": (
        {
            "conversations": [
                human("a"),
                {"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": 1}}'},
                {"from": "observation", "value": "12"},
                {"from": "gpt", "value": "b"},
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": 1}}}],
            },
            {"role": "tool", "content": "12"},
            SAYS,
        ],
        [1, 1, 1, 1],
    ),
    "roles in conversations": ({"conversations": [USER, SAYS]}, [USER, SAYS], [1, 1]),
    "Alpaca": ({"instruction": "a", "input": "", "output": "b"}, [USER, SAYS], [1, 1]),
    "Alpaca's input": (
        {"instruction": "a", "input": "x", "output": "b", "text": "no"},
        [{"role": "user", "content": "a\nx"}, SAYS],
        [1, 1],
    ),
    "Alpaca's history": (
        {"instruction": "a", "input": None, "output": "b", "system": "s", "history": [["q", "r"]]},
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "r"},
            USER,
            SAYS,
        ],
        [1] * 5,
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_chats(case):
    row, messages, trained = ROWS[case]
    assert read(row) == Chat(messages, list(map(bool, trained)), None, {})


def test_tools_are_a_list_or_its_json():
    """A column of a table has one type, so that tools are often stored as a text."""
    for tools in ([TOOL], json.dumps([TOOL])):
        assert read({"messages": [USER, SAYS], "tools": tools}).tools == [TOOL]
    for tools in (None, "", [], "[]"):
        assert read({"messages": [USER, SAYS], "tools": tools}).tools is None


def test_alpaca_without_a_template_has_the_prompts_of_alpaca():
    without, given = (
        read({"instruction": "Add.", "input": text, "output": "3"}, template=False) for text in ("", "1, 2")
    )
    assert without == Pair(
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Response:",
        "3",
    )
    assert given == Pair(
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:",
        "3",
    )


def test_rows_of_all_forms_become_tokens(tmp_path):
    """All the same chat, so the same tokens; the tools reach the template; enable_thinking is a variable of it."""
    tokenizer = load_tokenizer(str(FOLDER))
    template = tmp_path / "t.jinja"
    call = "{{ m.content }}{% if think is defined %}{{ think }}{% endif %}{{ tools[0].function.name if tools else '' }}"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}{% else %}{% generation %}"
        + call
        + "<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
    )
    same = [{"messages": [USER, SAYS]}, {"conversations": [human("a"), {"from": "gpt", "value": "b"}]}]
    same += [{"instruction": "a", "output": "b"}, {"prompt": [USER], "completion": [SAYS]}]
    more = [{"messages": [USER, SAYS], "tools": json.dumps([TOOL]), "chat_template_kwargs": {"think": "hm"}}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in same + more))
    found = load_answers((str(path),), tokenizer, str(template), 100, False)
    texts = [
        tokenizer.decode(found.ids[slice(*ends)]) for ends in zip(found.offsets[:-1], found.offsets[1:], strict=True)
    ]
    assert texts == ["<|im_start|>ab<|im_end|>"] * 4 + ["<|im_start|>abhmclock<|im_end|>"]


def test_a_pair_begins_as_the_tokenizer_begins_a_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}))

    class Begins(ByteTokenizer):
        start = (7,)

    found = load_answers((str(path),), Begins(), None, 100, False)
    assert found.ids.tolist() == [7, ord("a"), ord("b"), 256] and found.loss_mask.tolist() == [False, False, True, True]
