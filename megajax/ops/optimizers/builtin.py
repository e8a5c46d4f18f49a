"""The optimizers of `--optimizer`, each made of optax's own parts from an `OptimizerContext`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megajax.ops.optimizers.context import OptimizerContext, with_rates
from megajax.ops.optimizers.muon import muon

__all__ = ["OPTIMIZERS"]

Optimizer = optax.GradientTransformationExtraArgs


def adamw(context: OptimizerContext) -> Optimizer:
    """AdamW (1711.05101): `optax.adamw`."""
    train = context.train
    adam = optax.scale_by_adam(b1=train.beta1, b2=train.beta2, eps=train.epsilon, mu_dtype=jnp.float32)
    return with_rates(adam, context)


def lion(context: OptimizerContext) -> Optimizer:
    """Lion (2302.06675): `optax.lion`. The sign of a momentum, which is all of its state."""
    return with_rates(optax.scale_by_lion(b1=context.train.beta1, b2=context.train.beta2), context)


def adafactor(context: OptimizerContext) -> Optimizer:
    """Adafactor (1804.04235): `optax.adafactor` of each layer's arrays, with the decay of AdamW.

    The learning rate is relative to the root mean square of an array. That of a token table, and of its update, is over the
    rows that are tokens: the others are zero, and how many there are depends on the mesh.
    """
    second = optax.scale_by_factored_rms()
    norms = optax.chain(optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())

    def scaled(tree: Any, power: int) -> Any:
        def one(axes, leaf):
            rows = leaf.shape[axes.index("vocabulary")] if context.vocabulary and "vocabulary" in axes else None
            return leaf * math.sqrt(rows / context.vocabulary) ** power if rows else leaf

        return jax.tree.map(one, context.logical_axes, tree, is_leaf=lambda node: isinstance(node, tuple))

    def update(gradients, state, params):
        updates, state = second.update(gradients, state, params)
        updates, _ = norms.update(scaled(updates, 1), norms.init(params), scaled(params, 1))
        return scaled(updates, -1), state

    return with_rates(context.per_layer(optax.GradientTransformation(second.init, update)), context)


OPTIMIZERS: Mapping[str, Callable[[OptimizerContext], Optimizer]] = {
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}
