"""The optimizer: clipping by global norm, then an optax transformation; rates are functions of the samples trained on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from megajax.config import ConfigError, TrainConfig
from megajax.ops.optimizers import groups
from megajax.ops.optimizers.builtin import OPTIMIZERS
from megajax.ops.optimizers.context import OptimizerContext
from megajax.train.lr_schedule import learning_rate, samples_after, weight_decay

MakeOptimizer = Callable[[OptimizerContext], optax.GradientTransformation]


class SamplesState(NamedTuple):
    """The argument of the learning rate and weight decay."""

    samples: jax.Array  # int32 scalar: samples of all updates, without those of skipped steps


def make_optimizer(
    train: TrainConfig,
    decay_mask: Any,
    logical_axes: Any = None,
    make: MakeOptimizer | None = None,
    rate_at: Callable[[jax.Array], jax.Array] | None = None,
    **more: Any,
) -> optax.GradientTransformationExtraArgs:
    """The gradient transformation of a run; `update(gradients, state, params)` returns the addends to the parameters.

    `update` also takes `batch_size`, the number of samples of the gradients; default: a full batch. The transformation
    within is given `samples` too, those of all updates and of this one. The state is (of the clipping, of the
    transformation, `SamplesState`).

    Args:
      train: the options.
      decay_mask: tree of bool like the parameters, True where weight decay applies (`PipelineModel.decay_mask`). It cannot
        be inferred from the arrays: block parameters have leading axes for chunk, rank and layer, so a bias is not 1-D.
      logical_axes: tree like the parameters of tuples of names (`PipelineModel.logical_axes`).
      make: makes the transformation; None: that of `train.optimizer`.
      rate_at: the learning rate as a function of the samples trained on; None: that of `train`.
      more: further fields of the `OptimizerContext`.

    The norm is taken over all parameters as global arrays, so each is counted once on any mesh, tied ones included.
    `clip_norm` None does not clip. State and arithmetic are fp32, as the parameters are. `train.lr_multiplier` multiplies
    what the transformation returns, which is proportional to the learning rate, whatever it is made of.

    Raises:
      ConfigError: `make` returns no transformation, or a pattern of `train` matches no parameter.
    """
    context = OptimizerContext(
        train,
        groups.decay_mask(train.no_weight_decay, decay_mask),
        logical_axes,
        model_decay_mask=decay_mask,
        rate_at=rate_at or (lambda samples: learning_rate(train, samples)),
        decay_at=lambda samples: weight_decay(train, samples),
        samples_after=lambda count: samples_after(train, count),
        **more,
    )
    # `identity` keeps the state's structure, so that a checkpoint can be resumed with and without clipping.
    clip = optax.identity() if train.clip_norm is None else optax.clip_by_global_norm(train.clip_norm)
    inner = (make or OPTIMIZERS[train.optimizer])(context)
    if not isinstance(inner, optax.GradientTransformation):
        raise ConfigError(
            f"optimizer: the function returned {type(inner).__name__}, not an optax.GradientTransformation"
        )
    inner = optax.with_extra_args_support(inner)
    multipliers = groups.rate_multipliers(train.rate_multipliers, decay_mask)

    def init(params):
        return clip.init(params), inner.init(params), SamplesState(jnp.zeros((), jnp.int32))

    def update(gradients, state, params, *, batch_size: int = train.global_batch_size):
        clipping, own, counter = state
        samples = counter.samples + batch_size
        gradients, clipping = clip.update(gradients, clipping)
        updates, own = inner.update(gradients, own, params, batch_size=batch_size, samples=samples)
        updates = jax.tree.map(lambda factor, u: u if factor == 1 else factor * u, multipliers, updates)
        return updates, (clipping, own, SamplesState(samples))

    return optax.GradientTransformationExtraArgs(init, update)


def _state_of(optimizer_state: Any, kind: type) -> Any:
    states = jax.tree.leaves(optimizer_state, is_leaf=lambda x: isinstance(x, kind))
    return next(state for state in states if isinstance(state, kind))


def updates_made(optimizer_state: Any) -> jax.Array:
    """int32 scalar: the number of AdamW's updates that led to this state."""
    return _state_of(optimizer_state, optax.ScaleByAdamState).count


def samples_trained(optimizer_state: Any) -> jax.Array:
    """int32 scalar: the samples of those updates, of which the rates are functions."""
    return optimizer_state[-1].samples
