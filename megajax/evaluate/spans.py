"""The dev score of SQuAD's spans: each question's best answer over its windows, as run_squad.py of 1810.04805 chooses it.

A window proposes the pairs of its 20 best first and 20 best last tokens, by the sum of their scores. Both tokens are of the
context, in order and at most `max_answer_length` long, and in no other window the first one has more context on both sides.
The answer is the context's text from the first to the last token. A question's score without an answer is the lowest of its
windows' scores of [CLS]; by the rules 2.0 it has none if that score exceeds the best answer's by more than `null_threshold`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError, DataConfig
from megajax.config.tasks import TASKS
from megajax.data.squad_windows import SpanSamples, Window
from megajax.evaluate.squad import Questions, score
from megajax.schedules.errors import counted, shown

__all__ = ["BEST_TOKENS", "NULL_ODDS", "PREDICTIONS", "SpanScores", "best_span", "most_context"]

PREDICTIONS, NULL_ODDS = "predictions.json", "null_odds.json"  # as megajax.evaluate.squad reads them
BEST_TOKENS = 20


class SpanScores:
    """The scores of `DevScore` for spans.

    Attributes:
      described: what is scored.
    """

    def __init__(self, samples: SpanSamples, data: DataConfig):
        """`samples`: in the order of their files.

        Raises:
          ConfigError: a question's id occurs twice.
        """
        self.samples, self.data, self.rules = samples, data, TASKS[data.task].rules
        questions = samples.found.questions
        answers: dict[str, Sequence[str]] = {}
        for question in questions:
            if question.name in answers:
                raise ConfigError(
                    f"{samples.name}: the id {shown(question.name)} occurs twice; pass --dev-data files with each question "
                    "once."
                )
            answers[question.name] = question.answers
        self.answers = Questions(self.rules, answers)
        self.described = counted(len(questions), "question")
        self._windows: list[list[int]] = [[] for _ in questions]
        for number, window in enumerate(samples.windows):
            self._windows[window.question].append(number)

    def collect(self, model: Any) -> Callable:
        """The model's outputs for a microbatch: losses fp32 [b], and scores of first and last tokens fp32 [b, s, 2]."""
        return model.span_scores

    def results(self, losses: np.ndarray, logits: np.ndarray) -> tuple[dict[str, float], dict[str, Any]]:
        """The scores, in percent, and the files of predictions, from the outputs for all windows and the batch's padding."""
        predictions, null_odds = self.predict(logits)
        found = score(self.answers, predictions)
        weights = self.samples.weights
        loss = losses[: len(weights)].sum(dtype=np.float64) / weights.sum()
        files: dict[str, Any] = {PREDICTIONS: predictions}
        if self.rules == "2.0":
            files[NULL_ODDS] = null_odds
        return {"exact_match": found["exact_match"], "f1": found["f1"], "loss": float(loss)}, files

    def predict(self, logits: np.ndarray) -> tuple[dict[str, str], dict[str, float]]:
        """By each question's id, its answer, and how much its score without one exceeds that of its best answer.

        Args:
          logits: fp32 [windows or more, s, 2].
        """
        predictions, null_odds = {}, {}
        for question, numbers in zip(self.samples.found.questions, self._windows, strict=True):
            windows, scores = [self.samples.windows[number] for number in numbers], logits[numbers].astype(np.float64)
            best, span = best_span(windows, scores, self.data.max_answer_length)
            null = float(scores[:, 0].sum(-1).min())
            text = ""
            if span is not None and not (self.rules == "2.0" and null - best > self.data.null_threshold):
                spans = self.samples.spans[question.context]
                text = self.samples.found.contexts[question.context][spans[span[0], 0] : spans[span[1], 1]]
            predictions[question.name], null_odds[question.name] = text, null - best
        return predictions, null_odds


def best_span(windows: Sequence[Window], logits: np.ndarray, longest: int) -> tuple[float, tuple[int, int] | None]:
    """A question's best answer.

    Args:
      windows: of the question.
      logits: of their tokens as the first and the last one, [windows, s, 2].
      longest: most tokens of an answer.

    Returns:
      The sum of its two scores; and its first and last token in the context. If there is no pair, 0 and None.
    """
    best, span = 0.0, None
    for window, scores, owned in zip(windows, logits, most_context(windows), strict=True):
        order = (
            np.argsort(-scores, axis=0, kind="stable")[:BEST_TOKENS] - window.offset
        )  # [20, 2], tokens of the window
        first, last = (column[(column >= 0) & (column < window.count)] for column in order.T)
        first = first[owned[first]]
        legal = (last >= first[:, None]) & (last < first[:, None] + longest)
        if not legal.any():
            continue
        sums = scores[first + window.offset, 0][:, None] + scores[last + window.offset, 1]
        row, column = np.unravel_index(np.where(legal, sums, -np.inf).argmax(), sums.shape)
        if span is None or sums[row, column] > best:
            best, span = float(sums[row, column]), (int(first[row]) + window.first, int(last[column]) + window.first)
    return best, span


def most_context(windows: Sequence[Window]) -> list[np.ndarray]:
    """For each window's tokens, bool [count], whether no other has more context on the shorter of a token's two sides.

    A hundredth of the window's length is added, so that of two windows the longer one has it; of equal ones, the first.
    """
    tokens = max(window.first + window.count for window in windows)
    context = np.full((len(windows), tokens), -np.inf)
    for row, window in zip(context, windows, strict=True):
        places = np.arange(window.count)
        row[window.first :][: window.count] = np.minimum(places, places[::-1]) + 0.01 * window.count
    best = context.argmax(0)
    return [best[window.first :][: window.count] == number for number, window in enumerate(windows)]
