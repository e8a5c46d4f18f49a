"""Samples of different lengths packed into rows of the sequence length, for supervised fine-tuning.

A sample of n tokens takes n - 1 places of a row: its tokens without the last are inputs, its tokens without the first are
labels, and a label's weight is 1 if the assistant says that token. So no label is another sample's token. In a row

    tokens        a0 a1 a2 | b0 b1 | padding
    labels        a1 a2 a3 | b1 b2 | padding
    weights        0  1  1 |  0  1 | 0
    padding_mask   0  0  0 |  0  0 | 1 1 ...
    positions      0  1  2 |  0  1 | 0 1 ...
    document       0  0  0 |  1  1 | 2 2 ...

a token attends to its own document only: the loss and the gradient of a row are those of its samples, each alone.
"""

import bisect

import numpy as np

from megajax.data.loader import EpochOrder
from megajax.data.sft import Answers
from megajax.schedules.errors import counted

__all__ = ["PackedSamples", "pack"]


class PackedSamples:
    """Rows of packed samples, in a different random order each epoch.

    The rows are the same in all epochs. Without a seed there is one epoch, in the order of the packing, and the rows after
    it are empty.

    Attributes:
      answers: the samples.
      count: number of rows.
      sequence_length: tokens of a row.
    """

    def __init__(self, answers: Answers, sequence_length: int, seed: int | None, padding: int):
        """Packs samples of at most `sequence_length` + 1 tokens; `padding` is the token after the last one of a row."""
        self.answers, self.sequence_length, self.seed, self.padding = answers, sequence_length, seed, padding
        self._rows = pack(np.diff(answers.offsets) - 1, sequence_length)
        self.count = len(self._rows)
        self._order = EpochOrder(self.count, seed)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Row `index` >= 0 of the run: weights float32, and the other arrays int32, each [s]."""
        ended = self.seed is None and index >= self.count
        samples = [] if ended else self._rows[self._order.row(index)]
        arrays = {name: np.zeros(self.sequence_length, np.int32) for name in ("positions", "document")}
        arrays |= {name: np.full(self.sequence_length, self.padding, np.int32) for name in ("tokens", "labels")}
        arrays["weights"] = np.zeros(self.sequence_length, np.float32)
        start = 0
        for number, sample in enumerate(samples):
            begin, end = self.answers.offsets[sample : sample + 2].tolist()
            stop = start + end - begin - 1
            arrays["tokens"][start:stop] = self.answers.ids[begin : end - 1]
            arrays["labels"][start:stop] = self.answers.ids[begin + 1 : end]
            arrays["weights"][start:stop] = self.answers.loss_mask[begin + 1 : end]
            arrays["positions"][start:stop] = np.arange(stop - start)
            arrays["document"][start:stop] = number
            start = stop
        arrays["positions"][start:] = np.arange(self.sequence_length - start)
        arrays["document"][start:] = len(samples)
        arrays["padding_mask"] = (np.arange(self.sequence_length) >= start).astype(np.int32)
        return arrays

    def sources(self, index: int) -> list[str]:
        """The samples that are packed into row `index`, counted from 0 in the files' order, without dropped ones."""
        return [f"{self.answers.name}: sample {sample}" for sample in self._rows[self._order.row(index)]]

    def describe(self, needed: int) -> str:
        """One line: the samples, how full the rows are, and the number of epochs in a run of `needed` rows."""
        found, tokens = self.answers, len(self.answers.ids)
        full = (tokens - found.count) / (self.count * self.sequence_length)
        return (
            f"{found.name}: {found.describe()}; packed into {counted(self.count, 'row')} of {self.sequence_length} tokens "
            f"({full:.1%} full), {needed / self.count:.3g} epochs of them"
        )


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Samples of `lengths`, at most `capacity`, in few rows: the longest first, each into the fullest row with room for it.

    Best-fit decreasing needs at most 11/9 of the fewest rows that are possible, and one more. It takes n log n steps.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by their free places
    rooms: list[int] = []  # the keys of with_room, ascending
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(sample)
        if room - length not in with_room:
            bisect.insort(rooms, room - length)
            with_room[room - length] = []
        with_room[room - length].append(row)
    return rows
