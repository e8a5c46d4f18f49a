"""Simulates a schedule's time: event by event, as independent processes run it, and in lockstep, as megajax does.

Time is in units of the caller's choice; costs are per chunk. "Ideal" is a rank's work without any waiting, the bubble
is makespan / ideal - 1 (2104.04473 section 2.2's bubble time over ideal time).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, ScheduleError, Work


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time of each operation on one chunk, and of a send to another rank.

    The default is a block's: a backward is twice a forward, half for the input's gradient and half for the weights'.
    """

    forward: float = 1.0
    backward: float = 2.0
    input: float = 1.0
    weight: float = 1.0
    latency: float = 0.0

    def of(self, schedule: Schedule, work: Work) -> float:
        """Time of a piece of work."""
        op = schedule.does(work)
        whole = {FORWARD: self.forward, BACKWARD: self.backward, INPUT: self.input, WEIGHT: self.weight}[op]
        return whole / work.parts if op in (FORWARD, BACKWARD) else whole

    def scaled(self, factor: float) -> "Costs":
        """All operations `factor` times as long; sends stay as they are."""
        ops = ("forward", "backward", "input", "weight")
        return dataclasses.replace(self, **{op: getattr(self, op) * factor for op in ops})


class Span(NamedTuple):
    """A piece of work on the time axis."""

    rank: int
    work: Work
    start: float
    stop: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The start and end of every piece of work of a schedule.

    Attributes:
      spans: every piece of work.
      ideal: the busiest rank's work, without waiting.
      makespan: from the first start to the last end.
      peak_live: for each rank, the most chunk activations held at once, from forward to the weights' gradients.
    """

    spans: tuple[Span, ...]
    ideal: float
    makespan: float
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Time lost, as a share of the ideal time."""
        return self.makespan / self.ideal - 1

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the fraction of the makespan in which it works."""
        return tuple(busy / self.makespan for busy in _busy(self.spans, len(self.peak_live)))


def simulate_event(schedule: Schedule, costs: Costs = Costs()) -> Simulation:  # noqa: B008
    """Each rank runs its order, each operation as soon as its inputs have arrived.

    Parts that overlap end together.

    Raises:
      ScheduleError: the orders deadlock. Those of a schedule that does not drain always do.
    """
    queues = [
        [together for tick in schedule.ticks for together in run_together(schedule, tick[rank])]
        for rank in range(schedule.stages)
    ]
    position, clock = [0] * schedule.stages, [0.0] * schedule.stages
    finished: dict[tuple[str, int, int], float] = {}  # when each (result, stage, microbatch) was
    spans: list[Span] = []
    while any(position[rank] < len(queues[rank]) for rank in range(schedule.stages)):
        moved = False
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                works = queue[position[rank]]
                stages = [schedule.stage(work.chunk, rank) for work in works]
                wanted = [
                    (result, of, work.microbatch)
                    for work, stage in zip(works, stages, strict=True)
                    for result, of in schedule.needs(work, stage)
                ]
                if any(want not in finished for want in wanted):
                    break
                away = [costs.latency if schedule.home(of)[1] != rank else 0.0 for _, of, _ in wanted]
                clock[rank] = max(
                    [clock[rank], *(finished[want] + late for want, late in zip(wanted, away, strict=True))]
                )
                for work in works:
                    spans.append(Span(rank, work, clock[rank], clock[rank] + costs.of(schedule, work)))
                    clock[rank] = spans[-1].stop
                for work, stage in zip(works, stages, strict=True):
                    finished |= {(result, stage, work.microbatch): clock[rank] for result in schedule.results(work)}
                position[rank] += 1
                moved = True
        if not moved:
            raise ScheduleError(f"{schedule.name}: the orders deadlock")
    return simulation_of(schedule, spans)


def run_together(schedule: Schedule, works: tuple[Work, ...]) -> list[tuple[Work, ...]]:
    """A rank's works of a tick: those that overlap together, others one by one."""
    return [works] if schedule.overlaps(works) else [(work,) for work in works]


def simulate_lockstep(schedule: Schedule, costs: Costs = Costs()) -> Simulation:  # noqa: B008
    """All ranks start each tick together.

    In a paired tick each phase that any rank has takes its op's time on all ranks; a mixed tick takes as long as its
    slowest rank. `latency` is added once per tick.
    """
    spans: list[Span] = []
    now = 0.0
    for row in schedule.ticks:
        if schedule.paired:
            for op, time in ((FORWARD, costs.forward), (BACKWARD, costs.backward)):
                active = [(rank, work) for rank, works in enumerate(row) for work in works if work.op == op]
                spans += [Span(rank, work, now, now + time) for rank, work in active]
                now += time if active else 0.0
        else:
            ends = [now]
            for rank, works in enumerate(row):
                start = now
                for work in works:
                    spans.append(Span(rank, work, start, start + costs.of(schedule, work)))
                    start = spans[-1].stop
                ends.append(start)
            now = max(ends)
        now += costs.latency
    return simulation_of(schedule, spans)


def fill_and_drain(stages: int, microbatches: int, chunks: int, costs: Costs, lockstep: bool, **options) -> float:
    """Idle time (p - 1)(tF + tB) of a rank: the closed form of GPipe, 1F1B and interleaved 1F1B (2104.04473 2.2).

    It holds event by event, and in lockstep where ticks are paired, for any number of microbatches and chunks.
    """
    return (stages - 1) * (costs.forward + costs.backward)


def simulation_of(schedule: Schedule, spans: list[Span]) -> Simulation:
    """The summary of the spans of every piece of work."""
    work = _busy(spans, schedule.stages)
    makespan = max(s.stop for s in spans) - min(s.start for s in spans)
    return Simulation(tuple(spans), max(work), makespan, tuple(_peaks(schedule, spans)))


def _busy(spans: Sequence[Span], stages: int) -> list[float]:
    """For each rank, the time in which it works."""
    busy = [0.0] * stages
    for span in spans:
        busy[span.rank] += span.stop - span.start
    return busy


def _peaks(schedule: Schedule, spans: list[Span]) -> list[int]:
    """For each rank, the most chunk activations held at once, from a forward's start to the end of its W."""
    of_rank: list[list[Span]] = [[] for _ in range(schedule.stages)]
    for span in spans:
        of_rank[span.rank].append(span)
    peaks = []
    for own in of_rank:
        forwards, weights = {}, {}
        for span in own:
            place = (span.work.chunk, span.work.microbatch)
            if span.work.op == FORWARD:
                forwards.setdefault(place, span)
            if WEIGHT in schedule.results(span.work):
                weights[place] = span
        changes = [(span.start, 1) for span in forwards.values()] + [(span.stop, -1) for span in weights.values()]
        live = most = sum(_is_of_the_step_before(schedule, forwards[place], span) for place, span in weights.items())
        for _, change in sorted(changes):  # at equal times ends come before starts
            live += change
            most = max(most, live)
        peaks.append(most)
    return peaks


def _is_of_the_step_before(schedule: Schedule, forward: Span, weight: Span) -> bool:
    """Whether a chunk was in flight at the start of the step, as in a schedule that does not drain.

    Its W then comes before its forward, or immediately after where another rank must have run in between.
    """
    if schedule.stage(forward.work.chunk, forward.rank) == schedule.last_stage:
        return weight.stop <= forward.start
    return weight.start <= forward.stop
