"""What one operation of a tick runs on: the arguments that `stage.Stack` and `rank.Rank` pass to each other."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from megajax.pipeline.records import Recorder
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
      parts: the numbers of parts, of which `blocks` is one, in which a rank runs such an operation (`Stack.part_bounds`).
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

    def record(self, records: Tree, block, **values: jax.Array) -> Tree:
        """`records` with the statistics of `values` of a local block."""
        return self.recorder.write(records, block, self.microbatch, values) if self.recorder else records
