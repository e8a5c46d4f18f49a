"""The optimizer: clip by global norm, AdamW with a decay mask, cosine learning rate with linear warm-up."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from megajax.config import TrainConfig


def learning_rate_schedule(train: TrainConfig) -> optax.Schedule:
    """The learning rate of an update, as a function of the number of updates made before it.

    Linear from 0 to `learning_rate` over `warmup_steps`, then `minimum + (maximum - minimum) (1 + cos(pi r)) / 2` with
    r the fraction of the remaining steps that is done. The value is taken at the *end* of the update: the first update
    already moves (Megatron-LM's first update has learning rate 0 and is lost), and update number `steps` has exactly
    `minimum_learning_rate`. Skipped steps are no updates: they do not advance it.
    """
    # optax wants a decay longer than the warm-up; a run that is all warm-up never reaches the decay.
    decay_steps = max(train.steps, train.warmup_steps + 1)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=train.learning_rate,
        warmup_steps=train.warmup_steps,
        decay_steps=decay_steps,
        end_value=train.minimum_learning_rate,
    )
    return lambda updates: schedule(updates + 1)


def make_optimizer(train: TrainConfig, decay_mask: Any) -> optax.GradientTransformation:
    """The gradient transformation of a run; `update(gradients, state, params)` gives what to add to the parameters.

    Args:
      decay_mask: tree of bool like the parameters, True where weight decay applies (`models.gpt.decay_mask`). It cannot
        be read off the arrays: block parameters carry leading axes for chunk, rank and layer, so a bias is not 1-D.

    The norm is taken over all parameters as global arrays, so each is counted once on any mesh, tied ones included.
    State and arithmetic are fp32, as the parameters are.
    """
    adamw = optax.adamw(
        learning_rate_schedule(train),
        b1=train.beta1,
        b2=train.beta2,
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        mask=decay_mask,
        mu_dtype=jnp.float32,
    )
    return optax.chain(optax.clip_by_global_norm(train.clip_norm), adamw)


def updates_made(optimizer_state: Any) -> jax.Array:
    """int32 scalar: how many updates this state has been through, which is the argument of the learning rate."""
    states = jax.tree.leaves(optimizer_state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
    return next(state.count for state in states if isinstance(state, optax.ScaleByAdamState))
