"""Rows of sentences as BERT reads them (1810.04805 figure 2): [CLS] A [SEP], or [CLS] A [SEP] B [SEP], then padding."""

from collections.abc import Sequence

import numpy as np

from megajax.data.bert import WordPieces

__all__ = ["cut", "sentence_row"]


def sentence_row(pieces: WordPieces, sentences: Sequence[Sequence[int]], length: int) -> dict[str, np.ndarray]:
    """A sample of ids: "tokens" and "types" (the number of each token's sentence) int32 [length], and "padding" int32 []."""
    tokens, types = [pieces.begin], [0]
    for number, ids in enumerate(sentences):
        tokens += [*ids, pieces.separator]
        types += [number] * (len(ids) + 1)
    row = {"tokens": np.full(length, pieces.padding, np.int32), "types": np.zeros(length, np.int32)}
    row["tokens"][: len(tokens)], row["types"][: len(types)] = tokens, types
    return row | {"padding": np.int32(length - len(tokens))}


def cut(sentences: Sequence[np.ndarray], room: int) -> list[list[int]]:
    """At most `room` tokens: without the last ones of the longest sentence, as often as needed."""
    lengths = [len(ids) for ids in sentences]
    while sum(lengths) > room:
        lengths[lengths.index(max(lengths))] -= 1
    return [ids[:length].tolist() for ids, length in zip(sentences, lengths, strict=True)]
