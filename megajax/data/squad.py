"""SQuAD's files (1606.05250; 2.0: 1806.03822): JSON with articles, their paragraphs, and the questions about each paragraph.

{"version": "v2.0", "data": [{"paragraphs": [{"context": "...", "qas": [
    {"id": "...", "question": "...", "is_impossible": false, "answers": [{"text": "...", "answer_start": 17}]}]}]}]}
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megajax.config import ConfigError
from megajax.data.json_values import read_json, value_of
from megajax.schedules.errors import shown

__all__ = ["Question", "Squad", "questions_in", "read_squad"]

REMEDY = "give a file in SQuAD's format"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
      name: its id.
      text: the question.
      context: index of its paragraph in `Squad.contexts`.
      answers: the texts of its answers; none if it has no answer.
      span: the first answer's first character in the context, and its last + 1; None: it has none, or `misplaced`.
      misplaced: whether the first answer is not in the context at its offset.
    """

    name: str
    text: str
    context: int
    answers: tuple[str, ...]
    span: tuple[int, int] | None
    misplaced: bool = False


@dataclasses.dataclass(frozen=True)
class Squad:
    """The questions of files.

    Attributes:
      contexts: the paragraphs.
      questions: those of a paragraph follow one another.
      misplaced: the first question, with its place in the file, whose first answer is not at its offset; None: none is.
    """

    contexts: Sequence[str]
    questions: Sequence[Question]
    misplaced: str | None


def read_squad(files: Sequence[str], rules: str) -> Squad:
    """Reads all questions of files.

    Args:
      files: JSON.
      rules: "1.1", where each question has an answer, or "2.0".

    Raises:
      ConfigError: a file cannot be read, is not as above or has no question; by the rules 1.1, a question has no answer; or
        its answers contradict its `is_impossible`.
    """
    contexts, questions, misplaced = [], [], None
    for file in files:
        before, last = len(questions), None
        for place, paragraph, item in questions_in(file, read_json(file, REMEDY), REMEDY):
            if paragraph is not last:
                contexts.append(value_of(place.rpartition(", ")[0], paragraph, "context", str, REMEDY))
                last = paragraph
            question = _question(place, item, contexts, rules)
            questions.append(question)
            if question.misplaced and misplaced is None:
                misplaced = f"{place}, {shown(question.answers[0])}"
        if len(questions) == before:
            raise ConfigError(f"{file} has no question: {REMEDY}.")
    return Squad(contexts, questions, misplaced)


def _question(place: str, item: Mapping[str, Any], contexts: Sequence[str], rules: str) -> Question:
    """The question of a paragraph, the last of `contexts`."""
    name, text = (value_of(place, item, key, str, REMEDY) for key in ("id", "question"))
    answers = [
        tuple(
            value_of(f"{place}, answers[{index}]", answer, *key, REMEDY)
            for key in (("text", str), ("answer_start", int))
        )
        for index, answer in enumerate(value_of(place, item, "answers", list, REMEDY))
    ]
    impossible = value_of(place, item, "is_impossible", bool, REMEDY) if "is_impossible" in item else not answers
    if impossible == bool(answers):
        raise ConfigError(
            f"{place} has is_impossible = {str(impossible).lower()} and {len(answers)} answers: mend or remove it."
        )
    if impossible and rules == "1.1":
        raise ConfigError(
            f"{place}: question {shown(name)} has no answer, which SQuAD 1.1 requires: pass --task squad2."
        )
    span, texts = None, tuple(text for text, _ in answers)
    if answers:
        first, start = answers[0]
        found = first.strip() and start >= 0 and contexts[-1][start : start + len(first)] == first
        span = (start, start + len(first)) if found else None
    return Question(name, text, len(contexts) - 1, texts, span, misplaced=bool(answers) and span is None)


def questions_in(path: str, content: Mapping[str, Any], remedy: str) -> Iterator[tuple[str, Mapping, Mapping]]:
    """Each question of a file's content: its place for messages, its paragraph, and itself. `remedy`: the messages' end."""
    for i, article in enumerate(value_of(path, content, "data", list, remedy)):
        for j, paragraph in enumerate(value_of(f"{path}: data[{i}]", article, "paragraphs", list, remedy)):
            place = f"{path}: data[{i}], paragraphs[{j}]"
            for k, question in enumerate(value_of(place, paragraph, "qas", list, remedy)):
                yield f"{place}, qas[{k}]", paragraph, question
