"""Stages with different numbers of blocks in one program: what runs for an empty slot is computed and discarded.

All ranks run the same loops over the slots of a chunk, with trip counts that are known at compile time, so that those with
an empty slot (`schedules/stages.py`) run a block on weights that are zero. (Not where stages differ by more than a block:
`StageBlocks.skips`.) Its results can have any value, NaN included. A
select outside of the block's VJP discards them: the forward keeps x, the backward keeps dy. Its weight gradients are added
to the accumulators' row of that slot, where nothing reads them, because with `ExecutorOptions.in_place` nothing may stand
between a matmul and its addition; `clear_empty_slots` replaces the row by zeros after the last tick. To run fewer blocks
on such a rank would not shorten a tick: the other ranks have a block in this slot, and by default they share the head.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.ops.order import choose
from megajax.schedules.schedule import Schedule
from megajax.schedules.stages import KindLayers, skips_slots

__all__ = ["StageBlocks", "clear_empty_slots"]

Tree = Any


@dataclasses.dataclass(frozen=True)
class StageBlocks:
    """The numbers of the stages' blocks. Where all stages have the same number, nothing is added to the program.

    Attributes:
      slots: blocks of the largest stage.
      counts: blocks of each stage, `slots` or fewer; None: all stages have `slots`, or the blocks are of one of several
        kinds, of which no empty slot is run.
      numbers: of such a kind, those of each stage's blocks, [stages, slots].
    """

    slots: int
    counts: Sequence[int] | None = None
    numbers: jax.Array | None = None

    @classmethod
    def of_kind(cls, where: KindLayers) -> "StageBlocks":
        """Those of one of several kinds."""
        numbers = iter(where.numbers)
        rows = [[next(numbers) for _ in range(count)] for count in where.counts]
        return cls(where.slots, numbers=jnp.array([[*row, *[0] * (where.slots - len(row))] for row in rows], jnp.int32))

    @property
    def skips(self) -> bool:
        """Whether a stage runs its own blocks only, and nothing for its empty slots: another one has two more, or none."""
        return self.counts is not None and skips_slots(self.counts)

    def number(self, stage: jax.Array, slot: jax.Array) -> jax.Array:
        """The model's number of the block in a slot of a stage, int32 scalars; without meaning for an empty slot."""
        if self.numbers is not None:
            return self.numbers[stage, slot]
        if self.counts is None:
            return stage * self.slots + slot
        first = np.cumsum([0, *self.counts[:-1]], dtype=np.int32)
        return jnp.asarray(first)[stage] + slot

    def select(self, stage: jax.Array, slot: jax.Array, new: Tree, old: Tree) -> Tree:
        """`new`, a result of the block in this slot; `old`, of the same type, if the slot is empty."""
        if self.counts is None:
            return new
        return choose(slot < jnp.asarray(self.counts, jnp.int32)[stage], new, old)


def clear_empty_slots(gradients: Tree, counts: Sequence[int] | None, schedule: Schedule) -> Tree:
    """A rank's gradients of blocks [chunks, 1, slots, ...] with zeros in empty slots.

    Args:
      counts: as `StageBlocks.counts`.
      schedule: which stage a rank's chunk is.
    """
    if counts is None:
        return gradients
    own = np.array(
        [[counts[schedule.stage(c, rank)] for rank in range(schedule.stages)] for c in range(schedule.chunks)]
    )
    first = min(counts)  # slots before it are empty on no stage
    kept = jnp.asarray(own[:, :, None] > np.arange(first, max(counts)))[:, lax.axis_index("pipe")]

    def clear(leaf):
        rows = leaf[:, :, first:]
        return leaf.at[:, :, first:].set(jnp.where(kept.reshape(len(own), 1, -1, *[1] * (leaf.ndim - 3)), rows, 0))

    return jax.tree.map(clear, gradients)
