"""Which collectives of a merged tick's block XLA's GPU compiler overlaps with no matmul, read off scheduled programs.

A merged tick runs a block's forward and another one's backward together (`pipeline/stage.py`). Of their ten gathers and
scatters over `tensor`, or more, most run beside matmuls or attention of the other pass, which take longer. The others run
beside a few kernels that move memory, one collective after the other:

    gated MLPs            the backward's first gather beside the activation's gradient; then, for attention and MLP each,
                          its scatter, and the forward's gather that is queued behind it beside the norm's gradient
    others                the backward's first gather, and one scatter with the gather behind it: the forward's gathers
                          start earlier
    full recomputation    the second forward's collectives are in the order of its matmuls, and few overlap

Why the compiler's scheduler orders them so is its own; the lists are those of Llama 2 7B and 3 8B, GPT-3 6.7B and 13B.
"""

from typing import NamedTuple

__all__ = ["ExposedPart", "exposed_parts"]


class ExposedPart(NamedTuple):
    """Collectives, one after the other, and the kernels that run beside them.

    Attributes:
      collectives: how many.
      residuals: passes of those kernels over the residual stream.
      widest: passes over the widest activation of the block.
      kernels: how many kernels.
    """

    collectives: int
    residuals: int
    widest: float
    kernels: int


def exposed_parts(gated: bool, full: bool) -> tuple[ExposedPart, ...]:
    """The parts of a block with attention and an MLP, by whether this is gated and recomputation is full."""
    if full:
        return ExposedPart(1, 2, 0, 2), ExposedPart(5 if gated else 4, 12, 0, 7)
    if not gated:
        return ExposedPart(1, 2, 3, 4), ExposedPart(2, 19, 0, 11)
    scatters, gather = (ExposedPart(1, 2, 0, 1), ExposedPart(1, 3, 0, 1)), ExposedPart(1, 7, 0, 3)
    return ExposedPart(1, 0, 1.5, 1), scatters[0], gather, scatters[1], gather
