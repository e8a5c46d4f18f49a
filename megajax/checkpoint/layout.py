"""Converts training state between its sharding on devices and the checkpoint's: named arrays in canonical layer order.

A name is the leaf's path without indices into tuples: "params/blocks/attention/qkv/kernel", "optimizer_state/mu/...";
with them if two leaves would have one name. A leaf with "blocks" in its path is [chunks, pipe, slots of a stage, ...] on
devices (pipeline/layout.py) and [layers, ...] in a checkpoint; if layers are of several kinds, the name after "blocks" is
the kind, and these are its layers. (An optimizer's state may have others there too, without these axes.) Both conversions
run leaf by leaf on the devices and stay sharded: no host and no device holds a whole leaf that is sharded, and the extra
memory on a device is its shard of one leaf.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.pipeline import layout
from megajax.schedules.stages import StageLayers

Tree = Any


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The layout of a run's training state on its mesh, for saving and loading.

    Attributes:
      shapes: jax.ShapeDtypeStruct leaves: the part of the state that is stored.
      shardings: NamedSharding leaves, of the same structure.
      where: the layers of each pipeline stage.
    """

    shapes: Tree
    shardings: Tree
    where: StageLayers

    def with_params(self, of: Callable[[Tree], Tree]) -> "StateLayout":
        """The layout of a state with `of(params)` in place of its parameters, a part of them."""
        part = lambda state: dataclasses.replace(state, params=of(state.params))  # noqa: E731
        return dataclasses.replace(self, shapes=part(self.shapes), shardings=part(self.shardings))


def named(tree: Tree, only: Container[str] | None = None) -> dict[str, Any]:
    """The leaves by name, in the tree's order; `only`: those of these names, if a tree has other leaves too."""
    paths, leaves = zip(*jax.tree.leaves_with_path(tree), strict=True) if jax.tree.leaves(tree) else ((), ())
    names = [name_of(path) for path in paths]
    count = collections.Counter(names)
    clash = {name for name, times in count.items() if times > 1}
    for name in count:  # nor is a leaf inside of another
        if above := count.keys() & {name[: slash.start()] for slash in re.finditer("/", name)}:
            clash |= {name, *above}
    names = [name_of(path, indices=name in clash) for path, name in zip(paths, names, strict=True)]
    assert len(set(names)) == len(names), "two leaves have one name"
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if only is None or name in only}


def name_of(path: Sequence[Any], indices: bool = False) -> str:
    """The name of the leaf at a path, with or without the path's indices into tuples."""
    keys = [key for key in path if indices or not isinstance(key, jax.tree_util.SequenceKey)]
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
    """Whether the parameter of that name has an axis of layers."""
    return "blocks" in name.split("/")


def layers_of(name: str, where: StageLayers, shape: tuple[int, ...]) -> StageLayers | None:
    """Where the layers are that a leaf has rows for: all, or those of its kind. None: it has no axis of layers.

    `shape`: of the leaf on devices. What an optimizer keeps for a parameter of blocks need not have rows for layers.
    """
    if not is_block(name):
        return None
    path = name.split("/")
    kind = path[len(path) - path[::-1].index("blocks") :][:1]
    if where.kinds is not None and not (kind and kind[0] in where.kind_names):
        return None
    own = where if where.kinds is None else where.of(kind[0])
    return own if tuple(shape[:3]) == (own.chunks, own.ranks, own.slots) else None


def canonical_shape(name: str, shape: tuple[int, ...], where: StageLayers) -> tuple[int, ...]:
    """The shape in a checkpoint of a leaf that has `shape` on devices; `where`: of the model."""
    own = layers_of(name, where, shape)
    return (own.layers, *shape[3:]) if own else shape


def canonical_sharding(name: str, shape: tuple[int, ...], sharding: NamedSharding, where: StageLayers) -> NamedSharding:
    """The sharding of a leaf in canonical order while it is written or read: without replicas, as far as axes divide.

    The axis of layers takes the mesh axes of the three pipeline axes it replaces, unless stages have unequal numbers of
    layers. Each mesh axis over which the leaf is replicated, or which is left, then shards the largest axis that it divides.
    So every element is copied, written and read once, and all devices share the work.

    Args:
      name: of the leaf.
      shape: of the leaf on devices.
      sharding: of the leaf on devices.
      where: the layers of each stage, of the model.
    """
    names, own = sharding.mesh.axis_names, layers_of(name, where, shape)
    axes = _spread(shape, sharding, own, ("pipe", *names) if own and own.idle else names)
    return NamedSharding(sharding.mesh, P(*(over or None for over in axes)))


def without_pipe(shape: tuple[int, ...], sharding: NamedSharding, where: StageLayers) -> NamedSharding:
    """The sharding of a leaf of blocks in pipeline layout while its layers move from stage to stage (see `arrange`).

    Pipe shards the largest of the other axes that it divides. Arguments as for `canonical_sharding`; `where`: of the leaf.
    """
    _, *axes = _spread(shape, sharding, where, ("pipe",))
    return NamedSharding(sharding.mesh, P(None, None, None, *(over or None for over in axes)))


def _spread(shape: tuple[int, ...], sharding: NamedSharding, own: StageLayers | None, names: Iterable[str]) -> list:
    """For each axis of the leaf in canonical order the mesh axes that shard it, the unused ones of `names` included."""
    mesh, spec = sharding.mesh, tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
    axes = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    uneven = own is not None and own.idle > 0
    if own:
        axes, shape = [() if uneven else sum(axes[:3], ()), *axes[3:]], (own.layers, *shape[3:])
    left = [size // math.prod(mesh.shape[axis] for axis in over) for size, over in zip(shape, axes, strict=True)]
    for axis in names:
        if axis in sum(axes, ()):
            continue
        places = [place for place, size in enumerate(left) if size % mesh.shape[axis] == 0 and place >= uneven]
        if places:
            place = max(places, key=left.__getitem__)
            axes[place], left[place] = (*axes[place], axis), left[place] // mesh.shape[axis]
    return axes


def arrange(leaf: jax.Array, where: StageLayers, sharding: NamedSharding) -> jax.Array:
    """`pipeline.layout.to_pipeline_layout` of a leaf [layers, ...] that no device holds whole, to be traced.

    XLA shards a reshape. Empty slots, though, shift layers from stage to stage by other numbers on each rank: with layers
    sharded, every rank would gather all of them. So another axis is sharded over pipe while they are inserted, and the
    result is resharded with an all-to-all.

    Args:
      leaf: in canonical order.
      where: the layers of each stage.
      sharding: of the result.
    """
    if not where.idle:
        return layout.to_pipeline_layout(leaf, where)
    between = without_pipe((where.chunks, where.ranks, where.slots, *leaf.shape[1:]), sharding, where)
    leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(between.mesh, P(None, *between.spec[3:])))
    slots = jax.lax.with_sharding_constraint(layout.to_pipeline_layout(leaf, where), between)
    return jax.lax.with_sharding_constraint(slots, sharding)


@partial(jax.jit, static_argnames=("where", "between", "sharding"), donate_argnames="into", keep_unused=True)
def _to_layers(
    leaf: jax.Array,
    into: jax.Array | None,
    where: StageLayers | None,
    between: NamedSharding | None,
    sharding: NamedSharding,
) -> jax.Array:
    """The leaf in canonical order. `into`, an array of the result's shape, is donated: XLA reuses its memory."""
    if between is not None:
        leaf = jax.lax.with_sharding_constraint(leaf, between)  # see `arrange`
    whole = layout.from_pipeline_layout(leaf, where) if where is not None else leaf
    return jax.lax.with_sharding_constraint(whole, sharding)


@partial(jax.jit, static_argnames=("where", "sharding"))
def _to_pipeline(leaf: jax.Array, where: StageLayers | None, sharding: NamedSharding) -> jax.Array:
    """The leaf as on devices; `where` is None for a leaf that is not one of blocks."""
    if where is not None:
        leaf = arrange(leaf, where, sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def to_canonical(state: Tree, where: StageLayers, into: Mapping[str, jax.Array] | None = None) -> dict[str, jax.Array]:
    """Copies all leaves to host memory, each process its devices' shards; `state` may be donated afterwards.

    On a GPU a leaf is reordered on the devices, then copied to the host while the next one is reordered. The call returns
    when all copies are complete. A copy of the whole state on the devices would return at once, but doubles the state's
    memory while a step runs that may need all of it. The wait is short: PCIe is ten times as fast as storage.

    Args:
      state: a pytree of arrays.
      where: the layers of each stage.
      into: the result of an earlier call, which is donated. CPU devices reuse its memory: the operating system zeroes
        newly allocated memory page by page, which takes five times as long as the copy. (On GPUs the allocator of host
        memory keeps it.)

    Returns:
      The copies by name.
    """
    copies, before, into = {}, None, into or {}
    for name, leaf in named(state).items():
        sharding = canonical_sharding(name, leaf.shape, leaf.sharding, where)
        on_host = sharding.mesh.devices.flat[0].platform == "cpu"
        old = into.get(name)
        fits = on_host and old is not None and old.shape == canonical_shape(name, leaf.shape, where)
        fits = fits and old.sharding.is_equivalent_to(sharding, old.ndim)
        stages = layers_of(name, where, leaf.shape)
        between = without_pipe(leaf.shape, leaf.sharding, stages) if stages and stages.idle else None
        copy = _to_layers(leaf, old if fits else None, stages, between, sharding)
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
        where = layers_of(name, target.where, leaf.shape)
        leaves.append(jax.block_until_ready(_to_pipeline(copies.pop(name), where, sharding)))
    return jax.tree.unflatten(jax.tree.structure(target.shapes), leaves)
