"""What one operation of a tick runs on: the arguments that `stage.Stack` and `rank.Rank` pass to each other."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.pipeline.records import Recorder
from megajax.pipeline.slots import OperationRow
from megajax.pipeline.stash import StashRef, TickStash
from megajax.schedules.stages import StageLayers

Tree = Any
ONE = ""  # the kind of blocks that are all of one


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


class Choice(NamedTuple):
    """What one branch of a conditional runs: of a chunk whose blocks have this order of kinds, blocks [start, stop)."""

    chunk: int
    order: tuple[str, ...]
    start: int
    stop: int


class Pair(NamedTuple):
    """What one branch of a merged tick runs, or of parts that overlap: a forward's blocks beside a backward's.

    Attributes:
      chunks, orders: of the forward and of the backward, the chunk and the kinds of its blocks.
      start, stop: of the forward, blocks [start, stop); of the backward the same part, which counts from its last slot.
    """

    chunks: tuple[int, int]
    orders: tuple[tuple[str, ...], tuple[str, ...]]
    start: int
    stop: int


@dataclasses.dataclass(eq=False)
class ChunkParts:
    """What a chunk's blocks are, and the parts of them in which operations run.

    Attributes:
      per_chunk: slots for blocks in a chunk, of whatever kind.
      where: the layers of each stage, of several kinds. None: all are of one kind.
      counts: blocks of each stage, if it runs these only (`StageBlocks.skips`). None: it runs all slots, or has kinds.
    """

    per_chunk: int
    where: StageLayers | None = None
    counts: tuple[int, ...] | None = None

    def order_of(self, stage: int) -> tuple[str, ...]:
        """The kinds of a stage's blocks."""
        if self.where:
            return self.where.stage_kinds[stage]
        return (ONE,) * (self.counts[stage] if self.counts else self.per_chunk)

    def choices(self, chunks: int, parts: Sequence[int], *, backwards: bool = False) -> list[Choice]:
        """The branches of a conditional on the chunk, the order of kinds that its stage has, and the part, in their order.

        Args:
          chunks: of a rank, or versions of its only one (`pipedream_2bw`).
          parts, backwards: as for `ranges`.
        """
        ranges = self.ranges(parts, backwards=backwards)
        return [
            Choice(chunk, order, start, stop)
            for chunk in range(chunks)
            for order in self._orders_of(chunk)
            for start, stop in ranges
        ]

    def pairs(self, chunks: Sequence[tuple[int, int]], parts: Sequence[int]) -> list[Pair]:
        """The branches of a conditional on two chunks of a rank, their orders of kinds, and the part, in their order.

        Args:
          chunks: the pairs that ranks have in a tick.
          parts: as for `ranges`.
        """
        ranges = self.ranges(parts)
        return sorted(
            Pair(both, orders, *bounds) for both in chunks for orders in self._orders_of_pair(both) for bounds in ranges
        )

    def _orders_of_pair(self, chunks: tuple[int, int]) -> set[tuple]:
        """The orders of kinds that any rank has in two of its chunks; of one kind, all that there may be."""
        if self.where is None:
            return set(itertools.product(*map(self._orders_of, chunks)))
        stage_of, order_of = self.where.placement.stage_of, self.where.stage_kinds
        return {tuple(order_of[stage_of[chunk][rank]] for chunk in chunks) for rank in range(len(stage_of[0]))}

    def _orders_of(self, chunk: int) -> list[tuple[str, ...]]:
        """The orders of kinds of the stages that a chunk is, on any rank; of one kind, the numbers of all stages' blocks."""
        if self.where is None:
            return [(ONE,) * count for count in sorted(set(self.counts or (self.per_chunk,)))]
        stages = self.where.placement.stage_of[chunk % self.where.chunks]
        return sorted({self.where.stage_kinds[stage] for stage in stages})

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
