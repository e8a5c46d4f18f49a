"""Simulates a schedule whose ranks are on several sites, joined by links with latency, limited bandwidth and jitter.

Consecutive ranks share a site. Sends within a site take no time here; those between two sites share one link in each
direction. Times are in the unit of the costs.
"""

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from megajax.schedules.schedule import FORWARD, INPUT, Schedule, ScheduleError, Work
from megajax.schedules.simulate import Costs, Simulation, Span, run_together, simulation_of

__all__ = ["Sites", "simulate_sites"]


@dataclasses.dataclass(frozen=True)
class Sites:
    """Sites of a pipeline and the links between them.

    Attributes:
      count: sites, of p / count ranks each; larger ones first if that is not whole.
      latency: one way, from the last byte sent to its arrival.
      transfer: time that one activation, or its gradient, occupies the link; later ones wait.
      jitter: mean of the delay that is added to each message's latency, exponentially distributed. Messages of a link arrive
        in order, as over TCP.
      seed: of the delays.
    """

    count: int = 2
    latency: float = 0.0
    transfer: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def of(self, rank: int, stages: int) -> int:
        """The site of a rank."""
        return rank * self.count // stages


def simulate_sites(schedule: Schedule, costs: Costs, sites: Sites) -> Simulation:
    """Each rank runs its order, each operation as soon as its inputs have arrived; `costs.latency` is not used.

    Operations are taken in the order in which they end, so that messages enter a link in the order in which they are sent.

    Raises:
      ScheduleError: more sites than ranks, or the orders deadlock.
    """
    if not 1 <= sites.count <= schedule.stages:
        raise ScheduleError(f"{schedule.stages} stages cannot be on {sites.count} sites; each has at least one stage")
    queues = [
        [together for tick in schedule.ticks for together in run_together(schedule, tick[rank])]
        for rank in range(schedule.stages)
    ]
    place = [sites.of(rank, schedule.stages) for rank in range(schedule.stages)]
    random = np.random.default_rng(sites.seed)
    position, clock, waiting = [0] * schedule.stages, [0.0] * schedule.stages, set(range(schedule.stages))
    arrived: dict[tuple[str, int, int, int], float] = {}  # (result, stage, microbatch, at rank): when
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    last_arrival: dict[tuple[int, int], float] = defaultdict(float)
    ends: list[tuple[float, int, float]] = []  # (end, rank, start) of the operations that run
    spans: list[Span] = []

    def start_next(rank: int) -> None:
        """Starts the rank's next operation if the arrival of all its inputs is known."""
        if rank not in waiting or position[rank] == len(queues[rank]):
            return
        works = queues[rank][position[rank]]
        times = [
            arrived.get((result, stage, work.microbatch, rank))
            for work in works
            for result, stage in schedule.needs(work, schedule.stage(work.chunk, rank))
        ]
        if None not in times:
            end = start = max([clock[rank], *times])
            waiting.remove(rank)
            for work in works:
                end += costs.of(schedule, work)
            heapq.heappush(ends, (end, rank, start))

    def arrival(now: float, source: int, target: int) -> float:
        """When a message that is ready now arrives."""
        link = (place[source], place[target])
        if link[0] == link[1]:
            return now
        link_free[link] = max(link_free[link], now) + sites.transfer
        delay = random.exponential(sites.jitter) if sites.jitter else 0.0
        last_arrival[link] = max(last_arrival[link], link_free[link] + sites.latency + delay)
        return last_arrival[link]

    for rank in range(schedule.stages):
        start_next(rank)
    while ends:
        now, rank, start = heapq.heappop(ends)
        works = queues[rank][position[rank]]
        position[rank] += 1
        clock[rank] = now
        waiting.add(rank)
        for work in works:
            spans.append(Span(rank, work, start, start + costs.of(schedule, work)))
            start, stage = spans[-1].stop, schedule.stage(work.chunk, rank)
            for result in schedule.results(work):
                arrived[result, stage, work.microbatch, rank] = now
            for result, target in _sends(schedule, work, stage):
                if target != rank:
                    arrived[result, stage, work.microbatch, target] = arrival(now, rank, target)
                    start_next(target)
        start_next(rank)
    if any(position[rank] < len(queues[rank]) for rank in range(schedule.stages)):
        raise ScheduleError(f"{schedule.name}: the orders deadlock")
    return simulation_of(schedule, spans)


def _sends(schedule: Schedule, work: Work, stage: int) -> Iterator[tuple[str, int]]:
    """(result, rank that needs it) of each result that a piece of work completes for another stage."""
    for result in schedule.results(work):
        if result == FORWARD and stage < schedule.last_stage:
            yield result, schedule.home(stage + 1)[1]
        elif result == INPUT and stage:
            yield result, schedule.home(stage - 1)[1]
