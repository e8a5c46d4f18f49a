"""Where a layout computes a layer and a sample: pipeline rank and chunk, microbatch and data rank."""

from collections.abc import Sequence

import jax
import numpy as np

from megajax.pipeline import layout
from megajax.schedules.stages import StageLayers
from megajax.train.step import Training


class Locations:
    """The locations of one layout."""

    def __init__(self, training: Training):
        """Reads the mesh and the schedule's placement of layers.

        `layers`: int [chunks, pipe, slots of a stage], the model's number of each stored layer; -1 for an empty slot.
        """
        self.mesh, self.parallel, self.microbatches = training.mesh, training.run.parallel, training.run.microbatches
        self.where = training.where
        self.layers = self.numbers(training.where.without_kinds)

    def numbers(self, where: StageLayers) -> np.ndarray:
        """`layers` of the rows of a leaf of blocks; `where`: of the leaf."""
        return np.asarray(layout.to_pipeline_layout(np.array(where.numbers) + 1, where)) - 1

    def layer(self, number: int) -> str:
        """Where a layer is computed, "pipe rank 1, chunk 0"; empty without a pipeline."""
        if self.parallel.pipe == 1:
            return ""
        chunk, rank, _ = np.argwhere(self.layers == number)[0]
        return f"pipe rank {rank}" + (f", chunk {chunk}" if self.parallel.chunks > 1 else "")

    def samples(self, numbers: Sequence[int]) -> str:
        """Where samples of the batch are computed: their microbatches and data ranks, where these are not all."""
        each = self.parallel.microbatch_size
        flat = np.asarray(numbers) // each
        microbatches, ranks = sorted(set(flat // self.parallel.data)), sorted(set(flat % self.parallel.data))
        parts = []
        if len(microbatches) < self.microbatches:
            parts.append(f"microbatch {_some(microbatches)} of {self.microbatches}")
        elif self.microbatches > 1:
            parts.append("every microbatch")
        if self.parallel.data > 1:
            parts.append(f"data rank {_some(ranks)}" if len(ranks) < self.parallel.data else "every data rank")
        return ", ".join(parts)

    def device(self, device: jax.Device) -> str:
        """A device by its position in the mesh: "data 0, pipe 1, tensor 0"."""
        position = np.argwhere(self.mesh.devices == device)[0]
        return ", ".join(f"{axis} {index}" for axis, index in zip(self.mesh.axis_names, position, strict=True))


def _some(numbers: Sequence[int]) -> str:
    """The numbers as "0, 1, 2", or the first four of more."""
    shown = ", ".join(str(int(number)) for number in numbers[:4])
    return shown if len(numbers) <= 4 else f"{shown} and {len(numbers) - 4} more"
