"""Reads a compiled program's text (HLO): what it communicates over which mesh axis, and how many FLOPs it multiplies.

A loop's body counts as often as the loop turns. XLA prints how often, except where that is decided at run time: loops
over a chunk's blocks in a mixed tick, and the head's and embedding's, which turn once or not at all. Those are counted
as what they come to over a whole step (see `Program`).
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

AXES = ("data", "pipe", "tensor")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ITEMSIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(")
SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")
TURNS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of communication.

    Attributes:
      axes: the mesh axes whose devices meet.
      sent: bytes that a device sends in one call, round a ring.
    """

    kind: str
    axes: tuple[str, ...]
    sent: int


@dataclasses.dataclass
class Totals:
    """What a program, or a part of one, does: calls of each collective, and FLOPs of its matrix multiplications."""

    calls: Counter = dataclasses.field(default_factory=Counter)
    flops: float = 0.0

    def add(self, other: "Totals", times: float) -> None:
        for collective, count in other.calls.items():
            self.calls[collective] += count * times
        self.flops += other.flops * times


class Program:
    """A compiled training step.

    Attributes:
      totals: of one device over a step.
    """

    def __init__(self, text: str, mesh: Sequence[int], *, vocabulary_rows: int, blocks_run: int, microbatches: int):
        """Parses and counts.

        Args:
          text: the scheduled module.
          mesh: sizes of (data, pipe, tensor); XLA numbers its partitions in that order.
          vocabulary_rows: a device's rows of the token table: a loop that touches an array of so many rows is the
            embedding's or the head's, and turns `microbatches` times a step on the rank that has it.
          blocks_run: forwards (or backwards) of blocks on a rank in a step: what any other loop without a number comes to.
        """
        self.mesh, self.rows = tuple(mesh), vocabulary_rows
        self.computations, self.entry = _computations(text)
        self.run_turns, self.head_turns = blocks_run, microbatches
        self._known: dict[str, Totals] = {}
        scans = [_turns(line) for line in self.computations[self.entry] if " while(" in line]
        self.ticks = max(1, sum(turns for turns in scans if turns))
        self.totals = self._count(self.entry)

    def _count(self, name: str) -> Totals:
        if name in self._known:
            return self._known[name]
        lines, totals = self.computations.get(name, []), Totals()
        self._known[name] = totals
        shapes = {}
        for line in lines:
            match = INSTRUCTION.match(line)
            if not match:
                continue
            result, kind, operation = match[1], match[2], match[3]
            shapes[result] = kind
            base = operation.removesuffix("-start")
            if base in KINDS:
                totals.calls[self._collective(base, kind, line)] += 1
            elif operation == "dot":
                totals.flops += _dot_flops(line, kind, shapes)
            if operation.endswith("-done") or base in KINDS or operation == "reduce":
                continue  # what these call are sums of two numbers
            for called in _called(line):
                totals.add(self._count(called), self._turns_of(line, called) if operation == "while" else 1)
        return totals

    def _turns_of(self, line: str, body: str) -> float:
        """Turns of a loop each time it is come to."""
        turns = _turns(line)
        if turns is not None:
            return turns
        in_head = any(
            f"[{self.rows}," in text or f",{self.rows}]" in text for text in self.computations.get(body, [])[1:]
        )
        return (self.head_turns if in_head else self.run_turns) / self.ticks

    def _collective(self, kind: str, result: str, line: str) -> Collective:
        size = sum(_bytes(shape) for shape in SHAPE.findall(result))
        if kind == "collective-permute":
            group = _pairs(line)
            return Collective(kind, self._axes(group), _bytes(SHAPE.findall(result)[0]))
        group = _group(line)
        members = len(group)
        if "-start(" in line and kind in ("all-gather", "reduce-scatter"):
            size = size * members // (members + 1)  # what is printed is the whole and a part
        elif kind == "reduce-scatter":
            size *= members
        share = (members - 1) / members * (2 if kind == "all-reduce" else 1)
        return Collective(kind, self._axes(group), round(size * share))

    def _axes(self, devices: Iterable[int]) -> tuple[str, ...]:
        """Axes along which these partitions differ."""
        places = [self._place(device) for device in devices]
        return tuple(axis for index, axis in enumerate(AXES) if len({place[index] for place in places}) > 1)

    def _place(self, device: int) -> tuple[int, int, int]:
        _, pipe, tensor = self.mesh
        return device // (pipe * tensor), device // tensor % pipe, device % tensor


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, and the name of the one that starts."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _turns(line: str) -> int | None:
    match = TURNS.search(line)
    return int(match[1]) if match else None


def _called(line: str) -> list[str]:
    return [name for match in CALLED.findall(line) for name in re.findall(r"%([\w.\-]+)", match)]


def _bytes(shape: tuple[str, str]) -> int:
    kind, sizes = shape
    return math.prod(_numbers(sizes)) * ITEMSIZES.get(kind, 4)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _dot_flops(line: str, result: str, shapes: dict[str, str]) -> float:
    """Two operations for each element of the result and each term of its sum."""
    left = re.search(r" dot\(%([\w.\-]+)", line)[1]
    sizes = _numbers(SHAPE.search(shapes[left])[2])
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
    terms = math.prod(sizes[index] for index in _numbers(summed[1])) if summed else 1
    return 2.0 * terms * math.prod(_numbers(SHAPE.search(result)[2]))


def _pairs(line: str) -> tuple[int, int]:
    """The first sender and its receiver of a permute."""
    return _numbers(re.search(r"source_target_pairs=\{\{([\d,]+)\}", line)[1])


def _group(line: str) -> tuple[int, ...]:
    """The first group of a collective, in any of the three forms that XLA prints.

    A list, {{0,1},{2,3}}; an iota, [2,2]<=[4] or [2,2]<=[2,2]T(1,0); or axes of a mesh, mesh['a'=2,'b'=4] {'b'}.
    """
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return _numbers(listed[1])
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        groups, sizes = _numbers(iota[1]), _numbers(iota[2])
        order = _numbers(iota[3]) if iota[3] else tuple(range(len(sizes)))
        return tuple(_iota(sizes, order, index) for index in range(math.prod(groups[1:])))
    mesh = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    )
    if not mesh:
        return (0,)
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    meeting = re.findall(r"'(\w+)'", mesh[4])
    places = [0]
    for name, size in sizes.items():
        places = [place * size + (step if name in meeting else 0) for place in places for step in range(size)]
    places = sorted(set(places))
    if mesh[2] is None:
        return tuple(places)
    order = _numbers(mesh[3]) if mesh[3] else tuple(range(len(_numbers(mesh[2]))))
    return tuple(_iota(_numbers(mesh[2]), order, place) for place in places)


def _iota(sizes: tuple[int, ...], order: tuple[int, ...], index: int) -> int:
    """Element `index` of arange(prod(sizes)).reshape(sizes).transpose(order).ravel()."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    value = 0
    for axis in reversed(order):
        index, step = divmod(index, sizes[axis])
        value += step * strides[axis]
    return value
