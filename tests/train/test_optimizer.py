"""AdamW, clipping and the decay mask, against the papers' formulas in numpy. Rates: test_lr_schedule.py."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import TrainConfig
from megajax.train.optimizer import make_optimizer, updates_made

TRAIN = TrainConfig(
    global_batch_size=8,
    steps=20,
    learning_rate=1e-2,
    minimum_learning_rate=1e-3,
    warmup_steps=5,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    clip_norm=1.0,
)
# Leading axes [chunks, pipe, layers]: the number of axes does not show whether a leaf is a bias.
SHAPES = {"blocks": {"matrix": (2, 1, 3, 4, 5), "bias": (2, 1, 3, 5)}, "shared": {"table": (7, 4)}}
MASK = {"blocks": {"matrix": True, "bias": False}, "shared": {"table": True}}


def random_tree(seed: int, scale: float):
    random = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: scale * random.normal(size=s).astype(np.float32), SHAPES, is_leaf=is_shape)


def rate(update: int, train: TrainConfig) -> float:
    """The learning rate of update number `update`, counted from 1."""
    if update <= train.warmup_steps:
        return train.learning_rate * update / train.warmup_steps
    done = min(1.0, (update - train.warmup_steps) / (train.steps - train.warmup_steps))
    span = train.learning_rate - train.minimum_learning_rate
    return train.minimum_learning_rate + span * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize(
    ("gradient_scale", "clip_norm"), [(1e-3, 1.0), (10.0, 1.0), (10.0, None)], ids=["small", "clipped", "clipping off"]
)
def test_updates_are_adamw_with_clipping_and_mask(gradient_scale, clip_norm):
    """1711.05101 algorithm 2; clipping by the norm over all leaves together."""
    optimizer = make_optimizer(dataclasses.replace(TRAIN, clip_norm=clip_norm), MASK)
    params = random_tree(0, 1.0)
    state = optimizer.init(params)
    expected = jax.tree.leaves(jax.tree.map(np.float64, params))
    first = [np.zeros_like(p) for p in expected]
    second = [np.zeros_like(p) for p in expected]
    step = jax.jit(optimizer.update)
    for update in range(1, 8):
        gradients = random_tree(update, gradient_scale)
        assert updates_made(state) == update - 1
        changes, state = step(gradients, state, params)
        params = jax.tree.map(jnp.add, params, changes)

        leaves = [np.float64(g) for g in jax.tree.leaves(gradients)]
        norm = math.sqrt(sum((g**2).sum() for g in leaves))
        leaves = [g * min(1.0, (clip_norm or math.inf) / norm) for g in leaves]
        for i, (gradient, decayed) in enumerate(zip(leaves, jax.tree.leaves(MASK), strict=True)):
            first[i] = TRAIN.beta1 * first[i] + (1 - TRAIN.beta1) * gradient
            second[i] = TRAIN.beta2 * second[i] + (1 - TRAIN.beta2) * gradient**2
            change = first[i] / (1 - TRAIN.beta1**update)
            change = change / (np.sqrt(second[i] / (1 - TRAIN.beta2**update)) + TRAIN.epsilon)
            change = change + TRAIN.weight_decay * decayed * expected[i]
            expected[i] = expected[i] - rate(update, TRAIN) * change
    for got, want in zip(jax.tree.leaves(params), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_a_state_does_not_depend_on_whether_gradients_are_clipped():
    """So a run can be resumed with and without clipping."""
    params = random_tree(0, 1.0)
    states = [make_optimizer(dataclasses.replace(TRAIN, clip_norm=c), MASK).init(params) for c in (1.0, None)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


def test_gradients_zero_and_no_decay_change_nothing_but_decayed_leaves():
    params = random_tree(0, 1.0)
    optimizer = make_optimizer(TRAIN, MASK)
    zeros = jax.tree.map(np.zeros_like, params)
    changes, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    assert not changes["blocks"]["bias"].any()
    np.testing.assert_allclose(
        changes["blocks"]["matrix"], -rate(1, TRAIN) * TRAIN.weight_decay * params["blocks"]["matrix"], rtol=1e-5
    )
