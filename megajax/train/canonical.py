"""Training state as a checkpoint stores it: plain named arrays, blocks in canonical layer order, whatever the mesh.

A name is the leaf's path without positions in tuples: "params/blocks/attention/qkv/kernel", "optimizer_state/mu/...". A
leaf with "blocks" in its path is dealt over chunks and ranks on devices (pipeline/layout.py) and [layers, ...] in a
checkpoint. Both directions go leaf by leaf on the devices, sharded: no host and no device ever holds a whole leaf that
is split, and the extra memory on a device is one leaf's part.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.pipeline import layout

Tree = Any


def named(tree: Tree) -> dict[str, Any]:
    """The leaves by name, in the tree's order."""
    leaves = jax.tree.leaves_with_path(tree)
    names = {_name(path): leaf for path, leaf in leaves}
    assert len(names) == len(leaves), "two leaves have one name"
    return names


def _name(path) -> str:
    keys = [key for key in path if not isinstance(key, jax.tree_util.SequenceKey)]
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": 1} to {"a": {"b": 1}}: how other tools want to see a checkpoint."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return root


def is_block(name: str) -> bool:
    """Whether a leaf has an axis of layers."""
    return "blocks" in name.split("/")


def canonical_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a checkpoint of a leaf that has `shape` on devices."""
    if not is_block(name):
        return shape
    chunks, ranks, layers, *rest = shape
    return (chunks * ranks * layers, *rest)


def canonical_sharding(name: str, dimensions: int, sharding: NamedSharding) -> NamedSharding:
    """Where the canonical form of a leaf of `dimensions` axes lies while it is written or read.

    Layers are split over whatever the dealt axes were split over, so that a device holds as much as before.
    """
    spec = tuple(sharding.spec) + (None,) * (dimensions - len(sharding.spec))
    if is_block(name):
        axes = [
            axis
            for entry in spec[:3]
            if entry is not None
            for axis in (entry if isinstance(entry, tuple) else (entry,))
        ]
        spec = (tuple(axes) or None, *spec[3:])
    return NamedSharding(sharding.mesh, P(*spec))


@partial(jax.jit, static_argnames=("placement", "sharding"))
def _gather(leaf: jax.Array, placement: str, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(layout.gather(leaf, placement=placement), sharding)


@partial(jax.jit, static_argnames=("shape", "placement", "sharding"))
def _deal(leaf: jax.Array, shape: tuple[int, int], placement: str, sharding: NamedSharding) -> jax.Array:
    chunks, stages = shape
    dealt = layout.deal(leaf, stages=stages, chunks=chunks, placement=placement)
    return jax.lax.with_sharding_constraint(dealt, sharding)


def to_canonical(state: Tree, placement: str) -> dict[str, jax.Array]:
    """Copies of all leaves in the hosts' memory, each process with its devices' parts; `state` can be used up after."""
    copies = {}
    for name, leaf in named(state).items():
        sharding = canonical_sharding(name, leaf.ndim, leaf.sharding)
        if is_block(name):
            leaf = _gather(leaf, placement, sharding)
        copies[name] = jax.device_put(leaf, sharding.with_memory_kind("pinned_host"), may_alias=False)
    return jax.block_until_ready(copies)


def from_canonical(copies: dict[str, jax.Array], like: Tree, shardings: Tree, placement: str) -> Tree:
    """The inverse of `to_canonical`, for any mesh; the copies are used up.

    Args:
      copies: by name, arrays laid out by `canonical_sharding`.
      like: the state's structure and shapes.
      shardings: where its leaves belong.
    """
    leaves = []
    for (name, leaf), sharding in zip(named(like).items(), jax.tree.leaves(shardings), strict=True):
        array = copies.pop(name)
        if is_block(name):
            array = _deal(array, leaf.shape[:2], placement, sharding)
        leaves.append(array)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
