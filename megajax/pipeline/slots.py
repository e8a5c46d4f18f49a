"""From a schedule to the integer tables its compiled program reads.

Every rank runs the same program and differs only in its column of these tables: which chunk and microbatch it works on,
in which slot of the stash a forward leaves what its backward needs, and in which slot of an inbox an arriving activation
or gradient waits until it is used. Slots are given out here, ahead of time, as few as there are values alive at once.
"""

import dataclasses
import heapq

import numpy as np

from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule

Route = tuple[tuple[int, int], ...]
Interval = tuple[int, int, object]
PREFIX = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward", WEIGHT: "weight"}
Times = dict[tuple[str, int, int], int]  # (result, stage, microbatch) -> tick


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule as arrays. Each column is int32 [ticks, ranks].

    Columns of a forward (prefix `forward_`), of a backward or of its gradient of the input alone (`backward_`), and of the
    weights' gradients done later (`weight_`): `on` 1 where there is work, `chunk`, `stage`, `microbatch`, `first` and
    `last` 1 on the model's first and last stage, `stash` the slot written or read, `inbox` the slot its input waits in.
    `forward_loss_gradient` is where the head leaves the loss's gradient. `forward_arrival_J` and `backward_arrival_J` say
    where what comes over route J goes at the end of the tick; the slot after an inbox's last is for what nobody needs. In
    paired ticks a gradient arrives a tick later, between forward and backward, and its `backward_arrival_J` is there.
    `backward_part` of `backward_parts` says which run of the chunk's blocks a backward goes through. `backward_kept` and
    `weight_kept` are the slot of what I leaves for W. `embed_`, `head_` and `embed_backward_` have `on` and `microbatch`
    of the model's ends; where ranks share these, the same on all of them.

    Attributes:
      stash_slots: chunk activations kept at once; the shape of the stash in the program.
      kept_slots: how many I wait for their W at once.
      inbox_slots: received activations ("F") and gradients ("B") waiting at once.
      routes: for activations ("F") and gradients ("B"), the open chains of (sender, receiver) pairs they travel along.
    """

    columns: dict[str, np.ndarray]
    stash_slots: int
    kept_slots: int
    inbox_slots: dict[str, int]
    routes: dict[str, tuple[Route, ...]]


def slot_tables(schedule: Schedule, *, share_ends: bool = False) -> Tables:
    """The tables of a valid schedule.

    Args:
      share_ends: all ranks run embedding and head, each its part, in the ticks in which one rank has a microbatch there.
    """
    shape = (len(schedule.ticks), schedule.stages)
    columns: dict[str, np.ndarray] = {}
    for prefix in ("forward", "backward", "weight"):
        for name in ("on", "chunk", "stage", "microbatch", "first", "last", "stash", "part"):
            columns[f"{prefix}_{name}"] = np.zeros(shape, np.int32)
        columns[f"{prefix}_parts"] = np.ones(shape, np.int32)
    start: Times = {}
    finish: Times = {}
    for tick, rank, work in _works(schedule):
        op, stage = schedule.does(work), schedule.stage(work.chunk, rank)
        whole = op != BACKWARD  # an I or a W is never in parts, though it may be a part of a B
        values = dict(
            on=1,
            chunk=work.chunk,
            stage=stage,
            microbatch=work.microbatch,
            first=stage == 0,
            last=stage == schedule.last_stage,
            part=0 if whole else work.part,
            parts=1 if whole else work.parts,
        )
        for name, value in values.items():
            columns[f"{PREFIX[op]}_{name}"][tick, rank] = value
        start.setdefault((INPUT if op == BACKWARD else op, stage, work.microbatch), tick)
        for result in schedule.results(work):
            finish[result, stage, work.microbatch] = tick
    routes = {direction: _routes(schedule, direction) for direction in (FORWARD, BACKWARD)}
    stash_slots = _stash(schedule, columns, finish) if schedule.has_backward else 0
    kept_slots = _kept(schedule, columns, finish)
    inbox_slots = {way: _inbox(schedule, columns, start, finish, way, routes[way]) for way in (FORWARD, BACKWARD)}
    columns |= _ends(columns, share_ends)
    return Tables(columns, stash_slots, kept_slots, inbox_slots, routes)


def _ends(columns: dict, share: bool) -> dict[str, np.ndarray]:
    """When a rank runs the embedding, the head, and the embedding's backward, and for which microbatch."""
    whole = columns["backward_part"] == columns["backward_parts"] - 1
    here = {
        "embed": ("forward", columns["forward_on"] & columns["forward_first"]),
        "head": ("forward", columns["forward_on"] & columns["forward_last"]),
        "embed_backward": ("backward", columns["backward_on"] & columns["backward_first"] & whole),
    }
    ends = {}
    for end, (prefix, on) in here.items():
        microbatch = on * columns[f"{prefix}_microbatch"]
        if share:  # no two ranks have a first stage, or a last one
            on, microbatch = (np.broadcast_to(a.max(1, keepdims=True), a.shape) for a in (on, microbatch))
        ends |= {f"{end}_on": on, f"{end}_microbatch": microbatch}
    return ends


def _works(schedule: Schedule):
    for tick, row in enumerate(schedule.ticks):
        for rank, works in enumerate(row):
            for work in works:
                yield tick, rank, work


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


def _stash(schedule: Schedule, columns: dict, finish: Times) -> int:
    """Gives each forward the slot that its backward reads; returns how many slots the rank with most needs.

    A slot is held until the weights' gradients are done. A masked forward in a bubble writes too, so it is given a slot
    that is free in that tick.
    """
    spans = [range(segment.start, segment.stop) for segment in schedule.segments if FORWARD in segment.ops]
    held: dict[int, list[Interval]] = {rank: [] for rank in range(schedule.stages)}
    for (result, stage, microbatch), tick in finish.items():
        if result == FORWARD:
            span = (tick, finish[WEIGHT, stage, microbatch], (stage, microbatch))
            held[schedule.home(stage)[1]].append(span)
    slots_of = {}
    for rank, intervals in held.items():
        if schedule.paired:
            bubbles = [tick for span in spans for tick in span if not columns["forward_on"][tick, rank]]
            intervals += [(tick, tick, ("bubble", tick)) for tick in bubbles]
        slots_of[rank] = _colour(intervals)
        for name, slot in slots_of[rank].items():
            if name[0] == "bubble":
                columns["forward_stash"][name[1], rank] = slot
    for tick, rank, work in _works(schedule):
        column = columns[f"{PREFIX[schedule.does(work)]}_stash"]
        column[tick, rank] = slots_of[rank][schedule.stage(work.chunk, rank), work.microbatch]
    return _count(slots_of)


def _kept(schedule: Schedule, columns: dict, finish: Times) -> int:
    """Gives each I the slot that its W reads; returns how many the rank with most needs, 0 where nothing is split."""
    for prefix in ("backward", "weight"):
        columns[f"{prefix}_kept"] = np.zeros_like(columns["forward_on"])
    splits = [(tick, rank, work) for tick, rank, work in _works(schedule) if schedule.does(work) in (INPUT, WEIGHT)]
    slots_of = {}
    owned: dict[int, set] = {rank: set() for rank in range(schedule.stages)}
    for _, rank, work in splits:
        owned[rank].add((schedule.stage(work.chunk, rank), work.microbatch))
    for rank, own in owned.items():
        slots_of[rank] = _colour([(finish[INPUT, *name], finish[WEIGHT, *name], name) for name in own])
    for tick, rank, work in splits:
        column = columns[f"{PREFIX[schedule.does(work)]}_kept"]
        column[tick, rank] = slots_of[rank][schedule.stage(work.chunk, rank), work.microbatch]
    return _count(slots_of)


def _inbox(schedule: Schedule, columns: dict, start: Times, finish: Times, direction: str, routes) -> int:
    """Gives each arriving value a slot from its arrival to its use; returns the number of slots, without the spare."""
    prefix, wanted = PREFIX[direction], FORWARD if direction == FORWARD else INPUT
    intervals: dict[int, list[Interval]] = {rank: [] for rank in range(schedule.stages)}
    for (result, stage, microbatch), tick in finish.items():
        after = _stage_after(schedule, direction, stage)
        if result == wanted and after is not None:
            use = start[wanted, after, microbatch]
            intervals[schedule.home(after)[1]].append((tick + 1, use, (after, microbatch)))
        scored = direction == BACKWARD and result == FORWARD and stage == schedule.last_stage and schedule.has_backward
        if scored:  # the head's gradient is there at once
            intervals[schedule.home(stage)[1]].append((tick, start[INPUT, stage, microbatch], (stage, microbatch)))
    slots_of = {rank: _colour(intervals[rank]) for rank in intervals}
    spare = _count(slots_of)
    columns[f"{prefix}_inbox"] = np.full_like(columns["forward_on"], spare)
    arrivals = [np.full_like(columns["forward_on"], spare) for _ in routes]
    if direction == BACKWARD:
        columns["forward_loss_gradient"] = np.full_like(columns["forward_on"], spare)
    for tick, rank, work in _works(schedule):
        op, stage = schedule.does(work), schedule.stage(work.chunk, rank)
        slot = slots_of[rank].get((stage, work.microbatch))
        if slot is not None and PREFIX[op] == prefix:
            columns[f"{prefix}_inbox"][tick, rank] = slot
        if slot is not None and direction == BACKWARD and op == FORWARD and stage == schedule.last_stage:
            columns["forward_loss_gradient"][tick, rank] = slot
        after = _stage_after(schedule, direction, stage)
        if wanted in schedule.results(work) and after is not None:
            edge = _edge(schedule, stage, after)
            route = next(index for index, pairs in enumerate(routes) if edge in pairs)
            late = schedule.paired and direction == BACKWARD
            arrivals[route][tick + late, edge[1]] = slots_of[edge[1]][after, work.microbatch]
    for index, arrival in enumerate(arrivals):
        columns[f"{prefix}_arrival_{index}"] = arrival
    return spare


def _count(slots_of: dict[int, dict]) -> int:
    return max((1 + slot for slots in slots_of.values() for slot in slots.values()), default=0)


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
