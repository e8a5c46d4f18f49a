"""ZeRO (1910.02054): which axis of an array data-parallel replicas cut it along, and how it is put together again."""

import dataclasses
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec

from megajax.sharding.rules import only

__all__ = ["Cut", "cut_over_data"]


def cut_over_data(spec: PartitionSpec, shape: tuple[int, ...], replicas: int, first: int = 0) -> PartitionSpec:
    """The partition of an array with its longest free axis over `data` as well.

    Args:
      spec: how it lies without that.
      shape: the array's.
      replicas: devices along the mesh's data axis.
      first: axes before this one are left alone.

    Returns:
      `spec` itself where no axis is free that the replicas divide: a small array is then on all of them.
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
class Cut:
    """How an array lies over data and tensor, inside a `shard_map` that is manual over data.

    Left to XLA's partitioner, a reduce-scatter over data there puts the array together over tensor first (jax 0.10.2);
    so both ways enter a nested `shard_map`, where it is in its parts.

    Attributes:
      axis: that replicas cut it along; None if each has all of it.
      tensor: how it lies over tensor.
    """

    axis: int | None
    tensor: PartitionSpec

    @classmethod
    def of(cls, spec: PartitionSpec, first: int = 0) -> "Cut":
        """The cut of an array's partition, without its axes before `first`."""
        entries = tuple(spec)[first:]
        axis = next((axis for axis, entry in enumerate(entries) if entry == "data"), None)
        return cls(axis, only(PartitionSpec(*entries), ("tensor",)))

    def gather(self, x: jax.Array) -> jax.Array:
        """The whole array on each replica, of a part on each."""
        if self.axis is None:
            return x
        return self._in_parts(lambda x: lax.all_gather(x, "data", axis=self.axis, tiled=True))(x)

    def scatter(self, x: jax.Array) -> jax.Array:
        """Each replica's part of the sum of whole arrays. fp32: XLA's CPU compiler does not take 16-bit sums here."""
        if self.axis is None:
            return x
        return self._in_parts(lambda x: lax.psum_scatter(x, "data", scatter_dimension=self.axis, tiled=True))(x)

    def _in_parts(self, function: Callable) -> Callable:
        return jax.shard_map(function, in_specs=self.tensor, out_specs=self.tensor, axis_names={"tensor"})
