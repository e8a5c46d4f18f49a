"""Random chat templates, and random chats with tools, thoughts and calls."""

from typing import Any

from hypothesis import strategies as st

CONTENTS = st.one_of(
    st.sampled_from(
        [
            "Hi",
            " a ",
            "2 + 2?",
            "caf\u00e9 \U0001f600",
            "line\n\nline",
            "<|im_end|>",
            "<think>no</think>yes",
            "{{ x }}",
            "None",
        ]
    ),
    st.text(min_size=1, max_size=6).filter(str.strip),
)
TOOL = {
    "type": "function",
    "function": {"name": "clock", "description": 'the "time" \u00e9', "parameters": {"type": "object"}},
}
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "<utc>", "n": 1}}}


@st.composite
def chats(draw) -> dict[str, Any]:
    """A chat with tools, or none, that ends with the assistant."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(CONTENTS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(CONTENTS)})
        if draw(st.booleans()):
            call = {"role": "assistant", "tool_calls": [CALL] * draw(st.integers(1, 2))}
            content = draw(st.sampled_from(["missing", None, "", "text"]))
            messages.append(call | ({} if content == "missing" else {"content": content}))
            messages.append({"role": "tool", "content": draw(CONTENTS), "name": "clock"})
        answer = {"role": "assistant", "content": draw(CONTENTS)}
        if draw(st.booleans()):
            answer[draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))] = draw(
                st.sampled_from(["hm", None, " t\n"])
            )
        messages.append(answer)
    return {"messages": messages, "tools": draw(st.sampled_from([None, None, [TOOL], [TOOL, TOOL]]))}


@st.composite
def templates(draw) -> str:
    """A template put together from what released ones do."""
    pick = lambda *words: draw(st.sampled_from(words))  # noqa: E731
    trim = pick("", " | trim")
    open_, close = pick(
        ("<|im_start|>{{ m.role }}\n", "<|im_end|>\n"),
        ("[{{ m['role'] }}] ", "</s>"),
        ("{{- m.role + ': ' }}", "\n\n"),
        ("\n<s>{{ m.role }}\n", "{{ eos_token }}"),
    )
    content = "{{ (m.content or '')" + trim + " }}"
    if draw(st.booleans()):
        content = pick("{{ m.content" + trim + " }}", "{{- m['content']" + trim + " -}}")
    thoughts = pick(
        "",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}",
        "{% if m.reasoning_content is defined and loop.last %}<think>\n{{ m.reasoning_content | trim }}</think>{% endif %}",
    )
    calls = pick(
        "",
        "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}",
        "{% if m.tool_calls %}{% set f = m.tool_calls[0]['function'] %}{{ f.name }}({{ f.arguments | tojson(indent=2) }})"
        "{% endif %}",
    )
    before, after = pick(
        ("", ""), ("", ""), ("{% generation %}", "{% endgeneration %}"), ("{%- generation -%}", "{%- endgeneration -%}")
    )
    said = f"{before}{thoughts}{content}{calls}{close}{after}"
    if draw(st.booleans()):
        said = f"{before}{thoughts}{content}{calls}{after}{close}"
    beginning = pick("", "{{ bos_token }}", "{{- bos_token -}}\n", "{{ bos_token or '' }}{{ strftime_now('%Y') }}")
    tools = pick(
        "",
        "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}",
        "{% if tools is not none %}{% for tool in tools %}{{ tool.function.name }}: {{ tool | tojson(indent=4) }}\n"
        "{% endfor %}{% endif %}",
    )
    default = pick("", "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}")
    refusal = pick(
        "",
        "",
        "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no developer') }}{% endif %}{% endfor %}",
    )
    prompt = pick("", open_.replace("m.role", "'assistant'").replace("m['role']", "'assistant'"))
    lines = pick("", "\n")
    others = f"{lines}{open_}{content}{close}"
    body = f"{lines}{{% if m.role == 'assistant' %}}{open_}{said}{{% else %}}{others}{{% endif %}}{lines}"
    loop = pick("{% for m in messages %}", "{%- for m in messages %}", "{% for m in messages -%}\n")
    end = f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    return f"{beginning}{tools}{default}{refusal}{loop}{body}{end}"
