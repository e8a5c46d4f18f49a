"""The tasks of `--task`: from a file to requests, and from their scores to the papers' numbers.

1909.08053 table 3 has both, of models without any training on them. WikiText103: the perplexity of a whole file in
overlapping windows. LAMBADA: how often the last word of a passage is the model's most likely continuation.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megajax.config import ConfigError
from megajax.config.evaluate import STRIDE
from megajax.data.blocks import documents_of
from megajax.data.sources import kind_of
from megajax.data.text import read_blocks
from megajax.data.tokenizers import Tokenizer
from megajax.evaluate.detokenize import DETOKENIZERS
from megajax.evaluate.scorer import Request, Score

__all__ = ["Lambada", "Perplexity", "Task", "make_task", "perplexity", "window_sizes", "windows"]


class Task(Protocol):
    """Interface of a task.

    Attributes:
      requests: what is scored.
      counts: of the data, by name, as the results have them.
    """

    requests: list[Request]
    counts: dict[str, int]

    def results(self, scores: Sequence[Score]) -> dict[str, Any]:
        """The task's numbers, from the scores of all requests in their order."""


def make_task(
    name: str,
    path: str,
    tokenizer: Tokenizer,
    context: int,
    *,
    window: int | None = None,
    stride: int | None = None,
    last_token: bool = False,
) -> Task:
    """A task by its name, with its requests for a model of `context` tokens.

    Args:
      path: of its file.
      tokenizer: the model's.
      window, stride: of a perplexity; None: see `window_sizes`.
      last_token: of LAMBADA.

    Raises:
      ConfigError: the windows do not fit, or the file cannot be used.
    """
    if name == "lambada":
        return Lambada(path, tokenizer, context, strict=not last_token)
    window, stride = window_sizes(window, stride, context)
    if window > context:
        raise ConfigError(f"--window {window} is longer than the model's context: pass at most --window {context}.")
    if stride > window:
        raise ConfigError(
            f"--stride {stride} skips tokens between windows of {window}: pass at most --stride {window}."
        )
    return Perplexity(name, path, tokenizer, window, stride)


def window_sizes(window: int | None, stride: int | None, context: int) -> tuple[int, int]:
    """Window and stride in tokens, with their defaults."""
    window = context if window is None else window
    return window, min(STRIDE, window) if stride is None else stride


def perplexity(loss: float) -> float | None:
    """exp(loss); None where that is above all fp64 numbers."""
    return math.exp(loss) if loss < 709 else None


def windows(tokens: np.ndarray, length: int, stride: int) -> list[Request]:
    """Overlapping windows of a stream of T tokens, such that each token but the first is scored once.

    Window i is tokens[i * stride : i * stride + length + 1]. The first one scores all its labels, a later one the last
    `stride` of `length`, of which the last windows have fewer. There are ceil(max(T - 1 - stride, 0) / stride) + 1 windows;
    those at the end that would score nothing are left out.

    Args:
      tokens: int32 [T], T at least 2.
      length: most labels of a window, s.
      stride: o, at most `length`.
    """
    count = -(-max(len(tokens) - 1 - stride, 0) // stride) + 1
    found = []
    for start in range(0, count * stride, stride):
        part = tokens[start : start + length + 1]
        scored = len(part) - 1 - (length - stride if start else 0)
        if scored > 0:
            found.append(Request(part, scored))
    return found


class Perplexity:
    """The perplexity of one file: `--task wikitext103` and `--task ptb`.

    The file is one stream of tokens without a start token. "perplexity" is exp(L / (T - 1)) of the T tokens' summed loss L;
    "adjusted_perplexity" is exp(L / (T0 - 1)) with the T0 words of the raw file, which is independent of the tokenizer, and
    the number of the papers.
    """

    def __init__(self, name: str, path: str, tokenizer: Tokenizer, length: int, stride: int):
        """Reads the file.

        Args:
          name: one of DETOKENIZERS.
          path: of the raw file.
          tokenizer: the model's.
          length: tokens of a window.
          stride: of the windows.

        Raises:
          ConfigError: the file cannot be read, is empty or not UTF-8, or is less than two tokens.
        """
        raw = _read(path, "file")[0]
        words = len(raw.strip().split(" "))
        tokens = tokenizer.encode(DETOKENIZERS[name](raw))
        if len(tokens) < 2 or words < 2:
            raise ConfigError(f"{path} has {words} words and {len(tokens)} tokens: give --task-data a longer text.")
        self.requests = windows(tokens, length, stride)
        self.counts = {"words": words, "tokens": len(tokens), "windows": len(self.requests)}

    def results(self, scores: Sequence[Score]) -> dict[str, Any]:
        """Loss per token, perplexity and adjusted perplexity."""
        total = math.fsum(score.loss for score in scores)
        of_token, of_word = total / (self.counts["tokens"] - 1), total / (self.counts["words"] - 1)
        return {
            "adjusted_perplexity": perplexity(of_word),
            "perplexity": perplexity(of_token),
            "loss": of_token,
            "token_accuracy": sum(score.right for score in scores) / (self.counts["tokens"] - 1),
        }


@dataclasses.dataclass(frozen=True)
class Passage:
    """A passage's tokens before its target, and its target's."""

    context: np.ndarray
    target: np.ndarray


class Lambada:
    """The accuracy of the last word of each passage: `--task lambada` (1606.06031).

    A passage is right if every token of the target is the most likely one. The target is the last word, tokenized with a
    space before it ("strict", the papers' number), or the last token of the passage. "perplexity" is exp of the mean loss of
    a target, summed over its tokens.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, context: int, strict: bool):
        """Reads the file: JSON lines with a "text", or a passage a line.

        A passage longer than the model's context keeps its last tokens, and is counted as "truncated".

        Args:
          path: of the file.
          tokenizer: the model's.
          context: most tokens of the model's input.
          strict: whether the target is the last word, not the last token.

        Raises:
          ConfigError: the file cannot be read or is empty, a line has no text, or a passage nothing before its target.
        """
        passages = [_passage(path, number, text, tokenizer, strict) for number, text in _numbered(path)]
        self.requests, truncated = [], 0
        for passage in passages:
            tokens = np.concatenate([passage.context, passage.target])
            if len(passage.target) > context:
                raise ConfigError(
                    f"{path} has a target of {len(passage.target)} tokens, but the model's context is {context} tokens: "
                    "remove that passage."
                )
            truncated += len(tokens) > context + 1
            self.requests.append(Request(tokens[-context - 1 :], len(passage.target)))
        self.counts = {
            "passages": len(passages),
            "target_tokens": sum(request.scored for request in self.requests),
            "truncated": truncated,
        }

    def results(self, scores: Sequence[Score]) -> dict[str, Any]:
        """Accuracy, and perplexity of the targets."""
        pairs = zip(self.requests, scores, strict=True)
        right = sum(score.right == request.scored for request, score in pairs)
        loss = math.fsum(score.loss for score in scores) / len(scores)
        return {"accuracy": right / len(scores), "right": right, "perplexity": perplexity(loss), "loss": loss}


def _read(path: str, kind: str) -> list[str]:
    """The texts of a file, all of them.

    Raises:
      ConfigError: it cannot be read, has no text, or a line that is none.
    """
    found = []
    for block in read_blocks(path, kind, "--task-data"):
        if kind == "file" and block.kind != kind:
            raise ConfigError(f"{path} has JSON lines, and this task reads one plain text: give --task-data that text.")
        documents, bad = documents_of(block, ("text",))
        if bad:
            raise ConfigError(f"{bad[0]}; correct the file, or give --task-data another.")
        found += [text for (text,) in documents]
    if not found:
        raise ConfigError(f"{path} has no text: give --task-data the task's file.")
    return found


def _numbered(path: str) -> list[tuple[int, str]]:
    return list(enumerate(_read(path, kind_of(path, "line")), 1))


def _passage(path: str, number: int, text: str, tokenizer: Tokenizer, strict: bool) -> Passage:
    words = text.split()
    if strict and words:
        before = text[: text.rfind(words[-1])].strip()
        passage = Passage(tokenizer.encode(before), tokenizer.encode(" " + words[-1]))
    else:
        tokens = tokenizer.encode(text)
        passage = Passage(tokens[:-1], tokens[-1:])
    if not len(passage.context) or not len(passage.target):
        target = "word" if strict else "token"
        raise ConfigError(f"{path}: passage {number} has nothing before its last {target}; correct it, or remove it.")
    return passage
