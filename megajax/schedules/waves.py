"""Hanayo: 1F1B on chunks that go down the ranks and up again, several times. Notation as in gpipe.py."""

import functools

from megajax.schedules.greedy import list_schedule
from megajax.schedules.registry import register
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, Schedule, pack
from megajax.schedules.simulate import Costs, simulate_lockstep
from megajax.schedules.stages import wave


@register(
    "hanayo",
    chunks="even",
    most_forwards=2**14,  # it simulates three orders
    split=False,
    paired=False,
    placement=wave,
    simplicity=None,  # interleaved_1f1b has a smaller bubble
)
def hanayo(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Hanayo (2308.15762): v/2 waves, in each of which a microbatch passes the ranks down and up again.

    Rank 0 has the first stage and the last one, and nothing is sent where a wave turns. An idle rank runs, of what is ready,
    the oldest microbatch, or what is farthest behind microbatches of an even pace, whichever order takes less time. If
    tB = 2 tF the bubble is 3(p - 1) chunk forwards at least, in which a microbatch reaches the last rank and comes back
    from it, 4(p - 1) with one wave and m = p, and somewhat more with three waves. At most (v + 1)p chunks in flight, vp
    with m = p.

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 .    F0.1 B0.1 B0.1' F1.1 B1.1  B1.1' .     B0.0 B0.0' .    .     B1.0 B1.0'
        rank 1  .    F0.0 F0.1 F1.0 F1.1 .     B0.1 B0.1' B0.0  B0.0' B1.1 B1.1' B1.0 B1.0' .    .
    """
    table = Schedule("hanayo", stages, microbatches, chunks, False, (), wave(stages, chunks))
    sizes = {"microbatches": microbatches, "chunks": chunks, "placement": table.placement}
    made, last = [], table.last_stage

    def oldest(operation: Operation, rank: int) -> tuple:
        forward = operation.op == FORWARD
        return forward, -operation.chunk if forward else operation.chunk, operation.microbatch

    def ahead(pace: float, operation: Operation, rank: int) -> tuple:
        """Negative: so many chunk forwards behind microbatches that start `pace` of a rank's forwards apart."""
        stage = table.stage(operation.chunk, rank)
        left = 3 * (last + 1) - stage if operation.op == FORWARD else 2 * stage
        return (pace * chunks * operation.microbatch - left,)

    for key in (oldest, functools.partial(ahead, 0.75), functools.partial(ahead, 1)):
        orders = list_schedule(table, Costs(), (chunks + 1) * stages, key)
        made.append(pack("hanayo", orders, **sizes, paired=False, parts={BACKWARD: 2}))
    return min(made, key=lambda schedule: simulate_lockstep(schedule).makespan)
