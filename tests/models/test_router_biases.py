"""The balancing biases of a run whose rate is 0 at its end, as in DeepSeek-V3's recipe, stay in use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.models.context import ModelContext
from megajax.models.moe import Router
from tests import dense_experts

CONFIG = dense_experts.PLAIN


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_biases_choose_the_experts_with_and_without_a_rate(rate):
    config = dataclasses.replace(CONFIG, balance_bias_rate=rate, expert_capacity=0.0)
    router = Router(config, jax.random.key(0), ModelContext(training=False))
    y = np.random.default_rng(0).normal(size=(2, 5, config.hidden)).astype(np.float32)
    scores = np.asarray(jax.nn.softmax(y @ np.asarray(router.kernel[...])))
    biases = np.zeros(config.experts, np.float32)
    for favoured in (None, 1):
        if favoured is not None:
            biases[favoured] = 1.0
        router.bias[...] = jnp.asarray(biases)
        _, experts = router(jnp.asarray(y), {})
        expected = np.argsort(-(scores + biases), axis=-1, kind="stable")[..., : config.experts_per_token]
        np.testing.assert_array_equal(experts, expected)
