"""The optimizer: clipping by global norm, AdamW with a decay mask, rates that are functions of the samples trained on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from megajax.config import TrainConfig
from megajax.train.lr_schedule import learning_rate, weight_decay


class SamplesState(NamedTuple):
    """The argument of the learning rate and weight decay."""

    samples: jax.Array  # int32 scalar: samples of all updates, without those of skipped steps


def make_optimizer(train: TrainConfig, decay_mask: Any) -> optax.GradientTransformationExtraArgs:
    """The gradient transformation of a run; `update(gradients, state, params)` returns the addends to the parameters.

    `update` also takes `batch_size`, the number of samples of the gradients; default: a full batch.

    Args:
      decay_mask: tree of bool like the parameters, True where weight decay applies (`PipelineModel.decay_mask`). It cannot
        be inferred from the arrays: block parameters have leading axes for chunk, rank and layer, so a bias is not 1-D.

    The norm is taken over all parameters as global arrays, so each is counted once on any mesh, tied ones included.
    `clip_norm` None does not clip. State and arithmetic are fp32, as the parameters are.
    """
    # `identity` keeps the state's structure, so that a checkpoint can be resumed with and without clipping.
    return optax.chain(
        optax.identity() if train.clip_norm is None else optax.clip_by_global_norm(train.clip_norm),
        optax.scale_by_adam(b1=train.beta1, b2=train.beta2, eps=train.epsilon, mu_dtype=jnp.float32),
        scale_by_samples(train, decay_mask),
    )


def scale_by_samples(train: TrainConfig, decay_mask: Any) -> optax.GradientTransformationExtraArgs:
    """AdamW's last two steps, -rate (update + decay * parameter), with both rates functions of the samples so far."""

    def init(params):
        return SamplesState(jnp.zeros((), jnp.int32))

    def update(updates, state, params, *, batch_size: int = train.global_batch_size):
        samples = state.samples + batch_size
        rate, decay = learning_rate(train, samples), weight_decay(train, samples)
        change = lambda update, param, decayed: -rate * (update + (decay * param if decayed else 0))  # noqa: E731
        return jax.tree.map(change, updates, params, decay_mask), SamplesState(samples)

    return optax.GradientTransformationExtraArgs(init, update)


def _state_of(optimizer_state: Any, kind: type) -> Any:
    states = jax.tree.leaves(optimizer_state, is_leaf=lambda x: isinstance(x, kind))
    return next(state for state in states if isinstance(state, kind))


def updates_made(optimizer_state: Any) -> jax.Array:
    """int32 scalar: the number of updates that led to this state."""
    return _state_of(optimizer_state, optax.ScaleByAdamState).count


def samples_trained(optimizer_state: Any) -> jax.Array:
    """int32 scalar: the samples of those updates, of which the rates are functions."""
    return _state_of(optimizer_state, SamplesState).samples
