"""ZeRO (1910.02054): the axis of an array that data-parallel replicas shard, its all-gather and its reduce-scatter."""

import dataclasses
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec

from megajax.sharding.rules import only

__all__ = ["ZeroSharding", "shard_over_data"]


def shard_over_data(spec: PartitionSpec, shape: tuple[int, ...], replicas: int, first: int = 0) -> PartitionSpec:
    """The partition of an array with its longest free axis sharded over `data` as well.

    Args:
      spec: the partition without that.
      shape: of the array.
      replicas: devices along the mesh's data axis.
      first: axes before this one are left alone.

    Returns:
      `spec` itself where the replicas divide no free axis: a small array is then replicated.
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    free = [
        axis for axis in range(first, len(shape)) if entries[axis] is None and shape[axis] % replicas == 0 < shape[axis]
    ]
    if not free:
        return spec
    entries[max(free, key=lambda axis: shape[axis])] = "data"
    return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True)
class ZeroSharding:
    """How an array is sharded over data and tensor, inside a `shard_map` that is manual over data.

    Left to XLA's partitioner, a reduce-scatter over data first all-gathers the array over tensor (jax 0.10.2). So
    `gather` and `scatter` enter a nested `shard_map` over tensor, where each device works on its own shard.

    Attributes:
      axis: the axis that replicas shard; None if the array is replicated over data.
      tensor: the partition over tensor.
    """

    axis: int | None
    tensor: PartitionSpec

    @classmethod
    def from_spec(cls, spec: PartitionSpec, first: int = 0) -> "ZeroSharding":
        """From an array's partition, without its axes before `first`."""
        entries = tuple(spec)[first:]
        axis = next((axis for axis, entry in enumerate(entries) if entry == "data"), None)
        return cls(axis, only(PartitionSpec(*entries), ("tensor",)))

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gather over data of each replica's shard."""
        if self.axis is None:
            return x
        return self._per_shard(lambda x: lax.all_gather(x, "data", axis=self.axis, tiled=True))(x)

    def scatter(self, x: jax.Array) -> jax.Array:
        """Reduce-scatter over data. fp32: XLA's CPU compiler does not support 16-bit sums here."""
        if self.axis is None:
            return x
        return self._per_shard(lambda x: lax.psum_scatter(x, "data", scatter_dimension=self.axis, tiled=True))(x)

    def _per_shard(self, function: Callable) -> Callable:
        return jax.shard_map(function, in_specs=self.tensor, out_specs=self.tensor, axis_names={"tensor"})
