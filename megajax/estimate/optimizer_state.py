"""Bytes of an optimizer's state, from its shapes."""

import functools
import math
from typing import Any

import jax

from megajax.config import TrainConfig
from megajax.models.interface import model_class
from megajax.ops.optimizers.builtin import OPTIMIZERS
from megajax.ops.optimizers.context import OptimizerContext
from megajax.pipeline.trained import only_trained, trained_mask
from megajax.sharding.optimizer_state import STACK, owner, parameters_by_path

__all__ = ["bytes_per_parameter"]


@functools.lru_cache(maxsize=256)
def bytes_per_parameter(model: Any, optimizer: str, freeze: tuple[str, ...] = ()) -> tuple[float, float]:
    """Bytes of state for each trained parameter of the blocks, and for each one outside of them, on average.

    Args:
      model: the configuration of a registered model.
      optimizer, freeze: as of `TrainConfig`.
    """
    build = model_class(model)(model)
    shapes = jax.eval_shape(lambda: build.init(jax.random.key(0)))
    stack = lambda leaf: jax.ShapeDtypeStruct((*[1] * (STACK - 1), *leaf.shape), leaf.dtype)  # noqa: E731
    own = functools.partial(only_trained, trained=trained_mask(build, freeze))
    shapes = own({**shapes, "blocks": jax.tree.map(stack, shapes["blocks"])})
    unused = lambda samples: samples  # noqa: E731
    context = OptimizerContext(
        TrainConfig(), own(build.decay_mask()), own(build.logical_axes()), unused, unused, unused
    )
    state = jax.eval_shape(OPTIMIZERS[optimizer](context).init, shapes)
    params, held = parameters_by_path(shapes), {"blocks": 0, "shared": 0}
    for path, leaf in jax.tree.leaves_with_path(state):
        if of := owner(path, params):
            held[of[0].key] += math.prod(leaf.shape) * leaf.dtype.itemsize
    count = {part: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes[part])) for part in held}
    return held["blocks"] / max(1, count["blocks"]), held["shared"] / max(1, count["shared"])
