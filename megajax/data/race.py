"""RACE's reading comprehension (1704.04683) as BERT's samples, as Megatron-LM read it: one for each answer of a question.

RACE's folders have a .txt file for each article, whose lines (one, in the original) are JSON:

    {"article": "...", "questions": ["... _ ?"], "options": [["...", "...", "...", "..."]], "answers": ["B"]}

A sample is [CLS] A [SEP] B [SEP]: A is the question with the answer in the place of "_", or followed by it; B is the
article, whose end is cut off.
"""

import dataclasses
import pathlib
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.data.bert import WordPieces
from megajax.data.json_values import object_of_line, value_of
from megajax.data.loader import EpochOrder
from megajax.data.sentence_rows import sentence_row
from megajax.data.text import numbered_lines
from megajax.data.tokenizers import Tokenizer
from megajax.schedules.errors import counted, shown

__all__ = ["Race", "RaceSamples", "read_race"]

REMEDY = "give RACE's folder of .txt files"


@dataclasses.dataclass(frozen=True)
class Race:
    """The questions of folders.

    Attributes:
      articles: the texts.
      article: the index of each question's article.
      texts: each question with each of its answers, [questions][choices].
      classes: int32 [questions], the right answers.
    """

    articles: Sequence[str]
    article: Sequence[int]
    texts: Sequence[Sequence[str]]
    classes: np.ndarray


def read_race(paths: Sequence[str], choices: int) -> Race:
    """Reads all questions of files, or of the .txt files in folders and the folders in them.

    Args:
      paths: files and folders.
      choices: answers of a question.

    Raises:
      ConfigError: there is no file, or no question in a file; a file cannot be read or is not as above; or a question has
        another number of answers, or no right one.
    """
    articles, article, texts, classes = [], [], [], []
    for path in paths:
        for file in _files(path):
            before = len(texts)
            for place, line in numbered_lines(str(file), REMEDY):
                item = object_of_line(place, line, REMEDY)
                for asked, label in _questions(place, item, choices):
                    article.append(len(articles))
                    texts.append(asked)
                    classes.append(label)
                articles.append(value_of(place, item, "article", str, REMEDY))
            if len(texts) == before:
                raise ConfigError(f"{file} has no question: {REMEDY}.")
    return Race(articles, article, texts, np.array(classes, np.int32))


def _files(path: str) -> list[pathlib.Path]:
    """The file, or those of the folder in the order of their names."""
    if not pathlib.Path(path).is_dir():
        return [pathlib.Path(path)]
    found = sorted(pathlib.Path(path).rglob("*.txt"))
    if not found:
        raise ConfigError(f"{path} has no .txt file: {REMEDY}.")
    return found


def _questions(place: str, item: Mapping[str, Any], choices: int) -> Iterator[tuple[list[str], int]]:
    """Each question of an article: the texts with its answers, and the right one's number."""
    questions, options, answers = (
        value_of(place, item, name, list, REMEDY) for name in ("questions", "options", "answers")
    )
    if not len(questions) == len(options) == len(answers):
        raise ConfigError(
            f"{place} has {len(questions)} questions, {len(options)} options and {len(answers)} answers: mend or remove it."
        )
    letters = string.ascii_uppercase[:choices]
    for number, (question, texts, answer) in enumerate(zip(questions, options, answers, strict=True)):
        if (
            not isinstance(question, str)
            or not isinstance(texts, list)
            or not all(isinstance(one, str) for one in texts)
        ):
            raise ConfigError(f"{place}: questions[{number}] or options[{number}] is no text: mend or remove it.")
        if len(texts) != choices:
            raise ConfigError(
                f"{place}: options[{number}] has {len(texts)} answers, and choices = {choices}: mend or remove it, or pass "
                "--choices."
            )
        if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
            raise ConfigError(
                f"{place}: answers[{number}] = {shown(answer)} is not one of {', '.join(letters)}: mend it."
            )
        joined = [question.replace("_", text) if "_" in question else f"{question} {text}" for text in texts]
        yield joined, letters.index(answer)


class RaceSamples:
    """A sample for each answer of each question, those of a question one after the other.

    Questions are in another random order in each epoch, or once in the order of the files.

    Attributes:
      count: number of samples, questions times choices.
      classes: int32 [questions], the right answers, in the order of the files.
    """

    def __init__(
        self, found: Race, tokenizer: Tokenizer, sequence_length: int, longest_query: int, seed: int | None, name: str
    ):
        """Tokenises the questions of the files `name`; `seed` None keeps their order, and there is one epoch.

        Args:
          longest_query: most tokens of a question with an answer; the rest is cut off.

        Raises:
          ConfigError: the tokenizer is not BERT's, or there is no room for an article.
        """
        self.pieces, self.sequence_length, self.seed = WordPieces.from_tokenizer(tokenizer), sequence_length, seed
        self.found, self.classes, self.name, self.choices = found, found.classes, name, len(found.texts[0])
        self._articles = tokenizer.encode_all(found.articles)
        queries = tokenizer.encode_all([text for texts in found.texts for text in texts])
        self._queries = [ids[:longest_query] for ids in queries]
        longest = max(map(len, self._queries))
        if sequence_length - 3 - longest < 1:
            raise ConfigError(
                f"sequence_length = {sequence_length} leaves no room for an article beside a question and answer of "
                f"{longest} tokens: pass a larger --sequence-length or a smaller --max-query-length."
            )
        self.count, self._cut_queries = len(queries), sum(len(ids) > longest_query for ids in queries)
        self._cut_articles = sum(len(self._article(row)) > self._room(row) for row in range(self.count))
        self._order = EpochOrder(len(found.texts), seed)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index` >= 0 of the run: "tokens", "types" int32 [s], "padding", "class" int32 [], "weights" fp32 [].

        "class" is the question's, and the weight is 1 for its first sample, 0 for the others. Without a seed, samples after
        the last one have weight 0.
        """
        question, choice = divmod(index, self.choices)
        place = self._order.row(question)
        number = place * self.choices + choice
        sentences = [self._queries[number], self._article(number)[: self._room(number)]]
        counts = choice == 0 and (self.seed is not None or index < self.count)
        row = sentence_row(self.pieces, sentences, self.sequence_length)
        return row | {"class": self.classes[place], "weights": np.float32(counts)}

    def describe(self, needed: int) -> str:
        """One line: questions and samples, what is cut, and the number of epochs in a run of `needed` samples."""
        questions = f"{counted(len(self.found.texts), 'question')} with {self.choices} answers each"
        parts = [f"{questions}: {counted(self.count, 'sample')}"]
        parts += [f"{self._cut_articles:,} of them with an article cut to {self.sequence_length} tokens in all"]
        parts += [f"{self._cut_queries:,} with a question and answer cut"] if self._cut_queries else []
        return f"{self.name}: {', '.join(parts)}, {needed / self.count:.3g} epochs of them"

    def _article(self, number: int) -> np.ndarray:
        """The article's tokens of a sample, in the order of the files."""
        return self._articles[self.found.article[number // self.choices]]

    def _room(self, number: int) -> int:
        """Tokens of its article that fit in the sample."""
        return self.sequence_length - 3 - len(self._queries[number])
