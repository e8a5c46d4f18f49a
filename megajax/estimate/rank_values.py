"""Values of operations and collectives on all ranks, for the walk of a program (`rank_walk`)."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megajax.estimate.collective_members import Members, place
from megajax.estimate.hlo_demand import OPAQUE, Demand, base
from megajax.estimate.hlo_parser import Line, operands
from megajax.estimate.hlo_scalars import (
    REDUCTIONS,
    TYPES,
    attribute,
    bound,
    constant,
    decided,
    evaluate,
    in_memory_order,
    is_evaluated,
    is_known,
    shape_of,
)
from megajax.estimate.rank_labels import Labels, Value

Tree = Any  # a Value, or a dict from a tuple's index to a Tree; parts that are not needed are absent


class RankValues:
    """Evaluates the lines of a module.

    `inputs`: the value of all integers that are inputs, of those that decide a collective; None: not known.
    """

    def __init__(self, demand: Demand, members: Members, inputs: int | None = None):
        self.demand, self.members, self.inputs = demand, members, inputs
        self.ranks = members.replicas * members.partitions
        self.labels = Labels(self.ranks)
        numbers = np.arange(self.ranks, dtype=np.uint32)
        self._ids = {"partition-id": numbers % members.partitions, "replica-id": numbers // members.partitions}
        self._constants: dict[tuple[str, str], Value] = {}

    def input(self, line: Line) -> tuple[int, Tree]:
        """A parameter of the program. A number is the same on all ranks; other arrays may be split over them."""
        number, name = int(re.match(r"(\d+)\)", line.rest)[1]), place(line)
        kind, shape = shape_of(line.type)
        if self.inputs is not None and is_integer(line):
            return number, Value(np.full((1, *shape), self.inputs, TYPES[kind]))
        if shape == ():
            return number, self.labels.common(f"the input {name}")
        return number, self.labels.differing(f"the input {name}")

    def received(self, name: str, line: Line, found: dict, ranks: np.ndarray) -> Tree:
        """The result of a collective on these ranks, by groups where all members have the same."""
        numbered = {path[0] for path in self.demand.wanted[name][line.name] if path}
        permutes = base(line) == "collective-permute"
        meeting = self.members.pairs(line) if permutes else self.members.of(line)
        here = [ranks[list(group)] for group in meeting]
        together = all(
            one.all() or not one.any() for one in here
        )  # otherwise other members' operands are not the current
        results = {number: self._part(name, line, number, found if together else {}) for number in numbered or {0}}
        return results if numbered else results[0]

    def _part(self, name: str, line: Line, number: int, found: dict) -> Value:
        """The result for operand `number`."""
        operand = self.demand.lines[name].get(operands(line)[number])
        value = found.get(operand.name) if operand is not None and is_evaluated(operand.type) else None
        value, reason = value if isinstance(value, Value) else None, f"the result of {place(line)}"
        if base(line) == "collective-permute" and value is not None:
            return self._permuted(value, self.members.pairs(line))
        if base(line) not in ("all-reduce", "all-gather"):
            return self.labels.differing(reason)
        groups = self.members.of(line)
        if value is not None and is_known(value):
            array = np.broadcast_to(value.array, (self.ranks, *value.array.shape[1:]))
            if base(line) == "all-gather":
                return Value(gathered(array, groups, int(attribute(line, "dimensions"))))
            if function := REDUCTIONS.get(self._reduction(line)):
                return Value(reduced(array, groups, function))
        # Sums of equal floats in another group may be rounded differently.
        exact = operand is not None and shape_of(operand.type)[0] in TYPES
        return self.labels.shared_by(groups, reason, value if exact else None)

    def _permuted(self, value: Value, pairs: Sequence[Sequence[int]]) -> Value:
        """What each rank receives, zeros where it is no target."""
        source = np.full(self.ranks, -1)
        for one, other in pairs:
            source[other] = one
        array, labels = value.array, value.labels
        if array is not None:
            array = np.array(np.broadcast_to(array, (self.ranks, *array.shape[1:])))[source]
            array[source < 0] = 0
        elif (source < 0).any():
            return self.labels.differing("a collective-permute of what is not known")
        labels = None if labels is None else np.where(source < 0, -1, labels[source])
        return Value(array, labels if labels is not None and (labels >= 0).any() else None)

    def operation(self, name: str, line: Line, given: list[Tree]) -> Value:
        """The result of an operation on arrays."""
        if line.op in self._ids:
            return Value(self._ids[line.op])
        if line.op == "constant":
            key = name, line.name
            if key not in self._constants:
                known = constant(line) if is_evaluated(line.type) else None
                absent = ", whose elements are not in the text" if "{...}" in line.rest else ""
                self._constants[key] = known or self.labels.common(f"the constant {line.name}{absent}")
            return self._constants[key]
        absent = any(not isinstance(one, Value) for one in given)
        if not is_evaluated(line.type) or line.op in OPAQUE or absent:
            return self.labels.differing(f"{line.op} {place(line)}")
        if (chosen := self._short_cut(line, given)) is not None:
            return chosen
        unknown = [one.labels for one in given if one.labels is not None]
        array = None
        if all(one.array is not None for one in given):
            arrays = [one.array for one in given]
            if line.op == "bitcast":
                types = self.demand.lines[name]
                arrays = [in_memory_order(arrays[0], types[operands(line)[0]].type)]
            array = evaluate(line, arrays, self._reduction(line))
        if array is not None and not unknown:
            return Value(array)
        computed = self.labels.computed(given, "" if unknown else f"{line.op} {place(line)}, which is not evaluated")
        if array is None:
            return computed._replace(most=bound(line, given))
        known = np.all([one < 0 for one in unknown], axis=0)
        return Value(array, np.where(known, -1, computed.labels))

    def _short_cut(self, line: Line, given: list[Value]) -> Value | None:
        """A selection whose predicate is known on all ranks, and what one operand decides of and, or and compare."""
        if (result := decided(line, given)) is not None:
            return result
        if line.op == "select" and is_known(given[0]):
            flat = given[0].array.reshape(len(given[0].array), -1)
            if flat.size and (flat == flat[:, :1]).all():
                return self.labels.chosen(np.broadcast_to(flat[:, 0], self.ranks), given[1], given[2])
        if line.op in ("and", "or") and line.type.startswith("pred[]"):
            decisive = line.op == "or"
            for one, other in (given, given[::-1]):
                if is_known(one) and not is_known(other):
                    return self.labels.chosen(np.broadcast_to(one.array == decisive, self.ranks), one, other)
        return None

    def _reduction(self, line: Line) -> str:
        """The opcode that a reduce or an all-reduce applies to two elements; "" if it is not one operation."""
        name = attribute(line, "to_apply") or ""
        ops = [one.op for one in self.demand.bodies.get(name, ())]
        return self.demand.roots[name].op if len(ops) == 3 and ops.count("parameter") == 2 else ""


def is_integer(line: Line) -> bool:
    """Whether the result is one integer."""
    kind, shape = shape_of(line.type)
    return math.prod(shape) == 1 and kind in TYPES and kind != "pred"


def reduced(array: np.ndarray, groups: Sequence[Sequence[int]], function: Callable) -> np.ndarray:
    """An all-reduce of [ranks, ...]."""
    result = array.copy()
    for group in groups:
        result[list(group)] = function.reduce(array[list(group)], 0, dtype=array.dtype)
    return result


def gathered(array: np.ndarray, groups: Sequence[Sequence[int]], axis: int) -> np.ndarray:
    """An all-gather of [ranks, ...] along `axis` of a rank's array."""
    sizes = list(array.shape)
    sizes[1 + axis] *= len(groups[0])
    result = np.zeros(sizes, array.dtype)
    for group in groups:
        result[list(group)] = np.concatenate(list(array[list(group)]), axis)
    return result
