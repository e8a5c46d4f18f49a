"""`OptimizerContext`: what the function of `Trainer(optimizer=...)` is given to make an optax transformation from."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from megajax.config import TrainConfig
from megajax.ops.optimizers.stacked import per_layer
from megajax.sharding.whole_layers import on_whole_layers

Tree = Any
Rate = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class OptimizerContext:
    """What an optimizer is made from. The trees are like the parameters, {"blocks": ..., "shared": ...}.

    A leaf of "blocks" is [chunks, pipe, slots of a stage, ...]: three axes of layers, then those of the layer's array. So
    what optax computes for each element (Adam, Lion, momentum) is the same on any layout. What it computes from a whole
    array (Adafactor's rows and norms, Muon's matrices) is of one layer with `per_layer`.

    Attributes:
      train: the options of the run.
      decay_mask: bools, whether weight decay applies: `PipelineModel.decay_mask`, without `train.no_weight_decay`.
      logical_axes: tuples of names; of blocks they start with "layers", which stands for the three axes.
      rate_at, decay_at: learning rate and weight decay as functions of the samples trained on, int32 scalars that include
        the update's own; `update` is given them as its keyword argument `samples`.
      vocabulary: tokens of the model, if it has a vocabulary; an axis of that name is padded with rows of zeros.
      on_whole_layers: `(function, tree, is_batch)` -> the function of each leaf of a tree like (some of) the parameters of
        blocks, computed where a device has whole arrays of some layers; see `megajax.sharding.whole_layers`.
      model_decay_mask: `PipelineModel.decay_mask` itself; None: it is `decay_mask`.
      samples_after: the samples trained on after an update, as a function of the number of updates before it.
    """

    train: TrainConfig
    decay_mask: Tree
    logical_axes: Tree
    rate_at: Rate
    decay_at: Rate
    samples_after: Rate
    vocabulary: int | None = None
    on_whole_layers: Callable[..., Tree] = on_whole_layers()
    model_decay_mask: Tree | None = None

    def learning_rate(self, count: jax.Array) -> jax.Array:
        """The run's learning rate as a schedule of optax, a function of the updates before: `optax.lion(it)`.

        With a batch ramp a skipped step moves it by the difference of two batch sizes; `scale_by_rates` is exact.
        """
        return self.rate_at(self.samples_after(count))

    def weight_decay(self, count: jax.Array) -> jax.Array:
        """The run's weight decay as a schedule of optax."""
        return self.decay_at(self.samples_after(count))

    def scale_by_rates(self, decay: bool = True) -> optax.GradientTransformationExtraArgs:
        """The last part of a chain: -rate (update + decay * parameter), without state.

        Args:
          decay: False: -rate * update.
        """

        def update(updates, state, params=None, *, samples, **others):
            rate, weight = self.rate_at(samples), self.decay_at(samples)
            if not decay:
                return jax.tree.map(lambda update: -rate * update, updates), state
            change = lambda decayed, update, param: jax.tree.map(  # noqa: E731
                lambda u, p: -rate * (u + (weight * p if decayed else 0)), update, param
            )
            return jax.tree.map(change, self.decay_mask, updates, params), state

        return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)

    def per_layer(self, transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """The transformation with each layer's array as a parameter of its own, see `stacked.per_layer`."""
        return per_layer(transformation)


def with_rates(
    transformation: optax.GradientTransformation, context: OptimizerContext
) -> optax.GradientTransformationExtraArgs:
    """The transformation, then `OptimizerContext.scale_by_rates`, which has no state."""
    rates = context.scale_by_rates()

    def update(gradients, state, params, **more):
        updates, state = transformation.update(gradients, state, params)
        return rates.update(updates, optax.EmptyState(), params, **more)[0], state

    return optax.GradientTransformationExtraArgs(transformation.init, update)
