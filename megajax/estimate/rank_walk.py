"""Walks a compiled HLO module as all its ranks run it, and lists the collectives that each reaches.

All ranks are walked at once: at a branch or a loop whose predicate differs, the ranks that take it are followed. Predicates
are evaluated (`hlo_scalars`). Those that depend on data are not known: both ways are followed, and the collectives on them
are marked with what the ranks have to share, so that all members of a group go the same way.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from megajax.estimate.collective_members import Members, Unsupported, place
from megajax.estimate.hlo_demand import (
    PASSES_ON,
    Demand,
    inner,
    is_collective,
    is_done,
)
from megajax.estimate.hlo_parser import Line, known_trip_count, operands
from megajax.estimate.hlo_scalars import attribute
from megajax.estimate.rank_labels import Value
from megajax.estimate.rank_values import RankValues, Tree

MOST_STEPS = 20_000_000  # lines to follow, over all iterations


class Event(NamedTuple):
    """A collective that some ranks reach at the same time.

    Attributes:
      ranks: number of the set of ranks, of `Walk.sets`.
      line: number of the collective, of `Walk.lines`.
      done: whether it is the end of one that was started before.
      unknowns: numbers of the predicates around it that are not known, of `Walk.unknowns`.
    """

    ranks: int
    line: int
    done: bool
    unknowns: tuple[int, ...]


class Unknown(NamedTuple):
    """A predicate that depends on data: ranks with the same label [ranks] have the same value of it."""

    labels: np.ndarray
    where: str
    reason: str


class Walk:
    """The program of all ranks.

    `inputs`: as for `RankValues`.

    Attributes:
      sets: sets of ranks, as masks [ranks].
      lines: the collectives that are reached, each with its computation.
      unknowns: predicates that depend on data, around collectives.
      events: what the ranks reach. Those of each rank are in its order.
    """

    def __init__(self, demand: Demand, members: Members, inputs: int | None = None):
        self.demand, self.members, self.values = demand, members, RankValues(demand, members, inputs)
        self.ranks = self.values.ranks
        self.sets: list[np.ndarray] = []
        self.lines: list[tuple[str, Line]] = []
        self.unknowns: list[Unknown] = []
        self.events: list[Event] = []
        self._set_numbers: dict[bytes, int] = {}
        self._line_numbers: dict[tuple[str, str], int] = {}
        self._unknown_numbers: dict[tuple, int] = {}
        self._within: tuple[int, ...] = ()
        self._steps = 0

    def run(self) -> None:
        """Fills `events`."""
        entry = self.demand.entry
        arguments = [self.values.input(line) for line in self.demand.bodies[entry] if line.op == "parameter"]
        self._compute(entry, dict(arguments), np.ones(self.ranks, bool))

    def _compute(self, name: str, arguments: dict[int, Tree], ranks: np.ndarray) -> Tree:
        """Runs a computation on some ranks; returns the needed parts of its result."""
        found: dict[str, Tree] = {}
        for line in self.demand.steps[name]:
            found[line.name] = self._line(name, line, found, arguments, ranks)
        self._steps += len(found)
        if self._steps > MOST_STEPS:
            raise Unsupported(f"more than {MOST_STEPS} operations decide the collectives")
        return found.get(self.demand.roots[name].name)

    def _line(self, name: str, line: Line, found: dict, arguments: dict[int, Tree], ranks: np.ndarray) -> Tree:
        given = operands(line)
        match line.op:
            case "parameter":
                return arguments.get(int(re.match(r"(\d+)\)", line.rest)[1]))
            case "tuple":
                return {i: found[one] for i, one in enumerate(given) if found.get(one) is not None}
            case "get-tuple-element":
                whole = found.get(given[0])
                return whole.get(int(attribute(line, "index"))) if isinstance(whole, dict) else None
            case "while":
                return self._loop(name, line, found.get(given[0]), ranks)
            case "conditional":
                return self._branch(name, line, [found.get(one) for one in given], ranks)
        if is_done(line):
            start = self.demand.lines[name].get(given[0])
            if start is not None and is_collective(start):
                self._record(name, start, ranks, done=True)
            return found.get(given[0])
        if line.op in PASSES_ON:
            return found.get(given[0])
        if is_collective(line):
            self._record(name, line, ranks)
            return self.values.received(name, line, found, ranks) if line.name in self.demand.wanted[name] else None
        if called := inner(line):
            return self._compute(called[0], {i: found.get(one) for i, one in enumerate(given)}, ranks)
        return self.values.operation(name, line, [found.get(one) for one in given])

    def _record(self, name: str, line: Line, ranks: np.ndarray, done: bool = False) -> None:
        key = ranks.tobytes()
        if key not in self._set_numbers:
            self._set_numbers[key] = len(self.sets)
            self.sets.append(ranks.copy())
        if (name, line.name) not in self._line_numbers:
            self._line_numbers[name, line.name] = len(self.lines)
            self.lines.append((name, line))
        self.events.append(Event(self._set_numbers[key], self._line_numbers[name, line.name], done, self._within))

    # Branches and loops.

    def _branch(self, name: str, line: Line, given: list[Tree], ranks: np.ndarray) -> Tree:
        predicate, branches = given[0], inner(line)
        if not isinstance(predicate, Value):
            predicate = self.values.labels.differing(f"the predicate of {place(line)}")
        unknown = np.zeros(self.ranks, bool) if predicate.labels is None else predicate.labels >= 0
        if (unknown & ranks).any():
            return self._either(name, line, predicate, given[1:], ranks)
        chosen = predicate.array
        if chosen.dtype == bool:
            chosen = np.where(chosen, 0, 1)
        chosen = np.broadcast_to(chosen.astype(np.int64), self.ranks)
        chosen = np.where((chosen < 0) | (chosen >= len(branches)), len(branches) - 1, chosen)
        result: Tree = None
        for number in np.unique(chosen[ranks]):
            taken = ranks & (chosen == number)
            outcome = self._compute(branches[number], {0: given[1 + number]}, taken)
            result = outcome if result is None else self._merged(taken, outcome, result)
        return result

    def _either(self, name: str, line: Line, predicate: Value, given: list[Tree], ranks: np.ndarray) -> Tree:
        """A conditional whose predicate is not known: all branches are followed."""
        reason = self._reason(predicate, ranks)
        outer, self._within = self._within, (*self._within, self._unknown(line, predicate, reason))
        outcomes = [self._compute(one, {0: given[i]}, ranks) for i, one in enumerate(inner(line))]
        self._within = outer
        return self._joined(predicate, outcomes)

    def _reason(self, predicate: Value, ranks: np.ndarray) -> str:
        labels = [] if predicate.labels is None else predicate.labels[ranks]
        return next((self.values.labels.reason(one) for one in labels if one >= 0), "data")

    def _unknown(self, line: Line, predicate: Value, reason: str) -> int:
        _, classes = np.unique(self.values.labels.numbers_of(predicate), return_inverse=True)
        key = (line.name, classes.tobytes())
        if key not in self._unknown_numbers:
            self._unknown_numbers[key] = len(self.unknowns)
            self.unknowns.append(Unknown(classes, f"{line.op} {place(line)}", reason))
        return self._unknown_numbers[key]

    def _joined(self, predicate: Value, outcomes: list[Tree]) -> Tree:
        """Results of branches of which it is not known which is taken."""
        if any(isinstance(one, dict) for one in outcomes):
            present = [one for one in outcomes if isinstance(one, dict)]
            parts = set.intersection(*(set(one) for one in present)) if len(present) == len(outcomes) else ()
            return {i: self._joined(predicate, [one[i] for one in outcomes]) for i in parts}
        if any(not isinstance(one, Value) for one in outcomes):
            return None
        first = outcomes[0]
        if all(one.labels is None for one in outcomes) and all(
            one.array.shape == first.array.shape and (one.array == first.array).all() for one in outcomes
        ):
            return first
        return self.values.labels.computed([predicate, *outcomes])

    def _merged(self, ranks: np.ndarray, new: Tree, old: Tree) -> Tree:
        if isinstance(new, dict) and isinstance(old, dict):
            return {i: self._merged(ranks, new[i], old[i]) for i in new.keys() & old.keys()}
        return self.values.labels.chosen(ranks, new, old) if isinstance(new, Value) and isinstance(old, Value) else None

    def _loop(self, name: str, line: Line, state: Tree, ranks: np.ndarray) -> Tree:
        body, known = inner(line)[0], known_trip_count(line)
        if known is not None:
            for _ in range(known):
                state = self._merged(ranks, self._compute(body, {0: state}, ranks), state)
            return state
        condition = attribute(line, "condition")
        while ranks.any():
            predicate = self._compute(condition, {0: state}, ranks)
            if not isinstance(predicate, Value):
                predicate = self.values.labels.differing(f"the condition of {place(line)}")
            if predicate.labels is not None and (predicate.labels >= 0)[ranks].any():
                return self._some_iterations(line, self._reason(predicate, ranks), state, ranks)
            ranks = ranks & predicate.array
            if ranks.any():
                state = self._merged(ranks, self._compute(body, {0: state}, ranks), state)
        return state

    def _some_iterations(self, line: Line, reason: str, state: Tree, ranks: np.ndarray) -> Tree:
        """A loop whose trip count is not known, followed once, with a state as after any number of iterations.

        Ranks are assumed to share what changes in the loop, and no longer where an iteration makes it differ.
        """
        body, condition, outer = inner(line)[0], attribute(line, "condition"), self._within
        kept = self._kept(body)
        assumed = self._assumed(state, kept)
        while True:
            before = len(self.events)
            predicate = self._compute(condition, {0: assumed}, ranks)
            if not isinstance(predicate, Value):
                predicate = self.values.labels.differing(f"the condition of {place(line)}")
            self._within = (*outer, self._unknown(line, predicate, reason))
            after = self._compute(body, {0: assumed}, ranks)
            self._within = outer
            refined, same = self._refined(line, assumed, after, predicate, kept)
            if same:
                return self._merged(ranks, assumed, state)
            del self.events[before:]
            assumed = refined

    def _kept(self, body: str) -> set[int]:
        """The parts of a loop's state that its body returns as they are."""
        lines, root = self.demand.lines[body], self.demand.roots[body]
        if root.op != "tuple":
            return set()
        kept = set()
        for index, one in enumerate(operands(root)):
            line = lines.get(one)
            if line and line.op == "get-tuple-element" and int(attribute(line, "index")) == index:
                kept |= {index} if lines[operands(line)[0]].op == "parameter" else set()
        return kept

    def _assumed(self, state: Tree, kept: Collection[int] = ()) -> Tree:
        if isinstance(state, dict):
            return {i: one if i in kept else self._assumed(one) for i, one in state.items()}
        return self.values.labels.computed([state]) if isinstance(state, Value) else None

    def _refined(self, line: Line, assumed: Tree, after: Tree, predicate: Value, kept: Collection[int] = ()):
        """(the assumption with ranks apart that an iteration makes differ, whether it is the same)."""
        if isinstance(assumed, dict):
            parts, same = {}, True
            for i, one in assumed.items():
                later = after.get(i) if isinstance(after, dict) else None
                if i in kept:
                    parts[i] = one
                    continue
                parts[i], still = self._refined(line, one, later, predicate)
                same &= still
            return parts, same
        if not isinstance(after, Value) or not isinstance(assumed, Value):
            missing = isinstance(assumed, Value)
            apart = self.values.labels.differing(f"the state of the loop {line.name}")
            return (apart, len(set(assumed.labels)) == self.ranks) if missing else (assumed, True)
        refined = self.values.labels.computed([assumed, after, predicate])
        return refined, len(set(refined.labels)) == len(set(self.values.labels.numbers_of(assumed)))
