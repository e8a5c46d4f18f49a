"""Which collectives of a compiled program for CPU devices may run beside a loop with collectives.

A device runs what a computation's operations are compiled to in their order, several at once where none writes what another
uses, and a collective, a loop or a conditional with collectives starts after those before it have started. A collective by
itself ends before it lets another start. A loop may not: so it must have ended before a later collective can start, which
then has to need a result that an iteration of the loop changes.
"""

import functools
import re

from megajax.estimate.hlo_parser import KINDS, Line, called_by, computations, operands

INDEX = re.compile(r"index=(\d+)")
BODY = re.compile(r"body=%?([\w.\-]+)")
Needs = set[Line] | list  # of an array: loops and conditionals that it is computed after; of a tuple: a list of them


def beside_loops(text: str) -> tuple[list[tuple[str, str]], int]:
    """The op names of (loop, later collective or loop) that may run at once, and the number of loops with collectives."""
    bodies, _ = computations(text)

    @functools.cache
    def has_collectives(name: str) -> bool:
        return any(is_collective(line) or is_loop(line) for line in bodies.get(name, ()))

    def is_loop(line: Line) -> bool:
        return line.op in ("while", "conditional", "call") and any(map(has_collectives, called_by(line.rest)))

    pairs, loops = [], 0
    for lines in bodies.values():
        needs: dict[str, Needs] = {}
        seen: list[Line] = []
        for line in lines:  # in the order in which they run
            given = [needs.get(operand, set()) for operand in operands(line)]
            before = flat(given)
            if is_loop(line) or is_collective(line):
                pairs += [(op_name(loop), op_name(line)) for loop in seen if loop not in before]
            if is_loop(line):
                seen.append(line)
                before = before | {line}
            needs[line.name] = of_result(line, given, before, bodies)
        loops += len(seen)
    return pairs, loops


def is_collective(line: Line) -> bool:
    return line.op.removesuffix("-start") in KINDS


def of_result(line: Line, given: list[Needs], before: set[Line], bodies: dict[str, list[Line]]) -> Needs:
    """What the result of `line` needs: of tuples, what each of their arrays needs."""
    if line.op == "tuple":
        return given
    if line.op == "get-tuple-element" and isinstance(given[0], list):
        return given[0][int(INDEX.search(line.rest)[1])]
    if line.op == "while" and isinstance(given[0], list):
        kept = unchanged(bodies[BODY.search(line.rest)[1]])
        return [own if index in kept else before for index, own in enumerate(given[0])]
    return before


def unchanged(body: list[Line]) -> set[int]:
    """The arrays of a loop's state that its body returns as they are: who needs one need not wait for the loop."""
    by_name = {line.name: line for line in body}
    kept = set()
    for index, name in enumerate(operands(next(line for line in body if line.is_root))):
        line = by_name.get(name)
        if line and line.op == "get-tuple-element" and by_name[operands(line)[0]].op == "parameter":
            kept |= {index} & {int(INDEX.search(line.rest)[1])}
    return kept


def flat(needs: Needs) -> set[Line]:
    return set().union(*map(flat, needs)) if isinstance(needs, list) else needs


def op_name(line: Line) -> str:
    found = re.search(r'op_name="([^"]*)"', line.rest)
    return f"{line.op} {found[1] if found else line.name}"
