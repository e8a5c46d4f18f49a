"""A pipeline schedule: a table of the operations of every rank at every tick.

All ranks run one SPMD program and advance together, one *tick* at a time. In a tick a rank does one or more pieces of
`Work`; at its end activations and gradients are sent to the neighbouring stage, which may use them from the next tick
on. `orders()` drops the ticks and keeps each rank's list of operations, which is how papers and Megatron-LM write a
schedule. A schedule is plain data: this file imports no jax.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megajax.schedules.errors import UserError
from megajax.schedules.stages import Placement, loop

FORWARD, BACKWARD = "F", "B"
INPUT, WEIGHT = "I", "W"  # a split backward: gradient of the input, gradients of the weights (2401.10241)
OVERLAP_PARTS = (
    3  # ticks of a forward and a backward that overlap, together three times a forward: a third of both in each
)
# Forwards of all ranks in one table. A trillion parameters on 64 stages with 2 chunks and 512 microbatches are 65,536. To
# build, validate and simulate a table takes about 50 us for each of them, and the program holds it as constants.
MOST_FORWARDS = 2**18


class Operation(NamedTuple):
    """One operation of a schedule, as the papers write it."""

    op: str  # "F" forward, "B" backward, or "I" and "W" for its two parts
    chunk: int  # which of the rank's model chunks
    microbatch: int


class Work(NamedTuple):
    """The work of a rank in one phase of one tick: an operation, or one of the parts of an operation."""

    op: str
    chunk: int
    microbatch: int
    part: int = 0
    parts: int = 1

    @property
    def operation(self) -> Operation:
        return Operation(self.op, self.chunk, self.microbatch)


Action = Operation | tuple[Operation, Operation]  # of an order: an operation, or a forward and a backward that overlap


def operations_of(action: Action) -> tuple[Operation, ...]:
    """The one or two operations of an item of an order."""
    return (action,) if isinstance(action, Operation) else action


class Segment(NamedTuple):
    """A run of ticks [start, stop) in which ranks do the same ops, forwards before backwards; one `lax.scan` each.

    `full`: in each of these paired ticks every rank does all of the ops; no rank waits.
    `overlaps`: in some of these mixed ticks ranks have a forward and a backward.
    """

    start: int
    stop: int
    ops: tuple[str, ...]
    full: bool
    overlaps: bool = False


class ScheduleError(UserError):
    """A schedule that is unknown or has illegal sizes, or a table that breaks a rule; says which and where."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule over `stages` ranks, `chunks` model chunks on each rank and `microbatches` microbatches.

    Attributes:
      ticks: `ticks[tick][rank]` is the tuple of `Work` that the rank does in that tick, in order.
      paired: the kind of tick. True: a forward and then a backward on every rank, either of which may be absent.
        False: a mixed tick, in which each rank does at most one piece of work, or a part of a forward and of a backward
        of another microbatch or chunk, which overlap.
      placement: which stage each chunk of a rank is, and, if it says so, how many layers that has. None is replaced by
        `stages.loop`: chunk c of rank r is stage c * stages + r.
      split: backwards run as I and W. A whole backward then takes two ticks, I (part 0) and W (part 1); otherwise, and
        where it overlaps a forward, its parts are consecutive blocks of the chunk, the last blocks first.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    paired: bool
    ticks: tuple[tuple[tuple[Work, ...], ...], ...]
    placement: Placement | None = None
    split: bool = False

    def __post_init__(self):
        """Raises ScheduleError for chunks that the placement is not for: stages would be missing."""
        placement = self.placement or loop(self.stages, self.chunks)
        object.__setattr__(self, "placement", placement)
        if (placement.chunks, placement.ranks) != (self.chunks, self.stages):
            given = f"{placement.chunks} chunks on each of {placement.ranks} ranks"
            raise ScheduleError(
                f"{self.name}: the placement is for {given}, not for {self.chunks} on each of {self.stages}"
            )

    def stage(self, chunk: int, rank: int) -> int:
        """The global stage held as `chunk` by `rank`.

        Raises:
          ScheduleError: there is no such chunk.
        """
        if not 0 <= chunk < self.chunks:
            raise ScheduleError(f"{self.name}: chunk {chunk} does not exist: each rank has {self.chunks}")
        return self.placement.stage_of[chunk][rank]

    def home(self, stage: int) -> tuple[int, int]:
        """(chunk, rank) of a global stage: the inverse of `stage`."""
        return self.placement.homes[stage]

    @property
    def last_stage(self) -> int:
        return self.stages * self.chunks - 1

    def orders(self) -> list[list[Operation]]:
        """For each rank, its operations in the order in which it starts them."""
        return [
            [work.operation for tick in self.ticks for work in tick[rank] if work.part == 0]
            for rank in range(self.stages)
        ]

    def actions(self) -> list[list[Action]]:
        """`orders`, with the forwards and backwards that overlap as pairs."""

        def starts(works: tuple[Work, ...]) -> list[Action]:
            started = [work.operation for work in works if work.part == 0]
            return [tuple(started)] if started and self.overlaps(works) else started

        return [[action for tick in self.ticks for action in starts(tick[rank])] for rank in range(self.stages)]

    def overlaps(self, works: tuple[Work, ...]) -> bool:
        """Whether a rank's works of a mixed tick are a forward and a backward that overlap."""
        return not self.paired and len(works) == 2

    def does(self, work: Work) -> str:
        """The op that the program runs for a piece of work: F, B, I or W."""
        if self.split and work.op == BACKWARD and work.parts < OVERLAP_PARTS:
            return WEIGHT if work.part else INPUT
        return work.op

    def results(self, work: Work) -> tuple[str, ...]:
        """The results that a piece of work completes: F an activation, I a gradient to send, W a weight gradient."""
        op = self.does(work)
        if op in (INPUT, WEIGHT):
            return (op,)
        whole = (FORWARD,) if op == FORWARD else (INPUT, WEIGHT)
        return whole if work.part == work.parts - 1 else ()

    def needs(self, work: Work, stage: int) -> list[tuple[str, int]]:
        """The (result, stage) of the same microbatch that this work depends on."""
        op = self.does(work)
        if op == FORWARD:
            return [(FORWARD, stage - 1)] if stage else []
        if op == WEIGHT:
            return [(INPUT, stage)]
        return [(FORWARD, stage)] + ([(INPUT, stage + 1)] if stage < self.last_stage else [])

    @functools.cached_property
    def has_backward(self) -> bool:
        return any(work.op != FORWARD for tick in self.ticks for works in tick for work in works)

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Runs of ticks: the fill (forwards only), the steady state, and the drain (no forward).

        In a steady state of paired ticks, the longest full run is a separate segment between its ramps.
        """
        count = len(self.ticks)
        done = [[{self.does(work) for work in works} for works in tick] for tick in self.ticks]
        ops = [set().union(*ranks) for ranks in done]
        fill = next((tick for tick in range(count) if ops[tick] - {FORWARD}), count)
        drain = next((tick + 1 for tick in reversed(range(count)) if FORWARD in ops[tick]), 0)
        drain = max(fill, drain)
        order = (FORWARD, BACKWARD, INPUT, WEIGHT)
        segments = []
        for start, stop in ((0, fill), (fill, drain), (drain, count)):
            both = set().union(*ops[start:stop])
            full = [self.paired and all(rank == both for rank in done[tick]) for tick in range(start, stop)]
            low, high = (start + bound for bound in _longest_run(full))
            bounds = [start, low, high, stop] if len(both) > 1 else [start, stop]
            segments += [
                Segment(
                    a,
                    b,
                    tuple(sorted(both, key=order.index)),
                    all(full[a - start : b - start]),
                    any(self.overlaps(works) for tick in self.ticks[a:b] for works in tick),
                )
                for a, b in itertools.pairwise(bounds)
                if b > a
            ]
        return tuple(segments)

    def with_later_backwards(self) -> "Schedule":
        """This schedule of paired ticks with every backward one tick later, so that none runs in the tick of its forward.

        The forward and the backward of a tick then do not depend on each other. The first backward runs one forward later,
        which fills a tick that had forwards only: the bubble is the same, and at most one chunk more is in flight.
        """
        assert self.paired, self.name
        nothing = ((),) * self.stages
        of = lambda tick, forwards: [tuple(w for w in works if (w.op == FORWARD) == forwards) for works in tick]  # noqa: E731
        forwards = [*(of(tick, True) for tick in self.ticks), nothing]
        backwards = [nothing, *(of(tick, False) for tick in self.ticks)]
        ticks = [
            tuple(first + then for first, then in zip(*both, strict=True))
            for both in zip(forwards, backwards, strict=True)
        ]
        return dataclasses.replace(self, ticks=tuple(ticks))

    def validate(self) -> "Schedule":
        """Checks the table and returns it.

        Every operation runs exactly once on every stage, its parts in order; each phase holds at most one piece of
        work; a forward follows the forward of the stage before it, and a backward (or I) follows its own forward and
        the backward of the stage after it, in a later tick where the two are on different ranks; W follows its I.

        Raises:
          ScheduleError: the message names the rank, tick and work at fault; a note shows that part of the table.
        """
        available: set[tuple[str, int, int]] = set()  # (result, stage, microbatch)
        done: set[tuple[int, Work]] = set()
        for tick, row in enumerate(self.ticks):
            new: set[tuple[str, int, int]] = set()  # of this tick, which other ranks receive after it
            for rank, works in enumerate(row):
                self._check_phases(tick, rank, works)
                for work in works:
                    if not (0 <= work.chunk < self.chunks and 0 <= work.microbatch < self.microbatches):
                        self._refuse(tick, rank, f"{show(work)} is of a chunk or microbatch that does not exist")
                    stage = self.stage(work.chunk, rank)
                    if work.part and (rank, work._replace(part=work.part - 1)) not in done:
                        self._refuse(tick, rank, f"{show(work)} comes before its part {work.part - 1}")
                    for result, of in self.needs(work, stage):
                        need = (result, of, work.microbatch)
                        if need not in available or (need in new and self.home(of)[1] != rank):
                            self._refuse(
                                tick,
                                rank,
                                f"{show(work)} needs {result} of stage {of}, microbatch {work.microbatch} first",
                            )
                    for result in self.results(work):
                        if (result, stage, work.microbatch) in available:
                            self._refuse(tick, rank, f"{show(work)} is done twice")
                        available.add((result, stage, work.microbatch))
                        new.add((result, stage, work.microbatch))
                    done.add((rank, work))
        for result in (FORWARD, INPUT, WEIGHT) if self.has_backward else (FORWARD,):
            for stage in range(self.last_stage + 1):
                for microbatch in range(self.microbatches):
                    if (result, stage, microbatch) not in available:
                        chunk, rank = self.home(stage)
                        what = f"{result}{microbatch} of chunk {chunk} on rank {rank} (stage {stage})"
                        raise ScheduleError(f"{self.name}: {what} is missing")
        return self

    def _check_phases(self, tick: int, rank: int, works: tuple[Work, ...]) -> None:
        ops = [work.op for work in works]
        if self.paired:
            legal = ops in ([], [FORWARD], [BACKWARD], [FORWARD, BACKWARD])
        else:
            parts = {(work.part, work.parts) for work in works}
            both = ops == [FORWARD, BACKWARD] and len(parts) == 1 and works[0].parts == OVERLAP_PARTS
            legal = len(ops) <= 1 or both
        if not legal:
            rule = "a forward and then a backward" if self.paired else "one piece of work, or parts of two that overlap"
            self._refuse(tick, rank, f"{' '.join(map(show, works))}: a tick holds at most {rule}")

    def _refuse(self, tick: int, rank: int, problem: str):
        error = ScheduleError(f"{self.name}: tick {tick}, rank {rank}: {problem}")
        error.add_note(self.grid(tick, rank))  # which a traceback shows
        raise error

    def grid(self, tick: int, rank: int, around: int = 4) -> str:
        """The table near a cell as text, one row for each rank, the cell marked."""
        ticks = range(max(0, tick - around), min(len(self.ticks), tick + around + 1))
        cells = [["tick", *map(str, ticks)]]
        for row in range(self.stages):
            texts = ["+".join(show(work, short=True) for work in self.ticks[column][row]) or "." for column in ticks]
            if row == rank:
                texts[ticks.index(tick)] = f">{texts[ticks.index(tick)]}<"
            cells.append([f"rank {row}", *texts])
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        )


def _longest_run(flags: list[bool]) -> tuple[int, int]:
    """[start, stop) of the longest run of True; empty if there is none."""
    runs, start = [(0, 0)], 0
    for flag, run in itertools.groupby(flags):
        stop = start + len(list(run))
        runs += [(start, stop)] if flag else []
        start = stop
    return max(runs, key=lambda run: run[1] - run[0])


def show(work: Work, short: bool = False) -> str:
    """A piece of work as text: "B3 of chunk 1 part 0", or short, "B3.1"."""
    if short:
        return f"{work.op}{work.microbatch}.{work.chunk}" + ("'" * work.part)
    part = f" part {work.part}" if work.parts > 1 else ""
    return f"{work.op}{work.microbatch} of chunk {work.chunk}{part}"


def pack(
    name: str,
    orders: Sequence[Sequence[Action]],
    *,
    microbatches: int,
    chunks: int = 1,
    paired: bool,
    parts: dict[str, int] | None = None,
    placement: Placement | None = None,
    split: bool = False,
) -> Schedule:
    """Places each rank's operations into ticks, each as early as its dependencies and its place in the order allow.

    Args:
      orders: for each rank its operations, in the order in which it must start them. A forward and a backward that overlap
        are one item, and take `OVERLAP_PARTS` mixed ticks; in paired ticks they are two.
      paired: a tick holds a forward and then a backward (True) or a single piece of work (False).
      parts: how many ticks an operation takes, by op; 1 where not given. If a backward costs twice a forward,
        `{"B": 2}` makes all pieces of work cost the same, so that no rank waits for another within a tick.

    Raises:
      ScheduleError: the orders deadlock; the message says which operation each rank waits at.
    """
    parts = parts or {}
    table = Schedule(name, len(orders), microbatches, chunks, paired, (), placement, split)
    queues = [[works for action in order for works in _ticks_of(action, parts, paired)] for order in orders]
    position = [0] * len(orders)
    available: set[tuple[str, int, int]] = set()  # (result, stage, microbatch) of the ticks before
    ticks = []
    while any(position[rank] < len(queue) for rank, queue in enumerate(queues)):
        row, new = [], set()
        for rank, queue in enumerate(queues):
            works: list[Work] = []
            mine: set[tuple[str, int, int]] = set()
            while position[rank] < len(queue):
                following = queue[position[rank]]
                fits = not works or (paired and works[-1].op == FORWARD and following[0].op != FORWARD)
                wanted = [
                    (result, of, work.microbatch)
                    for work in following
                    for result, of in table.needs(work, table.stage(work.chunk, rank))
                ]
                if not fits or any(want not in available and want not in mine for want in wanted):
                    break
                works += following
                position[rank] += 1
                for work in following:
                    stage = table.stage(work.chunk, rank)
                    mine |= {(result, stage, work.microbatch) for result in table.results(work)}
            new |= mine
            row.append(tuple(works))
        if not any(row):
            waiting = "; ".join(
                f"rank {rank} "
                + (f"waits at {show(queue[position[rank]][0])}" if position[rank] < len(queue) else "is done")
                for rank, queue in enumerate(queues)
            )
            raise ScheduleError(f"{name}: the orders deadlock: {waiting}")
        available |= new
        ticks.append(tuple(row))
    return dataclasses.replace(table, ticks=tuple(ticks))


def _ticks_of(action: Action, parts: dict[str, int], paired: bool) -> Iterator[tuple[Work, ...]]:
    """The work of a rank in each of the ticks that an item of its order takes."""
    operations = operations_of(action)
    if len(operations) == 2 and not paired:
        for part in range(OVERLAP_PARTS):
            yield tuple(Work(*operation, part, OVERLAP_PARTS) for operation in operations)
        return
    for operation in operations:
        count = parts.get(operation.op, 1)
        for part in range(count):
            yield (Work(*operation, part, count),)
