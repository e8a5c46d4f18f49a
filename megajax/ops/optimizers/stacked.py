"""Transformations of parameters whose layers are stacked."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from megajax.config import ConfigError
from megajax.sharding.optimizer_state import STACK, owner, parameters_by_path

__all__ = ["per_layer"]

Tree = Any


def per_layer(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation as if each layer's arrays were parameters of their own: `jax.vmap` over the axes of layers.

    The transformation sees arrays of blocks without these axes. What its state has for each of them gets the axes; counters
    are one for all layers. It must compute each parameter's update from that parameter alone: a norm over all of them, as
    of `optax.clip_by_global_norm`, is refused.
    """
    transformation = optax.with_extra_args_support(transformation)

    def init(params):
        return _over_layers(transformation.init, params, params)

    def update(updates, state, params=None, **more):
        one = lambda updates, state, params: transformation.update(updates, state, params, **more)  # noqa: E731
        return _over_layers(one, params, updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def _over_layers(function: Callable, params: Tree, *arguments: Tree) -> Tree:
    """`function(*arguments)` of each layer; layers of one kind have as many slots as one another, those of others not."""
    stacks = {path: leaf.shape[:STACK] for path, leaf in parameters_by_path(params).items() if path[0].key == "blocks"}
    stack_of = lambda path: stacks.get(owner(path, stacks))  # noqa: E731
    by_path = jax.tree_util.tree_map_with_path
    first = lambda path, leaf: leaf[(0,) * STACK] if stack_of(path) else leaf  # noqa: E731
    shapes = jax.eval_shape(lambda *trees: function(*(by_path(first, tree) for tree in trees)), *arguments)
    results = {}
    for stack in sorted(set(stacks.values())):
        mapped = lambda path, _: 0 if stack_of(path) == stack else None  # noqa: B023, E731
        view = lambda path, leaf: leaf if stack_of(path) == stack else first(path, leaf)  # noqa: B023, E731
        ins, outs, run = tuple(by_path(mapped, tree) for tree in arguments), by_path(mapped, shapes), function
        for _ in range(STACK):
            run = jax.vmap(run, ins, outs)
        try:
            results[stack] = run(*(by_path(view, tree) for tree in arguments))
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise ConfigError(
                "optimizer: per_layer got a transformation that computes one value from several parameters, such as a "
                "global norm: leave that part outside of per_layer"
            ) from error
    if not results:
        return function(*arguments)
    choose = lambda path, *leaves: dict(zip(results, leaves, strict=True)).get(stack_of(path), leaves[0])  # noqa: E731
    return by_path(choose, *results.values())
