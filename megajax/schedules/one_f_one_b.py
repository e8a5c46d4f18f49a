"""One forward, one backward: 1F1B, eager 1F1B, and the steady state of PipeDream-2BW. Notation as in gpipe.py."""

from megajax.schedules.registry import Slots, register
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, Schedule, Work, pack
from megajax.schedules.simulate import Costs, fill_and_drain
from megajax.schedules.stages import loop


def depth_first(group: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in Megatron-LM's order: each group of microbatches passes all chunks before the next group."""
    return [
        (chunk, microbatch)
        for low in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(low, min(low + group, microbatches))
    ]


def alternate(warmup: int, sequence: list[tuple[int, int]], last_chunk: int = 0) -> list[Operation]:
    """`warmup` forwards, then alternating forwards and backwards, then the remaining backwards.

    Backwards follow the same sequence as forwards, with the chunks from last to first.
    """
    forwards = [Operation(FORWARD, chunk, microbatch) for chunk, microbatch in sequence]
    backwards = [Operation(BACKWARD, last_chunk - chunk, microbatch) for chunk, microbatch in sequence]
    steady = [operation for pair in zip(forwards[warmup:], backwards, strict=False) for operation in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def _1f1b_slots(stages: int, microbatches: int, chunks: int) -> Slots:
    return Slots(min(microbatches, stages), 0, (1 if stages == 1 else 2) + 2)  # one rank receives no activations


def _1f1b_bubble(stages: int, microbatches: int, chunks: int, costs: Costs, lockstep: bool) -> float:
    """In lockstep each tick takes max(tF, tB / 2), except p ticks that have only forwards."""
    if not lockstep or stages == 1:
        return fill_and_drain(stages, microbatches, chunks, costs, lockstep)
    slower = max(costs.forward, costs.backward / 2)
    ticks = 3 * (microbatches + stages - 1) * slower - stages * (slower - costs.forward)
    return ticks - microbatches * (costs.forward + costs.backward)


@register("1f1b", split=False, paired=False, placement=loop, slots=_1f1b_slots, bubble=_1f1b_bubble, simplicity=2)
def one_forward_one_backward(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B, PipeDream-Flush (2104.04473 section 2.2.1; Megatron-LM's non-interleaved order).

    Rank r runs min(p - r - 1, m) forwards, then alternating forwards and backwards, then the remaining backwards. Bubble
    (p - 1)(tF + tB); at most p - r microbatches in flight on rank r, for any m. Its ticks are mixed: one operation
    on each rank, with the backward in two halves, so that a tick costs tF = tB / 2 on every rank and no rank waits.

        p = 2, m = 3
        rank 0  F0.0 F1.0 .    .     B0.0 B0.0' F2.0  B1.0 B1.0' .     B2.0 B2.0'
        rank 1  .    F0.0 B0.0 B0.0' F1.0 B1.0  B1.0' F2.0 B2.0  B2.0' .    .
    """
    sequence = depth_first(stages, microbatches, 1)
    orders = [alternate(min(stages - rank - 1, microbatches), sequence) for rank in range(stages)]
    return pack("1f1b", orders, microbatches=microbatches, paired=False, parts={BACKWARD: 2})


def _eager_slots(stages: int, microbatches: int, chunks: int) -> Slots:
    return Slots(1, 0, 1 + 2) if stages == 1 else Slots(min(2 * stages - 1, microbatches + 1), 0, 2 + 2)


@register(
    "eager_1f1b", split=False, paired=True, placement=loop, slots=_eager_slots, bubble=fill_and_drain, simplicity=3
)
def eager_1f1b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Eager 1F1B (2211.05322): 1F1B with 2(p - r - 1) warm-up forwards, so that a send may take a whole tick.

    Bubble (p - 1)(tF + tB); at most 2(p - r) - 1 microbatches in flight on rank r. Its ticks are paired: a forward and
    a backward each, which needs no conditional. It is `interleaved_1f1b` with one chunk.

        p = 2, m = 3
        rank 0  F0.0 F1.0      F2.0+B0.0 B1.0      B2.0
        rank 1  .    F0.0+B0.0 F1.0+B1.0 F2.0+B2.0 .
    """
    sequence = depth_first(stages, microbatches, 1)
    orders = [alternate(min(2 * (stages - rank - 1), len(sequence)), sequence) for rank in range(stages)]
    return pack("eager_1f1b", orders, microbatches=microbatches, paired=True)


def backward_lag(rank, stages: int):
    """Ticks of PipeDream-2BW from the start of a step to the first backward of that step's microbatches on a rank."""
    return 2 * (stages - 1) - rank


@register(
    "pipedream_2bw",
    fewest_microbatches=lambda stages: max(1, 2 * (stages - 1)),  # else a step's backwards would start two steps later
    any_microbatches=False,
    drains=False,
    split=False,
    paired=True,
    placement=loop,
    slots=lambda stages, microbatches, chunks: Slots(2 * stages - 1, 0, 2 + 2),
    bubble=lambda stages, microbatches, chunks, costs, lockstep: 0.0,
    simplicity=None,  # it changes the training: gradients are one step old
)
def pipedream_2bw(stages: int, microbatches: int, chunks: int) -> Schedule:
    """PipeDream-2BW (2006.09503): eager 1F1B that is never drained, on two versions of the weights.

    The table is one step in the steady state: m ticks of a forward and a backward on every rank, without a bubble. The
    first 2(p - 1) - r backwards on rank r belong to the microbatches of the step before. 2(p - r) - 1 microbatches in
    flight on rank r. `megajax/pipeline/pipedream_2bw.py` runs it.

        p = 2, m = 3
        rank 0  F0.0+B1.0 F1.0+B2.0 F2.0+B0.0
        rank 1  F2.0+B2.0 F0.0+B0.0 F1.0+B1.0
    """
    ticks = tuple(
        tuple(
            (
                Work(FORWARD, 0, (tick - rank) % microbatches),
                Work(BACKWARD, 0, (tick - backward_lag(rank, stages)) % microbatches),
            )
            for rank in range(stages)
        )
        for tick in range(microbatches)
    )
    return Schedule("pipedream_2bw", stages, microbatches, 1, True, ticks)
