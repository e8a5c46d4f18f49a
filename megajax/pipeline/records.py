"""Statistics of the arrays between blocks, recorded while a schedule runs (`ExecutorOptions.statistics`, megajax.verify).

For each block and microbatch a rank records the statistics of four values:

    input              x, the block's input                    recorded by the forward
    output             y, its output
    output_gradient    dy, the gradient of the loss for y      recorded by the backward, or by I
    input_gradient     dx, that for x

The buffers are part of the carry and small: [local blocks, microbatches, samples, statistics]. Without the option the
carry has no buffers, and the program is the same as if this file did not exist.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.pipeline.layout import batch_spec

Tree = Any
RECORDED = ("input", "output", "output_gradient", "input_gradient")


def records_spec(mesh: Mesh) -> P:
    """The PartitionSpec of the executor's result, [chunks, pipe, blocks, microbatches, samples, ...]."""
    return P(None, "pipe", None, *batch_spec(mesh))


def empty_records(statistics: Callable, x: Tree, microbatch: Tree, sizes: tuple[int, int]) -> dict[str, jax.Array]:
    """Buffers of zeros.

    Args:
      statistics: `statistics(x, microbatch) -> fp32 [samples, k]`.
      x: a block's input; only its type is read, as of `microbatch`.
      sizes: blocks of this rank, and microbatches.
    """
    shape = jax.eval_shape(statistics, x, microbatch)
    return {name: jnp.zeros((*sizes, *shape.shape), shape.dtype) for name in RECORDED}


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Records one operation of a tick.

    Attributes:
      statistics: as for `empty_records`.
      index: int32 scalar, the microbatch of the operation.
      on: bool scalar; False in a bubble that runs its blocks anyway, which records nothing.
      row: of blocks that are stacked apart by kind, the row of the buffers for one of them. None: its number.
    """

    statistics: Callable
    index: Any
    on: Any
    row: Callable | None = None

    def write(self, buffers: dict, block, microbatch: Tree, values: dict[str, Tree]) -> dict:
        """The buffers with the statistics of `values`, by name, of the local block `block`."""
        buffers, row = dict(buffers), self.row(block) if self.row else block
        for name, value in values.items():
            whole, new = buffers[name], self.statistics(value, microbatch)[None, None]
            start = (row, self.index, *[0] * (whole.ndim - 2))
            old = lax.dynamic_slice(whole, start, new.shape)
            buffers[name] = lax.dynamic_update_slice(whole, jnp.where(self.on, new, old), start)
        return buffers
