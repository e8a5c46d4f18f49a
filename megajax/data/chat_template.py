"""Chats as tokens: the output of transformers' `apply_chat_template`, and the loss mask of the assistant's tokens.

The loss mask is 1 for

* the text inside {% generation %} ... {% endgeneration %}, if the template has such blocks: transformers' assistant mask;
* if not, the text that follows the prompt of a generation: for each turn of the assistant, the text of the chat up to this
  turn without that of the chat before it, rendered with add_generation_prompt. So the end of the turn (<|im_end|>) is
  included, and its header (<|im_start|>assistant) is not, as when the model generates.

Some templates change earlier turns when others follow (Qwen3 removes their thoughts). Such a chat is one sample for each
turn of the assistant: the model's input when it generates that turn.
"""

import contextlib
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.hugging_face import load_file
from megajax.data.tokenizers import HuggingFaceTokenizer, Tokenizer

__all__ = ["ChatTemplate", "Sample", "has_template", "load_template", "template_text"]

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
GUIDE = "pass --chat-template with a template that has {% generation %} ... {% endgeneration %} around what it says"
Messages = Sequence[Mapping[str, Any]]
Sample = tuple[np.ndarray, np.ndarray]


class Turn(NamedTuple):
    """A message of the assistant.

    Attributes:
      number: of the message, from 0.
      text: of the chat up to its end.
      begin: first character of the assistant's text.
    """

    number: int
    text: str
    begin: int


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, hugging_face: Any, given: str | None, name: str):
        """A template that `load_template` has found.

        Args:
          tokenizer: encodes the texts.
          hugging_face: the same tokenizer, of transformers.
          given: the template's text, in place of the tokenizer's; None: the tokenizer's.
          name: where it is from, for messages.
        """
        self.name, self._tokenizer, self._hugging_face, self._given = name, tokenizer, hugging_face, given

    def prompt(self, messages: Messages, tools: Sequence[Any] | None = None, **variables: Any) -> np.ndarray:
        """The ids of a chat whose next message the model generates, int32 [tokens]; see `samples`."""
        found = self._apply(messages, tools, add_generation_prompt=True, return_dict=True, **variables)
        return self._tokenizer.checked(np.array(found["input_ids"], np.int32))

    def whole(self, messages: Messages, tools: Sequence[Any] | None = None, **variables: Any) -> np.ndarray:
        """The ids of a finished chat, int32 [tokens]."""
        found = self._apply(messages, tools, return_dict=True, **variables)
        return self._tokenizer.checked(np.array(found["input_ids"], np.int32))

    def samples(
        self, messages: Messages, tools: Sequence[Any] | None = None, trained: Sequence[bool] = (), **variables: Any
    ) -> list[Sample]:
        """The samples of a chat: one, or one for each turn of the assistant.

        Args:
          messages: in the form of transformers, with "role" and "content".
          tools: descriptions of functions, for templates that list them.
          trained: for each message whether it is trained on, if it is the assistant's; empty: all are.
          variables: of the template, such as enable_thinking.

        Returns:
          For each sample its ids, int32 [tokens], and its loss mask, bool [tokens].

        Raises:
          ConfigError: the template refuses the chat, or does not show where the assistant speaks.
        """
        answers = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
        kept = [number for number in answers if not trained or trained[number]]
        with self._refusals():
            source = self._hugging_face.get_chat_template(self._given, tools)
        if GENERATION.search(source):
            return [self._marked(messages, tools, answers, kept, variables)]
        whole = self.render(messages, tools, **variables)
        turns = [self._turn(messages, tools, number, whole, variables) for number in answers]
        if all(whole.startswith(turn.text) for turn in turns):
            spans = [(turn.begin, len(turn.text)) for turn in turns if turn.number in kept]
            return [self._encoded(whole, spans)]
        return [self._encoded(turn.text, [(turn.begin, len(turn.text))]) for turn in turns if turn.number in kept]

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, generation: bool = False, **variables: Any
    ) -> str:
        """The text of a chat; `generation`: that the model is to continue."""
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=generation, **variables)

    def _turn(self, messages: Messages, tools: Any, number: int, whole: str, variables: Mapping[str, Any]) -> Turn:
        before = self.render(messages[:number], tools, generation=True, **variables)
        last = number + 1 == len(messages)
        after = whole if last else self.render(messages[: number + 1], tools, **variables)
        if not after.startswith(before) or len(after) == len(before):
            raise ConfigError(
                f"{self.name} does not continue its own prompt of a generation with message {number + 1}: {GUIDE}"
            )
        return Turn(number, after, len(before))

    def _encoded(self, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
        [(ids, offsets)] = self._tokenizer.encode_with_offsets([text])
        loss_mask = np.zeros(len(ids), bool)
        for begin, end in spans:
            loss_mask |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
        return ids, loss_mask

    def _marked(self, messages: Messages, tools: Any, answers: list[int], kept: list[int], variables) -> Sample:
        found = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True, **variables)
        ids, loss_mask = np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], bool)
        if kept != answers:
            runs = np.cumsum(np.diff(loss_mask, prepend=False) & loss_mask)  # the number of a token's block, from 1
            if runs[-1] != len(answers):
                raise ConfigError(
                    f"{self.name} generates {runs[-1]} parts for {len(answers)} messages of the assistant, so that none can "
                    "be left out: remove weight and train, or pass another --chat-template"
                )
            loss_mask &= np.isin(runs, [answers.index(number) + 1 for number in kept])
        return self._tokenizer.checked(ids), loss_mask

    def _apply(self, messages: Messages, tools: Any, **options: Any) -> Any:
        """apply_chat_template, whose errors are of people's chats and templates."""
        hugging_face = self._hugging_face
        parts = [one["content"] for one in messages if isinstance(one.get("content"), list)]
        with self._refusals("; a content has several parts: give it as one text" if parts else ""):
            if not messages:  # the prompt of a chat that the assistant begins, which apply_chat_template refuses
                source = hugging_face.get_chat_template(self._given, tools)
                options.pop("tokenize")
                return _renderer()([[]], tools, None, source, **hugging_face.special_tokens_map, **options)[0][0]
            if parts:
                text = hugging_face.apply_chat_template(messages, tools, chat_template=self._given, tokenize=False)
                if any(str(one) in text for one in parts):
                    raise ValueError("it writes a list as Python does")
            return hugging_face.apply_chat_template(messages, tools, chat_template=self._given, **options)

    @contextlib.contextmanager
    def _refusals(self, advice: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a template raises: it may divide by zero, or recurse for ever
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            if type(error).__name__ == "TemplateSyntaxError":
                raise ConfigError(
                    f"{self.name} is not a Jinja template ({reason}): pass another --chat-template"
                ) from None
            raise ConfigError(f"{self.name} refuses the chat: {reason}{advice}") from None


def _renderer() -> Any:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def has_template(tokenizer: Tokenizer, given: str | None) -> bool:
    """Whether chats have a template: `given`, or the tokenizer's own."""
    return given is not None or bool(getattr(tokenizer.hugging_face, "chat_template", None))


def load_template(tokenizer: Tokenizer, given: str | None) -> ChatTemplate:
    """The chat template of a tokenizer.

    Args:
      tokenizer: of a directory of Hugging Face, or, with `given`, of a tokenizer.json.
      given: a file with a template in place of the tokenizer's, or the name of one of its several; None: the tokenizer's.

    Raises:
      ConfigError: there is none, it cannot be read, or a library is missing.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.files:
        raise ConfigError(
            f"tokenizer {tokenizer.name} cannot be used for chats (messages), whose special tokens are text: pass "
            "--tokenizer with a directory of Hugging Face, or data with prompt and completion"
        )
    hugging_face = tokenizer.hugging_face or load_file(pathlib.Path(tokenizer.name))
    source = template_text(tokenizer, given)
    if source is None and not hugging_face.chat_template:
        raise ConfigError(
            f"{tokenizer.name} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): pass "
            "--chat-template FILE, or data with prompt and completion"
        )
    return ChatTemplate(tokenizer, hugging_face, source, given or f"the chat template of {tokenizer.name}")


def template_text(tokenizer: Tokenizer, given: str | None) -> str | None:
    """The template that is given in place of the tokenizer's (`load_template`); None: none is."""
    own = getattr(tokenizer.hugging_face, "chat_template", None)
    if given is None or (isinstance(own, dict) and given in own):
        return given and own[given]
    return _read(pathlib.Path(given))


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read the chat template {path}: {reason}; pass --chat-template FILE") from None
