"""Chats as text: the Jinja template of a Hugging Face tokenizer, and which part of the text the assistant says.

A template is found and rendered as transformers does (sandboxed, with its options, variables and functions), so that the
text is that of `tokenizer.apply_chat_template(messages, tokenize=False)`. The assistant's part is

* the text inside {% generation %} ... {% endgeneration %}, if the template has such blocks: transformers' assistant mask;
* if not, the text that follows the prompt of a generation: for each turn of the assistant, the text of the chat up to this
  turn without that of the chat before it, rendered with add_generation_prompt. So the end of the turn (<|im_end|>) is
  included, and its header (<|im_start|>assistant) is not, as when the model generates.

Some templates change earlier turns when others follow (Qwen3 removes their thoughts). The texts of such a chat are one for
each turn of the assistant: what the model sees when it generates that turn.
"""

import datetime
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from megajax.config import ConfigError
from megajax.data.bounded_jinja import bounded_environment

__all__ = ["ChatTemplate", "ChatText", "load_template"]

ROLES = ("system", "developer", "user", "assistant", "tool")
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Unicode's noncharacters, for use inside programs: they mark where the template generates.
BEGIN, END = "\ufdd0", "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
GUIDE = "pass --chat-template with a template that has {% generation %} ... {% endgeneration %} around what it says"


class ChatText(NamedTuple):
    """A rendered chat.

    Attributes:
      text: the whole of it.
      answers: first character and last + 1 of each part that the assistant says.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, variables: Mapping[str, str], name: str):
        """Compiles a template.

        Args:
          source: its text.
          variables: the special tokens, by their names in tokenizer_config.json.
          name: where it is from, for messages.

        Raises:
          ConfigError: it is not a Jinja template, or jinja2 is not installed.
        """
        jinja2 = _library(name)
        self.name, self._variables = name, dict(variables)
        self._marks = bool(GENERATION.search(source))
        try:
            self._template = _environment(jinja2).from_string(source)
        except Exception as error:  # jinja2's compiler, and Python's, on texts that nobody foresaw
            reason = str(error) or type(error).__name__
            raise ConfigError(f"{name} is not a Jinja template ({reason}): pass another --chat-template") from None

    def texts(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[ChatText]:
        """The texts of a chat: one, or one for each turn of the assistant.

        Args:
          messages: with "role" and "content".
          tools: descriptions of functions, for templates that list them.

        Raises:
          ConfigError: the template refuses the chat, or does not show where the assistant speaks; without the chat's place.
        """
        if self._marks:
            return [_without_marks(self.render(messages, tools), self.name)]
        whole = self.render(messages, tools)
        turns = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], tools, generation=True)
            after = whole if number + 1 == len(messages) else self.render(messages[: number + 1], tools)
            if not after.startswith(before) or len(after) == len(before):
                raise ConfigError(
                    f"{self.name} does not continue its own prompt of a generation with message {number + 1}: {GUIDE}"
                )
            turns.append(ChatText(after, ((len(before), len(after)),)))
        if all(whole.startswith(turn.text) for turn in turns):
            return [ChatText(whole, tuple(span for turn in turns for span in turn.answers))]
        return turns

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, generation: bool = False
    ) -> str:
        """The text, with marks if the template has generation blocks."""
        given = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": generation}
        self._template.environment.begin()
        try:
            return self._template.render(**self._variables | given)
        except Exception as error:  # whatever a template raises: it may divide by zero, or recurse for ever
            raise ConfigError(f"{self.name} refuses the chat: {str(error) or type(error).__name__}") from None


def load_template(tokenizer: str, given: str | None) -> ChatTemplate:
    """The template of a tokenizer's directory.

    Args:
      tokenizer: path of its tokenizer.json; next to it chat_template.jinja, chat_template.json or tokenizer_config.json
        has the template, and the last one the special tokens.
      given: a file with another template; None: the directory's.

    Raises:
      ConfigError: there is none, or it cannot be read.
    """
    directory = pathlib.Path(tokenizer).parent
    settings = _read_json(directory / "tokenizer_config.json")
    tokens = {name: settings[name] for name in TOKENS if settings.get(name) is not None}
    variables = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    if given is not None:
        return ChatTemplate(_read(pathlib.Path(given)), variables, given)
    path = directory / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(_read(path), variables, str(path))
    for path in (directory / "chat_template.json", directory / "tokenizer_config.json"):
        found = _read_json(path).get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return ChatTemplate(found, variables, f"chat_template in {path}")
    raise ConfigError(
        f"{directory} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): pass "
        "--chat-template FILE, or data with prompt and completion"
    )


def _library(name: str) -> ModuleType:
    try:
        import jinja2.compiler
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ConfigError(f"{name} needs the library jinja2: pip install 'megajax[finetune]'") from None
    return jinja2


def _environment(jinja2: ModuleType) -> Any:
    """What transformers gives to templates; the generation blocks put marks around their text."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller):
            return f"{BEGIN}{caller()}{END}"

    def refuse(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = bounded_environment(jinja2)(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _without_marks(marked: str, name: str) -> ChatText:
    parts = re.split(f"([{BEGIN}{END}])", marked)
    text, answers, start = "", [], None
    for part in parts:
        if part == BEGIN and start is None:
            start = len(text)
        elif part == END and start is not None:
            answers.append((start, len(text)))
            start = None
        elif part in (BEGIN, END):
            raise ConfigError(f"{name} has a generation block inside another, or the chat has the character U+FDD0")
        else:
            text += part
    return ChatText(text, tuple(answers))


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read the chat template {path}: {reason}; pass --chat-template FILE") from None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not JSON: download it again, or pass --chat-template FILE") from None
    return found if isinstance(found, dict) else {}
