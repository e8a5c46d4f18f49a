"""The optimizers of `--optimizer`, each made of optax's own parts from an `OptimizerContext`."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from megajax.ops.optimizers.context import OptimizerContext

__all__ = ["OPTIMIZERS", "muon_matrices"]

Optimizer = optax.GradientTransformationExtraArgs


def adamw(context: OptimizerContext) -> Optimizer:
    """AdamW (1711.05101): `optax.adamw`."""
    train = context.train
    adam = optax.scale_by_adam(b1=train.beta1, b2=train.beta2, eps=train.epsilon, mu_dtype=jnp.float32)
    return _with_rates(adam, context)


def lion(context: OptimizerContext) -> Optimizer:
    """Lion (2302.06675): `optax.lion`. The sign of a momentum, which is all of its state."""
    return _with_rates(optax.scale_by_lion(b1=context.train.beta1, b2=context.train.beta2), context)


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

    return _with_rates(context.per_layer(optax.GradientTransformation(second.init, update)), context)


def muon(context: OptimizerContext) -> Optimizer:
    """Muon (2502.16982): `optax.contrib.muon`, Newton-Schulz on the matrices of each layer, AdamW on all else.

    Newton-Schulz multiplies whole matrices, five times three products. On arrays that ZeRO or tensor parallelism has split,
    each of these would need a collective; so the momentum is resharded before and the result after it, each once.
    """
    train, matrices = context.train, muon_matrices(context)
    adam = optax.scale_by_adam(train.beta1, train.beta2, train.epsilon, nesterov=True)
    momentum = optax.chain(scale_by_nesterov(train.muon_momentum), _orthogonal(context, matrices))
    is_axes = lambda node: node is None or isinstance(node, MuonDimensionNumbers)  # noqa: E731
    labels = jax.tree.map(lambda axes: "muon" if axes else "adam", matrices, is_leaf=is_axes)
    return _with_rates(optax.partition({"muon": momentum, "adam": adam}, labels), context)


class NesterovState(NamedTuple):
    """The mean gradient, and the number of updates."""

    count: jax.Array
    mu: Any


def scale_by_nesterov(decay: float) -> optax.GradientTransformation:
    """The momentum of `optax.contrib.scale_by_muon`: `optax.scale_by_adam(nesterov=True)` without second moments."""

    def init(params):
        return NesterovState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=jnp.float32))

    def update(gradients, state, params=None):
        count, mu = state.count + 1, optax.tree.update_moment(gradients, state.mu, decay, 1)
        means, new = (
            optax.tree.bias_correction(mu, decay, count + 1),
            optax.tree.bias_correction(gradients, decay, count),
        )
        return jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, means, new), NesterovState(count, mu)

    return optax.GradientTransformation(init, update)


def _orthogonal(context: OptimizerContext, matrices: Any) -> optax.GradientTransformation:
    """Newton-Schulz and the scale by the shape, of each layer's matrices: `optax.contrib.muon` without a momentum."""
    newton_schulz = context.per_layer(
        optax.contrib.muon(
            learning_rate=-1.0,  # not yet a descent: `_with_rates` scales by the rate, and subtracts
            beta=0.0,
            nesterov=False,
            eps=context.train.epsilon,
            consistent_rms=context.train.muon_rms,
            muon_weight_dimension_numbers=lambda _: matrices,
        )
    )

    def update(updates, state, params=None):
        one = lambda tree: newton_schulz.update(tree, newton_schulz.init(tree), tree)[0]  # noqa: E731
        return context.on_whole_layers(one, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


OPTIMIZERS: Mapping[str, Callable[[OptimizerContext], Optimizer]] = {
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}


def muon_matrices(context: OptimizerContext) -> Any:
    """A tree like the parameters: the axes of a layer's array that Muon makes a matrix of; None: it is AdamW's.

    Matrices are the arrays of blocks that the model decays, with `--no-weight-decay` too, and that have two axes, or more of
    which the first or the last is "hidden": the product with it maps this axis to all others, or them to it. Each of the
    experts has matrices of its own. Token tables, the head, norms and biases are AdamW's.
    """

    def matrix(axes: tuple, decayed: bool) -> MuonDimensionNumbers | None:
        names = axes[1:]  # without "layers"
        own = [axis for axis, name in enumerate(names) if name != "experts"]
        if not decayed or len(own) < 2:
            return None
        first, *others = own
        *before, last = own
        if len(own) == 2 or names[first] == "hidden":
            return MuonDimensionNumbers((first,), tuple(others))
        return MuonDimensionNumbers(tuple(before), (last,)) if names[last] == "hidden" else None

    axes, mask = context.logical_axes, context.model_decay_mask or context.decay_mask
    is_names = lambda node: isinstance(node, tuple)  # noqa: E731
    blocks = jax.tree.map(matrix, axes["blocks"], mask["blocks"], is_leaf=is_names)
    return {**jax.tree.map(lambda _: None, axes, is_leaf=is_names), "blocks": blocks}


def _with_rates(transformation: optax.GradientTransformation, context: OptimizerContext) -> Optimizer:
    """The transformation, then `OptimizerContext.scale_by_rates`, which has no state."""
    rates = context.scale_by_rates()

    def update(gradients, state, params, **more):
        updates, state = transformation.update(gradients, state, params)
        return rates.update(updates, optax.EmptyState(), params, **more)[0], state

    return Optimizer(transformation.init, update)
