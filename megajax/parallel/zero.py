"""ZeRO (1910.02054): which axis of an array data-parallel replicas cut it along."""

from jax.sharding import PartitionSpec

__all__ = ["cut_over_data"]


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
