"""ZeRO (1910.02054): the axis of an array that data-parallel replicas shard, its all-gather and its reduce-scatter."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
from jax import lax
from jax.sharding import PartitionSpec

from megajax.sharding.rules import only

__all__ = ["ZeroSharding", "shard_over_data"]


def shard_over_data(
    spec: PartitionSpec, shape: tuple[int, ...], replicas: Mapping[str, int], first: int = 0
) -> PartitionSpec:
    """The partition of an array with its longest free axis sharded over the replicas that have the same part of it.

    Args:
      spec: the partition without that.
      shape: of the array.
      replicas: the sizes of the mesh axes of replicas: `data`, and `expert` if the mesh has it.
      first: axes before this one are left alone.

    Returns:
      `spec` itself where the replicas divide no free axis: a small array is then replicated.
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    taken = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))}
    over = {axis: size for axis, size in replicas.items() if axis not in taken}  # an expert has fewer replicas
    count = math.prod(over.values())
    free = [
        axis for axis in range(first, len(shape)) if entries[axis] is None and shape[axis] % count == 0 < shape[axis]
    ]
    if not free or count == 1:
        return spec
    entries[max(free, key=lambda axis: shape[axis])] = tuple(over) if len(over) > 1 else "data"
    return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True)
class ZeroSharding:
    """How an array is sharded over replicas and tensor, inside a `shard_map` that is manual over data (and expert).

    Left to XLA's partitioner, a reduce-scatter over data first all-gathers the array over tensor (jax 0.10.2). So
    `gather` and `scatter` enter a nested `shard_map` over tensor, where each device works on its own shard.

    Attributes:
      axis: the axis that replicas shard; None if the array is replicated over data.
      tensor: the partition over tensor.
      over: the mesh axes of these replicas: `data`, or data and expert.
    """

    axis: int | None
    tensor: PartitionSpec
    over: tuple[str, ...] = ("data",)

    @classmethod
    def from_spec(cls, spec: PartitionSpec, first: int = 0) -> "ZeroSharding":
        """From an array's partition, without its axes before `first`."""
        entries = tuple(spec)[first:]
        axes = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
        axis = next((axis for axis, over in enumerate(axes) if "data" in over), None)
        tensor = only(PartitionSpec(*entries), ("tensor",))
        return cls(axis, tensor) if axis is None else cls(axis, tensor, axes[axis])

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gather over the replicas of each one's shard."""
        if self.axis is None:
            return x
        return self._per_shard(lambda x: lax.all_gather(x, self.over, axis=self.axis, tiled=True))(x)

    def scatter(self, x: jax.Array) -> jax.Array:
        """Reduce-scatter over the replicas. fp32: XLA's CPU compiler does not support 16-bit sums here."""
        if self.axis is None:
            return x
        return self._per_shard(lambda x: lax.psum_scatter(x, self.over, scatter_dimension=self.axis, tiled=True))(x)

    def _per_shard(self, function: Callable) -> Callable:
        return jax.shard_map(function, in_specs=self.tensor, out_specs=self.tensor, axis_names={"tensor"})
