"""Values on all ranks of a program, some of which are not known.

A value has an axis of ranks before its own. Where it is not known, because it depends on data, a rank has a label instead:
two ranks with one label have the same value, since the same operation computed it from the same inputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Value(NamedTuple):
    """An array on all ranks.

    Attributes:
      array: [1 or ranks, *shape]; None if no rank's is known.
      labels: [ranks], -1 where the array is known; None if it is on all ranks.
      most: an upper bound of the elements that are not known; None: none is known.
    """

    array: np.ndarray | None
    labels: np.ndarray | None = None
    most: int | None = None


class Labels:
    """Labels of unknown values, of which each value has numbers of its own; `reason` tells why it is not known.

    A program of a thousand ranks has hundreds of millions of labels, so that neither their number nor the way in which each
    was computed is kept: values of two operations have no labels in common, even if they must be equal.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._reasons: list[str] = []  # of each value, whose labels begin at its place here times the ranks

    def differing(self, reason: str) -> Value:
        """A value that may differ from rank to rank."""
        return self._value(np.arange(self.ranks), reason)

    def common(self, reason: str) -> Value:
        """A value that all ranks share."""
        return self._value(np.zeros(self.ranks, np.int64), reason)

    def shared_by(self, groups: Sequence[Sequence[int]], reason: str, operand: Value | None) -> Value:
        """The result of a collective that gives all members of a group the same: a function of all members' operands."""
        classes = np.arange(self.ranks)
        operands = None if operand is None else self.numbers_of(operand)
        first: dict[tuple, int] = {}
        for group in groups:
            members = list(group)
            row = tuple(members) if operands is None else tuple(operands[members].tolist())
            classes[members] = first.setdefault(row, members[0])
        return self._value(classes, reason)

    def computed(self, operands: Sequence[Value], reason: str = "") -> Value:
        """A deterministic function of operands. `reason`: of what is not known; else that of an operand."""
        classes = np.zeros(self.ranks, np.int64)
        for operand in operands:
            numbers = self.numbers_of(operand)
            if not reason and operand.labels is not None:
                reason = self.reason(operand.labels.max())
            _, own = np.unique(numbers, return_inverse=True)
            _, classes = np.unique(classes * (own.max() + 1) + own, return_inverse=True)
        return self._value(classes, reason or "a number that is not an integer")

    def reason(self, label: int) -> str:
        """Why the value of this label is not known."""
        return self._reasons[label // self.ranks]

    def numbers_of(self, value: Value) -> np.ndarray:
        """[ranks] labels, of known values too: negative numbers that are the same where this value is."""
        if value.array is None:
            return value.labels
        first: dict[bytes, int] = {}
        own = np.array([first.setdefault(row.tobytes(), len(first)) for row in value.array])
        known = np.broadcast_to(-2 - own, self.ranks)
        return known if value.labels is None else np.where(value.labels < 0, known, value.labels)

    def _value(self, classes: np.ndarray, reason: str) -> Value:
        """A value that ranks of a class, from 0, have in common."""
        self._reasons.append(reason)
        return Value(None, (len(self._reasons) - 1) * self.ranks + classes)

    def chosen(self, ranks: np.ndarray, new: Value, old: Value) -> Value:
        """`new` on these ranks (a mask), `old` on the others."""
        if ranks.all():
            return new
        array = new.array if old.array is None else old.array
        if new.array is not None and old.array is not None:
            array = np.where(ranks.reshape(-1, *[1] * (new.array.ndim - 1)), new.array, old.array)
        if new.labels is None and old.labels is None:
            return Value(array)
        known = np.full(self.ranks, -1)
        labels = np.where(
            ranks, known if new.labels is None else new.labels, known if old.labels is None else old.labels
        )
        return Value(array, labels if (labels >= 0).any() else None)
