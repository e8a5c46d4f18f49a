"""SQuAD's questions as BERT's samples (1810.04805 section 4.2): [CLS] question [SEP] a window of the context [SEP].

A context that is too long for the sequence is read in windows that begin every `stride` tokens, as in the paper's
run_squad.py. A window's answer is its first and last token; an answer that is not wholly in a window, or is none, is [CLS].
"""

from typing import NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.bert import WordPieces
from megajax.data.loader import EpochOrder
from megajax.data.sentence_rows import sentence_row
from megajax.data.squad import Squad
from megajax.data.tokenizers import Tokenizer
from megajax.schedules.errors import counted, shown

__all__ = ["SpanSamples", "Window", "WindowSizes"]


class WindowSizes(NamedTuple):
    """Sizes in tokens.

    Attributes:
      sequence: of a sample.
      stride: between the beginnings of two windows of a context.
      question: of which more are cut off.
    """

    sequence: int
    stride: int
    question: int


class Window(NamedTuple):
    """A window of a question's context.

    Attributes:
      question: index of the question.
      first, count: its first token in the context, and their number.
      offset: the place of that token in the sample.
      start, end: places in the sample of the answer's first and last token.
    """

    question: int
    first: int
    count: int
    offset: int
    start: int
    end: int


class SpanSamples:
    """The windows of all questions, in another random order in each epoch, or once in the order of the files.

    Attributes:
      found: the questions.
      windows: those of a question follow one another.
      spans: for each context, its tokens' first character and last + 1, int [tokens, 2].
      count: number of windows.
      weights: fp32 [windows], 0 where the answer is not known.
    """

    def __init__(self, found: Squad, tokenizer: Tokenizer, sizes: WindowSizes, seed: int | None, name: str):
        """Tokenises the questions of the files `name`.

        With a seed they are trained on, without those whose answer is misplaced; `seed` None keeps the order of the files,
        and there is one epoch.

        Raises:
          ConfigError: the tokenizer is not BERT's, a question leaves no room for its context, or all answers are misplaced.
        """
        self.found, self.sizes, self.seed, self.name = found, sizes, seed, name
        self.pieces = WordPieces.from_tokenizer(tokenizer)
        encoded = list(tokenizer.encode_with_offsets(found.contexts))
        self._contexts, self.spans = [ids for ids, _ in encoded], [spans for _, spans in encoded]
        asked = tokenizer.encode_all([question.text for question in found.questions])
        self._questions, self._cut = (
            [ids[: sizes.question] for ids in asked],
            sum(len(ids) > sizes.question for ids in asked),
        )
        self._misplaced = sum(question.misplaced for question in found.questions)
        if self._misplaced == len(found.questions):
            raise ConfigError(
                f"no answer is in its context at answer_start, the first one not at {found.misplaced}: give a file in "
                "SQuAD's format."
            )
        kept = [index for index, question in enumerate(found.questions) if seed is None or not question.misplaced]
        self.windows = [window for index in kept for window in self._windows_of(index)]
        self.count = len(self.windows)
        self.weights = np.array([not found.questions[window.question].misplaced for window in self.windows], np.float32)
        self._order = EpochOrder(self.count, seed)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index` >= 0 of the run: "tokens" and "types" int32 [s], "padding", "start" and "end" int32 [], "weights".

        Weights are fp32 []. Without a seed, samples after the last one have weight 0.
        """
        place = self._order.row(index)
        window = self.windows[place]
        context = self._contexts[self.found.questions[window.question].context]
        part = context[window.first : window.first + window.count]
        row = sentence_row(self.pieces, [self._questions[window.question], part], self.sizes.sequence)
        counts = self.seed is not None or index < self.count
        ends = {"start": np.int32(window.start), "end": np.int32(window.end)}
        return row | ends | {"weights": np.float32(counts * self.weights[place])}

    def describe(self, needed: int) -> str:
        """One line: questions and windows, what is cut or left out, and the number of epochs in `needed` samples."""
        windows = f"{counted(self.count, 'window')} of {self.sizes.sequence} tokens"
        parts = [f"{counted(len(self.found.questions), 'question')} in {windows}"]
        parts += [f"{counted(self._cut, 'question')} cut to {self.sizes.question} tokens"] if self._cut else []
        if self._misplaced:
            what = f"{self._misplaced:,} {'left out' if self.seed is not None else 'without a loss'}"
            parts.append(f"{what}, whose answer is not in the context at answer_start (first {self.found.misplaced})")
        unseen = self._unseen()
        parts += [f"{unseen:,} whose answer is in no window"] if unseen else []
        return f"{self.name}: {', '.join(parts)}, {needed / self.count:.3g} epochs of them"

    def _unseen(self) -> int:
        """Questions that have an answer, which is [CLS] in all windows: it is too long, or has no token."""
        seen = {window.question for window in self.windows if window.start}
        asked = {window.question for window in self.windows}
        return sum(self.found.questions[index].span is not None for index in asked - seen)

    def _windows_of(self, index: int) -> list[Window]:
        """The windows of a question."""
        question, offset = self.found.questions[index], len(self._questions[index]) + 2
        tokens, room = len(self._contexts[question.context]), self.sizes.sequence - offset - 1
        if room < 1:
            raise ConfigError(
                f"question {shown(question.name)} has {offset - 2} tokens, and sequence_length = {self.sizes.sequence} "
                "leaves no room for its context: pass a larger --sequence-length or a smaller --max-query-length."
            )
        answer, windows, first = self._answer(index), [], 0
        while True:
            count = min(room, tokens - first)
            inside = answer is not None and first <= answer[0] and answer[1] < first + count
            start, end = (offset + place - first for place in answer) if inside else (0, 0)
            windows.append(Window(index, first, count, offset, start, end))
            if first + count == tokens:
                return windows
            first += min(count, self.sizes.stride)

    def _answer(self, index: int) -> tuple[int, int] | None:
        """The first and last of the context's tokens that have characters of the answer; None if there is none."""
        question = self.found.questions[index]
        if question.span is None:
            return None
        spans = self.spans[question.context]
        within = np.flatnonzero((spans[:, 1] > question.span[0]) & (spans[:, 0] < question.span[1]))
        return (int(within[0]), int(within[-1])) if len(within) else None
