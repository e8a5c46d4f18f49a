"""The rows of files for supervised fine-tuning, in the forms of public data sets, as chats or as prompts with completions.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...], "tools": [...]}
    {"prompt": "...", "completion": "..."}                         "answer" or "response" for "completion" too
    {"prompt": [message, ...], "completion": [message, ...]}       trained on the completion only (TRL)
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}], "system": "..."}     ShareGPT
    {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["...", "..."]]}         Alpaca

A message of the assistant with "weight": 0 or "train": false is context, and not trained on. "chat_template_kwargs" are
variables of the template. Other keys are not read.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megajax.config import ConfigError
from megajax.schedules.errors import shown

__all__ = [
    *("Chat", "Pair", "check_messages", "check_text", "object_of", "read_question", "read_row"),
    "tools_of",
]

COMPLETIONS = ("completion", "answer", "response")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment", "observation")
# ShareGPT's names of roles; those of the second table are assistant and tool with a call in their text.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
CALL = "function_call"
FLAGS = ("weight", "train")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
ALPACA = ("instruction", "output")
# The prompts of the Alpaca model (github.com/tatsu-lab/stanford_alpaca), for tokenizers without a chat template.
ALPACA_PROMPT = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:"
)
ALPACA_INPUT = ", paired with an input that provides further context", "### Input:\n{}\n\n"
# Keys of data that are for something else, and what to do with them.
OTHER_FORMATS = {
    "chosen rejected": "preferences, which experiments.dpo trains on; to train on the chosen chat, give it as messages",
    "question": "rename question to prompt",
    "text": "a text without answers is for --text of experiments.gpt3",
}
Message = Mapping[str, Any]


class Chat(NamedTuple):
    """A chat for the tokenizer's template.

    Attributes:
      messages: with "role" and "content", as transformers takes them.
      trained: for each message, whether it is trained on if it is the assistant's.
      tools: descriptions of functions; None: the row has none.
      variables: of the template.
    """

    messages: list[Message]
    trained: list[bool]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = {}


class Pair(NamedTuple):
    """A prompt and its completion, which are joined as they are."""

    prompt: str
    completion: str


def read_row(place: str, row: Mapping[str, Any], has_template: Callable[[], bool]) -> Chat | Pair:
    """A row as a chat or a pair.

    Args:
      place: of the row, "FILE, line 3".
      row: the object.
      has_template: whether there is a template for chats: without one, a row of Alpaca is a pair.

    Raises:
      ConfigError: the row has none of the forms above; with its place.
    """
    names = [name for name in COMPLETIONS if name in row]
    if "messages" in row and "prompt" in row and names:
        raise ConfigError(f"{place} has both messages and a prompt: give one of them")
    if "messages" in row:
        return _chat(place, row, row["messages"])
    if "conversations" in row:
        return _chat(place, row, _conversation(place, row))
    if "prompt" in row and len(names) == 1:
        return _prompt_and_completion(place, row, names[0])
    if all(name in row for name in ALPACA) and "prompt" not in row:
        return _alpaca(place, row, has_template)
    found = ", ".join(map(shown, row)) or "nothing"
    hint = next((f" ({hint})" for keys, hint in OTHER_FORMATS.items() if set(keys.split()) <= set(row)), "")
    raise ConfigError(f"{place} has {found}: give messages, or a prompt and one of {', '.join(COMPLETIONS)}{hint}")


def read_question(place: str, row: Mapping[str, Any], messages: Any) -> Chat:
    """The messages of a row as a chat whose next message the model is to say.

    Raises:
      ConfigError: a message is wrong, or the last one is the assistant's; with the row's place.
    """
    check_messages(place, messages)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: the last message is the assistant's, which the model is to generate: remove it")
    plain = [{key: value for key, value in one.items() if key not in FLAGS} for one in messages]
    return Chat(plain, [False] * len(plain), tools_of(place, row), object_of(place, row, "chat_template_kwargs"))


def _prompt_and_completion(place: str, row: Mapping[str, Any], name: str) -> Chat | Pair:
    if isinstance(row["prompt"], list) and isinstance(row[name], list):
        return _chat(place, row, [*row["prompt"], *row[name]], context=len(row["prompt"]))
    for key in ("prompt", name):
        check_text(place, key, row[key])
    return Pair(row["prompt"], row[name])


def check_text(place: str, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {name} = {shown(value)} is not a text: correct the line")
    if not value.strip():
        raise ConfigError(f"{place}: the {name} is empty: correct or delete the line")


def _alpaca(place: str, row: Mapping[str, Any], has_template: Callable[[], bool]) -> Chat | Pair:
    for key in ALPACA:
        check_text(place, key, row[key])
    given, system, history = (row.get(key) or empty for key, empty in (("input", ""), ("system", ""), ("history", [])))
    if not isinstance(given, str) or not isinstance(system, str):
        raise ConfigError(f"{place}: input and system must be texts: correct the line")
    pairs = isinstance(history, list) and all(isinstance(one, list) and len(one) == 2 for one in history)
    if not pairs or not all(isinstance(text, str) for one in history for text in one):
        raise ConfigError(f"{place}: history = {shown(history)} is not a list of pairs of texts: correct the line")
    if has_template():
        turns = [*history, ["\n".join(filter(None, (row["instruction"], given))), row["output"]]]
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            messages += [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
        return _chat(place, row, messages)
    if system or history:
        raise ConfigError(
            f"{place} has a system or a history, for which a chat template is needed: pass --chat-template"
        )
    kind, body = (ALPACA_INPUT[0], ALPACA_INPUT[1].format(given)) if given else ("", "")
    return Pair(ALPACA_PROMPT.format(kind, row["instruction"], body), row["output"])


def _conversation(place: str, row: Mapping[str, Any]) -> Any:
    """ShareGPT's messages in the form of transformers; whatever else there is as it is."""
    found = row["conversations"]
    if not isinstance(found, list) or not all(isinstance(one, dict) and "from" in one for one in found):
        return found
    messages = []
    for number, one in enumerate(found, 1):
        speaker, text, flags = one["from"], one.get("value"), {key: one[key] for key in FLAGS if key in one}
        if speaker == CALL:
            messages.append({"role": "assistant", "tool_calls": _calls(place, number, text)} | flags)
        elif speaker in SPEAKERS:
            messages.append({"role": SPEAKERS[speaker], "content": text} | flags)
        else:
            legal = ", ".join([*SPEAKERS, CALL])
            raise ConfigError(f"{place}: message {number} is from {shown(speaker)}: give one of {legal}")
    system = row.get("system")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages


def _calls(place: str, number: int, text: Any) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(one, dict) and "name" in one for one in calls):
        raise ConfigError(f'{place}: message {number} is a {CALL}, and not JSON with a "name": correct the line')
    return [{"type": "function", "function": one} for one in calls]


def _chat(place: str, row: Mapping[str, Any], messages: Any, context: int = 0) -> Chat:
    """A chat whose first `context` messages are not trained on."""
    check_messages(place, messages)
    trained = [_is_trained(place, number, one) for number, one in enumerate(messages, 1)]
    trained = [number >= context and one for number, one in enumerate(trained)]
    says = [one["role"] == "assistant" for one in messages]
    if not any(says):
        raise ConfigError(f"{place} has no message of the assistant: there is nothing to learn; delete the line")
    if not any(one and learnt for one, learnt in zip(says, trained, strict=True)):
        raise ConfigError(f"{place} has no message of the assistant that is trained on: delete the line")
    plain = [{key: value for key, value in one.items() if key not in FLAGS} for one in messages]
    return Chat(plain, trained, tools_of(place, row), object_of(place, row, "chat_template_kwargs"))


def _is_trained(place: str, number: int, message: Message) -> bool:
    found = [message[key] for key in FLAGS if message.get(key) is not None]
    if not all(isinstance(one, int | float) and one in (0, 1) for one in found):
        raise ConfigError(f"{place}: message {number} has weight or train = {shown(found[0])}: give 0 or 1")
    if message["role"] != "assistant" and "train" in message and message["train"]:
        raise ConfigError(
            f"{place}: message {number} is the {message['role']}'s, of which nothing is learnt: omit train"
        )
    return all(found)


def tools_of(place: str, row: Mapping[str, Any]) -> list[Any] | None:
    """The tools; data sets whose columns have one type store them as a JSON string."""
    found = row.get("tools")
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            raise ConfigError(f"{place}: tools is a text that is not JSON: correct the line") from None
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"{place}: tools = {shown(found)} is not a list of objects: correct the line")
    return found


def object_of(place: str, row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = row.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{place}: {name} = {shown(found)} is not an object: correct the line")
    return found


def check_messages(place: str, messages: Any) -> None:
    """Raises ConfigError for the first message that is wrong."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{place}: messages = {shown(messages)} is not a list of messages: correct the line")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{place}: message {number} has no role: give an object with role and content")
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise ConfigError(f"{place}: message {number} has the role {shown(role)}: give one of {', '.join(ROLES)}")
        calls = role == "assistant" and message.get("tool_calls")
        parts = isinstance(content, list) and content and all(isinstance(one, dict) for one in content)
        if not isinstance(content, str) and not parts and not (content is None and calls):
            raise ConfigError(f"{place}: message {number} has no content: give a text")
        thinks = any(message.get(key) for key in THOUGHTS)
        if role == "assistant" and not calls and not thinks and isinstance(content, str) and not content.strip():
            raise ConfigError(f"{place}: message {number}, the assistant's, is empty: correct or delete the line")
