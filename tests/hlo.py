"""Reads collectives out of a compiled program's text (HLO)."""

import dataclasses
import re

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: of KINDS.
      shape: of (the first of) what it returns on one device.
      groups: devices that meet, or (from, to) pairs of a permute.
      in_loop: whether a `while` runs it.
    """

    kind: str
    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    in_loop: bool


def collectives(text: str) -> list[Collective]:
    """Every collective of a module."""
    computations = _computations(text)
    looped = set()
    for lines in computations.values():
        for line in lines:
            if " while(" in line:
                looped |= {name for name in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line)}
    reached = set()
    while looped:
        name = looped.pop()
        reached.add(name)
        called = {word for line in computations.get(name, ()) for word in re.findall(r"%([\w.\-]+)", line)}
        looped |= (called & computations.keys()) - reached
    found = []
    for name, lines in computations.items():
        for line in lines:
            match = re.search(rf"= \(?\w+\[([\d,]*)\].* ({'|'.join(KINDS)})(?:-start)?\(", line)
            if match:
                shape = tuple(int(size) for size in match[1].split(",") if size)
                found.append(Collective(match[2], shape, _groups(line), name in reached))
    return found


def _computations(text: str) -> dict[str, list[str]]:
    computations, lines = {}, []
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            lines = computations.setdefault(head[1], [])
        else:
            lines.append(line)
    return computations


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Groups as they are written, in one of three forms.

    A list, {{0,1},{2,3}}; an iota, [2,2]<=[4] or [2,2]<=[2,2]T(1,0); or axes of a mesh, mesh['a'=2,'b'=4] {'b'}, whose
    devices may be in an order of their own, device_ids=([4,2]T(1,0)).
    """
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line)
    if listed:
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        ids = _iota(iota[2], iota[3]).reshape(_numbers(iota[1]))
        return tuple(map(tuple, ids.tolist()))
    mesh = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    )
    assert mesh, f"replica groups of an unknown form: {line}"
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    shape = [int(size) for size in sizes.values()]
    ids = _iota(mesh[2] or str(np.prod(shape)), mesh[3]).reshape(shape)
    meeting = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", mesh[4])]
    ids = np.moveaxis(ids, meeting, range(-len(meeting), 0))
    return tuple(map(tuple, ids.reshape(-1, np.prod([shape[axis] for axis in meeting])).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    ids = np.arange(np.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return ids.transpose(_numbers(order)) if order else ids
