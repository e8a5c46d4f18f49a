"""GPipe: all forwards, then all backwards.

Notation of all generators: p stages (ranks), m microbatches, v chunks on each rank, r this rank; tF and tB are a
chunk's forward and backward time. A generator writes each rank's order of operations, as the papers do, and `pack`
places it into ticks. In the tables of the docstrings a column is a tick: F2.1 is the forward of microbatch 2 through
chunk 1, B2.1' the second part of its backward.
"""

from megajax.schedules.registry import Slots, register
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, Schedule, pack
from megajax.schedules.simulate import fill_and_drain
from megajax.schedules.stages import loop


def _slots(stages: int, microbatches: int, chunks: int) -> Slots:
    """Every microbatch is held at once; bubbles write to one more slot."""
    if stages == 1:
        return Slots(microbatches, 0, microbatches + 2)
    return Slots(microbatches + 1, 0, microbatches + 1 + 2)


@register("gpipe", split=False, paired=True, placement=loop, slots=_slots, bubble=fill_and_drain, simplicity=7)
def gpipe(stages: int, microbatches: int, chunks: int) -> Schedule:
    """GPipe (1811.06965): all forwards, then all backwards, in microbatch order.

    Bubble (p - 1)(tF + tB), that is (p - 1)/m of the ideal time; m microbatches in flight on every rank.

        p = 2, m = 3
        rank 0  F0.0 F1.0 F2.0 .         B0.0 B1.0 B2.0
        rank 1  .    F0.0 F1.0 F2.0+B0.0 B1.0 B2.0 .
    """
    order = [Operation(op, 0, microbatch) for op in (FORWARD, BACKWARD) for microbatch in range(microbatches)]
    return pack("gpipe", [order] * stages, microbatches=microbatches, paired=True)
