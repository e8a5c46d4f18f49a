"""Whether the collectives of a compiled program can deadlock: all ranks' programs are followed, and their order compared.

A collective completes when all members of its group have reached it. All devices take part in a collective-permute: XLA
makes one communicator for them. Two executions are simulated: ranks wait in each collective for its members, in the order of
the schedule; and ranks wait only at the end of what was started asynchronously. Both are deterministic in what they reach:
if a rank is left waiting in one order of execution, it is in all.
"""

import dataclasses
import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import numpy as np

from megajax.estimate.collective_members import Groups, Members, Unsupported, describe, named, place
from megajax.estimate.hlo_demand import Demand, base
from megajax.estimate.hlo_parser import Line, computations
from megajax.estimate.rank_values import is_integer
from megajax.estimate.rank_walk import Event, Walk

VALUES = 6  # of integers that are inputs and decide collectives, from 0: the number of steps of PipeDream-2BW
SHOWN = 4  # waiting sets of ranks, or faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of a program's collectives.

    Attributes:
      ranks: number of ranks.
      fewest, most: collectives that a rank reaches, over ranks; those of `shared` only in `most`, one pass of their loops.
      shared: of all collectives in the text that are reached, those under a predicate that depends on data, which all
        members of their groups compute from the same values.
      faults: why ranks would wait for ever.
      unknown: what could not be determined.
      assumed: the values of inputs for which all of this holds; "" if it does for all.
    """

    ranks: int
    fewest: int = 0
    most: int = 0
    shared: int = 0
    faults: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    assumed: str = ""

    @property
    def consistent(self) -> bool:
        """Whether the program cannot deadlock in its collectives; false if that is not known."""
        return not (self.faults or self.unknown)

    def __str__(self) -> str:
        """One line, or one for each fault."""
        if self.faults:
            return f"collectives: DEADLOCK{self.assumed}: " + "\n  ".join(self.faults)
        if self.unknown:
            return "collectives: cannot tell whether their order is consistent: " + "\n  ".join(self.unknown)
        count = f"{self.most:,}" if self.fewest == self.most else f"{self.fewest:,} to {self.most:,}"
        if self.shared:
            count += f" ({self.shared} in branches that depend on data, the same on all members)"
        where = f"all {self.ranks:,} ranks" if self.ranks > 1 else "1 rank"
        return f"collectives: {count} a rank, order consistent on {where}, no deadlock{self.assumed}"


def check(text: str) -> Verdict:
    """The verdict on a compiled program, with all elements of its constants (`runtime.compat.compiled_text`)."""
    header = text.partition("\n")[0]
    counts = dict(re.findall(r"(replica_count|num_partitions)=(\d+)", header))
    replicas, partitions = (int(counts.get(name, 1)) for name in ("replica_count", "num_partitions"))
    ranks = replicas * partitions
    if "is_scheduled=true" not in header:
        return Verdict(ranks=ranks, unknown=("the program is not scheduled",))
    bodies, entry = computations(text)
    demand = Demand(bodies, entry)
    if demand.unsupported:
        lines = demand.unsupported[:SHOWN]
        return Verdict(ranks=ranks, unknown=tuple(f"{line.op} {place(line)} is not understood" for line in lines))
    verdict = _followed(demand, replicas, partitions)
    integers = [line for line in bodies[entry] if line.op == "parameter" and line.name in demand.wanted[entry]]
    names = ", ".join(place(line) for line in integers if is_integer(line))
    if verdict.faults or not (verdict.unknown and names):
        return verdict
    found = [_followed(demand, replicas, partitions, value) for value in range(VALUES)]
    worst = next((one for one in found if one.faults), None) or next((one for one in found if one.unknown), None)
    if worst:
        return dataclasses.replace(worst, assumed=f" (with {names} = {found.index(worst)})" if worst.faults else "")
    return dataclasses.replace(
        found[0],
        fewest=min(one.fewest for one in found),
        most=max(one.most for one in found),
        assumed=f" (with {names} = 0 to {VALUES - 1})",
    )


def _followed(demand: Demand, replicas: int, partitions: int, inputs: int | None = None) -> Verdict:
    walk = Walk(demand, Members(replicas, partitions), inputs)
    try:
        walk.run()
        return _judge(walk)
    except Unsupported as error:
        return Verdict(ranks=walk.ranks, unknown=(str(error),))


def _judge(walk: Walk) -> Verdict:
    """The verdict on what the ranks were found to reach."""
    faults, unknown, shared = [], [], set()
    lines = [line for _, line in walk.lines]
    groups = [walk.members.of(line) for line in lines]
    for event in dict.fromkeys(event for event in walk.events if not event.done):
        line, ranks = lines[event.line], walk.sets[event.ranks]
        if event.unknowns:
            problem = _differs(walk, event, groups[event.line])
            shared |= set() if problem else {event.line}
            unknown += [f"{describe(line)}: {problem}"] if problem else []
        faults += _ill_formed(line, groups[event.line], ranks)
        if base(line) == "collective-permute":
            faults += _one_sided(line, walk.members.pairs(line), ranks)
    always, all_ways = np.zeros((2, walk.ranks), int)
    for (number, depends), times in Counter(
        (one.ranks, bool(one.unknowns)) for one in walk.events if not one.done
    ).items():
        all_ways += times * walk.sets[number]
        always += 0 if depends else times * walk.sets[number]
    for asynchronous in (False, True):
        faults += [] if faults else _simulate(walk, groups, asynchronous)
    return Verdict(
        ranks=walk.ranks,
        fewest=int(always.min()),
        most=int(all_ways.max()),
        shared=len(shared),
        faults=tuple(dict.fromkeys(faults))[:SHOWN],
        unknown=tuple(dict.fromkeys(unknown))[:SHOWN],
    )


def _ill_formed(line: Line, groups: Groups, ranks: np.ndarray) -> list[str]:
    """Groups that have a rank twice, or not at all."""
    times = Counter(rank for group in groups for rank in group)
    if twice := [rank for rank, count in times.items() if count > 1]:
        return [f"{describe(line)} has {named(twice)} in more than one group"]
    if without := [rank for rank in np.flatnonzero(ranks).tolist() if not times[rank]]:
        return [f"{describe(line)} is reached by {named(without)}, in none of its groups"]
    return []


def _differs(walk: Walk, event: Event, groups: Groups) -> str:
    """Why members of a group may go different ways at a predicate that is not known; "" if they cannot."""
    ranks = walk.sets[event.ranks]
    for number in event.unknowns:
        predicate = walk.unknowns[number]
        for group in groups:
            here = list(group)
            if ranks[here].any() and not (ranks[here].all() and len(set(predicate.labels[here])) == 1):
                return (
                    f"whether ranks reach it is decided by {predicate.where}, by {predicate.reason}, "
                    f"which may differ between {named(here)}"
                )
    return ""


def _one_sided(line: Line, pairs: Groups, ranks: np.ndarray) -> list[str]:
    """A permute in a branch that only one rank of a pair takes."""
    for pair in pairs:
        for one, other in (pair, pair[::-1]):
            if ranks[one] and not ranks[other]:
                here = np.flatnonzero(ranks).tolist()
                return [f"{describe(line)} is in a branch of {named(here)}, and not of rank {other}, rank {one}'s peer"]
    return []


# Execution.


def _simulate(walk: Walk, groups: Sequence[Groups], asynchronous: bool) -> list[str]:
    """What ranks wait for when none can proceed; nothing if all end.

    Ranks that reach the same collectives are followed together, and one by one if they seem to be stuck.
    """
    table = np.stack(walk.sets) if walk.sets else np.zeros((0, walk.ranks), bool)
    _, classes = np.unique(table.T, axis=0, return_inverse=True)
    for numbers in (classes.reshape(-1), np.arange(walk.ranks)):
        run = _Execution(walk, groups, numbers, asynchronous)
        if run.ends():
            return []
    return run.faults()


class _Execution:
    """All classes of ranks, each with the position that it has reached."""

    def __init__(self, walk: Walk, groups: Sequence[Groups], classes: np.ndarray, asynchronous: bool):
        self.walk, self.classes, self.asynchronous = walk, classes, asynchronous
        self.count = int(classes.max()) + 1
        first = [int(np.flatnonzero(classes == one)[0]) for one in range(self.count)]
        started = {event.line for event in walk.events if event.done} if asynchronous else set()
        self.traces: list[list[tuple[int, bool, bool]]] = [[] for _ in range(self.count)]  # line, posts, waits
        within = [[one for one in range(self.count) if ranks[first[one]]] for ranks in walk.sets]
        for event in walk.events:
            if event.done and not asynchronous:
                continue
            step = (event.line, not event.done, event.done or event.line not in started)
            for one in within[event.ranks]:
                self.traces[one].append(step)
        self.needs = [self._needs(one) for one in groups]
        self.posted = [Counter() for _ in range(self.count)]
        self.positions = [0] * self.count

    def _needs(self, groups: Groups) -> list[tuple[int, ...]]:
        """The classes of all members of the groups of a class's ranks."""
        found: list[set[int]] = [set() for _ in range(self.count)]
        for group in groups:
            several = {int(self.classes[rank]) for rank in group}
            for one in several:
                found[one] |= several
        return [tuple(one) for one in found]

    def ends(self) -> bool:
        """Runs until all have ended, or none can proceed."""
        waiting: dict[int, set[int]] = defaultdict(set)
        posted, queue = self.posted, deque(range(self.count))
        arrived = [False] * self.count  # at its position
        while queue:
            one = queue.popleft()
            trace, position, own = self.traces[one], self.positions[one], posted[one]
            while position < len(trace):
                line, posts, waits = trace[position]
                if posts and not arrived[one]:
                    own[line] += 1
                    arrived[one] = True
                    queue.extend(waiting.pop(line, ()))
                count = own[line]
                if waits and any(posted[other][line] < count for other in self.needs[line][one]):
                    waiting[line].add(one)
                    break
                position, arrived[one] = position + 1, False
            self.positions[one] = position
        return all(position == len(trace) for position, trace in zip(self.positions, self.traces, strict=True))

    def faults(self) -> list[str]:
        """Where each rank waits, and for whom; the classes are single ranks."""
        lines = [line for _, line in self.walk.lines]
        stuck: dict[int, list[int]] = defaultdict(list)
        for rank, (trace, position) in enumerate(zip(self.traces, self.positions, strict=True)):
            if position < len(trace):
                stuck[trace[position][0]].append(rank)
        late = {number: self._late(number, ranks) for number, ranks in stuck.items()}
        at = {rank: number for number, ranks in stuck.items() for rank in ranks}
        after = {number: {at.get(rank, -1) for rank in ranks} for number, ranks in late.items()}

        def is_cause(number: int) -> bool:
            """Whether those that it waits for have ended, or wait for it; others wait for such ones."""
            seen, queue = set(), [number]
            while queue:
                following = after.get(queue.pop(), set()) - seen
                seen |= following
                queue += following
            return number in seen or -1 in after[number]

        how = " with asynchronous starts" if self.asynchronous else ""
        return [
            f"{named(stuck[number])} {'wait' if len(stuck[number]) > 1 else 'waits'}{how} at {describe(lines[number])} "
            f"for {self._states(late[number], lines)}"
            for number in sorted(stuck, key=is_cause, reverse=True)
        ]

    def _late(self, line: int, ranks: Sequence[int]) -> list[int]:
        """The members of these ranks' groups that have not come to the collective as often."""
        return sorted(
            {
                other
                for rank in ranks
                for other in self.needs[line][rank]
                if self.posted[other][line] < self.posted[rank][line]
            }
        )

    def _states(self, ranks: Sequence[int], lines: Sequence[Line]) -> str:
        """What these ranks do: they wait elsewhere, or have ended."""
        found: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            trace, position = self.traces[rank], self.positions[rank]
            ended = position == len(trace)
            found["ended" if ended else f"at {describe(lines[trace[position][0]])}"].append(rank)
        return ", ".join(f"{named(several)} ({state})" for state, several in list(found.items())[:SHOWN])
