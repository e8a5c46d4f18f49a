"""The best layouts of a question without pricing the others: branch and bound, best first.

`search.search` prices every legal layout. Here a heap has layouts that are known in part, with a lower bound of their time
(`bounds.py`), and layouts that are priced. The first of it is taken, again and again: if it is known in part, those that it
stands for are put in its place, with a recompute mode, with a closer bound, with a schedule, then priced; if it is priced,
nothing else can be faster. So the rows are those of the exhaustive search, in its order, and most layouts are never priced.
"""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from megajax.config import ParallelConfig, RunConfig
from megajax.plan.bounds import Bounds
from megajax.plan.layouts import SCHEDULE_FIELDS, Fields, layouts
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
RECOMPUTE_FIELDS = ("recompute_blocks", "recompute")
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


@dataclasses.dataclass(frozen=True)
class Node:
    """Layouts that share these fields; `place` is their position among all that are declared.

    Attributes:
      whole: all but the schedule's fields are known; until then the recompute mode is not either, and none stands for it.
      bounded: their bound is `Bounds.seconds`, or closer; until then it is `Bounds.least_seconds`.
      scheduled: the schedule's fields are known too.
    """

    place: tuple[int, ...]
    base: RunConfig
    fields: Fields
    whole: bool = False
    bounded: bool = False
    scheduled: bool = False

    @functools.cached_property
    def run(self) -> RunConfig:
        return self.base.with_layout(**self.fields)


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
      groups: functions of a layout. Given any, layouts are left out that are slower than the fastest with the same value of
        each of them.
    """
    sizes = dict(zip(("tensor", "pipe", "data"), mesh, strict=True))
    filtered = filters(question)
    for name, size in sizes.items():
        filtered[name] = lambda declared, layout, size=size: [one for one in declared if one == size]
    entries = []
    for base in bases(question):
        bounds = Bounds(question.gpu, question.gpus)
        runs = (legal_run(question, base, fields) for fields in layouts(base, question.gpus, filtered))
        entries += [
            ((bounds.scheduled_seconds(run) if groups else None) or 0.0, run) for run in runs if run is not None
        ]
    times: dict[Hashable, float] = {}  # of the fastest with each value
    found: dict[int, Candidate] = {}  # by place
    for place, (bound, run) in sorted(enumerate(entries), key=lambda entry: entry[1][0]):
        keys = [(number, group(run.parallel)) for number, group in enumerate(groups)]
        if groups and all(times.get(key, math.inf) < bound for key in keys):
            continue
        found[place] = one = fastest_placement(question, run)
        for key in keys if one.fits else ():
            times[key] = min(times.get(key, math.inf), one.time.total)
    return sorted((found[place] for place in sorted(found)), key=order)


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
        self.priced: dict[tuple[int, ...], Candidate | None] = {}  # by place
        self.limit = math.inf  # seconds, beyond which no group is looked for

    def found(self) -> Found:
        """Runs the search."""
        return self._sorted(*self.run())

    def run(self, longest: float = math.inf) -> tuple[list[tuple[float, tuple[int, ...], Node]], frozenset[Hashable]]:
        """Finds layouts that fit, up to so many seconds.

        Returns all nodes without a schedule, each after a bound of its memory and its place, and the groups that are slower.
        """
        heap, nodes = [], []
        for number, base in enumerate(bases(self.question)):
            bounds = Bounds(self.question.gpu, self.question.gpus)
            for place, fields in enumerate(self._unscheduled(base)):
                node = Node((number, place), base, fields)
                run = node.run
                memory = bounds.memory(run)
                self.seen.update(self._keys(run.parallel))
                nodes.append((memory, node.place, node))
                if memory <= self.question.memory_limit:
                    heap.append((bounds.least_seconds(run), 0, (), node.place, node, bounds))
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
            elif not one.whole:
                for node in self._recomputing(one):
                    least = bounds.least_seconds(node.run, kernels=True)
                    heapq.heappush(heap, (max(seconds, least), 0, (), node.place, node, bounds))
            elif not one.bounded:
                if bounds.memory_of_a_microbatch(one.run) > self.question.memory_limit:
                    continue
                closer = max(seconds, bounds.seconds(one.run))
                heapq.heappush(heap, (closer, 0, (), place, dataclasses.replace(one, bounded=True), bounds))
            elif not one.scheduled:
                for node in self._schedules(one):
                    bound = bounds.scheduled_seconds(node.run)
                    if bound is not None and bounds.scheduled_memory(node.run) <= self.question.memory_limit:
                        heapq.heappush(heap, (max(seconds, bound), 0, (), node.place, node, bounds))
            elif (candidate := self._price(one)) is not None and candidate.fits:
                sort = order(candidate)[1:]
                self.fitting.append((sort, place, candidate))
                heapq.heappush(heap, (candidate.time.total, 1, sort, place, candidate, bounds))
        slower = {key for *_, one, _ in heap for key in self._keys(one.run.parallel)} - self.closed
        return nodes, frozenset(slower)

    def in_order(self) -> list[Candidate]:
        """The layouts that were priced and fit, in the order of `search.search`."""
        return [one for *_, one in sorted(self.fitting, key=lambda entry: entry[:2])]

    def _unscheduled(self, base: RunConfig) -> Iterator[Fields]:
        later = (*SCHEDULE_FIELDS, *RECOMPUTE_FIELDS)
        known = {name: values for name, values in self.filters.items() if name not in later}
        for fields in layouts(base, self.question.gpus, known):
            ranks = 1 if fields["context_exchange"] == "all_to_all" else fields["context"]
            attention = attention_of(base, self.question.gpu, fields["attention"], ranks)
            if attention is not None:
                yield {**fields, "attention": attention, "recompute": "none", "recompute_blocks": 1}

    def _recomputing(self, node: Node) -> Iterator[Node]:
        """The node with each recompute mode."""
        chosen = {name: values for name, values in self.filters.items() if name in RECOMPUTE_FIELDS}
        for number, fields in enumerate(layouts(node.run, self.question.gpus, chosen)):
            yield Node((*node.place, number), node.base, fields, whole=True)

    def _schedules(self, node: Node) -> Iterator[Node]:
        """The node with each schedule and its options."""
        chosen = {name: values for name, values in self.filters.items() if name in SCHEDULE_FIELDS}
        run = node.run
        for number, fields in enumerate(layouts(run, self.question.gpus, chosen)):
            yield Node((*node.place, number), node.base, fields, whole=True, bounded=True, scheduled=True)

    def _complete(self, node: Node) -> Iterator[Node]:
        """The node with each recompute mode and schedule."""
        return itertools.chain.from_iterable(map(self._schedules, self._recomputing(node)))

    def _price(self, node: Node) -> Candidate | None:
        """The candidate; None if it is not legal."""
        if node.place not in self.priced:
            run = legal_run(self.question, node.base, node.fields)
            self.priced[node.place] = run and fastest_placement(self.question, run)
        return self.priced[node.place]

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

    def _sorted(self, nodes: list[tuple[float, tuple[int, ...], Node]], slower: frozenset[Hashable]) -> Found:
        """The candidates; `nodes` are all of those without a schedule, with a bound of their memory."""
        candidates = self.in_order()
        nodes.sort(key=lambda entry: entry[:2])
        if not candidates:
            candidates = self._smallest(nodes)
            if not candidates:
                raise no_layout(self.question)
            return Found(candidates, self._count)
        missing = self.seen - self.closed - slower
        refused = []
        for *_, node in nodes if missing else ():
            if missing.isdisjoint(keys := self._keys(node.run.parallel)):
                continue
            one = next((one for one in map(self._price, self._complete(node)) if one is not None), None)
            if one is not None:
                missing.difference_update(keys)
                refused.append(one)
        return Found(candidates + sorted(refused, key=order), self._count, slower)

    def _smallest(self, nodes: list[tuple[float, tuple[int, ...], Node]]) -> list[Candidate]:
        """Where nothing fits: the SMALLEST legal layouts, those with least memory first."""
        found: list[Candidate] = []
        for memory, _, node in nodes:
            if len(found) >= SMALLEST and found[SMALLEST - 1].peak <= memory:
                break
            priced = [one for one in map(self._price, self._complete(node)) if one is not None]
            found = sorted(found + priced, key=order)[:SMALLEST]
        return found


def _mesh(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.tensor, parallel.pipe, parallel.data
