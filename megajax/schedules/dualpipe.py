"""DualPipeV, the form of DualPipe without a second copy of the weights. Notation as in gpipe.py, zero_bubble.py."""

from megajax.schedules.registry import register
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule
from megajax.schedules.stages import wave
from megajax.schedules.zero_bubble import OrderWriter, in_a_v


@register(
    "dualpipe_v",
    chunks="two",
    fewest_microbatches=lambda stages: 2 * stages,
    any_microbatches=False,
    split=True,
    paired=False,
    placement=wave,
    simplicity=None,  # zb_v with more memory
)
def dualpipe_v(stages: int, microbatches: int, chunks: int) -> Schedule:
    """DualPipeV (DeepSeek-V3, 2412.19437; "cut in half" by sail-sg): a V whose steady state pairs forwards with
    backwards.

    The two of a pair overlap, so that the collectives of one run beside the matmuls of the other, as the all-to-all of a
    mixture of experts must: a pair is three ticks, with a third of the chunk's blocks of both in each. Other backwards
    that are whole (B) are two ticks, I and then W. Bubble (p - 1)(tFB + tB - 3 tW), which is (p - 1)/(3m) of the ideal at
    equal costs (tFB is a pair's time); 2p + 1 chunks in flight on every rank. Needs m >= 2p.

        p = 1, m = 2, v = 2
        rank 0  F0.0 F0.1 F1.0 B0.1 B0.1' F1.1+B0.0 F1.1'+B0.0' F1.1''+B0.0'' B1.1 B1.1' I1.0 W1.0
    """
    return in_a_v("dualpipe_v", stages, microbatches, _dual_pipe_v)


def _dual_pipe_v(writer: OrderWriter, stages: int, rank: int) -> None:
    """The eight steps of DeepSeek's dualpipev.py."""
    do, overlap, late = writer.do, writer.overlap, stages - rank - 1
    for _ in range(2 * late):
        do(0, FORWARD)
    for _ in range(rank + 1):
        do(0, FORWARD)
        do(1, FORWARD)
    for _ in range(late):
        do(1, INPUT, WEIGHT, FORWARD)
    for step in range(writer.microbatches - 2 * stages + rank + 1):
        if step or late:
            overlap(0, 1)
        else:  # apart, which makes the bubble smaller, says DeepSeek's code
            do(0, FORWARD)
            do(1, BACKWARD)
        overlap(1, 0)
    for _ in range(late):
        do(1, BACKWARD)
        overlap(1, 0)
    waiting = []  # chunks of the last I's; their W's run in the same order
    for step in range(2 * (rank + 1)):
        split, chunk = step >= rank + 1, 1 - step % 2
        if split:
            waiting.append(chunk)
        do(chunk, INPUT if split else BACKWARD)
    for _ in range(late):
        do(waiting.pop(0), WEIGHT)
        waiting.append(0)
        do(0, INPUT)
    for chunk in waiting:
        do(chunk, WEIGHT)
