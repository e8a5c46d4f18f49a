"""JSON lines for supervised fine-tuning: the tokens of each sample, and which of them have loss weight 1.

A line is one of

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "...", "completion": "..."}          "answer" or "response" for "completion" too

Chats become text by the tokenizer's template (`chat_template`), with "tools" if the line has them; all that the assistant
says has loss weight 1. A prompt and its completion are joined as they are, and followed by the end of a document. The
whole text is encoded at once, and a token is part of the answer if any of its characters is.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.chat_template import ROLES, ChatTemplate, ChatText, load_template
from megajax.data.file_kinds import not_utf8
from megajax.data.text import Block, json_lines, read_blocks
from megajax.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megajax.schedules.errors import counted, shown

__all__ = ["Answers", "load_answers", "tokens_and_answers"]

COMPLETIONS = ("completion", "answer", "response")
# Keys of other tools' data, and how they are renamed.
OTHER_FORMATS = {
    "conversations": "of ShareGPT: rename conversations to messages, from to role, human to user, gpt to assistant, and "
    "value to content",
    "instruction output": "of Alpaca: rename instruction, with input after it, to prompt, and output to completion",
    "chosen rejected": "preferences: there is no training on pairs; give the chosen chat as messages",
    "question": "rename question to prompt",
    "text": "a text without answers is for --text of experiments.gpt3",
}


@dataclasses.dataclass(frozen=True)
class Answers:
    """The samples of some files.

    Attributes:
      name: the files.
      ids: tokens of all samples, int32 [tokens].
      loss_mask: whether each is part of an answer, bool [tokens].
      offsets: first token of each sample, and the number of tokens, int64 [samples + 1].
      lines: of the files.
      cut, dropped: samples that were longer than the sequence.
      unanswered: samples dropped because their cut left no answer.
    """

    name: str
    ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    lines: int
    cut: int
    dropped: int
    unanswered: int

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.offsets) - 1

    def describe(self) -> str:
        """Counts in words."""
        answers = int(self.loss_mask.sum())
        text = f"{counted(self.lines, 'line')}, {counted(self.count, 'sample')}, "
        text += f"{answers:,} of {len(self.ids):,} tokens are answers"
        counts = {"cut": self.cut, "dropped as too long": self.dropped, "cut before an answer": self.unanswered}
        return text + "".join(f", {count:,} {what}" for what, count in counts.items() if count)


class Sample(NamedTuple):
    """The text of a sample, and its place for messages: "FILE, line 3"."""

    place: str
    text: ChatText
    is_chat: bool


@functools.lru_cache(maxsize=2)
def load_answers(
    files: tuple[str, ...], tokenizer: Tokenizer, template: str | None, longest: int, drop_long: bool
) -> Answers:
    """Reads files.

    Args:
      files: JSON lines, also .gz and .zst.
      tokenizer: the model's.
      template: file of a chat template; None: the one beside the tokenizer's file.
      longest: tokens of a sample.
      drop_long: drop longer ones; if not, they are cut.

    Raises:
      ConfigError: a file cannot be read or has no samples; a line is not as above, with its number; there is no template;
        or the tokenizer cannot be used for chats.
    """
    chats = functools.cache(lambda: _template(tokenizer, template))
    ids, masks, counts = [], [], dict.fromkeys(("lines", "cut", "dropped", "unanswered"), 0)
    for file in files:
        for block in read_blocks(file, "jsonl", "--sft-data"):
            records = list(_records(block))
            counts["lines"] += len(records)
            samples = [sample for place, record in records for sample in _samples(place, record, chats)]
            for tokens, loss_mask in _encoded(samples, tokenizer):
                if len(tokens) > longest:
                    counts["dropped" if drop_long else "cut"] += 1
                    if drop_long:
                        continue
                    tokens, loss_mask = tokens[:longest], loss_mask[:longest]
                    if not loss_mask[1:].any():
                        counts["cut"] -= 1
                        counts["unanswered"] += 1
                        continue
                ids.append(tokens)
                masks.append(loss_mask)
    name = ", ".join(files)
    if not ids:
        long = counts["dropped"] + counts["unanswered"]
        problem = f"{counted(long, 'sample')}, all longer than {longest:,} tokens" if long else "no samples"
        raise ConfigError(f"{name} has {problem}: pass --sft-data another file, or a larger --sequence-length")
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in ids])])
    return Answers(name, np.concatenate(ids), np.concatenate(masks), offsets, **counts)


def tokens_and_answers(texts: Sequence[ChatText], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each text its tokens, int32 [tokens], and whether each is part of an answer, bool [tokens]."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        for one, (ids, spans) in zip(texts, tokenizer.encode_with_offsets([one.text for one in texts]), strict=True):
            loss_mask = np.zeros(len(ids), bool)
            for begin, end in one.answers:
                loss_mask |= (spans[:, 0] < end) & (spans[:, 1] > begin)
            yield ids, loss_mask
        return
    # Other libraries give no character offsets. An answer at the end starts where the tokens differ from those of the text
    # before it.
    wholes = tokenizer.encode_all([one.text for one in texts])
    befores = tokenizer.encode_all([one.text[: one.answers[0][0]] for one in texts])
    for whole, before in zip(wholes, befores, strict=True):
        common = min(len(whole), len(before))
        differing = np.flatnonzero(whole[:common] != before[:common])
        loss_mask = np.arange(len(whole)) >= (differing[0] if len(differing) else common)
        yield whole, loss_mask


def _encoded(samples: Sequence[Sample], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for sample, (ids, loss_mask) in zip(
        samples, tokens_and_answers([sample.text for sample in samples], tokenizer), strict=True
    ):
        if not sample.is_chat:
            ids, loss_mask = np.append(ids, np.int32(tokenizer.end_of_document)), np.append(loss_mask, True)
        if not loss_mask[1:].any():
            raise ConfigError(
                f"{sample.place}: the answer has no tokens of tokenizer {tokenizer.name}: correct the line"
            )
        yield ids, loss_mask


def _template(tokenizer: Tokenizer, given: str | None) -> ChatTemplate:
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.name.endswith(".json"):
        raise ConfigError(
            f"tokenizer {tokenizer.name} cannot be used for chats (messages), whose special tokens are text: pass "
            "--tokenizer with a tokenizer.json, or data with prompt and completion"
        )
    return load_template(tokenizer.name, given)


def _records(block: Block) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the object of each line that is not blank."""
    for line in json_lines(block):
        place = f"{block.path}, line {line.number}"
        try:
            record = json.loads(line.content)
            json.dumps(record, ensure_ascii=False).encode()  # fails for half a surrogate pair
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: the text is {not_utf8(error, block.path, line.before)}") from None
        except UnicodeEncodeError:
            raise ConfigError(f"{place}: the text is not UTF-8 (half a surrogate pair): correct the line") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place} is not JSON ({error}): correct the line") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{place} is a JSON {type(record).__name__}, not an object: give messages, or a prompt")
        yield place, record


def _samples(place: str, record: dict[str, Any], chats) -> list[Sample]:
    if "messages" in record and "prompt" in record:
        raise ConfigError(f"{place} has both messages and a prompt: give one of them")
    if "messages" in record:
        _check_messages(place, record["messages"])
        template = chats()
        try:
            texts = template.texts(record["messages"], record.get("tools"))
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        for text in texts:
            if not any(begin < end for begin, end in text.answers):
                raise ConfigError(f"{place}: {template.name} shows nothing that the assistant says: correct the line")
        return [Sample(place, text, is_chat=True) for text in texts]
    prompt, answer = _prompt_and_answer(place, record)
    return [Sample(place, ChatText(prompt + answer, ((len(prompt), len(prompt + answer)),)), is_chat=False)]


def _prompt_and_answer(place: str, record: dict[str, Any]) -> tuple[str, str]:
    names = [name for name in COMPLETIONS if name in record]
    if "prompt" not in record or len(names) != 1:
        found = ", ".join(map(shown, record)) or "nothing"
        hint = next((f" ({hint})" for keys, hint in OTHER_FORMATS.items() if set(keys.split()) <= set(record)), "")
        raise ConfigError(f"{place} has {found}: give messages, or a prompt and one of {', '.join(COMPLETIONS)}{hint}")
    for name in ("prompt", names[0]):
        if not isinstance(record[name], str):
            raise ConfigError(f"{place}: {name} = {shown(record[name])} is not a text: correct the line")
        if not record[name].strip():
            raise ConfigError(f"{place}: the {name} is empty: correct or delete the line")
    return record["prompt"], record[names[0]]


def _check_messages(place: str, messages: Any) -> None:
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
        if not isinstance(content, str) and not (content is None and calls):
            raise ConfigError(f"{place}: message {number} has no content: give a text")
        if role == "assistant" and not calls and not content.strip():
            raise ConfigError(f"{place}: message {number}, the assistant's, is empty: correct or delete the line")
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{place} has no message of the assistant: there is nothing to learn; delete the line")
