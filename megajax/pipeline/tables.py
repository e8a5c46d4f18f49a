"""From a schedule to the integer tables its compiled program reads.

Every rank runs the same program and differs only in its column of these tables: which chunk and microbatch it works on,
in which slot of the stash a forward leaves what its backward needs, and in which slot of an inbox an arriving activation
or gradient waits until it is used. Slots are given out here, ahead of time, as few as there are values alive at once.
"""

import dataclasses
import heapq

import numpy as np

from megajax.pipeline.schedule import BACKWARD, FORWARD, Schedule, Work

Route = tuple[tuple[int, int], ...]
Interval = tuple[int, int, object]


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule as arrays. Each column is int32 [ticks, ranks].

    Columns of a forward (prefix `forward_`) and of a backward (`backward_`): `on` 1 where there is work, `chunk`,
    `stage`, `microbatch`, `first` and `last` 1 on the model's first and last stage, `stash` the slot written or read,
    `inbox` the slot its input waits in. `forward_loss_gradient` is where the head leaves the loss's gradient.
    `forward_arrival_J` and `backward_arrival_J` say where what comes over route J goes at the end of the tick; the slot
    after an inbox's last is for what nobody needs. `backward_part` of `backward_parts` says which run of the chunk's
    blocks a backward goes through.

    Attributes:
      stash_slots: chunk activations kept at once; the shape of the stash in the program.
      inbox_slots: received activations and gradients waiting at once, by direction.
      routes: by direction, the open chains of (sender, receiver) pairs along which results travel.
    """

    columns: dict[str, np.ndarray]
    stash_slots: int
    inbox_slots: dict[str, int]
    routes: dict[str, tuple[Route, ...]]


def build(schedule: Schedule) -> Tables:
    """The tables of a valid schedule."""
    shape = (len(schedule.ticks), schedule.stages)
    columns: dict[str, np.ndarray] = {"backward_part": np.zeros(shape, np.int32), "backward_parts": np.ones(shape, np.int32)}
    for prefix in ("forward", "backward"):
        for name in ("on", "chunk", "stage", "microbatch", "first", "last", "stash", "inbox"):
            columns[f"{prefix}_{name}"] = np.zeros(shape, np.int32)
    start: dict[tuple[str, int, int], int] = {}
    finish: dict[tuple[str, int, int], int] = {}
    for tick, row in enumerate(schedule.ticks):
        for rank, works in enumerate(row):
            for work in works:
                _describe(schedule, columns, tick, rank, work)
                key = (work.op, schedule.stage(work.chunk, rank), work.microbatch)
                start.setdefault(key, tick)
                finish[key] = tick
    routes = {direction: _routes(schedule, direction) for direction in (FORWARD, BACKWARD)}
    stash_slots = _stash(schedule, columns, start, finish) if schedule.has_backward else 0
    inbox_slots = {FORWARD: _inbox(schedule, columns, start, finish, FORWARD, routes[FORWARD])}
    inbox_slots[BACKWARD] = _inbox(schedule, columns, start, finish, BACKWARD, routes[BACKWARD])
    return Tables(columns, stash_slots, inbox_slots, routes)


def _describe(schedule: Schedule, columns: dict, tick: int, rank: int, work: Work) -> None:
    prefix = "forward" if work.op == FORWARD else "backward"
    stage = schedule.stage(work.chunk, rank)
    values = dict(
        on=1,
        chunk=work.chunk,
        stage=stage,
        microbatch=work.microbatch,
        first=stage == 0,
        last=stage == schedule.last_stage,
    )
    if work.op == BACKWARD:
        values |= dict(part=work.part, parts=work.parts)
    for name, value in values.items():
        columns[f"{prefix}_{name}"][tick, rank] = value


def _stage_after(schedule: Schedule, direction: str, stage: int) -> int | None:
    after = stage + 1 if direction == FORWARD else stage - 1
    return after if 0 <= after <= schedule.last_stage else None


def _edge(schedule: Schedule, stage: int, after: int) -> tuple[int, int]:
    return schedule.home(stage)[1], schedule.home(after)[1]


def _routes(schedule: Schedule, direction: str) -> tuple[Route, ...]:
    """Who sends to whom, grouped by distance, so that no route closes a ring.

    A ring over several groups of devices is several cycles, which XLA's decomposition of permutes gets wrong
    (openxla/xla#45222); interleaving's edge from the last rank back to the first is therefore a route of its own.
    """
    groups: dict[int, set[tuple[int, int]]] = {}
    for stage in range(schedule.last_stage + 1):
        after = _stage_after(schedule, direction, stage)
        if after is not None:
            sender, receiver = _edge(schedule, stage, after)
            groups.setdefault(receiver - sender, set()).add((sender, receiver))
    return tuple(tuple(sorted(groups[distance])) for distance in sorted(groups, key=abs))


def _stash(schedule: Schedule, columns: dict, start: dict, finish: dict) -> int:
    """Gives each forward the slot that its backward reads; returns how many slots the rank with most needs.

    A masked forward in a bubble writes too, so it is given a slot that is free in that tick.
    """
    most = 0
    for rank in range(schedule.stages):
        intervals: list[Interval] = []
        for (op, stage, microbatch), tick in start.items():
            if op == FORWARD and schedule.home(stage)[1] == rank:
                intervals.append((tick, finish[BACKWARD, stage, microbatch], (stage, microbatch)))
        if schedule.paired:
            spans = [range(segment.start, segment.stop) for segment in schedule.segments if FORWARD in segment.ops]
            bubbles = [tick for span in spans for tick in span if not columns["forward_on"][tick, rank]]
            intervals += [(tick, tick, ("bubble", tick)) for tick in bubbles]
        slots = _colour(intervals)
        most = max(most, 1 + max(slots.values()))
        for tick, row in enumerate(schedule.ticks):
            if ("bubble", tick) in slots:
                columns["forward_stash"][tick, rank] = slots["bubble", tick]
            for work in row[rank]:
                prefix = "forward" if work.op == FORWARD else "backward"
                slot = slots[schedule.stage(work.chunk, rank), work.microbatch]
                columns[f"{prefix}_stash"][tick, rank] = slot
    return most


def _inbox(schedule: Schedule, columns: dict, start: dict, finish: dict, direction: str, routes) -> int:
    """Gives each arriving value a slot from its arrival to its use; returns the number of slots, without the spare."""
    prefix = "forward" if direction == FORWARD else "backward"
    slots_of = {}
    for rank in range(schedule.stages):
        intervals: list[Interval] = []
        for (op, stage, microbatch), tick in finish.items():
            after = _stage_after(schedule, direction, stage)
            if op == direction and after is not None and schedule.home(after)[1] == rank:
                intervals.append((tick + 1, start[direction, after, microbatch], (after, microbatch)))
            if direction == BACKWARD and op == FORWARD and stage == schedule.last_stage and schedule.has_backward:
                if schedule.home(stage)[1] == rank:  # the head's gradient is there at once
                    intervals.append((tick, start[BACKWARD, stage, microbatch], (stage, microbatch)))
        slots_of[rank] = _colour(intervals)
    count = max((1 + slot for slots in slots_of.values() for slot in slots.values()), default=0)
    spare = count
    shape = columns["forward_on"].shape
    columns[f"{prefix}_inbox"] = np.full(shape, spare, np.int32)
    arrivals = [np.full(shape, spare, np.int32) for _ in routes]
    if direction == BACKWARD:
        columns["forward_loss_gradient"] = np.full(shape, spare, np.int32)
    for tick, row in enumerate(schedule.ticks):
        for rank, works in enumerate(row):
            for work in works:
                stage = schedule.stage(work.chunk, rank)
                slot = slots_of[rank].get((stage, work.microbatch))
                if work.op == direction and slot is not None:
                    columns[f"{prefix}_inbox"][tick, rank] = slot
                if direction == BACKWARD and work.op == FORWARD and stage == schedule.last_stage and slot is not None:
                    columns["forward_loss_gradient"][tick, rank] = slot
                after = _stage_after(schedule, direction, stage)
                if work.op == direction and work.completes and after is not None:
                    edge = _edge(schedule, stage, after)
                    route = next(index for index, pairs in enumerate(routes) if edge in pairs)
                    arrivals[route][tick, edge[1]] = slots_of[edge[1]][after, work.microbatch]
    for index, arrival in enumerate(arrivals):
        columns[f"{prefix}_arrival_{index}"] = arrival
    return count


def _colour(intervals: list[Interval]) -> dict[object, int]:
    """Slots for closed intervals (from, to, name), so that none shares a slot with another it overlaps.

    Taken in order of their start, each into the lowest free slot: as many slots as intervals overlap at most.
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
