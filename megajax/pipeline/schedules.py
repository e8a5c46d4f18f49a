"""Who makes schedules: one function each, registered by name. `make_schedule` is the way in.

Notation: p stages (ranks), m microbatches, v chunks a rank, r this rank; tF and tB are a chunk's forward and backward
time. A generator writes each rank's order of operations, as the papers do, and `pack` lays it over ticks.
"""

import difflib
from collections.abc import Callable

from megajax.pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Operation, Schedule, ScheduleError, pack

Generator = Callable[..., Schedule]
SCHEDULES: dict[str, Generator] = {}


def register(name: str) -> Callable[[Generator], Generator]:
    """Makes a generator `f(stages, microbatches, chunks) -> Schedule` known to `make_schedule` by `name`."""

    def add(generator: Generator) -> Generator:
        SCHEDULES[name] = generator
        return generator

    return add


def make_schedule(name: str, *, stages: int, microbatches: int, chunks: int = 1, **options) -> Schedule:
    """The named schedule over `stages` ranks, as a validated table; `options` are those of its generator.

    Raises:
      ScheduleError: an unknown name, sizes below 1, or sizes that this schedule does not allow.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ScheduleError(f"schedule {name!r} is unknown{hint} Known: {', '.join(sorted(SCHEDULES))}")
    for label, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ScheduleError(f"{label} is {value}; it must be 1 or more")
    return SCHEDULES[name](stages, microbatches, chunks, **options).validate()


def _one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise ScheduleError(f"{name} has one chunk a rank, not chunks={chunks}; interleaved_1f1b takes several")


@register("gpipe")
def gpipe(stages: int, microbatches: int, chunks: int) -> Schedule:
    """GPipe (1811.06965): all forwards, then all backwards, in microbatch order.

    Bubble (p - 1)(tF + tB), that is (p - 1)/m of the ideal time; m microbatches in flight on every rank.

        rank 0  F0 F1 F2  .  . B0 B1 B2       p = 2, m = 3 (here the drain's first backward shares the last fill tick)
        rank 1   . F0 F1 F2 B0 B1 B2
    """
    _one_chunk("gpipe", chunks)
    order = [Operation(op, 0, microbatch) for op in (FORWARD, BACKWARD) for microbatch in range(microbatches)]
    return pack("gpipe", [order] * stages, microbatches=microbatches, paired=True)


@register("1f1b")
def one_forward_one_backward(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B, PipeDream-Flush (2104.04473 section 2.2.1; Megatron-LM's non-interleaved order).

    Rank r does min(p - r - 1, m) forwards, then a forward and a backward in turn, then the backwards left. Bubble
    (p - 1)(tF + tB); at most p - r microbatches in flight on rank r, whatever m. Its ticks are mixed: one piece of work
    each, the backward in two halves, so that a tick costs tF = tB / 2 on every rank and nobody waits.

        rank 0  F0 F1  .  . B0 b0 F2 B1 b1 B2 b2       p = 2, m = 3; B and b are the halves of a backward
        rank 1   . F0 B0 b0 F1 B1 b1 F2 ...
    """
    _one_chunk("1f1b", chunks)
    orders = [
        _alternate(min(stages - rank - 1, microbatches), _depth_first(stages, microbatches, 1))
        for rank in range(stages)
    ]
    return pack("1f1b", orders, microbatches=microbatches, paired=False, parts={BACKWARD: 2})


@register("eager_1f1b")
def eager_1f1b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Eager 1F1B (2211.05322): 1F1B that warms up with 2(p - r - 1) forwards, so that a send has a whole tick to travel.

    Bubble (p - 1)(tF + tB); at most 2(p - r) - 1 microbatches in flight on rank r. Its ticks are paired: a forward and
    a backward each, which costs no conditional. It is `interleaved_1f1b` with one chunk.
    """
    _one_chunk("eager_1f1b", chunks)
    return _interleaved("eager_1f1b", stages, microbatches, 1)


@register("interleaved_1f1b")
def interleaved_1f1b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (2104.04473 section 2.2.2; Megatron-LM's order, microbatch groups of p).

    A rank holds v chunks of the model and warms up with 2(p - r - 1) + (v - 1)p chunk forwards. Bubble
    (p - 1)(tF + tB) in chunk times, v times less than 1F1B's; at most (v - 1)p + 2(p - r) - 1 chunks in flight on rank r.

        rank 0  F0.0 F1.0 F0.1 F1.1 F2.0 ...       p = 2, v = 2; F1.0 is the forward of microbatch 1, chunk 0
        rank 1    .  F0.0 F1.0 F0.1 F1.1 ...
    """
    if stages > 1 and microbatches % stages:
        raise ScheduleError(
            f"interleaved_1f1b sends microbatches through in groups of {stages} stages, and {microbatches} microbatches "
            f"leave a rest; take a multiple of {stages}"
        )
    return _interleaved("interleaved_1f1b", stages, microbatches, chunks)


@register("forward_only")
def forward_only(stages: int, microbatches: int, chunks: int, placement: str = "loop") -> Schedule:
    """Forwards alone, for evaluation and sampling: groups of p microbatches through one chunk after the other.

    Takes any number of microbatches; in "loop" placement (p - 1) chunk forwards of bubble where it is a multiple of p.
    `placement` is that of the schedule the model was laid out for.
    """
    order = [Operation(FORWARD, chunk, microbatch) for chunk, microbatch in _depth_first(stages, microbatches, chunks)]
    sizes = {"microbatches": microbatches, "chunks": chunks, "placement": placement}
    return pack("forward_only", [order] * stages, **sizes, paired=True)


def _depth_first(group: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in Megatron-LM's order: groups of microbatches, each through all chunks in turn."""
    return [
        (chunk, microbatch)
        for low in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(low, min(low + group, microbatches))
    ]


def _interleaved(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    sequence = _depth_first(stages, microbatches, chunks)
    orders = [
        _alternate(min(2 * (stages - rank - 1) + (chunks - 1) * stages, len(sequence)), sequence, last_chunk=chunks - 1)
        for rank in range(stages)
    ]
    return pack(name, orders, microbatches=microbatches, chunks=chunks, paired=True)


def _alternate(warmup: int, sequence: list[tuple[int, int]], last_chunk: int = 0) -> list[Operation]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left.

    Backwards go through the same sequence as forwards, with the chunks from last to first.
    """
    forwards = [Operation(FORWARD, chunk, microbatch) for chunk, microbatch in sequence]
    backwards = [Operation(BACKWARD, last_chunk - chunk, microbatch) for chunk, microbatch in sequence]
    steady = [operation for pair in zip(forwards[warmup:], backwards, strict=False) for operation in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


@register("zb_1p_interleaved")
def zb_1p_interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved zero bubble, one-p memory (2401.10241; torch's InterleavedZeroBubble): W's fill the drain's bubbles.

    Bubble (p - 1)(tF + tI - tW) in chunk times, (p - 1)/(3mv) of the ideal where the three cost the same; vp chunks in
    flight on every rank, those waiting for W counted.
    """
    if stages > 1 and microbatches % stages:
        raise ScheduleError(f"zb_1p_interleaved takes a multiple of {stages} microbatches (stages), not {microbatches}")
    return _zero_bubble("zb_1p_interleaved", stages, microbatches, chunks)


@register("zb_h1")
def zb_h1(stages: int, microbatches: int, chunks: int) -> Schedule:
    """ZB-H1 (2401.10241): 1F1B with the backward split; rank r does W r microbatches late, and the rest in the drain.

    Bubble (p - 1)(tF + tI - tW), a third of 1F1B's at equal costs; p microbatches in flight on every rank, as 1F1B's most.
    """
    _one_chunk("zb_h1", chunks)
    return _zero_bubble("zb_h1", stages, microbatches, 1)


def _zero_bubble(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    sequence = _depth_first(stages, microbatches, chunks)
    orders = []
    for rank in range(stages):
        warmup = min((chunks - 1) * stages + stages - 1 - rank, len(sequence))
        order = [Operation(FORWARD, chunk, microbatch) for chunk, microbatch in sequence[:warmup]]
        backwards = [(chunks - 1 - chunk, microbatch) for chunk, microbatch in sequence]
        for index, (chunk, microbatch) in enumerate(backwards):
            if warmup + index < len(sequence):
                order.append(Operation(FORWARD, *sequence[warmup + index]))
            order.append(Operation(INPUT, chunk, microbatch))
            if index >= rank:
                order.append(Operation(WEIGHT, *backwards[index - rank]))
        order += [Operation(WEIGHT, *late) for late in backwards[max(0, len(backwards) - rank) :]]
        orders.append(order)
    return pack(name, orders, microbatches=microbatches, chunks=chunks, paired=False, split=True)


@register("zb_v")
def zb_v(stages: int, microbatches: int, chunks: int) -> Schedule:
    """ZB-V (2401.10241 section 6; 2405.15362): two chunks a rank, placed in a V, so that rank 0 has both ends.

    Bubble (p - 1)/(6m) of the ideal at equal costs; 2p chunks, that is p stages' worth, in flight on every rank.
    """
    if chunks != 2:
        raise ScheduleError(f"zb_v has two chunks a rank, not {chunks}")
    return pack(
        "zb_v",
        [_zero_bubble_v(stages, microbatches, rank) for rank in range(stages)],
        microbatches=microbatches,
        chunks=2,
        paired=False,
        split=True,
        placement="v",
    )


def _zero_bubble_v(stages: int, microbatches: int, rank: int) -> list[Operation]:
    order: list[Operation] = []
    done = {(op, chunk): 0 for op in (FORWARD, INPUT, WEIGHT) for chunk in (0, 1)}

    def do(chunk: int, *ops: str) -> None:
        for op in ops:
            if done[op, chunk] < microbatches:
                order.append(Operation(op, chunk, done[op, chunk]))
                done[op, chunk] += 1

    for _ in range(2 * (stages - rank) - 1):
        do(0, FORWARD)
    for _ in range(rank):
        do(1, FORWARD)
        do(0, FORWARD)
    for _ in range(stages - rank):
        do(1, FORWARD, INPUT, WEIGHT)
    while done[FORWARD, 1] < microbatches:
        do(0, FORWARD, INPUT, WEIGHT)
        do(1, FORWARD, INPUT, WEIGHT)
    for _ in range(rank):
        do(0, INPUT)
        do(1, INPUT)
    for _ in range(stages - rank):
        do(0, INPUT, WEIGHT)
    for chunk in (1, 0):
        while done[INPUT, chunk] < microbatches:
            do(chunk, INPUT)
        while done[WEIGHT, chunk] < microbatches:
            do(chunk, WEIGHT)
    return order
