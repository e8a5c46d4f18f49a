"""The training samples of a run, read through the same loaders as the training, with the text of every token."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megajax.config import ConfigError, RunConfig
from megajax.config.preference import PreferenceConfig
from megajax.data.loader import PADDING, Loader, RowLoader
from megajax.data.preferences import SIDES, PreferenceBatches, load_preferences
from megajax.data.source import make_loaders, tokenizer_of_model
from megajax.data.tokenizers import Tokenizer

__all__ = ["Cell", "SampleReader", "cells", "real_tokens", "token_texts"]

LONGEST_CHARACTER = 16  # tokens
PART = "\ufffd"  # the text of a part of a character
END = "<end of document>"
ENCODERS = ("types", "padding")  # arrays that only BERT's samples have


class Cell(NamedTuple):
    """A token of a sample: an input, or a label that is no input.

    Attributes:
      token: its id.
      text: what it adds to the text.
      document: number of its document in the sample; of BERT, of its segment.
      weight: of the token as a label in the loss; None if it is no label, as the first token of a sample.
      is_input: whether the model reads it.
      wanted: BERT's label of the token, where it counts.
    """

    token: int
    text: str
    document: int
    weight: float | None
    is_input: bool = True
    wanted: str | None = None


class SampleReader:
    """Training samples by their numbers in the run.

    Attributes:
      run: its data is opened.
      tokenizer: for the text of its tokens.
    """

    def __init__(self, run: RunConfig, tokenizer: Tokenizer, preferences: pathlib.Path | None = None):
        """Opens the data.

        Args:
          preferences: file of the options of `megajax dpo` in the run's directory; None: the run is another one's.

        Raises:
          ConfigError: it cannot be read.
        """
        self.run = run
        self.tokenizer = tokenizer_of_model(run, tokenizer)
        self._loader = _preferences(run, self.tokenizer, preferences) if preferences else None
        self._loader = self._loader or make_loaders(run, self.tokenizer)[0]

    def row(self, number: int) -> dict[str, np.ndarray]:
        """The arrays of a sample, as the training has them.

        Raises:
          ConfigError: the run has no such sample.
        """
        total = self.run.total_samples
        if not 0 <= number < min(total, PADDING):
            raise ConfigError(f"--sample {number}: the run has samples 0 to {total - 1}")
        return {name: array[0] for name, array in self._loader.rows(np.array([number])).items()}

    def numbers(self, step: int) -> list[int]:
        """The samples of the batch of a step, which are counted from 1.

        Raises:
          ConfigError: the run has no such step, or its batches grow.
        """
        train = self.run.train
        if train.batch_ramp:
            raise ConfigError(
                f"--batch {step}: the run has a --batch-ramp, with batches of several sizes: pass --sample N"
            )
        if not 1 <= step <= train.steps:
            raise ConfigError(f"--batch {step}: the run has the steps 1 to {train.steps}")
        return list(range((step - 1) * train.global_batch_size, step * train.global_batch_size))

    def sources(self, number: int) -> list[str]:
        """Where a sample is from."""
        samples = self._loader.samples
        found = getattr(samples, "sources", None)
        return list(found(number)) if found else [getattr(samples, "name", type(samples).__name__)]

    def close(self) -> None:
        """Ends the processes of a stream."""
        getattr(self._loader.samples, "close", lambda: None)()


def cells(row: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> list[Cell]:
    """The tokens of a sample without its padding.

    GPT's label of a token is the token after it, and is shown there; the last label of a document may be no input.
    """
    real = real_tokens(row)
    ids, weights = row["tokens"].tolist()[:real], row["weights"]
    if any(name in row for name in ENCODERS) or not weights.ndim:
        return _encoder_cells(row, ids, tokenizer)
    labels, packed = row["labels"].tolist(), "padding_mask" in row
    documents = row.get("document", np.zeros(real, np.int32)).tolist()
    found = []
    shown: float | None = None
    for at, token in enumerate(ids):
        found.append(Cell(token, "", documents[at], shown))
        follows = at + 1 < real and labels[at] == ids[at + 1] and not (packed and documents[at] != documents[at + 1])
        shown = float(weights[at]) if follows else None
        if not follows:
            found.append(Cell(labels[at], "", documents[at], float(weights[at]), is_input=False))
    texts = token_texts([one.token for one in found], tokenizer, [one.document for one in found])
    return [one._replace(text=text) for one, text in zip(found, texts, strict=True)]


def real_tokens(row: Mapping[str, np.ndarray]) -> int:
    """The number of a sample's tokens before its padding."""
    padding = int(row["padding_mask"].sum()) if "padding_mask" in row else int(row.get("padding", 0))
    return len(row["tokens"]) - padding


def _encoder_cells(row: Mapping[str, np.ndarray], ids: list[int], tokenizer: Tokenizer) -> list[Cell]:
    """Of BERT, whose labels are at their own places, if it has any."""
    types = row.get("types", np.zeros(len(ids), np.int32)).tolist()
    weights = row["weights"].tolist() if row["weights"].ndim else [None] * len(ids)
    labels = [token_texts([row["labels"][at]], tokenizer)[0] if weights[at] else None for at in range(len(ids))]
    texts = token_texts(ids, tokenizer)
    return [
        Cell(token, text, document, weight, wanted=label)
        for token, text, document, weight, label in zip(ids, texts, types, weights, labels, strict=False)
    ]


def token_texts(ids: Sequence[int], tokenizer: Tokenizer, documents: Sequence[int] | None = None) -> list[str]:
    """What each token adds to the text of those before it; a part of a character is empty, its last part the character.

    Args:
      documents: of the tokens: a text begins with each.
    """
    texts = []
    start = whole_to = 0  # where the decoded part starts, and where the last whole character ends
    for place, token in enumerate(ids):
        if (documents and place and documents[place] != documents[place - 1]) or place - start > LONGEST_CHARACTER:
            start = whole_to = place
        if token == tokenizer.end_of_document:
            texts.append(_end_of(tokenizer))
            start = whole_to = place + 1
            continue
        before, after = tokenizer.decode(ids[start:place]), tokenizer.decode(ids[start : place + 1])
        whole = before.rstrip(PART)
        text = after[len(whole) :] if after.startswith(whole) else tokenizer.decode([token])
        texts.append(text.rstrip(PART))
        if not after.endswith(PART):
            start, whole_to = whole_to, place + 1
    return texts


def _end_of(tokenizer: Tokenizer) -> str:
    """The token that ends documents, as the tokenizer's vocabulary has it."""
    inner = getattr(tokenizer, "inner", None)
    named = getattr(inner, "id_to_token", None) or getattr(inner, "id_to_piece", None)
    return named(tokenizer.end_of_document) if named else END


class _PreferenceSamples:
    """The completions of pairs as samples of a `RowLoader`."""

    def __init__(self, pairs: PreferenceBatches, files: Sequence[str]):
        self._pairs, self._name, self.count = pairs, ", ".join(files), 2 * len(pairs.pairs)

    def row(self, index: int) -> dict[str, np.ndarray]:
        return self._pairs.row(self._pairs.order.row(index // 2), index % 2)

    def sources(self, index: int) -> list[str]:
        return [f"{self._name}: pair {self._pairs.order.row(index // 2)}, {SIDES[index % 2]}"]


def _preferences(run: RunConfig, tokenizer: Tokenizer, file: pathlib.Path) -> Loader | None:
    """The loader of a run of `megajax dpo`; None if the file is not there."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        options = PreferenceConfig(
            **{name: tuple(value) if name == "pairs" else value for name, value in stored.items()}
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} has no options of preferences ({error}): give the directory of a run") from None
    length = run.model.sequence_length
    pairs, _ = load_preferences(options.pairs, tokenizer, options.chat_template, length)
    shape = (run.microbatches, run.parallel.microbatch_size * run.parallel.data)
    samples = _PreferenceSamples(PreferenceBatches(pairs, shape, length, run.train.seed), options.pairs)
    return RowLoader(
        samples, run.train.global_batch_size, run.microbatches, None, getattr(run.model, "vocabulary", None)
    )
