"""Zero bubble: the backward is split into I, the gradient of the input, and W, the gradients of the weights.

I is on the critical path; W runs where a rank would otherwise idle. Notation as in gpipe.py; tI and tW are a chunk's
times, tI + tW = tB. Ticks are mixed, one piece of work on each rank, so they lose nothing where tF = tI = tW. The
papers count the idle time between a rank's first and last operation, and call it zero. A step that ends with one update
of all weights takes the makespan, so the bubbles given here include the fill and the drain.
"""

from collections.abc import Callable

from megajax.schedules.one_f_one_b import depth_first
from megajax.schedules.registry import Slots, register
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Operation, Schedule, pack
from megajax.schedules.simulate import Costs
from megajax.schedules.stages import loop, wave


def split_bubble(stages: int, microbatches: int, chunks: int, costs: Costs, lockstep: bool) -> float:
    """Idle time of ZB-H1 and of its interleaved form.

    In lockstep a tick takes as long as the slowest of F, I and W that any rank has in it.
    """
    return _bubble(_ticks(stages, microbatches, chunks), stages, microbatches * chunks, costs, lockstep)


def _v_bubble(stages: int, microbatches: int, chunks: int, costs: Costs, lockstep: bool) -> float:
    """Idle time of ZB-V, in lockstep as of `split_bubble`, but for a few ticks of the fill and drain."""
    return _bubble(_v_ticks(stages, microbatches), stages, microbatches * chunks, costs, lockstep)


def _bubble(ticks: dict[str, int], stages: int, work: int, costs: Costs, lockstep: bool) -> float:
    """`ticks`: how many there are by the operations that any rank has in them."""
    if stages == 1:
        return 0.0
    if not lockstep:
        return (stages - 1) * max(0.0, costs.forward + costs.input - costs.weight)
    seconds = {FORWARD: costs.forward, INPUT: costs.input, WEIGHT: costs.weight}
    makespan = sum(count * max(seconds[op] for op in kind) for kind, count in ticks.items())
    return makespan - work * (costs.forward + costs.backward)


def _ticks(stages: int, microbatches: int, chunks: int) -> dict[str, int]:
    """Of a loop, as counted in its tables: the last tick has W only."""
    most = 3 * microbatches * chunks + stages - 1 + max(0, stages - microbatches)
    return _kinds(stages, microbatches, chunks, most, stages - 1, (2 * chunks - 1) * stages, 1)


def _v_ticks(stages: int, microbatches: int) -> dict[str, int]:
    """Of a V: with fewer than 2p - 1 microbatches there are more ticks, and fewer that have W only."""
    fewer = max(0, 2 * stages - 1 - microbatches)
    most = 6 * microbatches + stages - 1 + max(0, 2 * fewer - stages + 1)
    weights = 3 if microbatches <= stages else max(1, stages - 2 * fewer)
    return _kinds(stages, microbatches, 2, most, 1, 2 * stages, weights)


def _kinds(
    stages: int, microbatches: int, chunks: int, most: int, early: int, late: int, weights: int
) -> dict[str, int]:
    """Of `most` ticks pv have F only, then `early` F and I, in the end `late` I and W, and `weights` W only.

    The others have all three; on two ranks two of them.
    """
    alone = {FORWARD: stages * chunks, WEIGHT: weights}
    full = most - sum(alone.values())
    if stages == 2:
        apart = max(0, (microbatches - 2) * chunks)
        return alone | {"FI": apart + 1, "FW": apart, "IW": full - 2 * apart - 1}
    early = min(early, max(0, 2 * microbatches - 3))
    late = min(late, full - early)
    return alone | {"FI": early, "FIW": full - early - late, "IW": late}


def _h1_slots(stages: int, microbatches: int, chunks: int) -> Slots:
    held = min(microbatches, stages)
    return Slots(held, held, (1 if stages == 1 else 2) + 2)


def _1p_slots(stages: int, microbatches: int, chunks: int) -> Slots:
    if stages == 1:
        return Slots(1, 1, 1 + 2)
    inbox = 2
    if chunks > 1:
        inbox = (-(-3 * stages // 4) if microbatches > stages else 1) + stages // 2 + 1
    return Slots(min(microbatches * chunks, stages * chunks), min(microbatches, stages), inbox + 2)


def _v_slots(stages: int, microbatches: int, chunks: int) -> Slots:
    """As counted in all tables of up to 30 ranks; W starts to wait for more than one I with more than p microbatches."""
    if stages == 1:
        return Slots(1, 1, 1 + 2)
    more = microbatches - stages
    inbox = 4 if more > 0 else min(microbatches + 1, 3)
    return Slots(min(2 * microbatches, 2 * stages), min(max(1, 2 * more + 1), 2 * stages - 1), inbox + 2)


@register("zb_h1", split=True, paired=False, placement=loop, slots=_h1_slots, bubble=split_bubble, simplicity=4)
def zb_h1(stages: int, microbatches: int, chunks: int) -> Schedule:
    """ZB-H1 (2401.10241): 1F1B with a split backward; rank r delays W by r microbatches and ends with the delayed ones.

    Bubble (p - 1)(tF + tI - tW), a third of 1F1B's at equal costs; p microbatches in flight on every rank, as 1F1B's
    most.

        p = 2, m = 3
        rank 0  F0.0 F1.0 .    I0.0 W0.0 F2.0 I1.0 W1.0 I2.0 W2.0
        rank 1  .    F0.0 I0.0 F1.0 I1.0 W0.0 F2.0 I2.0 W1.0 W2.0
    """
    return _zero_bubble("zb_h1", stages, microbatches, 1, eager=1)


@register("zb_h2", split=True, paired=False, placement=loop, simplicity=None)  # zb_h1 with more memory
def zb_h2(stages: int, microbatches: int, chunks: int) -> Schedule:
    """ZB-H2 (2401.10241): twice ZB-H1's warm-up and delay of W, so that no rank idles between its first and last op.

    Bubble (p - 1)tF, that is (p - 1)(tI - tW) less than ZB-H1's: the same at equal costs, but it hides slow sends. It
    needs twice the memory, 2p - 1 microbatches in flight on every rank.

        p = 2, m = 3
        rank 0  F0.0 F1.0 F2.0 I0.0 W0.0 I1.0 W1.0 I2.0 W2.0 .
        rank 1  .    F0.0 I0.0 F1.0 I1.0 F2.0 I2.0 W0.0 W1.0 W2.0
    """
    return _zero_bubble("zb_h2", stages, microbatches, 1, eager=2)


@register(
    "zb_1p_interleaved",
    chunks="any",
    rounds=True,
    split=True,
    paired=False,
    placement=loop,
    slots=_1p_slots,
    bubble=split_bubble,
    one_chunk="zb_h1",
    simplicity=5,
)
def zb_1p_interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved zero bubble, one-p memory (2401.10241; torch's InterleavedZeroBubble): ZB-H1 over v chunks on each
    rank.

    Bubble (p - 1)(tF + tI - tW) in chunk times, (p - 1)/(3mv) of the ideal at equal costs; vp chunks in flight
    on every rank, including those that wait for W.

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 F0.1 F1.1 .    I0.1 W0.1 I1.1 W1.1 I0.0 W0.0 I1.0 W1.0
        rank 1  .    F0.0 F1.0 F0.1 I0.1 F1.1 I1.1 W0.1 I0.0 W1.1 I1.0 W0.0 W1.0
    """
    return _zero_bubble("zb_1p_interleaved", stages, microbatches, chunks, eager=1)


def _zero_bubble(name: str, stages: int, microbatches: int, chunks: int, *, eager: int) -> Schedule:
    """Rank r warms up with (v - 1) p + `eager` (p - 1 - r) forwards, and delays W by `eager` r operations."""
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


@register(
    "zb_v", chunks="two", split=True, paired=False, placement=wave, slots=_v_slots, bubble=_v_bubble, simplicity=6
)
def zb_v(stages: int, microbatches: int, chunks: int) -> Schedule:
    """ZB-V (2401.10241 section 6; 2405.15362): two chunks on each rank, placed in a V: rank 0 has both ends.

    Bubble (p - 1)/(6m) of the ideal at equal costs; 2p chunks, half a stage each, in flight on every rank.

        p = 2, m = 3, v = 2
        rank 0  F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0.0 W0.0 F2.1 I2.1 W2.1 I1.0 W1.0 I2.0 W2.0 .
        rank 1  .    F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 F2.0 I0.0 W0.0 F2.1 I1.1 W1.1 I1.0 I2.1 I2.0 W1.0 W2.1 W2.0
    """
    return in_a_v("zb_v", stages, microbatches, _zero_bubble_v, at_least=2 * stages - 1)


def _zero_bubble_v(writer: "OrderWriter", stages: int, rank: int) -> None:
    microbatches, do = writer.microbatches, writer.do
    for _ in range(2 * (stages - rank) - 1):
        do(0, FORWARD)
    for _ in range(rank):
        do(1, FORWARD)
        do(0, FORWARD)
    for _ in range(stages - rank):
        do(1, FORWARD, INPUT, WEIGHT)
    while writer.done[FORWARD, 1] < microbatches:
        do(0, FORWARD, INPUT, WEIGHT)
        do(1, FORWARD, INPUT, WEIGHT)
    for _ in range(rank):
        do(0, INPUT)
        do(1, INPUT)
    for _ in range(stages - rank):
        do(0, INPUT, WEIGHT)
    for chunk in (1, 0):
        for op in (INPUT, WEIGHT):
            while writer.done[op, chunk] < microbatches:
                do(chunk, op)


class OrderWriter:
    """Writes one rank's order: each op takes the next microbatch of its chunk, and is omitted after the last one.

    Attributes:
      order: what was written so far.
      done: by (op, chunk), how many microbatches have it; a whole backward counts as I and as W.
    """

    def __init__(self, microbatches: int):
        self.microbatches = microbatches
        self.order: list[Action] = []
        self.done = {(op, chunk): 0 for op in (FORWARD, INPUT, WEIGHT) for chunk in (0, 1)}

    def do(self, chunk: int, *ops: str) -> None:
        """Writes ops of a chunk, each of its next microbatch."""
        for op in ops:
            parts = (INPUT, WEIGHT) if op == BACKWARD else (op,)
            microbatch = self.done[parts[0], chunk]
            if microbatch < self.microbatches:
                self.order.append(Operation(op, chunk, microbatch))
                for part in parts:
                    self.done[part, chunk] += 1

    def overlap(self, forward: int, backward: int) -> None:
        """Writes a forward and a whole backward of two chunks, which overlap if there are microbatches left for both."""
        before = len(self.order)
        self.do(forward, FORWARD)
        self.do(backward, BACKWARD)
        both = self.order[before:]
        if len(both) == 2:
            self.order[before:] = [tuple(both)]


def in_a_v(name: str, stages: int, microbatches: int, write: Callable[..., None], at_least: int = 0) -> Schedule:
    """The schedule of two chunks in a V whose orders `write(writer, stages, rank)` writes.

    They are written for at least `at_least` microbatches; operations of other microbatches are then removed.
    """
    orders = []
    for rank in range(stages):
        writer = OrderWriter(max(microbatches, at_least))
        write(writer, stages, rank)
        orders.append(
            [action for action in writer.order if at_least <= microbatches or action.microbatch < microbatches]
        )
    return pack(
        name,
        orders,
        microbatches=microbatches,
        chunks=2,
        paired=False,
        parts={BACKWARD: 2},
        split=True,
        placement=wave(stages, 2),
    )
