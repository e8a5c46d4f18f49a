"""Which collectives of a merged tick's block XLA's GPU compiler overlaps with no matmul, read off scheduled programs.

A merged tick runs a block's forward and another one's backward together (`pipeline/stage.py`). Of their ten gathers and
scatters over `tensor`, or more, most run beside matmuls or attention of the other pass, which take longer. The others run
beside a few kernels that move memory, one collective after the other:

    gated MLPs            the backward's first gather beside the activation's gradient; the MLP's scatter; and two gathers
                          of the forward, behind a scatter each, beside a norm's gradient
    others                the backward's first gather
    full recomputation    the second forward's collectives are in the order of its matmuls, and few overlap

The compiler's scheduler orders them by the times of matmuls that it is told (`latency_profile.py`); the lists are those of
Llama 2 7B on two and eight tensor ranks, and of GPT-3 175B.
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
        return ExposedPart(1, 2, 0, 2), ExposedPart(5 if gated else 4, 14, 0, 12)
    if not gated:
        return (ExposedPart(1, 2, 3, 4),)
    gather = ExposedPart(1, 7, 0, 3)
    return ExposedPart(1, 0, 1.5, 1), ExposedPart(1, 2, 0, 1), gather, gather
