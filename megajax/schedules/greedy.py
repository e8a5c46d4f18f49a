"""`auto`: the fastest schedule for given costs and memory among all registered ones and greedy list schedules."""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterator

from megajax.schedules import registry
from megajax.schedules.registry import register, require
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Operation, Schedule, ScheduleError, pack
from megajax.schedules.simulate import Costs, simulate_event, simulate_lockstep
from megajax.schedules.stages import loop, wave


@register(
    "auto",
    chunks="any",
    most_forwards=2**14,  # it builds and simulates about 15 tables
    simplicity=None,  # a search tries the schedules themselves
)
def auto(
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs = Costs(),  # noqa: B008
    live_chunks: int | None = None,
) -> Schedule:
    """The schedule that takes least time in lockstep under `costs` and holds at most `live_chunks` on a rank.

    Candidates are all registered schedules that train and drain, with these sizes, and greedy list schedules: an idle
    rank runs the most preferred operation that is ready, by several orders of preference, in a loop or a V, with the
    backward whole or split. It is therefore at least as fast as the best registered one. Bubble and memory are those of
    the chosen schedule, whose name follows "auto:".

    Args:
      costs: time of each operation on a chunk, and of a send.
      live_chunks: most chunk activations held on a rank at once, from forward to weight gradients; None for no limit.

    Raises:
      ScheduleError: less memory than one activation for each chunk.
    """
    require(
        live_chunks is None or live_chunks >= chunks,
        f"live_chunks is {live_chunks}; a rank needs room for one activation of each of its {chunks} chunks",
    )
    best: tuple[float, int, Schedule] | None = None
    for schedule in _candidates(stages, microbatches, chunks, costs, live_chunks or microbatches * chunks):
        live = max(simulate_event(schedule, costs).peak_live + simulate_lockstep(schedule, costs).peak_live)
        key = (simulate_lockstep(schedule, costs).makespan, live)
        if live <= (live_chunks or live) and (best is None or key < best[:2]):
            best = (*key, schedule)
    return best[2]  # the greedy ones keep within the limit, so there is at least one


def _candidates(stages: int, microbatches: int, chunks: int, costs: Costs, memory: int) -> Iterator[Schedule]:
    for spec in registry.specs():
        if spec.generate is auto or not (spec.trains and spec.drains):
            continue
        try:
            made = registry.make_schedule(spec.name, stages=stages, microbatches=microbatches, chunks=chunks)
            yield dataclasses.replace(made, name=f"auto:{made.name}")
        except ScheduleError:
            pass  # these sizes are illegal for it
    for place in (loop, wave) if chunks == 2 else (loop,):
        placement = place(stages, chunks)
        for split in (False, True):
            for prefer in PREFERENCES[split]:
                table = Schedule("auto:greedy", stages, microbatches, chunks, False, (), placement, split)
                orders = list_schedule(table, costs, memory, functools.partial(_rank_of, prefer, stages))
                sizes = {"microbatches": microbatches, "chunks": chunks, "placement": placement, "split": split}
                mixed = pack("auto:greedy", orders, **sizes, paired=False, parts={BACKWARD: 2})
                yield mixed.validate()
                if not split:
                    yield pack("auto:greedy", orders, **sizes, paired=True).validate()


# Which op goes first of those that are ready. A late forward costs most where memory is plentiful. W frees memory; it
# is delayed where it can fill a later bubble.
PREFERENCES = {
    False: ((BACKWARD, FORWARD), (FORWARD, BACKWARD)),
    True: ((INPUT, FORWARD, WEIGHT), (FORWARD, INPUT, WEIGHT), (INPUT, WEIGHT, FORWARD)),
}


def list_schedule(
    table: Schedule, costs: Costs, memory: int, key: Callable[[Operation, int], tuple]
) -> list[list[Operation]]:
    """Each rank's order: at every moment an idle rank starts, of what is ready, the operation of the least `key(., rank)`.

    A forward of chunk c starts only if it leaves room for one activation of each later chunk. Then at least one
    activation on the rank can always proceed to its backward, and the ranks cannot deadlock.
    """
    durations = {FORWARD: costs.forward, BACKWARD: costs.backward, INPUT: costs.input, WEIGHT: costs.weight}
    ranks = range(table.stages)
    orders: list[list[Operation]] = [[] for _ in ranks]
    free, live = [0.0] * table.stages, [0] * table.stages
    ready: list[dict[Operation, float]] = [{} for _ in ranks]  # by operation, when its inputs arrive
    ready[0][Operation(FORWARD, 0, 0)] = 0.0
    left = table.microbatches * (table.last_stage + 1) * (3 if table.split else 2)
    moments = [(0.0, rank) for rank in ranks]
    while left:
        now, rank = heapq.heappop(moments)
        if free[rank] > now:
            continue
        open_now = [
            operation
            for operation, since in ready[rank].items()
            if since <= now and (operation.op != FORWARD or live[rank] + table.chunks - operation.chunk <= memory)
        ]
        if not open_now:
            continue
        choice = min(open_now, key=lambda operation: key(operation, rank))
        del ready[rank][choice]
        orders[rank].append(choice)
        end = free[rank] = now + durations[choice.op]
        left -= 1
        live[rank] += (choice.op == FORWARD) - (choice.op in (BACKWARD, WEIGHT))
        heapq.heappush(moments, (end, rank))
        for operation, owner in _enabled(table, choice, rank):
            since = end + (costs.latency if owner != rank else 0.0)
            ready[owner][operation] = since
            heapq.heappush(moments, (since, owner))
    return orders


def _rank_of(prefer: tuple[str, ...], group: int, operation: Operation, rank: int) -> tuple:
    """Forwards in groups of p microbatches, chunk by chunk; of backwards the oldest, and the last chunk's first."""
    if operation.op == FORWARD:
        return prefer.index(FORWARD), operation.microbatch // group, operation.chunk, operation.microbatch
    return prefer.index(operation.op), operation.microbatch // group, -operation.chunk, operation.microbatch


def _enabled(table: Schedule, done: Operation, rank: int) -> Iterator[tuple[Operation, int]]:
    """The operations that may start once `done` has ended, each with its rank."""
    back = INPUT if table.split else BACKWARD
    stage = table.stage(done.chunk, rank)
    if done.op == FORWARD and stage == 0 and done.microbatch + 1 < table.microbatches:
        yield Operation(FORWARD, 0, done.microbatch + 1), rank  # one at a time, which keeps `ready` small
    if done.op == FORWARD and stage < table.last_stage:
        chunk, owner = table.home(stage + 1)
        yield Operation(FORWARD, chunk, done.microbatch), owner
    elif done.op == FORWARD:
        yield Operation(back, done.chunk, done.microbatch), rank
    elif done.op == back and stage:
        chunk, owner = table.home(stage - 1)
        yield Operation(back, chunk, done.microbatch), owner
    if done.op == INPUT:
        yield Operation(WEIGHT, done.chunk, done.microbatch), rank
