"""The optimizer: clip by global norm, AdamW with a decay mask, rates that are functions of the samples trained on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from megajax.config import TrainConfig
from megajax.train.lr_schedule import learning_rate, weight_decay


class SamplesState(NamedTuple):
    """What rates are a function of."""

    samples: jax.Array  # int32 scalar: samples of all updates made; those of skipped steps do not count


def make_optimizer(train: TrainConfig, decay_mask: Any) -> optax.GradientTransformationExtraArgs:
    """The gradient transformation of a run; `update(gradients, state, params)` gives what to add to the parameters.

    `update` takes `batch_size` too, the samples that the gradients are of; a full batch if it is left out.

    Args:
      decay_mask: tree of bool like the parameters, True where weight decay applies (`PipelineModel.decay_mask`). It cannot
        be read off the arrays: block parameters carry leading axes for chunk, rank and layer, so a bias is not 1-D.

    The norm is taken over all parameters as global arrays, so each is counted once on any mesh, tied ones included.
    State and arithmetic are fp32, as the parameters are.
    """
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
    """int32 scalar: how many updates this state has been through."""
    return _state_of(optimizer_state, optax.ScaleByAdamState).count


def samples_trained(optimizer_state: Any) -> jax.Array:
    """int32 scalar: the samples of those updates, which is what the rates are functions of."""
    return _state_of(optimizer_state, SamplesState).samples
