"""Who makes schedules: one function each, registered by name. `make_schedule` is the way in.

Notation: p stages (ranks), m microbatches, v chunks a rank, r this rank; tF and tB are a chunk's forward and backward
time. A generator writes each rank's order of operations, as the papers do, and `pack` lays it over ticks. In the small
tables a column is a tick: F2.1 is the forward of microbatch 2 through chunk 1, B2.1' the second part of its backward.
"""

import inspect

from megajax.schedules import registry
from megajax.schedules.registry import SCHEDULES, depth_first, register, require
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, Schedule, pack

__all__ = ["SCHEDULES", "make_schedule", "register"]


def make_schedule(name: str, *, stages: int, microbatches: int, chunks: int = 1, **options) -> Schedule:
    """The named schedule over `stages` ranks, as a validated table; `options` are those of its generator.

    Raises:
      ScheduleError: an unknown name or option, sizes below 1, or sizes that this schedule does not allow.
    """
    generator = registry.find(name)
    for label, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        require(value >= 1, f"{label} is {value}; it must be 1 or more")
    known = list(inspect.signature(generator).parameters)[3:]
    for option in options:
        legal = f"has {', '.join(known)}" if known else "has no options"
        require(option in known, f"{name} has no option {option!r}: it {legal}")
    return registry.make(name, stages, microbatches, chunks, **options)


def _one_chunk(name: str, chunks: int) -> None:
    require(chunks == 1, f"{name} has one chunk a rank, not chunks={chunks}; interleaved_1f1b takes several")


@register("gpipe")
def gpipe(stages: int, microbatches: int, chunks: int) -> Schedule:
    """GPipe (1811.06965): all forwards, then all backwards, in microbatch order.

    Bubble (p - 1)(tF + tB), that is (p - 1)/m of the ideal time; m microbatches in flight on every rank.

        p = 2, m = 3
        rank 0  F0.0 F1.0 F2.0 .         B0.0 B1.0 B2.0
        rank 1  .    F0.0 F1.0 F2.0+B0.0 B1.0 B2.0 .
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

        p = 2, m = 3
        rank 0  F0.0 F1.0 .    .     B0.0 B0.0' F2.0  B1.0 B1.0' .     B2.0 B2.0'
        rank 1  .    F0.0 B0.0 B0.0' F1.0 B1.0  B1.0' F2.0 B2.0  B2.0' .    .
    """
    _one_chunk("1f1b", chunks)
    orders = [
        _alternate(min(stages - rank - 1, microbatches), depth_first(stages, microbatches, 1)) for rank in range(stages)
    ]
    return pack("1f1b", orders, microbatches=microbatches, paired=False, parts={BACKWARD: 2})


@register("eager_1f1b")
def eager_1f1b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Eager 1F1B (2211.05322): 1F1B that warms up with 2(p - r - 1) forwards, so that a send has a whole tick to travel.

    Bubble (p - 1)(tF + tB); at most 2(p - r) - 1 microbatches in flight on rank r. Its ticks are paired: a forward and
    a backward each, which costs no conditional. It is `interleaved_1f1b` with one chunk.

        p = 2, m = 3
        rank 0  F0.0 F1.0      F2.0+B0.0 B1.0      B2.0
        rank 1  .    F0.0+B0.0 F1.0+B1.0 F2.0+B2.0 .
    """
    _one_chunk("eager_1f1b", chunks)
    return _interleaved("eager_1f1b", stages, microbatches, 1, stages)


@register("interleaved_1f1b")
def interleaved_1f1b(stages: int, microbatches: int, chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B (2104.04473 section 2.2.2; Megatron-LM's order).

    A rank holds v chunks of the model. `group_size` microbatches (p unless given; Megatron's
    microbatch_group_size_per_vp_stage) go through a chunk before the next chunk's turn; the last group may be smaller,
    but not smaller than p. Rank r warms up with 2(p - r - 1) + (v - 1) group_size chunk forwards. Bubble
    (p - 1)(tF + tB) in chunk times, v times less than 1F1B's; at most (v - 1) group_size + 2(p - r) - 1 chunks in flight.

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 F0.1 F1.1      B0.1      B1.1 B0.0 B1.0
        rank 1  .    F0.0 F1.0 F0.1+B0.1 F1.1+B1.1 B0.0 B1.0 .
    """
    group = stages if group_size is None else group_size
    rest = microbatches % group if group > 0 else 0
    if group_size is None:
        require(
            stages == 1 or rest == 0,
            f"interleaved_1f1b sends microbatches through in groups of {stages} stages, and {microbatches} microbatches "
            f"leave a rest; take a multiple of {stages}, or a group_size that leaves none or at least {stages}",
        )
    require(
        stages <= group <= max(microbatches, stages) and (stages == 1 or rest == 0 or rest >= stages),
        f"group_size is {group}; it must be between {stages} stages and {microbatches} microbatches, and what the groups "
        f"leave of {microbatches} must be nothing or at least {stages}",
    )
    return _interleaved("interleaved_1f1b", stages, microbatches, chunks, group)


@register("looped_bfs")
def looped_bfs(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Breadth-first (2211.05953; torch's LoopedBFS): all microbatches through one chunk after the other, and back.

    Bubble (p - 1)(tF + tB) in chunk times; all mv chunks in flight. Backwards take the microbatches in reverse. A rank
    meets each chunk's weights once in each direction, which suits weights that are gathered when needed (FSDP).

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 F0.1 F1.1 .         B1.1 B0.1 B1.0 B0.0
        rank 1  .    F0.0 F1.0 F0.1 F1.1+B1.1 B0.1 B1.0 B0.0 .
    """
    order = [Operation(FORWARD, chunk, microbatch) for chunk in range(chunks) for microbatch in range(microbatches)]
    order += [Operation(BACKWARD, chunk, microbatch) for _, chunk, microbatch in reversed(order)]
    return pack("looped_bfs", [order] * stages, microbatches=microbatches, chunks=chunks, paired=True)


@register("forward_only")
def forward_only(stages: int, microbatches: int, chunks: int, placement: str = "loop") -> Schedule:
    """Forwards alone, for evaluation and sampling: groups of p microbatches through one chunk after the other.

    Takes any number of microbatches; in "loop" placement (p - 1) chunk forwards of bubble where it is a multiple of p.
    `placement` is that of the schedule the model was laid out for.

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 F0.1 F1.1 .
        rank 1  .    F0.0 F1.0 F0.1 F1.1
    """
    order = [Operation(FORWARD, chunk, microbatch) for chunk, microbatch in depth_first(stages, microbatches, chunks)]
    sizes = {"microbatches": microbatches, "chunks": chunks, "placement": placement}
    return pack("forward_only", [order] * stages, **sizes, paired=True)


def _interleaved(name: str, stages: int, microbatches: int, chunks: int, group: int) -> Schedule:
    sequence = depth_first(group, microbatches, chunks)
    orders = [
        _alternate(min(2 * (stages - rank - 1) + (chunks - 1) * group, len(sequence)), sequence, last_chunk=chunks - 1)
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
