"""Training state as a checkpoint stores it: plain named arrays, blocks in canonical layer order, whatever the mesh.

A name is the leaf's path without positions in tuples: "params/blocks/attention/qkv/kernel", "optimizer_state/mu/...". A
leaf with "blocks" in its path is dealt over chunks and ranks on devices (pipeline/layout.py) and [layers, ...] in a
checkpoint. Both directions go leaf by leaf on the devices, sharded: no host and no device ever holds a whole leaf that
is split, and the extra memory on a device is one leaf's part.
"""

import math
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


def canonical_sharding(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Where the canonical form of a leaf lies while it is written or read: no device holds what another one does.

    Layers are split over what the dealt axes were split over, and the mesh axes over which the leaf is replicated each
    split the largest axis that they divide. So a checkpoint is copied, written and read once, by all devices together.

    Args:
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
def _gather(leaf: jax.Array, into: jax.Array | None, block: bool, placement: str, sharding: NamedSharding) -> jax.Array:
    """The leaf in canonical order, in the memory of `into` if that is given: XLA sees a donated array of its shape."""
    whole = layout.from_pipeline_layout(leaf, placement=placement) if block else leaf
    return jax.lax.with_sharding_constraint(whole, sharding)


@partial(jax.jit, static_argnames=("pieces", "placement", "sharding"))
def _deal(leaf: jax.Array, pieces: tuple[int, int] | None, placement: str, sharding: NamedSharding) -> jax.Array:
    if pieces is not None:
        leaf = layout.to_pipeline_layout(leaf, chunks=pieces[0], stages=pieces[1], placement=placement)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def to_canonical(state: Tree, placement: str, into: Mapping[str, jax.Array] | None = None) -> dict[str, jax.Array]:
    """Copies of all leaves in the hosts' memory, each process with its devices' parts; `state` can be used up after.

    On a GPU a leaf is put in order on the devices, then copied out while the next one is put in order. The call waits for
    that. A copy of the whole state on the devices would wait for nothing, but takes as much memory again as the state's
    share of a device, when a step is under way that takes all there is; and what is waited for is short: bytes go over
    PCIe ten times as fast as to storage.

    Args:
      state: a training state.
      placement: of its blocks.
      into: copies of an earlier call, which are used up. On CPU devices their memory is used again: what the system gives
        out anew it clears page by page, five times as slow as the copy. (A GPU's host memory is kept by its allocator.)
    """
    copies, before, into = {}, None, into or {}
    for name, leaf in named(state).items():
        sharding = canonical_sharding(name, leaf.shape, leaf.sharding)
        on_host = sharding.mesh.devices.flat[0].platform == "cpu"
        old = into.get(name)
        fits = on_host and old is not None and old.shape == canonical_shape(name, leaf.shape)
        fits = fits and old.sharding.is_equivalent_to(sharding, old.ndim)
        copy = _gather(leaf, old if fits else None, is_block(name), placement, sharding)
        if on_host:
            before = copy  # CPU devices that are in several collectives at once can hang
        else:
            copy = jax.device_put(copy, copy.sharding.with_memory_kind("pinned_host"))
        jax.block_until_ready(before)
        copies[name] = before = copy
    return copies


def from_canonical(copies: dict[str, jax.Array], like: Tree, shardings: Tree, placement: str) -> Tree:
    """The inverse of `to_canonical`, for any mesh; the copies are used up.

    Args:
      copies: by name, arrays laid out by `canonical_sharding`.
      like: the state's structure and shapes.
      shardings: where its leaves belong.
    """
    leaves = []
    for (name, leaf), sharding in zip(named(like).items(), jax.tree.leaves(shardings), strict=True):
        pieces = tuple(leaf.shape[:2]) if is_block(name) else None
        leaves.append(jax.block_until_ready(_deal(copies.pop(name), pieces, placement, sharding)))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
