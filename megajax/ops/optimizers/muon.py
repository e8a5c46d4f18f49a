"""Muon: Newton-Schulz on the matrices of each layer, AdamW with Nesterov's momentum on all else."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from megajax.ops.optimizers.context import OptimizerContext, with_rates
from megajax.sharding.optimizer_state import STACK, parameters_by_path
from megajax.sharding.whole_layers import Part

__all__ = ["COEFFICIENTS", "STEPS", "muon", "muon_matrices", "newton_schulz"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, and optax's
STEPS = 5


def muon(context: OptimizerContext) -> optax.GradientTransformationExtraArgs:
    """Muon (2502.16982): `optax.contrib.muon`, Newton-Schulz on the matrices of each layer, AdamW on all else.

    Newton-Schulz multiplies whole matrices, five times three products. Where ZeRO or tensor parallelism has split them each
    product would need a collective; so the momentum is resharded before and the result after it (`sharding.whole_layers`).
    Both are sent, and multiplied, in bf16 unless the run computes in fp32, as in Keller Jordan's and torch's Muon.
    """
    train, matrices = context.train, muon_matrices(context)
    adam = optax.scale_by_adam(train.beta1, train.beta2, train.epsilon, nesterov=True)
    momentum = optax.chain(scale_by_nesterov(train.muon_momentum), _orthogonal(context, matrices))
    labels = jax.tree.map(lambda axes: "muon" if axes else "adam", matrices, is_leaf=_is_axes)
    return with_rates(optax.partition({"muon": momentum, "adam": adam}, labels), context)


def _is_axes(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


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
    train, axes = context.train, parameters_by_path(matrices, is_leaf=_is_axes)
    dtype = jnp.float32 if train.precision == "fp32" else jnp.bfloat16

    def is_batch(path: tuple, axis: int) -> bool:
        return axis not in (*axes[path].reduction_axis, *axes[path].output_axis)

    def one(path: tuple, part: Part) -> jax.Array:
        """The scaled update of the layers of a part."""
        x, lead = part.layers, STACK
        reduction, output = (
            sorted(side, key=lambda axis: axis != part.tensor_axis)  # so that the reshape keeps its sharding
            for side in (axes[path].reduction_axis, axes[path].output_axis)
        )
        batch = [axis for axis in range(x.ndim - lead) if is_batch(path, axis)]
        order = [*range(lead), *(lead + axis for axis in (*batch, *reduction, *output))]
        x = x.transpose(order)
        turned, rows = x.shape, math.prod(x.shape[lead + len(batch) :][: len(reduction)])
        x = x.reshape(*turned[: lead + len(batch)], rows, -1)
        scale = train.muon_rms * math.sqrt(max(x.shape[-2:]))
        swap = x.shape[-2] > x.shape[-1] or (x.shape[-2] == x.shape[-1] and part.tensor_axis in reduction)
        x = x.swapaxes(-1, -2) if swap else x
        x = newton_schulz(x, train.epsilon, lambda x, axis: part.shard(x, batch, axis)) * scale
        x = x.swapaxes(-1, -2) if swap else x
        return x.reshape(turned).transpose([order.index(axis) for axis in range(len(order))])

    def update(updates, state, params=None):
        results = context.on_whole_layers(one, jax.tree.map(lambda update: update.astype(dtype), updates), is_batch)
        return jax.tree.map(lambda result: result.astype(jnp.float32), results), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def newton_schulz(
    x: jax.Array, epsilon: float, shard: Callable[[jax.Array, int | None], jax.Array] = lambda x, axis: x
) -> jax.Array:
    """`optax.contrib`'s orthogonalisation of matrices [..., rows, columns], rows <= columns, by the Frobenius norm.

    With G = X X^T a step is X <- a X + (b G + c G G) X. If `shard` splits the matrices over a tensor group, by columns, each
    device has partial sums of G, of which it gets the sum of some rows; G is gathered for its square, of which each device
    computes these rows; and the polynomial is gathered. So no product is computed twice, and no X is sent.

    Args:
      x: the matrices.
      epsilon: added to the norm.
      shard: splits an axis of a matrix over the tensor group; None: gathers it.
    """
    a, b, c = COEFFICIENTS
    x = shard(x, -1)
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), (-2, -1), keepdims=True))
    x = (x / (norm + epsilon)).astype(x.dtype)
    for _ in range(STEPS):
        gram = shard(x @ x.swapaxes(-1, -2), -2)
        polynomial = shard(b * gram + c * (gram @ shard(gram, None)), -2)
        x = shard(a * x + shard(polynomial, None) @ x, -1)
    return x


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
