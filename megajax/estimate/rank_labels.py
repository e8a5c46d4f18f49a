"""Values on all ranks of a program, some of which are not known.

A value has an axis of ranks before its own. Where it is not known, because it depends on data, a rank has a label instead:
two ranks with one label have the same value, since they computed it in the same way from the same inputs.
"""

import itertools
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
    """Labels of unknown values: one number for each way to compute one; `reasons` tells why it is not known."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.reasons: dict[int, str] = {}
        self._numbers: dict[tuple, int] = {}
        self._serial = itertools.count()

    def differing(self, reason: str) -> Value:
        """A value that may differ from rank to rank."""
        return self._value([("own", next(self._serial), rank) for rank in range(self.ranks)], [reason] * self.ranks)

    def common(self, key: str, reason: str) -> Value:
        """A value that all ranks share."""
        return self._value([("common", key)] * self.ranks, [reason] * self.ranks)

    def shared_by(self, groups: Sequence[Sequence[int]], reason: str, key: object, operand: Value | None) -> Value:
        """The result of a collective that gives all members of a group the same: a function of all members' operands."""
        serial = next(self._serial)
        rows: list[tuple] = [("own", serial, rank) for rank in range(self.ranks)]
        operands = None if operand is None else self.numbers_of(operand)
        for number, group in enumerate(groups):
            row = ("group", serial, number) if operands is None else ("group", key, *operands[list(group)])
            for rank in group:
                rows[rank] = row
        return self._value(rows, [reason] * self.ranks)

    def computed(self, key: object, operands: Sequence[Value]) -> Value:
        """A deterministic function, named by `key`, of operands of which some are not known."""
        columns = [self.numbers_of(operand) for operand in operands]
        rows = [(key, *row) for row in zip(*columns, strict=True)] if columns else [(key,)] * self.ranks
        unknown = [operand.labels for operand in operands if operand.labels is not None]
        reasons = [
            next(
                (self.reasons[label[rank]] for label in unknown if label[rank] >= 0), "a number that is not an integer"
            )
            for rank in range(self.ranks)
        ]
        return self._value(rows, reasons)

    def explain(self, value: Value, reason: str) -> None:
        """Gives the reason why a value is not known, instead of an earlier one."""
        self.reasons.update(dict.fromkeys(value.labels.tolist(), reason))

    def numbers_of(self, value: Value) -> np.ndarray:
        """[ranks] labels, of known values too."""
        if value.array is None:
            return value.labels
        rows = value.array.reshape(len(value.array), -1)
        known = np.array([self._number(("known", rows.dtype.str, row.tobytes())) for row in rows])
        known = np.broadcast_to(known, self.ranks)
        return known if value.labels is None else np.where(value.labels < 0, known, value.labels)

    def _value(self, rows: Sequence[tuple], reasons: Sequence[str]) -> Value:
        labels = [self._number(row) for row in rows]
        for label, reason in zip(labels, reasons, strict=True):
            self.reasons.setdefault(label, reason)
        return Value(None, np.array(labels))

    def _number(self, row: tuple) -> int:
        return self._numbers.setdefault(row, len(self._numbers))

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
