"""How the state of an optimizer is sharded: from the paths and the shapes of its leaves."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.config import ConfigError

__all__ = ["STACK", "on_whole_layers", "owner", "parameters_by_path", "state_specs", "whole_layers"]

Tree = Any
Path = tuple[Any, ...]
STACK = 3  # axes of layers of a leaf of blocks: chunk, rank, slot in the chunk


def parameters_by_path(params: Tree, is_leaf: Callable[[Any], bool] | None = None) -> dict[Path, Any]:
    """The leaves by their paths."""
    return {tuple(path): leaf for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_leaf)}


def owner(path: Path, params: Mapping[Path, Any]) -> Path | None:
    """The path of the parameter to which a leaf of the state belongs: the one that the leaf's path contains."""
    path = tuple(path)
    for start in range(len(path)):
        for end in range(len(path), start, -1):
            if path[start:end] in params:
                return path[start:end]
    return None


def state_specs(init: Callable[[Tree], Tree], params: Tree, specs: Tree, label: Callable[[Any], str]) -> Tree:
    """The PartitionSpec of each leaf of an optimizer's state.

    A leaf belongs to the parameter whose path its own path contains. With that one's shape it has its sharding. If it
    lacks some of the axes, as Adafactor's rows and columns do, those that are left keep theirs: axes are found by their
    sizes, and one that may be either of two with different shardings is replicated. All other leaves are replicated.

    Whether a leaf has the axes of layers is found by tracing `init` with the layers stacked in other ways.

    Args:
      init: of the optimizer.
      params: jax.ShapeDtypeStruct of the parameters; blocks [chunks, pipe, slots of a stage, ...].
      specs: a tree like it of PartitionSpec.
      label: the name of a leaf by its path, for errors.

    Raises:
      ConfigError: a leaf's shape depends on how layers are split over the pipeline, or it is no plain array.
    """
    shapes = jax.eval_shape(init, params)
    stacked = parameters_by_path(params)
    partitions = dict(zip(stacked, jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)), strict=True))
    others = [_restacked(params, place) for place in range(STACK)]
    found = [jax.eval_shape(init, other) for other in others]
    if any(jax.tree.structure(other) != jax.tree.structure(shapes) for other in found):
        raise ConfigError("optimizer: the structure of its state depends on how layers are split over the pipeline")
    layouts = [stacked, *map(parameters_by_path, others)]

    def one(path, leaf, *elsewhere):
        name, of, leaves = label(path), owner(path, stacked), (leaf, *elsewhere)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ConfigError(
                f"optimizer state {name} is a typed key, which no checkpoint holds: make it with jax.random.PRNGKey"
            )
        is_block = of is not None and of[0].key == "blocks"
        first = STACK if is_block and _have_stack(leaves, [layout[of].shape for layout in layouts]) else 0
        rests = {leaf.shape[first:] for leaf in leaves}
        looks_stacked = (
            is_block and not first and leaf.ndim >= STACK and leaf.shape[:STACK] == stacked[of].shape[:STACK]
        )
        if len(rests) > 1 or looks_stacked:
            raise ConfigError(
                f"optimizer state {name} has shape {leaf.shape}, which depends on how layers are split over the pipeline, "
                "and cannot be placed: make this part of the optimizer with context.per_layer(...)"
            )
        if of is None or (is_block and not first):
            return PartitionSpec()
        parameter, spec = stacked[of].shape, tuple(partitions[of])
        spec += (None,) * (len(parameter) - len(spec))
        return PartitionSpec(*spec[:first], *_surviving(leaf.shape[first:], parameter[first:], spec[first:]))

    return jax.tree_util.tree_map_with_path(one, shapes, *found)


def whole_layers(spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """The partition of a parameter of blocks with whole arrays of a layer on a device, as far as that is worth it.

    The replicas that shard an axis of the array (ZeRO) get layers instead, an all-to-all; if they divide neither the slots
    of a stage nor the chunks, all get all layers, an all-gather. A tensor group gets layers if it divides what is left of
    them; if not, the array remains split over it.

    Args:
      spec: the partition that is stored.
      shape: of the parameter, [chunks, pipe, slots of a stage, ...].
      sizes: of the mesh's axes.
    """
    as_tuple = lambda entry: entry if isinstance(entry, tuple) else (entry,) if entry else ()  # noqa: E731
    entries = [as_tuple(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    parts = lambda names: math.prod(sizes[name] for name in names)  # noqa: E731
    for axis in ("data", "tensor"):
        for place in range(STACK, len(shape)):
            moved = entries[place]
            if axis not in moved:
                continue
            free = [stack for stack in (2, 0) if shape[stack] % (parts(entries[stack]) * parts(moved)) == 0]
            if free:
                entries[free[0]] += moved
            if free or axis == "data":
                entries[place] = ()
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in entries))


def on_whole_layers(mesh: Mesh, specs: Tree) -> Callable[[Callable[[Tree], Tree], Tree], Tree]:
    """`OptimizerContext.on_whole_layers`, to be traced.

    Args:
      mesh: of the run.
      specs: the PartitionSpec of each parameter, as it is stored.
    """
    stored = parameters_by_path(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))

    def placed(tree: Tree, spec_of: Callable) -> Tree:
        def one(path, leaf):
            sharding = NamedSharding(mesh, spec_of(stored[tuple(path)], leaf.shape))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    def apply(function: Callable[[Tree], Tree], tree: Tree) -> Tree:
        whole = placed(tree, lambda spec, shape: whole_layers(spec, shape, mesh.shape))
        return placed(function(whole), lambda spec, _: spec)

    return apply


def _restacked(params: Tree, place: int) -> Tree:
    """The parameters with all layers along one of the axes of layers, at least two."""

    def one(leaf):
        chunks, ranks, slots = leaf.shape[:STACK]
        stack = tuple(max(2, chunks * ranks * slots) if axis == place else 1 for axis in range(STACK))
        return jax.ShapeDtypeStruct((*stack, *leaf.shape[STACK:]), leaf.dtype)

    return {**params, "blocks": jax.tree.map(one, params["blocks"])}


def _have_stack(leaves, parameters) -> bool:
    """Whether a leaf starts with the axes of layers, however these are stacked."""
    return all(
        leaf.ndim >= STACK and leaf.shape[:STACK] == parameter[:STACK]
        for leaf, parameter in zip(leaves, parameters, strict=True)
    )


def _surviving(shape: tuple[int, ...], parameter: tuple[int, ...], spec: tuple) -> tuple:
    """The partition of an array that has some of a parameter's axes, in their order; None for an axis that is not clear."""
    if shape == parameter:
        return spec
    if len(shape) == len(parameter) and all(size in (1, of) for size, of in zip(shape, parameter, strict=True)):
        return tuple(over if size == of else None for size, of, over in zip(shape, parameter, spec, strict=True))
    places = itertools.combinations(range(len(parameter)), len(shape))
    matching = [
        tuple(spec[place] for place in chosen)
        for chosen in places
        if all(parameter[place] == size for place, size in zip(chosen, shape, strict=True))
    ]
    if not matching:
        return (None,) * len(shape)
    return tuple(over[0] if len(set(over)) == 1 else None for over in zip(*matching, strict=True))
