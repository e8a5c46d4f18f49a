"""How the state of an optimizer is sharded: from the paths and the shapes of its leaves."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.config import ConfigError

__all__ = ["STACK", "owner", "parameters_by_path", "state_specs"]

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
