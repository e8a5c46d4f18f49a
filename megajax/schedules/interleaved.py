"""Schedules with several model chunks on each rank: interleaved 1F1B, breadth-first, and forward only.

Notation as in gpipe.py.
"""

from megajax.schedules.one_f_one_b import alternate, depth_first
from megajax.schedules.registry import Slots, register, require
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, Schedule, pack
from megajax.schedules.simulate import fill_and_drain
from megajax.schedules.stages import Placement, loop


def _slots(stages: int, microbatches: int, chunks: int, group_size: int | None = None) -> Slots | None:
    if group_size is not None:
        return None
    if stages == 1:
        return Slots(1, 0, 1 + 2)
    return Slots(min((chunks + 1) * stages - 1, microbatches * chunks + 1), 0, 2 + 2)


@register(
    "interleaved_1f1b",
    chunks="any",
    rounds=True,
    split=False,
    paired=True,
    placement=loop,
    slots=_slots,
    bubble=fill_and_drain,
    one_chunk="eager_1f1b",
    simplicity=1,
)
def interleaved_1f1b(stages: int, microbatches: int, chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B (2104.04473 section 2.2.2; Megatron-LM's order).

    Each rank holds v chunks of the model. `group_size` microbatches (default p; Megatron-LM's
    microbatch_group_size_per_vp_stage) pass a chunk before the next chunk starts; the last group may be smaller, but
    not smaller than p. Rank r warms up with 2(p - r - 1) + (v - 1) group_size chunk forwards. Bubble
    (p - 1)(tF + tB) in chunk times, 1/v of 1F1B's; at most (v - 1) group_size + 2(p - r) - 1 chunks in flight.

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 F0.1 F1.1      B0.1      B1.1 B0.0 B1.0
        rank 1  .    F0.0 F1.0 F0.1+B0.1 F1.1+B1.1 B0.0 B1.0 .
    """
    group = stages if group_size is None else group_size
    rest = microbatches % group if group > 0 else 0
    require(
        stages <= group <= max(microbatches, stages) and (stages == 1 or rest == 0 or rest >= stages),
        f"group_size is {group}; it must be between {stages} stages and {microbatches} microbatches, and the "
        f"{microbatches} microbatches must leave no incomplete group, or one of at least {stages}",
    )
    sequence = depth_first(group, microbatches, chunks)
    orders = [
        alternate(min(2 * (stages - rank - 1) + (chunks - 1) * group, len(sequence)), sequence, last_chunk=chunks - 1)
        for rank in range(stages)
    ]
    return pack("interleaved_1f1b", orders, microbatches=microbatches, chunks=chunks, paired=True)


@register(
    "looped_bfs",
    chunks="any",
    split=False,
    paired=True,
    placement=loop,
    bubble=fill_and_drain,
    one_chunk="gpipe",
    simplicity=None,  # as slow as interleaved_1f1b, with more memory
)
def looped_bfs(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Breadth-first (2211.05953; torch's LoopedBFS): all microbatches through one chunk after the other, and back.

    Bubble (p - 1)(tF + tB) in chunk times; all mv chunks in flight. Backwards take the microbatches in reverse. A rank
    uses each chunk's weights in one run of ticks per direction, which suits weights that are gathered on demand (FSDP).

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 F0.1 F1.1 .         B1.1 B0.1 B1.0 B0.0
        rank 1  .    F0.0 F1.0 F0.1 F1.1+B1.1 B0.1 B1.0 B0.0 .
    """
    order = [Operation(FORWARD, chunk, microbatch) for chunk in range(chunks) for microbatch in range(microbatches)]
    order += [Operation(BACKWARD, chunk, microbatch) for _, chunk, microbatch in reversed(order)]
    return pack("looped_bfs", [order] * stages, microbatches=microbatches, chunks=chunks, paired=True)


@register("forward_only", chunks="any", trains=False, split=False, paired=True)
def forward_only(stages: int, microbatches: int, chunks: int, placement: Placement | None = None) -> Schedule:
    """Forward passes only, for evaluation and sampling: groups of p microbatches pass one chunk after the other.

    Takes any number of microbatches. The bubble is p - 1 chunk forwards if m is a multiple of p and `placement`, that of the
    schedule whose parameters are used, is `stages.loop`.

        p = 2, m = 2, v = 2
        rank 0  F0.0 F1.0 F0.1 F1.1 .
        rank 1  .    F0.0 F1.0 F0.1 F1.1
    """
    order = [Operation(FORWARD, chunk, microbatch) for chunk, microbatch in depth_first(stages, microbatches, chunks)]
    sizes = {"microbatches": microbatches, "chunks": chunks, "placement": placement}
    return pack("forward_only", [order] * stages, **sizes, paired=True)
