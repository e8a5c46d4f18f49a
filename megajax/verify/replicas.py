"""Names the devices whose copy of a replicated array differs from the other copies, in any bit.

jax reads one of the copies and assumes that they are equal.
"""

from typing import Any

import jax
import numpy as np

from megajax.checkpoint.layout import is_block, named
from megajax.verify.places import Places

Tree = Any


def differing_replicas(state: Tree, places: Places) -> list[str]:
    """A line for each array with copies that differ: its name, the first layer that differs, and the devices.

    Only devices of this process are compared.

    Args:
      state: a pytree of arrays on a mesh.
      places: of the layout that the state is of.
    """
    found = []
    for name, leaf in named(state).items():
        copies: dict[str, list] = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(shard)
        for shards in copies.values():
            if len(shards) > 1 and (line := _compare(name, shards, places)):
                found.append(line)
    return found


def _compare(name: str, shards: list[jax.Shard], places: Places) -> str | None:
    """The line of one shard's copies; None if all are equal."""
    values = [np.ascontiguousarray(shard.data) for shard in shards]
    texts = [value.tobytes() for value in values]
    usual = max(set(texts), key=texts.count)
    odd = [number for number, text in enumerate(texts) if text != usual]
    if not odd:
        return None
    majority = 2 * texts.count(usual) > len(texts)
    blamed = odd if majority else range(len(shards))
    devices = ", ".join(places.device(shards[number].device) for number in blamed)
    tensor = name
    if is_block(name):
        unequal = (values[odd[0]] != values[texts.index(usual)]).reshape(*values[0].shape[:3], -1).any(-1)
        local = np.argwhere(unequal)[0] if unequal.any() else (0, 0, 0)
        chunk, rank, index = (int(at) + (part.start or 0) for at, part in zip(local, shards[0].index, strict=False))
        tensor = f"{name} of layer {places.layer_at(chunk, rank, index)}"
    return f"{tensor}: the copy of {devices} differs" if majority else f"{tensor}: the copies of {devices} differ"
