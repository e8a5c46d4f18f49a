"""Drawing tokens: temperature, top-k, top-p by transformers' rules, and keys."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.config.sample import SampleConfig
from megajax.generate.sampling import draw, keep_likely

LOGITS = [0.0, 1.0, 2.0, -1.0]


def frequencies(sampling, draws=4000):
    rows = jnp.broadcast_to(jnp.array(LOGITS), (draws, len(LOGITS)))
    numbers = jnp.arange(draws, dtype=jnp.uint32)
    tokens = jax.jit(partial(draw, sampling=sampling, seed=0))(rows, numbers, jnp.zeros(draws, jnp.int32))
    return np.bincount(tokens, minlength=len(LOGITS)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_from_the_softmax_at_a_temperature(temperature):
    wanted = jax.nn.softmax(jnp.array(LOGITS) / temperature)
    np.testing.assert_allclose(frequencies(SampleConfig(temperature=temperature)), wanted, atol=0.03)


def test_temperature_zero_is_greedy():
    assert frequencies(SampleConfig(temperature=0)).tolist() == [0, 0, 1, 0]


def test_top_k_samples_only_the_most_likely():
    seen = frequencies(SampleConfig(temperature=1, top_k=2))
    assert seen[0] == seen[3] == 0
    np.testing.assert_allclose(seen[1:3], jax.nn.softmax(jnp.array(LOGITS[1:3])), atol=0.03)
    assert frequencies(SampleConfig(temperature=1, top_k=1))[2] == 1


def transformers_rule(logits, top_k, top_p):
    """TopKLogitsWarper, then TopPLogitsWarper, in numpy: ascending order, a cumulative sum up to 1 - top_p is removed."""
    logits = logits.astype(np.float64)
    if top_k:
        logits = np.where(logits < np.sort(logits)[..., -top_k, None], -np.inf, logits)
    order = np.argsort(logits, axis=-1)
    ascending = np.exp(np.take_along_axis(logits, order, -1))
    removed = np.cumsum(ascending / ascending.sum(-1, keepdims=True), -1) <= 1 - top_p
    removed[..., -1] = False
    mask = np.zeros_like(removed)
    np.put_along_axis(mask, order, removed, -1)
    return np.where(mask, -np.inf, logits)


@pytest.mark.parametrize("top_k", [None, 1, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_the_kept_tokens_are_those_of_transformers(top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32) * 2
    wanted = transformers_rule(logits, min(top_k, 40) if top_k else None, top_p)
    np.testing.assert_array_equal(np.isfinite(keep_likely(jnp.array(logits), top_k, top_p)), np.isfinite(wanted))


def test_no_token_is_dropped_for_its_small_probability_alone():
    """top_k without top_p: fp32 probabilities of the first tokens add up to 1."""
    logits = jnp.arange(0.0, -64.0, -1.0)[None]
    assert np.isfinite(keep_likely(logits, 50, 1.0)).sum() == 50
    assert np.isfinite(keep_likely(logits, None, 1 - 1e-9)).sum() > 20  # the first 17 add up to 1 in fp32


def test_a_draw_depends_on_seed_sample_and_position_alone():
    flat, number, position = jnp.zeros((64, 1000)), jnp.arange(64, dtype=jnp.uint32), jnp.arange(64)
    sampling = SampleConfig(temperature=1)
    whole = draw(flat, number, position, sampling, 3)
    assert len(set(np.asarray(whole).tolist())) > 50
    assert draw(flat[5:9], number[5:9], position[5:9], sampling, 3).tolist() == whole[5:9].tolist()
    for other in (draw(flat, number + 1, position, sampling, 3), draw(flat, number, position + 1, sampling, 3)):
        assert (np.asarray(other) != np.asarray(whole)).mean() > 0.9
    assert (np.asarray(draw(flat, number, position, sampling, 4)) != np.asarray(whole)).mean() > 0.9


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p = 1.5 must be above 0 and at most 1: pass --top-p"),
    ],
)
def test_illegal_options_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        SampleConfig(**options).validate()
