"""Converts training state between its sharding on devices and the checkpoint's: named arrays in canonical layer order.

A name is the leaf's path without indices into tuples: "params/blocks/attention/qkv/kernel", "optimizer_state/mu/...". A
leaf with "blocks" in its path is [chunks, pipe, layers per chunk, ...] on devices (pipeline/layout.py) and [layers, ...]
in a checkpoint. Both conversions run leaf by leaf on the devices and stay sharded: no host and no device holds a whole
leaf that is sharded, and the extra memory on a device is its shard of one leaf.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.pipeline import layout

Tree = Any


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The layout of a run's training state on its mesh, for saving and loading.

    Attributes:
      shapes: jax.ShapeDtypeStruct leaves: the part of the state that is stored.
      shardings: NamedSharding leaves, of the same structure.
      placement: of the blocks over pipeline ranks, "loop" or "v" (pipeline/layout.py).
    """

    shapes: Tree
    shardings: Tree
    placement: str


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
    """{"a/b": 1} to {"a": {"b": 1}}, the structure in which other tools read a checkpoint."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return root


def is_block(name: str) -> bool:
    """Whether the leaf has an axis of layers."""
    return "blocks" in name.split("/")


def canonical_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a checkpoint of a leaf that has `shape` on devices."""
    if not is_block(name):
        return shape
    chunks, ranks, layers, *rest = shape
    return (chunks * ranks * layers, *rest)


def canonical_sharding(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """The sharding of a leaf in canonical order while it is written or read: without replicas, as far as axes divide.

    The axis of layers takes the mesh axes of the three pipeline axes it replaces. Each mesh axis over which the leaf is
    replicated then shards the largest axis that it divides. So every element is copied, written and read once, and all
    devices share the work.

    Args:
      name: of the leaf.
      shape: of the leaf on devices.
      sharding: of the leaf on devices.
    """
    mesh, spec = sharding.mesh, tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
    axes = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    if is_block(name):
        axes = [sum(axes[:3], ()), *axes[3:]]
    left = [
        size // math.prod(mesh.shape[axis] for axis in over)
        for size, over in zip(canonical_shape(name, shape), axes, strict=True)
    ]
    for axis in mesh.axis_names:
        if axis in sum(axes, ()):
            continue
        places = [place for place, size in enumerate(left) if size % mesh.shape[axis] == 0]
        if places:
            place = max(places, key=left.__getitem__)
            axes[place], left[place] = (*axes[place], axis), left[place] // mesh.shape[axis]
    return NamedSharding(mesh, P(*(over or None for over in axes)))


@partial(jax.jit, static_argnames=("block", "placement", "sharding"), donate_argnames="into", keep_unused=True)
def _to_layers(
    leaf: jax.Array, into: jax.Array | None, block: bool, placement: str, sharding: NamedSharding
) -> jax.Array:
    """The leaf in canonical order. `into`, an array of the result's shape, is donated: XLA reuses its memory."""
    whole = layout.from_pipeline_layout(leaf, placement=placement) if block else leaf
    return jax.lax.with_sharding_constraint(whole, sharding)


@partial(jax.jit, static_argnames=("stages", "placement", "sharding"))
def _to_pipeline(leaf: jax.Array, stages: tuple[int, int] | None, placement: str, sharding: NamedSharding) -> jax.Array:
    """The leaf as on devices; `stages` is (chunks, pipe) for a leaf of blocks."""
    if stages is not None:
        leaf = layout.to_pipeline_layout(leaf, chunks=stages[0], stages=stages[1], placement=placement)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def to_canonical(state: Tree, placement: str, into: Mapping[str, jax.Array] | None = None) -> dict[str, jax.Array]:
    """Copies all leaves to host memory, each process its devices' shards; `state` may be donated afterwards.

    On a GPU a leaf is reordered on the devices, then copied to the host while the next one is reordered. The call returns
    when all copies are complete. A copy of the whole state on the devices would return at once, but doubles the state's
    memory while a step runs that may need all of it. The wait is short: PCIe is ten times as fast as storage.

    Args:
      state: a pytree of arrays.
      placement: of its blocks.
      into: the result of an earlier call, which is donated. CPU devices reuse its memory: the operating system zeroes
        newly allocated memory page by page, which takes five times as long as the copy. (On GPUs the allocator of host
        memory keeps it.)

    Returns:
      The copies by name.
    """
    copies, before, into = {}, None, into or {}
    for name, leaf in named(state).items():
        sharding = canonical_sharding(name, leaf.shape, leaf.sharding)
        on_host = sharding.mesh.devices.flat[0].platform == "cpu"
        old = into.get(name)
        fits = on_host and old is not None and old.shape == canonical_shape(name, leaf.shape)
        fits = fits and old.sharding.is_equivalent_to(sharding, old.ndim)
        copy = _to_layers(leaf, old if fits else None, is_block(name), placement, sharding)
        if on_host:
            before = copy  # CPU devices that run several collectives at once can deadlock
        else:
            copy = jax.device_put(copy, copy.sharding.with_memory_kind("pinned_host"))
        jax.block_until_ready(before)
        copies[name] = before = copy
    return copies


def from_canonical(copies: dict[str, jax.Array], target: StateLayout) -> Tree:
    """The inverse of `to_canonical`, for any mesh; removes each copy from the dictionary when its leaf is complete.

    Args:
      copies: by name, arrays sharded by `canonical_sharding`.
      target: the layout of the result.
    """
    leaves = []
    for (name, leaf), sharding in zip(named(target.shapes).items(), jax.tree.leaves(target.shardings), strict=True):
        stages = tuple(leaf.shape[:2]) if is_block(name) else None
        leaves.append(jax.block_until_ready(_to_pipeline(copies.pop(name), stages, target.placement, sharding)))
    return jax.tree.unflatten(jax.tree.structure(target.shapes), leaves)
