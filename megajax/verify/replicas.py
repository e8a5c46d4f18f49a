"""Names the devices whose copy of a replicated array differs from the others in any bit, and the layer."""

from typing import Any

import jax
import numpy as np

from megajax.checkpoint.layout import layers_of, named
from megajax.train.replica_check import Difference, ReplicaCheck
from megajax.verify.locations import Locations

Tree = Any


def differing_replicas(state: Tree, check: ReplicaCheck, locations: Locations) -> list[str]:
    """A line for each array with copies that differ: its name, the first layer that differs, and the devices.

    Args:
      state: the state to compare.
      check: compares its checksums.
      locations: of the layout that the state is of.
    """
    return [_describe(difference, named(state)[difference.name], locations) for difference in check.differences(state)]


def _describe(difference: Difference, leaf: jax.Array, locations: Locations) -> str:
    devices = "; ".join(locations.device(device) for device in difference.suspects)
    layer = None
    if own := layers_of(difference.name, locations.where, leaf.shape):
        layer = _layer(leaf, difference.suspects, locations.numbers(own))
    tensor = difference.name if layer is None else f"{difference.name} of layer {layer}"
    if difference.majority:
        return f"{tensor}: the copy of {devices} differs from the others"
    return f"{tensor}: the copies of {devices} differ from one another"


def _layer(leaf: jax.Array, suspects: tuple[jax.Device, ...], numbers: np.ndarray) -> int | None:
    """The first layer of a suspect's copy that is not as in another copy; None if this process has only one of them.

    `numbers`: of the layers of the leaf's rows.
    """
    shards = leaf.addressable_shards
    for suspect in (shard for shard in shards if shard.device in suspects):
        for other in shards:
            if other.index != suspect.index or other.device == suspect.device:
                continue
            bits, expected = (np.ascontiguousarray(shard.data).view(np.uint32) for shard in (suspect, other))
            unequal = (bits != expected).reshape(*bits.shape[:3], -1).any(-1)
            if unequal.any():
                layers = numbers[suspect.index[:3]][unequal]
                return min((int(layer) for layer in layers if layer >= 0), default=None)
    return None
