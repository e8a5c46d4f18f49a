"""Experts against `tests.dense_experts`: plain jax that computes every expert for every token."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.models.interface import mean_loss
from tests import dense_experts, small


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(dense_experts.DROPPING, layers=1),  # the reference is a program of every layer
        pytest.param(dense_experts.UNEVEN, marks=pytest.mark.slow),  # and quick in tests/train/test_moe.py
        pytest.param(dense_experts.PLAIN, marks=pytest.mark.slow),
    ],
)
def test_loss_gradients_and_measurements(config):
    """With equal scores and an expert without tokens (UNEVEN), and with tokens that are dropped."""
    model, params = small.build_model(config, recompute="none"), dense_experts.params_of(config)
    batch = small.make_batch(small.make_run(microbatches=2, model=config))
    value, gradients = jax.jit(jax.value_and_grad(lambda params: mean_loss(model, params, batch)))(params)
    want, want_gradients = dense_experts.expected(config)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    small.assert_gradients_close(jax.tree.map(np.asarray, gradients), want_gradients, rtol=1e-5)
    loads = np.asarray(gradients["blocks"]["feedforward"]["router"]["bias"])
    tokens = (batch["padding_mask"] == 0).sum() if "padding_mask" in batch else batch["tokens"].size
    np.testing.assert_array_equal(loads.sum(1), tokens * config.experts_per_token)
    if config.expert_capacity:  # three quarters of an even share
        dropped = np.asarray(gradients["blocks"]["feedforward"]["router"]["losses"])[:, 2]
        assert (dropped > 0.15 * loads.sum(1)).all() and (dropped == dropped.astype(int)).all()
    if config.balance_bias_rate:
        assert (loads[:, 5] == 0).all() and (loads[:, 1] >= loads[:, 2]).all() and (loads[:, 1] > 0).all()
