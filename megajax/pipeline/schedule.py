"""What a pipeline schedule is: a table that says what every rank does at every tick.

All ranks advance together, one *tick* at a time, because they run one SPMD program. In a tick a rank does one or more
pieces of `Work`; at its end activations and gradients travel to the neighbouring stage, where they may be used from the
next tick on. `orders()` forgets the ticks and keeps each rank's list of operations, which is how papers and Megatron-LM
write a schedule. This file imports no jax: a schedule is plain data.
"""

import dataclasses
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"


class Operation(NamedTuple):
    """One operation of a schedule, as the papers write it."""

    op: str  # "F" forward, "B" backward
    chunk: int  # which of the rank's model chunks
    microbatch: int


class Work(NamedTuple):
    """What a rank does in one phase of one tick: an operation, or one part of an operation that takes several ticks."""

    op: str
    chunk: int
    microbatch: int
    part: int = 0  # a backward cut into halves has part 0 (the later blocks, done first) and part 1
    parts: int = 1

    @property
    def operation(self) -> Operation:
        return Operation(self.op, self.chunk, self.microbatch)

    @property
    def completes(self) -> bool:
        """Whether the operation is finished, so that its result can be sent."""
        return self.part == self.parts - 1


class Segment(NamedTuple):
    """A run of ticks [start, stop) in which ranks do the same ops, forwards before backwards; one `lax.scan` each."""

    start: int
    stop: int
    ops: tuple[str, ...]


class ScheduleError(ValueError):
    """A schedule that cannot be made, or a table that breaks a rule; the message says which and where."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule over `stages` ranks, `chunks` model chunks a rank and `microbatches` microbatches.

    `ticks[tick][rank]` is the tuple of `Work` that the rank does in that tick, in order. `paired` says what a tick is:
    True, a forward and then a backward on every rank (where the table has neither, the program computes and throws away);
    False, a mixed tick, in which each rank does at most one piece of work, some a forward and some a backward.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    paired: bool
    ticks: tuple[tuple[tuple[Work, ...], ...], ...]

    def stage(self, chunk: int, rank: int) -> int:
        """The global stage held as `chunk` by `rank`; 2104.04473 section 2.2: chunks are dealt round the ranks."""
        return chunk * self.stages + rank

    @property
    def last_stage(self) -> int:
        return self.stages * self.chunks - 1

    def home(self, stage: int) -> tuple[int, int]:
        """(chunk, rank) of a global stage: the inverse of `stage`."""
        return divmod(stage, self.stages)

    def orders(self) -> list[list[Operation]]:
        """For each rank, its operations in the order in which it starts them."""
        return [
            [work.operation for tick in self.ticks for work in tick[rank] if work.part == 0]
            for rank in range(self.stages)
        ]

    @property
    def has_backward(self) -> bool:
        return any(work.op != FORWARD for tick in self.ticks for works in tick for work in works)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """At most three runs of ticks: the fill (forwards only), the steady state, and the drain (no forward)."""
        count = len(self.ticks)
        forward = [self._has(tick, lambda op: op == FORWARD) for tick in range(count)]
        other = [self._has(tick, lambda op: op != FORWARD) for tick in range(count)]
        fill = next((tick for tick in range(count) if other[tick]), count)
        drain = next((tick + 1 for tick in reversed(range(count)) if forward[tick]), 0)
        drain = max(fill, drain)
        bounds = [(0, fill), (fill, drain), (drain, count)]
        return tuple(Segment(start, stop, self._ops(start, stop)) for start, stop in bounds if stop > start)

    def _has(self, tick: int, test) -> bool:
        return any(test(work.op) for works in self.ticks[tick] for work in works)

    def _ops(self, start: int, stop: int) -> tuple[str, ...]:
        ops = {work.op for tick in self.ticks[start:stop] for works in tick for work in works}
        return tuple(sorted(ops, key=lambda op: (op != FORWARD, op)))

    def validate(self) -> "Schedule":
        """Proves the table and returns it.

        Every operation exactly once on every stage, its parts in order; at most one piece of work a phase; a forward
        after the forward of the stage before it, a backward after its own forward and after the backward of the stage
        behind it, in an earlier tick where the two are on different ranks.

        Raises:
          ScheduleError: names the rank, tick and work at fault.
        """
        finished: dict[tuple[str, int, int], int] = {}
        pieces: set[tuple[int, Work]] = set()
        for tick, row in enumerate(self.ticks):
            arrived = dict(finished)
            for rank, works in enumerate(row):
                self._check_phases(tick, rank, works)
                for work in works:
                    where = f"{self.name}: tick {tick}, rank {rank}, {_show(work)}"
                    if (rank, work) in pieces:
                        raise ScheduleError(f"{where} is done twice")
                    if work.part and (rank, work._replace(part=work.part - 1)) not in pieces:
                        raise ScheduleError(f"{where} comes before its part {work.part - 1}")
                    pieces.add((rank, work))
                    stage = self.stage(work.chunk, rank)
                    for need in self.needs(work.op, stage, work.microbatch):
                        known = finished if self.home(need[1])[1] == rank else arrived
                        if need not in known:
                            raise ScheduleError(f"{where} needs {need[0]} of stage {need[1]}, microbatch {need[2]} first")
                    if work.completes:
                        finished[work.op, stage, work.microbatch] = tick
        operations = (FORWARD, BACKWARD) if self.has_backward else (FORWARD,)
        for op in operations:
            for stage in range(self.last_stage + 1):
                for microbatch in range(self.microbatches):
                    if (op, stage, microbatch) not in finished:
                        raise ScheduleError(f"{self.name}: {op} of stage {stage}, microbatch {microbatch} is missing")
        if len(finished) != len(operations) * (self.last_stage + 1) * self.microbatches:
            raise ScheduleError(f"{self.name}: work on a stage or microbatch that does not exist")
        return self

    def needs(self, op: str, stage: int, microbatch: int) -> list[tuple[str, int, int]]:
        """The (op, stage, microbatch) that must be finished before this one starts."""
        if op == FORWARD:
            return [(FORWARD, stage - 1, microbatch)] if stage else []
        behind = [(BACKWARD, stage + 1, microbatch)] if stage < self.last_stage else []
        return [(FORWARD, stage, microbatch), *behind]

    def _check_phases(self, tick: int, rank: int, works: tuple[Work, ...]) -> None:
        most = 2 if self.paired else 1
        ops = [work.op for work in works]
        if len(works) > most or sorted(ops, key=lambda op: op != FORWARD) != ops or len(set(ops)) != len(ops):
            rule = "a forward and then a backward" if self.paired else "one piece of work"
            raise ScheduleError(f"{self.name}: tick {tick}, rank {rank} does {ops}; it may do at most {rule}")


def _show(work: Work) -> str:
    part = f" part {work.part}" if work.parts > 1 else ""
    return f"{work.op}{work.microbatch} of chunk {work.chunk}{part}"


def pack(
    name: str,
    orders: list[list[Operation]],
    *,
    microbatches: int,
    chunks: int = 1,
    paired: bool,
    parts: dict[str, int] | None = None,
) -> Schedule:
    """Places each rank's operations into ticks, each as early as its dependencies and its place in the order allow.

    Args:
      orders: for each rank its operations, in the order it must start them.
      paired: a tick holds a forward and then a backward (True) or a single piece of work (False).
      parts: how many ticks an operation takes, by op; 1 where not given. With backwards twice as dear as forwards,
        `{"B": 2}` makes all pieces of work cost the same, so no rank waits for another within a tick.

    Raises:
      ScheduleError: the orders wait for each other for ever; the message says where each rank stands.
    """
    parts = parts or {}
    stages = len(orders)
    table = Schedule(name, stages, microbatches, chunks, paired, ())
    queues = [
        [Work(*operation, part, parts.get(operation.op, 1)) for operation in order for part in range(parts.get(operation.op, 1))]
        for order in orders
    ]
    position = [0] * stages
    finished: set[tuple[str, int, int]] = set()
    ticks = []
    while any(position[rank] < len(queues[rank]) for rank in range(stages)):
        row, completed = [], set()
        for rank, queue in enumerate(queues):
            works: list[Work] = []
            mine = set(finished)
            while position[rank] < len(queue):
                work = queue[position[rank]]
                stage = table.stage(work.chunk, rank)
                fits = not works or (paired and works[-1].op == FORWARD and work.op != FORWARD)
                if not fits or any(need not in mine for need in table.needs(work.op, stage, work.microbatch)):
                    break
                works.append(work)
                position[rank] += 1
                if work.completes:
                    mine.add((work.op, stage, work.microbatch))
                    completed.add((work.op, stage, work.microbatch))
            row.append(tuple(works))
        if not any(row):
            waiting = "; ".join(
                f"rank {rank} waits at {_show(queue[position[rank]])}" if position[rank] < len(queue) else f"rank {rank} is done"
                for rank, queue in enumerate(queues)
            )
            raise ScheduleError(f"{name}: the orders wait for each other for ever: {waiting}")
        finished |= completed
        ticks.append(tuple(row))
    return dataclasses.replace(table, ticks=tuple(ticks))
