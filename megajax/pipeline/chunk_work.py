"""What one operation of a tick runs on: the arguments that `stage.Stack` and `rank.Rank` pass to each other."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megajax.pipeline.records import Recorder
from megajax.pipeline.slots import OperationRow
from megajax.pipeline.stash import StashRef, TickStash

Tree = Any


@dataclasses.dataclass(frozen=True)
class ChunkWork:
    """One operation on one chunk: what it runs on, and the slots that it reads and writes.

    Attributes:
      microbatch: pytree of [samples, ...], passed to the blocks.
      chunk: int32 scalar, which of the rank's chunks.
      stage: int32 scalar, the chunk's global stage.
      stash: the slot that a forward writes and a backward or W reads. None: a forward without backward.
      kept: the slot that I writes and W reads. None: the backward is not split.
      blocks: (low, high), the range of the chunk's blocks to run. Python ints if known at compile time, else int32
        scalars, equal where the rank has no work. None: all blocks.
      parts: the numbers of parts, of which `blocks` is one, in which a rank runs such an operation (`ChunkParts`).
      recorder: records statistics of the blocks' inputs, outputs and gradients. None: nothing is recorded.
      records: its buffers.
    """

    microbatch: Tree
    chunk: Any
    stage: Any = 0
    stash: StashRef | TickStash | None = None
    kept: StashRef | None = None
    blocks: tuple | None = None
    parts: Sequence[int] = (1,)
    recorder: Recorder | None = None
    records: Tree = ()

    def at_slot(self, slot: int) -> "ChunkWork":
        """The same with a slot of the stash that is known when the program is compiled."""
        return dataclasses.replace(self, stash=dataclasses.replace(self.stash, slot=slot))

    def record(self, records: Tree, block, **values: jax.Array) -> Tree:
        """`records` with the statistics of `values` of a local block."""
        return self.recorder.write(records, block, self.microbatch, values) if self.recorder else records


class ChunkParts:
    """The parts of a chunk's blocks in which operations run.

    Attributes:
      per_chunk: slots for blocks in a chunk.
    """

    per_chunk: int

    def part_bounds(self, part, parts, *, backwards: bool = False) -> tuple:
        """(low, high) blocks of part `part` of a forward or backward in `parts` parts, which starts with the first blocks of
        the chunk, or the last.

        Earlier parts have as many blocks as later ones, or one more. The arguments may be traced.
        """
        low, high = (-(-self.per_chunk * bound // parts) for bound in (part, part + 1))
        return (self.per_chunk - high, self.per_chunk - low) if backwards else (low, high)

    def part_range(self, operation: OperationRow, on, *, backwards: bool = False) -> tuple:
        """`ChunkWork.blocks` of a tick's operation: those of its part where `on` is 1, else none."""
        low, high = self.part_bounds(operation.part, operation.parts, backwards=backwards)
        return low, jnp.where(on == 1, high, low)

    def ranges(self, parts: Sequence[int], *, backwards: bool = False) -> list[tuple[int, int]]:
        """The (low, high) blocks of all parts that have any, if operations run in these numbers of parts."""
        bounds = {self.part_bounds(part, count, backwards=backwards) for count in parts for part in range(count)}
        return sorted((low, high) for low, high in bounds if low < high)
