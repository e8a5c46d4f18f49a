"""Schedules that split the backward: I, gradient of the input, hurries; W, gradients of the weights, fills the bubbles.

Notation as in schedules.py; tI and tW are a chunk's times, tI + tW = tB. Ticks are mixed, one piece of work a rank, so they
lose nothing where tF = tI = tW. The papers count idle time between a rank's first and last operation, and call it zero;
a step that ends with one update of all weights pays the makespan, and that is the bubble given here.
"""

from megajax.schedules.registry import depth_first, register, require
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Operation, Schedule, pack


@register("zb_h1")
def zb_h1(stages: int, microbatches: int, chunks: int) -> Schedule:
    """ZB-H1 (2401.10241): 1F1B with the backward split; rank r does W r microbatches late, and the rest in the drain.

    Bubble (p - 1)(tF + tI - tW), a third of 1F1B's at equal costs; p microbatches in flight on every rank, as 1F1B's most.

        p = 2, m = 3
        rank 0  F0.0 F1.0 .    I0.0 W0.0 F2.0 I1.0 W1.0 I2.0 W2.0
        rank 1  .    F0.0 I0.0 F1.0 I1.0 W0.0 F2.0 I2.0 W1.0 W2.0
    """
    require(chunks == 1, f"zb_h1 has one chunk a rank, not {chunks}; zb_1p_interleaved takes several")
    return _zero_bubble("zb_h1", stages, microbatches, 1, eager=1)


@register("zb_h2")
def zb_h2(stages: int, microbatches: int, chunks: int) -> Schedule:
    """ZB-H2 (2401.10241): twice ZB-H1's warm-up and twice its delay of W, so that no rank idles between first and last op.

    Bubble (p - 1)tF: over ZB-H1 it gains (p - 1)(tI - tW), nothing at equal costs, but it hides slow sends. It costs twice
    the memory, 2p - 1 microbatches in flight on every rank.

        p = 2, m = 3
        rank 0  F0.0 F1.0 F2.0 I0.0 W0.0 I1.0 W1.0 I2.0 W2.0 .
        rank 1  .    F0.0 I0.0 F1.0 I1.0 F2.0 I2.0 W0.0 W1.0 W2.0
    """
    require(chunks == 1, f"zb_h2 has one chunk a rank, not {chunks}; zb_1p_interleaved takes several")
    return _zero_bubble("zb_h2", stages, microbatches, 1, eager=2)


@register("zb_1p_interleaved")
def zb_1p_interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved zero bubble, one-p memory (2401.10241; torch's InterleavedZeroBubble): ZB-H1 over v chunks a rank.

    Bubble (p - 1)(tF + tI - tW) in chunk times, (p - 1)/(3mv) of the ideal where the three cost the same; vp chunks in
    flight on every rank, those waiting for W counted.

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 F0.1 F1.1 .    I0.1 W0.1 I1.1 W1.1 I0.0 W0.0 I1.0 W1.0
        rank 1  .    F0.0 F1.0 F0.1 I0.1 F1.1 I1.1 W0.1 I0.0 W1.1 I1.0 W0.0 W1.0
    """
    require(
        stages == 1 or microbatches % stages == 0,
        f"zb_1p_interleaved takes a multiple of {stages} microbatches (stages), not {microbatches}",
    )
    return _zero_bubble("zb_1p_interleaved", stages, microbatches, chunks, eager=1)


def _zero_bubble(name: str, stages: int, microbatches: int, chunks: int, *, eager: int) -> Schedule:
    """Rank r warms up with `eager` (p - 1 - r) forwards beside those of the earlier chunks, and delays W by `eager` r."""
    sequence = depth_first(stages, microbatches, chunks)
    backwards = [(chunks - 1 - chunk, microbatch) for chunk, microbatch in sequence]
    orders = []
    for rank in range(stages):
        warmup = min((chunks - 1) * stages + eager * (stages - 1 - rank), len(sequence))
        delay = eager * rank
        order = [Operation(FORWARD, *place) for place in sequence[:warmup]]
        for index, place in enumerate(backwards):
            if warmup + index < len(sequence):
                order.append(Operation(FORWARD, *sequence[warmup + index]))
            order.append(Operation(INPUT, *place))
            if index >= delay:
                order.append(Operation(WEIGHT, *backwards[index - delay]))
        order += [Operation(WEIGHT, *late) for late in backwards[max(0, len(backwards) - delay) :]]
        orders.append(order)
    return pack(name, orders, microbatches=microbatches, chunks=chunks, paired=False, split=True)


@register("zb_v")
def zb_v(stages: int, microbatches: int, chunks: int) -> Schedule:
    """ZB-V (2401.10241 section 6; 2405.15362): two chunks a rank, placed in a V, so that rank 0 has both ends.

    Bubble (p - 1)/(6m) of the ideal at equal costs; 2p chunks, that is p stages' worth, in flight on every rank.

        p = 2, m = 3, v = 2
        rank 0  F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0.0 W0.0 F2.1 I2.1 W2.1 I1.0 W1.0 I2.0 W2.0 .
        rank 1  .    F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 F2.0 I0.0 W0.0 F2.1 I1.1 W1.1 I1.0 I2.1 I2.0 W1.0 W2.1 W2.0
    """
    require(chunks == 2, f"zb_v has two chunks a rank, not {chunks}")
    return _in_a_v("zb_v", stages, microbatches, _zero_bubble_v, at_least=2 * stages - 1)


def _zero_bubble_v(counter: "_Counter", stages: int, rank: int) -> None:
    microbatches, do = counter.microbatches, counter.do
    for _ in range(2 * (stages - rank) - 1):
        do(0, FORWARD)
    for _ in range(rank):
        do(1, FORWARD)
        do(0, FORWARD)
    for _ in range(stages - rank):
        do(1, FORWARD, INPUT, WEIGHT)
    while counter.done[FORWARD, 1] < microbatches:
        do(0, FORWARD, INPUT, WEIGHT)
        do(1, FORWARD, INPUT, WEIGHT)
    for _ in range(rank):
        do(0, INPUT)
        do(1, INPUT)
    for _ in range(stages - rank):
        do(0, INPUT, WEIGHT)
    for chunk in (1, 0):
        for op in (INPUT, WEIGHT):
            while counter.done[op, chunk] < microbatches:
                do(chunk, op)


@register("dualpipe_v")
def dualpipe_v(stages: int, microbatches: int, chunks: int) -> Schedule:
    """DualPipeV (DeepSeek-V3, 2412.19437; "cut in half" by sail-sg): a V in which forwards and backwards meet in pairs.

    Bubble (p - 1)/(6m) of the ideal at equal costs, as ZB-V; 2p + 1 chunks in flight on every rank. The pairs were made to
    hide an expert model's all-to-all; here a forward and a backward run one after the other. Most backwards are whole
    (B): in ticks such a one is an I and then its W. Needs m >= 2p.

        p = 1, m = 2, v = 2
        rank 0  F0.0 F0.1 F1.0 B0.1 B0.1' F1.1 B0.0 B0.0' B1.1 B1.1' I1.0 W1.0
    """
    require(chunks == 2, f"dualpipe_v has two chunks a rank, not {chunks}")
    require(
        microbatches >= 2 * stages,
        f"dualpipe_v takes at least twice as many microbatches as stages, 2 * {stages} = {2 * stages}, not {microbatches}",
    )
    return _in_a_v("dualpipe_v", stages, microbatches, _dual_pipe_v)


def _dual_pipe_v(counter: "_Counter", stages: int, rank: int) -> None:
    """The eight steps of DeepSeek's dualpipev.py."""
    do, late = counter.do, stages - rank - 1
    for _ in range(2 * late):
        do(0, FORWARD)
    for _ in range(rank + 1):
        do(0, FORWARD)
        do(1, FORWARD)
    for _ in range(late):
        do(1, INPUT, WEIGHT, FORWARD)
    for _ in range(counter.microbatches - 2 * stages + rank + 1):
        do(0, FORWARD)
        do(1, BACKWARD)
        do(1, FORWARD)
        do(0, BACKWARD)
    for _ in range(late):
        do(1, BACKWARD, FORWARD)
        do(0, BACKWARD)
    waiting = []  # I's of the end, whose W's then run in the same order
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


class _Counter:
    """Writes one rank's order: each op takes the next microbatch of its chunk, and none after the last."""

    def __init__(self, microbatches: int):
        self.microbatches = microbatches
        self.order: list[Operation] = []
        self.done = {(op, chunk): 0 for op in (FORWARD, INPUT, WEIGHT) for chunk in (0, 1)}

    def do(self, chunk: int, *ops: str) -> None:
        for op in ops:
            parts = (INPUT, WEIGHT) if op == BACKWARD else (op,)
            microbatch = self.done[parts[0], chunk]
            if microbatch < self.microbatches:
                self.order.append(Operation(op, chunk, microbatch))
                for part in parts:
                    self.done[part, chunk] += 1


def _in_a_v(name: str, stages: int, microbatches: int, write, at_least: int = 0) -> Schedule:
    """The schedule in V placement whose orders `write(counter, stages, rank)` writes.

    They are written for `at_least` so many microbatches, and those that there are not are left out.
    """
    orders = []
    for rank in range(stages):
        counter = _Counter(max(microbatches, at_least))
        write(counter, stages, rank)
        orders.append([operation for operation in counter.order if operation.microbatch < microbatches])
    return pack(
        name,
        orders,
        microbatches=microbatches,
        chunks=2,
        paired=False,
        parts={BACKWARD: 2},
        split=True,
        placement="v",
    )
