"""Functions of whole arrays of a layer, such as Muon's Newton-Schulz, of parameters that ZeRO and tensor split.

The layers of a stage are distributed over its devices, and each computes with whole arrays of its own. First replicas that
shard the arrays (ZeRO) get layers instead, an all-to-all, unless they have layers already (`pipeline.parameters`); if they
do not divide the layers, layers of zeros are added. Then each device of a tensor group gets the same number of whole layers,
a second all-to-all. Those that are left, fewer than the group has devices, stay split over it, one after the other. The
results return in the same way.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.sharding.optimizer_state import STACK, parameters_by_path

__all__ = ["Part", "layer_counts", "on_whole_layers"]

Tree = Any
Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """Layers of a parameter of blocks that are computed together.

    Attributes:
      layers: [pipeline ranks, groups of replicas, layers of a group, *the array's axes].
      entries: the mesh axes of each of these axes, without that of `tensor_axis`.
      tensor_axis: the array's axis that is split over the tensor group where parameters are stored; None: none is.
      is_split: whether these arrays are split over it here too, and not its layers.
      mesh: None: there is one device.
    """

    layers: jax.Array
    entries: tuple[Names, ...]
    tensor_axis: int | None = None
    is_split: bool = False
    mesh: Mesh | None = None

    def shard(self, x: jax.Array, batch: Sequence[int], axis: int | None) -> jax.Array:
        """Matrices [ranks, groups, layers, *batch axes of the array, rows, columns], with `axis` split over the group.

        Only if the part `is_split`; what it does not divide stays whole.

        Args:
          x: the matrices.
          batch: the array's axes that they have too.
          axis: -2, -1 or None.
        """
        if not self.is_split:
            return x
        entries = [*self.entries[:STACK], *(self.entries[STACK + place] for place in batch), (), ()]
        if axis is not None and x.shape[axis] % self.mesh.shape["tensor"] == 0:
            entries[axis] = ("tensor",)
        return _placed(x, entries, self.mesh)


def layer_counts(layers: int, groups: int, tensor: int) -> tuple[int, int, int]:
    """Layers of a group of replicas: with added ones, then those that a device has whole, and those split over `tensor`."""
    of_group = -(-layers // groups)
    return of_group, of_group // tensor, of_group % tensor


def on_whole_layers(mesh: Mesh | None = None, specs: Tree = None) -> Callable[..., Tree]:
    """`OptimizerContext.on_whole_layers`, to be traced: `apply(function, tree, is_batch)`.

    `function(path, part)` returns an array of the shape of `part.layers`; called for each `Part` of each leaf of a tree
    like (some of) the parameters of blocks, [chunks, pipe, slots of a stage, ...]. `is_batch(path, axis)`: whether it needs
    no whole axis of an array, such as that of experts: a tensor group that has split one keeps it so.

    Args:
      mesh: of the run; None: one device.
      specs: the PartitionSpec of each parameter, as it is stored.
    """
    stored = parameters_by_path(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))

    def apply(
        function: Callable[[tuple, Part], jax.Array],
        tree: Tree,
        is_batch: Callable[[tuple, int], bool] = lambda path, axis: False,
    ) -> Tree:
        def one(path, leaf):
            path = tuple(path)
            batch = [axis for axis in range(leaf.ndim - STACK) if is_batch(path, axis)]
            return _of_leaf(lambda part: function(path, part), leaf, stored.get(path, PartitionSpec()), batch, mesh)

        return jax.tree_util.tree_map_with_path(one, tree)

    return apply


def _of_leaf(
    function: Callable[[Part], jax.Array], leaf: jax.Array, spec: PartitionSpec, batch: list[int], mesh: Mesh | None
) -> jax.Array:
    sizes: Mapping[str, int] = mesh.shape if mesh is not None else {}
    chunks, ranks, slots, *array = leaf.shape
    as_names = lambda entry: entry if isinstance(entry, tuple) else (entry,) if entry else ()  # noqa: E731
    entries = [as_names(entry) for entry in (*spec, *[None] * (leaf.ndim - len(spec)))]
    pipe, own = entries[1], entries[STACK:]
    has_layers = "data" in entries[STACK - 1]  # replicas have whole layers
    replicas = entries[STACK - 1] if has_layers else next((names for names in own if "data" in names), ())
    rest = [() if "data" in names else names for names in own]
    tensor_axis = next((place for place, names in enumerate(rest) if "tensor" in names and place not in batch), None)
    without = [() if place == tensor_axis else names for place, names in enumerate(rest)]
    groups, layers = math.prod(sizes[name] for name in replicas), chunks * slots
    tensor = 1 if tensor_axis is None else sizes["tensor"]
    of_group, each, _ = layer_counts(layers, groups, tensor)
    whole = each * tensor

    if has_layers:
        x = jnp.moveaxis(leaf.reshape(chunks, ranks, groups, -1, *array), 0, 2)
    else:
        x = jnp.moveaxis(leaf, 1, 0).reshape(ranks, layers, *array)
        x = jnp.pad(x, [(0, 0), (0, groups * of_group - layers), *[(0, 0)] * len(array)])
    x = _placed(x.reshape(ranks, groups, of_group, *array), [pipe, replicas, (), *rest], mesh)
    results = []
    for part, is_split in ((x[:, :, :whole], False), (x[:, :, whole:], tensor > 1)):
        if not part.shape[2]:
            continue
        over = () if is_split or tensor == 1 else ("tensor",)
        # Sharded as before it was cut: XLA would distribute all layers, with more of them than a device needs.
        part = _placed(part, [pipe, replicas, (), *rest], mesh)
        part = part if is_split else _placed(part, [pipe, replicas, over, *without], mesh)
        part = function(Part(part, (pipe, replicas, (), *without), tensor_axis, is_split, mesh))
        if not is_split:
            part = _placed(part, [pipe, replicas, over, *without], mesh)
        results.append(_placed(part, [pipe, replicas, (), *rest], mesh))
    x = jnp.concatenate(results, 2) if len(results) > 1 else results[0]
    if has_layers:
        x = jnp.moveaxis(x.reshape(ranks, groups, chunks, -1, *array), 2, 0)
        return _placed(x.reshape(leaf.shape), entries, mesh)
    x = _placed(x.reshape(ranks, groups * of_group, *array), [pipe, (), *own], mesh)[:, :layers]
    return _placed(jnp.moveaxis(x.reshape(ranks, chunks, slots, *array), 0, 1), entries, mesh)


def _placed(x: jax.Array, entries: Sequence[Names], mesh: Mesh | None) -> jax.Array:
    if mesh is None:
        return x
    spec = PartitionSpec(*(names if len(names) > 1 else names[0] if names else None for names in entries))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
