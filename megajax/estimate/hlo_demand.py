"""The lines of an HLO module that decide which collectives a rank reaches: a backward slice from predicates."""

import re
from collections import defaultdict
from collections.abc import Iterator

from megajax.estimate.hlo_parser import KINDS, SCALAR_CODE, Line, called_by, known_trip_count, operands
from megajax.estimate.hlo_scalars import attribute, is_evaluated

COLLECTIVES = (*KINDS, "collective-broadcast")
UNSUPPORTED = ("send", "recv", "send-done", "recv-done")  # their peers are not in the text of one operation
PASSES_ON = ("copy-start", "copy-done", "optimization-barrier", "opt-barrier")
NAMES = re.compile(r"[\w.\-]+")
Path = tuple[int, ...]
# Results that are not a function of the operands, or of what else all ranks share.
OPAQUE = ("custom-call", "rng", "rng-bit-generator", "rng-get-and-update-state", "infeed", "recv", "recv-done")


def base(line: Line) -> str:
    """The opcode without -start or -done."""
    return re.sub(r"-(start|done|update)$", "", line.op)


def is_collective(line: Line) -> bool:
    """Whether a line is a collective, or its start, and not its done."""
    return base(line) in COLLECTIVES and not line.op.endswith("-done")


def is_done(line: Line) -> bool:
    """Whether a line ends what an earlier one started."""
    return line.op.endswith(("-done", "-update"))


def inner(line: Line) -> list[str]:
    """Computations that a line runs as part of the program, in the order of their branches; a loop's body alone."""
    if line.op in SCALAR_CODE or base(line) in COLLECTIVES:
        return []
    if line.op == "while":
        return [attribute(line, "body")]
    return called_by(line.rest)


class Demand:
    """Which lines of each computation have to be evaluated or followed.

    Attributes:
      lines: by computation and name.
      roots: the line of each computation's result.
      steps: by computation, the lines to evaluate or to follow, in the order in which they run.
      wanted: by computation, names of the lines whose values are needed, each with the parts of its tuple.
      reaches: computations with collectives, or that call one.
      unsupported: lines whose collectives are not understood.
    """

    def __init__(self, bodies: dict[str, list[Line]], entry: str):
        self.bodies, self.entry = bodies, entry
        self.lines = {name: {line.name: line for line in lines} for name, lines in bodies.items()}
        self.roots = {name: next((one for one in lines if one.is_root), lines[-1]) for name, lines in bodies.items()}
        self.sites: dict[str, list[tuple[str, Line, int | None]]] = defaultdict(list)
        self._reachable = list(self._reach(entry))
        self.reaches = self._with_collectives()
        self.unsupported = [line for name in self._reachable for line in bodies[name] if self._is_unsupported(line)]
        self.wanted: dict[str, dict[str, set[Path]]] = defaultdict(lambda: defaultdict(set))
        self._mark_all()
        self.steps = {
            name: [line for line in bodies[name] if line.name in self.wanted[name] or self.has_effect(name, line)]
            for name in self._reachable
        }

    def _is_unsupported(self, line: Line) -> bool:
        """Whether it sends to a peer, or is a library's call of computations that have collectives."""
        called = NAMES.findall(attribute(line, "called_computations") or "") if line.op == "custom-call" else ()
        return line.op in UNSUPPORTED or any(is_collective(one) for name in called for one in self.bodies.get(name, ()))

    def has_effect(self, name: str, line: Line) -> bool:
        """Whether a line is a collective, its end, or runs a computation that reaches one."""
        if is_done(line):
            start = self.lines[name].get(operands(line)[0])
            return start is not None and (is_collective(start) or self.has_effect(name, start))
        return is_collective(line) or any(called in self.reaches for called in inner(line))

    def _reach(self, entry: str) -> Iterator[str]:
        seen, queue = {entry}, [entry]
        while queue:
            name = queue.pop()
            yield name
            for line in self.bodies[name]:
                called = inner(line)
                if line.op == "while":
                    condition = attribute(line, "condition")
                    called = [*called, condition]
                    self.sites[condition].append((name, line, 0))
                    self.sites[called[0]].append((name, line, 0))
                else:
                    for branch, one in enumerate(called):
                        self.sites[one].append((name, line, 1 + branch if line.op == "conditional" else None))
                fresh = [one for one in dict.fromkeys(called) if one in self.bodies and one not in seen]
                seen.update(fresh)
                queue += fresh

    def _with_collectives(self) -> set[str]:
        found = {name for name in self._reachable if any(map(is_collective, self.bodies[name]))}
        queue = list(found)
        while queue:
            for caller, _, _ in self.sites[queue.pop()]:
                if caller not in found:
                    found.add(caller)
                    queue.append(caller)
        return found

    def _mark_all(self) -> None:
        """Marks what the predicates need, starting with those of loops and branches with collectives."""
        self._queue: list[tuple[str, str, Path]] = []
        for name in self._reachable:
            for line in self.bodies[name]:
                if line.op in ("while", "conditional") and any(one in self.reaches for one in inner(line)):
                    self._mark_control(name, line)
        while self._queue:
            name, line, path = self._queue.pop()
            if line in self.lines[name] and path not in self.wanted[name][line]:
                self.wanted[name][line].add(path)
                self._mark_operands(name, self.lines[name][line], path)

    def _mark_control(self, name: str, line: Line) -> None:
        if line.op == "conditional":
            self._queue.append((name, operands(line)[0], ()))
        elif line.op == "while" and known_trip_count(line) is None:
            condition = attribute(line, "condition")
            self._queue.append((condition, self.roots[condition].name, ()))

    def _mark_operands(self, name: str, line: Line, path: Path) -> None:
        given = operands(line)
        if line.op == "parameter":
            self._mark_arguments(name, line, path)
        elif line.op == "get-tuple-element":
            self._queue.append((name, given[0], (int(attribute(line, "index")), *path)))
        elif line.op == "tuple":
            chosen = [(given[path[0]], path[1:])] if path else [(one, ()) for one in given]
            self._queue += [(name, one, rest) for one, rest in chosen]
        elif is_done(line) or line.op in PASSES_ON:
            self._queue.append((name, given[0], path))
        elif base(line) in COLLECTIVES:
            # An integer that a collective makes equal in its groups may have been known before.
            operand = given[path[0] if path else 0]
            if operand in self.lines[name] and is_evaluated(self.lines[name][operand].type):
                self._queue.append((name, operand, ()))
        elif line.op in ("while", "conditional") or inner(line):
            self._mark_control(name, line)
            self._queue += [(one, self.roots[one].name, path) for one in inner(line)]
            if line.op == "while":
                self._queue.append((name, given[0], path))
        elif is_evaluated(line.type) and line.op not in OPAQUE:
            self._queue += [(name, one, ()) for one in given]

    def _mark_arguments(self, name: str, line: Line, path: Path) -> None:
        number = int(re.match(r"(\d+)\)", line.rest)[1])
        for caller, site, operand in self.sites[name]:
            self._queue.append((caller, operands(site)[number if operand is None else operand], path))
            if site.op == "while":
                body = inner(site)[0]
                self._queue.append((body, self.roots[body].name, path))
