"""Labelled sentences and pairs of sentences, for BERT's fine-tuning: GLUE's tasks (1804.07461), in the columns they come in.

A file is JSON lines with the columns of Hugging Face's `glue` dataset, or GLUE's own TSV with a header. A sample is
[CLS] A [SEP], or [CLS] A [SEP] B [SEP] with type 1 from B on (1810.04805 section 4.1). Samples that are longer than the
sequence lose tokens at the end of the longer sentence, and are counted.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megajax.config import ConfigError
from megajax.config.tasks import TASKS, Task
from megajax.data.bert import WordPieces
from megajax.data.json_values import object_of_line
from megajax.data.loader import EpochOrder
from megajax.data.sentence_rows import cut, sentence_row
from megajax.data.text import numbered_lines
from megajax.data.tokenizers import Tokenizer
from megajax.schedules.errors import counted

__all__ = ["ClassificationSamples", "Labelled", "read_labelled"]

FORMATS = "FILE.tsv with a header, or FILE.jsonl"


@dataclasses.dataclass(frozen=True)
class Labelled:
    """The samples of files.

    Attributes:
      texts: the first sentences, and the second ones of a task with pairs.
      classes: int32 [samples].
      undecided: samples whose annotators did not agree (label "-"), which are left out.
    """

    texts: tuple[list[str], ...]
    classes: np.ndarray
    undecided: int


def read_labelled(task: str, files: Sequence[str]) -> Labelled:
    """Reads all samples of a task's files.

    Raises:
      ConfigError: a file cannot be read or is empty, or a row lacks a column or has a label that the task does not have.
    """
    found, rows, classes, undecided = TASKS[task], [], [], 0
    for file in files:
        before = len(rows) + undecided
        for place, row in _rows(file):
            texts, label = _columns(found, task, place, row)
            if label == "-":
                undecided += 1
                continue
            rows.append(texts)
            classes.append(_class(found, task, place, label))
        if len(rows) + undecided == before:
            raise ConfigError(f"{file} has no samples: give a {FORMATS}.")
    if not rows:
        raise ConfigError(f"{files[0]} has no sample with a label: give a {FORMATS}.")
    return Labelled(tuple(map(list, zip(*rows, strict=True))), np.array(classes, np.int32), undecided)


def _rows(file: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The rows of a file, each with its place for messages, "FILE line 3". Empty lines are skipped."""
    is_table = pathlib.Path(file).suffix == ".tsv"
    found = numbered_lines(file, f"give a {FORMATS}", "line" if is_table else "jsonl")
    numbered = [(place, line.rstrip("\r")) for place, line in found]
    if is_table:
        header = numbered[0][1].split("\t") if numbered else []
        for place, line in numbered[1:]:  # GLUE's TSV has no quotes: a quotation mark is a part of the text
            values = line.split("\t")
            if len(values) != len(header):
                raise ConfigError(
                    f"{place} has {len(values)} columns, and the header {len(header)}: mend or remove it."
                )
            yield place, dict(zip(header, values, strict=True))
        return
    for place, line in numbered:
        yield place, object_of_line(place, line, f"give a {FORMATS}")


def _columns(task: Task, name: str, place: str, row: Mapping[str, object]) -> tuple[tuple[str, ...], object]:
    """The sentences and the label of a row."""
    for *texts, label in task.columns:
        if all(column in row for column in (*texts, label)):
            values = tuple(row[column] for column in texts)
            wrong = next(
                (column for column, value in zip(texts, values, strict=True) if not isinstance(value, str)), None
            )
            if wrong:
                raise ConfigError(f"{place}: {wrong} is no text: mend or remove that row.")
            return values, row[label]
    legal = "; or ".join(", ".join(columns) for columns in task.columns)
    raise ConfigError(f"{place} has the columns {', '.join(map(str, row))}, and --task {name} needs {legal}.")


def _class(task: Task, name: str, place: str, label: object) -> int:
    """The number of a label, which is one of the task's names or a number already."""
    if label in task.labels:
        return task.labels.index(label)
    if str(label) in map(str, range(len(task.labels))) and not isinstance(label, bool):
        return int(str(label))
    hidden = " (of a test set, whose labels are not public)" if str(label) == "-1" else ""
    names = ", ".join(f"{number} or {label}" for number, label in enumerate(task.labels))
    raise ConfigError(f"{place} has the label {label!r}{hidden}, and --task {name} has {names}.")


class ClassificationSamples:
    """The samples of files, in another random order in each epoch, or once in the order of the files.

    Attributes:
      count: number of samples.
      cut: those that are longer than the sequence.
    """

    def __init__(self, found: Labelled, tokenizer: Tokenizer, sequence_length: int, seed: int | None, name: str):
        """Tokenises the samples of the task `name`; `seed` None keeps the order of the files, and there is one epoch.

        Raises:
          ConfigError: the tokenizer is not BERT's, or the sequence has no room for a token of each sentence.
        """
        self.pieces, self.sequence_length, self.seed = WordPieces.from_tokenizer(tokenizer), sequence_length, seed
        room = sequence_length - 1 - len(found.texts)
        if room < len(found.texts):
            raise ConfigError(
                f"sequence_length = {sequence_length} has no room for a sample: pass --sequence-length 128, for example."
            )
        encoded = [tokenizer.encode_all(texts) for texts in found.texts]
        self._ids = [cut([ids[row] for ids in encoded], room) for row in range(len(found.classes))]
        self.cut = sum(sum(len(ids[row]) for ids in encoded) > room for row in range(len(found.classes)))
        self.classes, self.count, self.undecided, self.name = found.classes, len(found.classes), found.undecided, name
        self._order = EpochOrder(self.count, seed)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index` >= 0 of the run: "tokens" and "types" int32 [s], "padding" and "class" int32 [], "weights" fp32 [].

        Without a seed, samples after the last one have weight 0.
        """
        place = self._order.row(index)
        row = sentence_row(self.pieces, self._ids[place], self.sequence_length)
        counts = self.seed is not None or index < self.count
        return row | {"class": self.classes[place], "weights": np.float32(counts)}

    def describe(self, needed: int) -> str:
        """One line: the samples, those that are cut or left out, and the number of epochs in a run of `needed` samples."""
        parts = [counted(self.count, "sample"), f"{self.cut:,} of them cut to {self.sequence_length} tokens"]
        parts += [f"{self.undecided:,} without a label left out"] if self.undecided else []
        return f"{self.name}: {', '.join(parts)}, {needed / self.count:.3g} epochs of them"
