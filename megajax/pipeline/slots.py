"""Turns a schedule into the int32 arrays that the compiled program reads.

Every rank runs the same program, and reads its operation of a tick from its column of these arrays: the chunk and the
microbatch, the slot of the stash that a forward writes and its backward reads, and the slot of an inbox in which
a received activation or gradient waits until it is used. Slots are assigned here, ahead of time; their number is the
largest number of values alive at once. For 1F1B on 2 ranks with 3 microbatches (a backward takes two ticks), the
operations and the slots are

    tick              0   1   2   3   4   5   6   7   8   9   10  11
    rank 0            F0  F1  .   .   B0  B0  F2  B1  B1  .   B2  B2
      forward.stash   0   1                   0
      backward.stash                  0   0       1   1       0   0
    rank 1            .   F0  B0  B0  F1  B1  B1  F2  B2  B2  .   .
      forward.stash       0           0           0
      backward.stash          0   0       0   0       0   0

so rank 0 needs `stash_slots` = 2, and microbatch 2 reuses the slot of microbatch 0. This file imports no jax.
"""

import dataclasses
import heapq
import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, Segment
from megajax.schedules.stages import Placement

Route = tuple[tuple[int, int], ...]  # (sender, receiver) pairs of pipeline ranks
Interval = tuple[int, int, object]
Column = Any  # int32: [ticks, ranks] in `Tables`, [ticks] of one rank in its scan, a scalar in one tick
Times = dict[tuple[str, int, int], int]  # (result, stage, microbatch) -> tick


class OperationRow(NamedTuple):
    """One operation of a tick: a forward, a backward (whole, a part of it, or I), or W.

    Where `on` is 0 the rank has no work. The other fields are then 0, except `parts`, which is 1, `inbox`, which is the
    inbox's extra slot, and in paired ticks `stash` of a forward, which is a slot that is free in that tick.
    """

    on: Column  # 1 if the rank has work
    chunk: Column  # which of the rank's chunks
    stage: Column  # the chunk's global stage
    microbatch: Column
    first: Column  # 1 on the model's first stage
    last: Column  # 1 on the model's last stage
    part: Column  # which part, from 0: of a forward from the chunk's first blocks on, of a backward from its last ones
    parts: Column  # in how many parts the operation runs
    stash: Column  # slot of the stash that a forward writes and that a backward and W read
    kept: Column  # slot that I writes and W reads
    inbox: Column  # slot in which the operation's input waits


class EndRow(NamedTuple):
    """Whether a rank runs the embedding, the head or the embedding's backward in a tick, and for which microbatch.

    Where all ranks share these layers, every rank has the same values.
    """

    on: Column
    microbatch: Column


class TickRow(NamedTuple):
    """The operations of all ranks in a tick. In a mixed tick a rank that has a forward and a backward overlaps them.

    `activation_arrivals[j]` is the inbox slot for the activation received over route j at the end of the tick, and
    `gradient_arrivals[j]` the one for the gradient. In paired ticks a gradient is received one tick after it was sent,
    between that tick's forward and backward, and its slot is in that row. The slot after an inbox's last one takes
    what no operation reads.
    """

    forward: OperationRow
    backward: OperationRow
    weight: OperationRow
    embed: EndRow
    head: EndRow
    embed_backward: EndRow
    loss_gradient: Column  # slot of the gradient inbox in which the head leaves the gradient of its input
    activation_arrivals: tuple[Column, ...]
    gradient_arrivals: tuple[Column, ...]
    sends: Column  # 1, on all ranks, if an operation reads any of what a mixed tick sends


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule as arrays, and the sizes of the buffers that they index.

    Attributes:
      schedule: the schedule itself.
      rows: int32 [ticks, ranks] in each field; None if the program computes its rows at run time (pipedream_2bw).
      stash_slots: chunk activations stashed at once.
      kept_slots: I whose W has not run yet, at once; 0 if backwards are not split.
      inbox_slots: received activations ("F") and gradients ("B") that wait at once, without the extra slot.
      routes: for activations ("F") and gradients ("B"), the (sender, receiver) pairs of each collective permute.
    """

    schedule: Schedule
    rows: TickRow | None
    stash_slots: int
    kept_slots: int
    inbox_slots: dict[str, int]
    routes: dict[str, tuple[Route, ...]]

    @property
    def backward_parts(self) -> list[int]:
        """The numbers of parts in which backwards run; where rows are computed at run time they run whole.

        Those that overlap a forward do not count.
        """
        if self.rows is None or self.schedule.paired:
            return [1]
        alone = (self.rows.backward.on == 1) & (self.rows.forward.on == 0)
        return np.unique(self.rows.backward.parts[alone]).tolist()

    def pairs(self, segment: Segment, column: str) -> list[tuple[int, int]]:
        """The (forward's, backward's) "chunk", or slot of the "stash", that ranks have in the same tick of a segment."""
        rows, ticks = (self.rows.forward, self.rows.backward), slice(segment.start, segment.stop)
        both = (rows[0].on & rows[1].on)[ticks] == 1
        return sorted(set(zip(*(getattr(row, column)[ticks][both].tolist() for row in rows), strict=True)))

    @property
    def slots_apart(self) -> bool:
        """Whether the stash can be an array for each slot: XLA then knows which of them a tick writes, and which it reads.

        With one stage ticks alternate between two slots, which its first and its last tick have alone.
        """
        return self.rows is not None and self.schedule.stages == 1 and self.stash_slots == 2

    def only_slot(self, row: OperationRow, segment: Segment) -> int:
        """With `slots_apart`, the slot of a segment's forward or backward without the other."""
        return np.unique(row.stash[segment.start : segment.stop]).item()

    def end_combinations(self, segment: Segment) -> Counter:
        """Which of a tick's head, embedding's backward and next tick's embedding a merged or mixed segment has together.

        Returns:
          For each combination, a tuple of "head", "embed_backward" and "embed", in how many ticks it occurs, summed over
          ranks; () is that of ticks without any of the three.
        """
        counts, columns = Counter(), {"head": self.rows.head.on, "embed_backward": self.rows.embed_backward.on}
        columns["embed"] = np.roll(self.rows.embed.on, -1, axis=0)
        for tick, rank in itertools.product(range(segment.start, segment.stop), range(self.schedule.stages)):
            names = {name for name, on in columns.items() if on[tick, rank]}
            names -= {"embed"} if tick + 1 == segment.stop else set()  # see `Rank.prepare`
            counts[tuple(name for name in columns if name in names)] += 1
        return counts

    def end_choices(self, segment: Segment) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
        """The combinations to compile, with those of `end_combinations` for which each runs.

        One that occurs less than an eighth as often as another that has more runs as that one, on masked inputs.
        """
        counts, choices = self.end_combinations(segment), {}
        for names in sorted(counts, key=len, reverse=True):
            larger = (one for one in choices if names and set(names) < set(one) and counts[one] > 8 * counts[names])
            choices.setdefault(next(larger, names), []).append(names)
        return choices


def slot_tables(schedule: Schedule, *, share_ends: bool = False) -> Tables:
    """The tables of a valid schedule.

    Args:
      share_ends: all ranks run their part of the embedding and the head, in each tick in which one rank has a
        microbatch at the model's first or last stage.
    """
    operations = _operations(schedule)
    start: Times = {}
    finish: Times = {}
    for tick, rank, work in _works(schedule):
        op, stage = schedule.does(work), schedule.stage(work.chunk, rank)
        start.setdefault((INPUT if op == BACKWARD else op, stage, work.microbatch), tick)
        for result in schedule.results(work):
            finish[result, stage, work.microbatch] = tick
    routes = {direction: send_routes(schedule.placement, direction) for direction in (FORWARD, BACKWARD)}
    stash_slots = _assign_stash(schedule, operations, (start, finish)) if schedule.has_backward else 0
    kept_slots = _assign_kept(schedule, operations, finish)
    times = start, finish
    activation_slots, activation_arrivals = _assign_inbox(schedule, operations, times, FORWARD, routes[FORWARD])
    gradient_slots, gradient_arrivals = _assign_inbox(schedule, operations, times, BACKWARD, routes[BACKWARD])
    loss_gradient = _loss_gradient(schedule, operations, gradient_slots)
    inbox_slots = {FORWARD: _count(activation_slots), BACKWARD: _count(gradient_slots)}
    read = [arrivals < inbox_slots[FORWARD] for arrivals in activation_arrivals]
    read += [arrivals < inbox_slots[BACKWARD] for arrivals in gradient_arrivals]
    forward, backward, weight = (operations[op] for op in (FORWARD, BACKWARD, WEIGHT))
    rows = TickRow(
        forward,
        backward,
        weight,
        embed=_end(forward, forward.on & forward.first & (forward.part == 0), share_ends),
        head=_end(forward, forward.on & forward.last & (forward.part == forward.parts - 1), share_ends),
        embed_backward=_end(backward, backward.on & backward.first & (backward.part == backward.parts - 1), share_ends),
        loss_gradient=loss_gradient,
        activation_arrivals=activation_arrivals,
        gradient_arrivals=gradient_arrivals,
        sends=np.broadcast_to(np.any(read, (0, 2), keepdims=True)[0], forward.on.shape).astype(np.int32)
        if read
        else np.zeros_like(forward.on),
    )
    return Tables(schedule, rows, stash_slots, kept_slots, inbox_slots, routes)


def _operations(schedule: Schedule) -> dict[str, OperationRow]:
    """The rows of F, B (the same object as I) and W, without slots; the arrays are filled in place."""
    zeros = np.zeros((len(schedule.ticks), schedule.stages), np.int32)
    forward, backward, weight = (OperationRow(*(zeros.copy() for _ in OperationRow._fields)) for _ in range(3))
    for row in (forward, backward, weight):
        row.parts[:] = 1
    operations = {FORWARD: forward, BACKWARD: backward, INPUT: backward, WEIGHT: weight}
    for tick, rank, work in _works(schedule):
        op, stage = schedule.does(work), schedule.stage(work.chunk, rank)
        row = operations[op]
        row.on[tick, rank] = 1
        row.chunk[tick, rank] = work.chunk
        row.stage[tick, rank] = stage
        row.microbatch[tick, rank] = work.microbatch
        row.first[tick, rank] = stage == 0
        row.last[tick, rank] = stage == schedule.last_stage
        if op in (FORWARD, BACKWARD):  # I and W are parts of a B in the schedule, and run whole here
            row.part[tick, rank] = work.part
            row.parts[tick, rank] = work.parts
    return operations


def _end(operation: OperationRow, on: np.ndarray, share: bool) -> EndRow:
    """The row of a layer at the model's end, which runs with `operation` where `on` is 1."""
    microbatch = on * operation.microbatch
    if share:  # in a tick at most one rank works on the first stage, and at most one on the last
        on, microbatch = (np.broadcast_to(a.max(1, keepdims=True), a.shape) for a in (on, microbatch))
    return EndRow(on, microbatch)


def _works(schedule: Schedule):
    """Yields (tick, rank, work) for every piece of work."""
    for tick, row in enumerate(schedule.ticks):
        for rank, works in enumerate(row):
            for work in works:
                yield tick, rank, work


def _stage_after(schedule: Schedule, direction: str, stage: int) -> int | None:
    """The stage that a stage sends to; None at the model's end."""
    after = stage + 1 if direction == FORWARD else stage - 1
    return after if 0 <= after <= schedule.last_stage else None


def _edge(schedule: Schedule, stage: int, after: int) -> tuple[int, int]:
    """(sender, receiver) ranks of a send between two stages."""
    return schedule.home(stage)[1], schedule.home(after)[1]


def stage_edges(placement: Placement, direction: str) -> list[tuple[int, int]]:
    """(sender, receiver) ranks of the sends between stages in a direction."""
    ranks = [rank for _, rank in placement.homes]
    return list(itertools.pairwise(ranks if direction == FORWARD else ranks[::-1]))


def send_routes(placement: Placement, direction: str) -> tuple[Route, ...]:
    """The (sender, receiver) pairs of a direction, in as few routes as a tick's sends need.

    On a route no rank sends or receives twice, so that it is one collective permute. Interleaving's edge from the last rank
    to the first completes a ring. With several pipelines on the mesh that is several cycles, for which XLA loses data if
    it decomposes the collective permute (openxla/xla#45222): `xla_flags.check_ring_flags` refuses the flag that does.
    """
    groups: dict[int, set[tuple[int, int]]] = {}
    for sender, receiver in stage_edges(placement, direction):
        groups.setdefault(receiver - sender, set()).add((sender, receiver))
    routes: list[set[tuple[int, int]]] = []
    for distance in sorted(groups, key=abs):
        for route in routes:
            if all(pair[end] != other[end] for pair in groups[distance] for other in route for end in (0, 1)):
                route |= groups[distance]
                break
        else:
            routes.append(groups[distance])
    return tuple(tuple(sorted(route)) for route in routes)


def _assign_stash(schedule: Schedule, operations: dict[str, OperationRow], times: tuple[Times, Times]) -> int:
    """Gives each forward the slot that its backward reads; returns how many slots the rank with most needs.

    A slot is occupied until the weights' gradients are computed. In paired ticks a forward in a bubble writes too, so
    it gets a slot that is free in that tick.
    """
    (start, finish), forward = times, operations[FORWARD]
    spans = [range(segment.start, segment.stop) for segment in schedule.segments if FORWARD in segment.ops]
    occupied: dict[int, list[Interval]] = {rank: [] for rank in range(schedule.stages)}
    for (result, stage, microbatch), tick in start.items():
        if result == FORWARD:
            span = (tick, finish[WEIGHT, stage, microbatch], (stage, microbatch))
            occupied[schedule.home(stage)[1]].append(span)
    slots_of = {}
    for rank, intervals in occupied.items():
        if schedule.paired:
            bubbles = [tick for span in spans for tick in span if not forward.on[tick, rank]]
            intervals += [(tick, tick, ("bubble", tick)) for tick in bubbles]
        slots_of[rank] = _colour(intervals)
        for name, slot in slots_of[rank].items():
            if name[0] == "bubble":
                forward.stash[name[1], rank] = slot
    for tick, rank, work in _works(schedule):
        slot = slots_of[rank][schedule.stage(work.chunk, rank), work.microbatch]
        operations[schedule.does(work)].stash[tick, rank] = slot
    return _count(slots_of)


def _assign_kept(schedule: Schedule, operations: dict[str, OperationRow], finish: Times) -> int:
    """Gives each I the slot that its W reads; returns how many slots the rank with most needs.

    0 if backwards are not split.
    """
    splits = [(tick, rank, work) for tick, rank, work in _works(schedule) if schedule.does(work) in (INPUT, WEIGHT)]
    slots_of = {}
    owned: dict[int, set] = {rank: set() for rank in range(schedule.stages)}
    for _, rank, work in splits:
        owned[rank].add((schedule.stage(work.chunk, rank), work.microbatch))
    for rank, own in owned.items():
        slots_of[rank] = _colour([(finish[INPUT, *name], finish[WEIGHT, *name], name) for name in own])
    for tick, rank, work in splits:
        slot = slots_of[rank][schedule.stage(work.chunk, rank), work.microbatch]
        operations[schedule.does(work)].kept[tick, rank] = slot
    return _count(slots_of)


def _assign_inbox(
    schedule: Schedule, operations: dict[str, OperationRow], times: tuple[Times, Times], direction: str, routes
) -> tuple[dict[int, dict], tuple[np.ndarray, ...]]:
    """Gives each received value a slot from its arrival to its use.

    Returns:
      for each rank the slot of each (stage, microbatch) that receives; and for each route the slots of its arrivals,
      int32 [ticks, ranks].
    """
    start, finish = times
    wanted = FORWARD if direction == FORWARD else INPUT
    intervals: dict[int, list[Interval]] = {rank: [] for rank in range(schedule.stages)}
    for (result, stage, microbatch), tick in finish.items():
        after = _stage_after(schedule, direction, stage)
        if result == wanted and after is not None:
            use = start[wanted, after, microbatch]
            intervals[schedule.home(after)[1]].append((tick + 1, use, (after, microbatch)))
        from_head = direction == BACKWARD and result == FORWARD and stage == schedule.last_stage
        if from_head and schedule.has_backward:  # the head writes its gradient in the tick of the forward
            intervals[schedule.home(stage)[1]].append((tick, start[INPUT, stage, microbatch], (stage, microbatch)))
    slots_of = {rank: _colour(intervals[rank]) for rank in intervals}
    spare = _count(slots_of)
    row = operations[direction]
    row.inbox[:] = spare
    arrivals = tuple(np.full_like(row.inbox, spare) for _ in routes)
    route_of = {pair: index for index, pairs in enumerate(routes) for pair in pairs}
    for tick, rank, work in _works(schedule):
        op, stage = schedule.does(work), schedule.stage(work.chunk, rank)
        slot = slots_of[rank].get((stage, work.microbatch))
        if slot is not None and operations[op] is row:
            row.inbox[tick, rank] = slot
        after = _stage_after(schedule, direction, stage)
        if wanted in schedule.results(work) and after is not None:
            edge = _edge(schedule, stage, after)
            late = schedule.paired and direction == BACKWARD
            arrivals[route_of[edge]][tick + late, edge[1]] = slots_of[edge[1]][after, work.microbatch]
    return slots_of, arrivals


def _loss_gradient(schedule: Schedule, operations: dict[str, OperationRow], slots_of: dict[int, dict]) -> np.ndarray:
    """The slot of the gradient inbox in which the head leaves its gradient; the extra slot in all other ticks."""
    slots = np.full_like(operations[FORWARD].on, _count(slots_of))
    for tick, rank, work in _works(schedule):
        stage = schedule.stage(work.chunk, rank)
        ends = FORWARD in schedule.results(work) and stage == schedule.last_stage
        if ends and schedule.has_backward:
            slots[tick, rank] = slots_of[rank][stage, work.microbatch]
    return slots


def _count(slots_of: dict[int, dict]) -> int:
    """The number of slots that the rank with most uses."""
    return max((1 + slot for slots in slots_of.values() for slot in slots.values()), default=0)


def _colour(intervals: list[Interval]) -> dict[object, int]:
    """Assigns slots to closed intervals (first tick, last tick, name); overlapping intervals have different slots.

    Greedy interval colouring, in order of the first tick, each into the lowest free slot. It uses as many slots as
    intervals overlap at most, which is optimal.
    """
    slots: dict[object, int] = {}
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for first, last, name in sorted(intervals, key=lambda interval: interval[:2]):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        slots[name] = slot
        heapq.heappush(busy, (last, slot))
    return slots
