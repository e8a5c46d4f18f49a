"""The best layouts of a question without pricing the others: branch and bound, best first.

`search.search` prices every legal layout. Here a heap has layouts that are known in part, with a lower bound of their time
(`bounds.py`), and layouts that are priced. The first of it is taken, again and again: if it is known in part, those that it
stands for are put in its place, with a level of ZeRO, with a schedule, whose bubble rules most of them out, with a recompute
mode, with a closer bound, then priced; if it is priced, nothing else can be faster. So the rows are those of the exhaustive
search, in its order, and most layouts are never made.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from typing import NamedTuple

from megajax.config import ParallelConfig, RunConfig
from megajax.plan.bounds import Bounds, Least
from megajax.plan.layouts import PARTS, layouts
from megajax.plan.search import (
    Candidate,
    Question,
    attention_of,
    bases,
    fastest_placement,
    filters,
    legal_run,
    no_layout,
    order,
)

__all__ = ["DEGREES", "SHAPES", "Found", "best_layouts", "fastest", "on_mesh"]

Group = Callable[[ParallelConfig], Hashable]
MESH, ZERO, SCHEDULE, RECOMPUTE = range(len(PARTS))
MODES = "none", "selective"  # of recomputation, one of which takes least
SMALLEST = 3  # layouts that are found if none fits
# What explanations compare, and what pictures of mesh shapes and pages show.
DEGREES: tuple[Group, ...] = (lambda one: ("tensor", one.tensor), lambda one: ("model", one.tensor * one.pipe))
SHAPES: tuple[Group, ...] = (
    lambda one: ("pipe, tensor", one.pipe, one.tensor),
    lambda one: ("pipe, data", one.pipe, one.data),
    lambda one: ("tensor, data", one.tensor, one.data),
)


class Found(NamedTuple):
    """What a search found.

    Attributes:
      candidates: priced layouts in the order of `search.search`; among them the best of each mesh that was asked for and of
        each group, and of groups in which nothing fits one that does not.
      priced: how many layouts were priced; all others cannot be among them.
      slower: groups whose layouts all exceed the question's fastest by more than the search looked at, or do not fit.
    """

    candidates: list[Candidate]
    priced: int
    slower: frozenset[Hashable] = frozenset()


class Node(NamedTuple):
    """Layouts that share these fields; `place` is their position among all that are declared.

    Attributes:
      part: which fields are known: those of `PARTS[part]` and before. Until the recompute mode is, none stands for it.
      least: what parts of a step take at least, until the schedule is known.
      bounded: the bound is the closest.
    """

    place: tuple[int, ...]
    base: RunConfig
    run: RunConfig
    part: int
    least: Least | None = None
    bounded: bool = False


def best_layouts(question: Question, rows: int = 1, groups: Sequence[Group] = (), within: float = math.inf) -> Found:
    """The layouts of `search.search` that are the first of the first `rows` meshes, and the first of each of `groups`.

    Args:
      rows: how many meshes, the fastest first.
      groups: functions of a layout's mesh; the best one with each of their values is found.
      within: of groups only those are looked for that take at most so many times the fastest layout's time.

    Raises:
      NoLayout: there is no legal layout at all.
    """
    return _BestFirst(question, rows, groups, within).found()


def fastest(question: Question, longest: float = math.inf) -> Candidate | None:
    """The layout that the planner chooses; None if none is legal, none fits, or none takes at most `longest` seconds."""
    search = _BestFirst(question)
    search.run(longest)
    found = (one for one in search.in_order() if one.time.total <= longest)
    return next(found, None)


def on_mesh(question: Question, mesh: tuple[int, int, int], groups: Sequence[Group] = ()) -> list[Candidate]:
    """The legal layouts with these sizes (tensor, pipe, data), in the order of `search.search`.

    Args:
      groups: functions of a layout. Given any, layouts are left out that come after the first with the same value of each
        of them: are slower, or larger if none fits.
    """
    sizes = dict(zip(("tensor", "pipe", "data"), mesh, strict=True))
    filtered = filters(question)
    for name, size in sizes.items():
        filtered[name] = lambda declared, layout, size=size: [one for one in declared if one == size]
    entries: list[_Entry] = []
    for base in bases(question):
        bounds = Bounds(question.gpu, question.gpus)
        for run in (legal_run(question, base, fields) for fields in layouts(base, question.gpus, filtered)):
            if run is not None:
                seconds, memory = (bounds.seconds(run) or 0.0, bounds.scheduled_memory(run)) if groups else (0.0, 0.0)
                entries.append(_Entry(len(entries), run, seconds, memory))
    if not groups:
        return sorted((fastest_placement(question, one.run) for one in entries), key=order)

    found: dict[int, Candidate] = {}  # by place
    first: dict[Hashable, tuple] = {}  # of `order`, the least that was found with each value

    def price(one: _Entry, bound: tuple[bool, float]) -> None:
        keys = [(number, group(one.run.parallel)) for number, group in enumerate(groups)]
        if any(first.get(key, bound) >= bound for key in keys):
            found[one.place] = candidate = fastest_placement(question, one.run)
            for key in keys:
                first[key] = min(first.get(key, (True, math.inf)), order(candidate)[:2])

    fits = lambda one: one.memory <= question.memory_limit  # noqa: E731
    for one in sorted(filter(fits, entries), key=lambda one: one.seconds):
        price(one, (False, one.seconds))
    larger = itertools.filterfalse(fits, entries)  # in the order after all that fit, and by memory
    for one in sorted(larger, key=lambda one: one.memory):
        price(one, (True, one.memory))
    return sorted((found[place] for place in sorted(found)), key=order)


class _Entry(NamedTuple):
    """A layout that may be priced: its place among all, and bounds of its seconds and bytes."""

    place: int
    run: RunConfig
    seconds: float
    memory: float


class _BestFirst:
    """One search. A heap's entry is (seconds, 0 for a node or 1 for a candidate, its order, its place, itself)."""

    def __init__(self, question: Question, rows: int = 1, groups: Sequence[Group] = (), within: float = math.inf):
        question.gpu.peak(question.precision)  # raises if the GPU does not support it
        self.question, self.rows, self.groups, self.within = question, rows, groups, within
        self.filters = filters(question)
        self.meshes: set[Hashable] = set()  # of which the best layout is found
        self.closed: set[Hashable] = set()  # groups likewise, of those that are seen
        self.seen: set[Hashable] = set()
        self.fitting: list[tuple[tuple, tuple, Candidate]] = []
        self.priced: dict[RunConfig, Candidate | None] = {}
        self.limit = math.inf  # seconds, beyond which no group is looked for

    def found(self) -> Found:
        """Runs the search."""
        return self._sorted(self.run())

    def run(self, longest: float = math.inf) -> frozenset[Hashable]:
        """Finds layouts that fit, up to so many seconds; returns the groups that are slower."""
        heap = []
        for number, base in enumerate(bases(self.question)):
            bounds = Bounds(self.question.gpu, self.question.gpus)
            for node in self._meshes(number, base):
                self.seen.update(self._keys(node.run.parallel))
                least = bounds.least(node.run, kernels=True, modes=MODES, once=False)
                heap.append((bounds.unscheduled_seconds(node.run, least), 0, (), node.place, node, bounds))
        heapq.heapify(heap)
        while heap:
            seconds, priced, sort, place, one, bounds = heapq.heappop(heap)
            if seconds > longest:
                break
            if len(self.meshes) >= self.rows and (seconds > self.limit or self.closed >= self.seen):
                heapq.heappush(heap, (seconds, priced, sort, place, one, bounds))
                break
            if not self._wanted(one.run.parallel):
                continue
            if priced:
                self._take(one.run.parallel)
                self.limit = min(self.limit, self.within * seconds)
            elif not one.bounded:
                for bound, node in self._closer(one, bounds):
                    if bound is not None:
                        heapq.heappush(heap, (max(seconds, bound), 0, (), node.place, node, bounds))
            elif (candidate := self._price(one)) is not None and candidate.fits:
                sort = order(candidate)[1:]
                self.fitting.append((sort, place, candidate))
                heapq.heappush(heap, (candidate.time.total, 1, sort, place, candidate, bounds))
        return frozenset({key for *_, one, _ in heap for key in self._keys(one.run.parallel)} - self.closed)

    def _closer(self, node: Node, bounds: Bounds) -> Iterator[tuple[float | None, Node]]:
        """The layouts that a node stands for, of which more is known, with bounds of their time; or it with a closer one."""
        limit = self.question.memory_limit
        if node.part == MESH:
            for one in self._extended(node, ZERO):
                if bounds.memory(one.run) <= limit:
                    least = bounds.least(one.run, kernels=True, modes=MODES)
                    yield bounds.unscheduled_seconds(one.run, least), one._replace(least=least)
        elif node.part == ZERO:
            for one in self._extended(node, SCHEDULE):
                yield bounds.seconds(one.run, node.least), one
        elif node.part == SCHEDULE:
            for one in self._extended(node, RECOMPUTE):
                if bounds.memory_of_a_microbatch(one.run) <= limit:
                    yield bounds.seconds(one.run, bounds.least(one.run, kernels=True)), one
        elif bounds.scheduled_memory(node.run) <= limit:
            yield bounds.seconds(node.run), node._replace(bounded=True)

    def in_order(self) -> list[Candidate]:
        """The layouts that were priced and fit, in the order of `search.search`."""
        return [one for *_, one in sorted(self.fitting, key=lambda entry: entry[:2])]

    def _meshes(self, number: int, base: RunConfig) -> Iterator[Node]:
        """The nodes of which the first part is known, with attention resolved, for the base of this number."""
        run = base.with_layout(zero=0, recompute="none", recompute_blocks=1)  # with which a step takes least
        for node in self._extended(Node((number,), base, run, -1), MESH):
            parallel = node.run.parallel
            attention = attention_of(base, self.question.gpu, parallel.attention, parallel.ring_ranks)
            if attention is not None:
                yield node._replace(run=node.run.with_layout(attention=attention))

    def _extended(self, node: Node, part: int) -> Iterator[Node]:
        """The node with each of the values of `PARTS[part]`."""
        chosen = {name: one for name, one in self.filters.items() if name in PARTS[part]}
        for number, fields in enumerate(layouts(node.run, self.question.gpus, chosen)):
            yield Node((*node.place, number), node.base, node.run.with_layout(**fields), part)

    def _complete(self, node: Node) -> Iterator[Node]:
        """The node of which all but these are known with each schedule and recompute mode."""
        for one in self._extended(node, SCHEDULE):
            yield from self._extended(one, RECOMPUTE)

    def _price(self, node: Node) -> Candidate | None:
        """The candidate; None if it is not legal."""
        if node.run not in self.priced:
            run = legal_run(self.question, node.base, vars(node.run.parallel))
            self.priced[node.run] = run and fastest_placement(self.question, run)
        return self.priced[node.run]

    @property
    def _count(self) -> int:
        """Layouts that were priced."""
        return sum(one is not None for one in self.priced.values())

    def _keys(self, parallel: ParallelConfig) -> list[Hashable]:
        return [group(parallel) for group in self.groups]

    def _wanted(self, parallel: ParallelConfig) -> bool:
        """Whether a layout may be the best of something that is asked for."""
        if len(self.meshes) < self.rows and _mesh(parallel) not in self.meshes:
            return True
        return any(key not in self.closed for key in self._keys(parallel))

    def _take(self, parallel: ParallelConfig) -> None:
        """Notes that the best layout of a mesh and of groups is found."""
        if len(self.meshes) < self.rows:
            self.meshes.add(_mesh(parallel))
        self.closed.update(self._keys(parallel))

    def _sorted(self, slower: frozenset[Hashable]) -> Found:
        """The candidates, and of groups in which none fits one that does not."""
        candidates = self.in_order()
        if not candidates:
            candidates = self._smallest()
            if not candidates:
                raise no_layout(self.question)
            return Found(candidates, self._count)
        missing = self.seen - self.closed - slower
        refused = []
        for _, node in self._by_memory(missing) if missing else ():
            if missing.isdisjoint(keys := self._keys(node.run.parallel)):
                continue
            one = next((one for one in map(self._price, self._complete(node)) if one is not None), None)
            if one is not None:
                missing.difference_update(keys)
                refused.append(one)
        return Found(candidates + sorted(refused, key=order), self._count, slower)

    def _by_memory(self, keys: Set[Hashable] | None = None) -> list[tuple[float, Node]]:
        """Nodes without schedule and recompute mode, all or these groups', after a bound of their memory, smallest first."""
        found = []
        for number, base in enumerate(bases(self.question)):
            bounds = Bounds(self.question.gpu, self.question.gpus)
            for node in self._meshes(number, base):
                if keys is None or not keys.isdisjoint(self._keys(node.run.parallel)):
                    found += [(bounds.memory(one.run), one) for one in self._extended(node, ZERO)]
        return sorted(found, key=lambda entry: (entry[0], entry[1].place))

    def _smallest(self) -> list[Candidate]:
        """Where nothing fits: the SMALLEST legal layouts, those with least memory first."""
        found: list[Candidate] = []
        for memory, node in self._by_memory():
            if len(found) >= SMALLEST and found[SMALLEST - 1].peak <= memory:
                break
            priced = [one for one in map(self._price, self._complete(node)) if one is not None]
            found = sorted(found + priced, key=order)[:SMALLEST]
        return found


def _mesh(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.tensor, parallel.pipe, parallel.data
