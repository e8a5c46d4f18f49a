"""Sampling: windows, temperature, top_k and seeds, with small models whose outputs are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.train.sampling import choose, generate

VOCABULARY = 11


def successor(params, tokens, position):
    """A model that predicts t + `params` after t with certainty."""
    return 50.0 * jax.nn.one_hot((tokens[:, position] + params) % VOCABULARY, VOCABULARY)


def causal_sum(params, tokens, position):
    """A model that uses its whole context: the next token is the sum of all tokens up to `position`."""
    seen = jnp.where(jnp.arange(tokens.shape[1]) <= position, jnp.asarray(tokens), 0)
    return 50.0 * jax.nn.one_hot(seen.sum(1) % VOCABULARY, VOCABULARY)


def test_greedy_follows_the_model_and_keeps_the_prompt():
    text = generate(successor, 3, np.array([[1, 2], [5, 0]]), 4, context=8, temperature=0)
    assert text.tolist() == [[1, 2, 5, 8, 0, 3], [5, 0, 3, 6, 9, 1]]


def test_the_window_is_the_end_of_a_long_text():
    context, prompt = 3, [[1, 2, 4, 1]]
    text = generate(causal_sum, None, np.array(prompt), 6, context=context, temperature=0)[0].tolist()
    expected = list(prompt[0])
    for _ in range(6):
        expected.append(sum(expected[-context:]) % VOCABULARY)
    assert text == expected


def test_the_model_is_called_with_one_shape():
    shapes = set()

    def model(params, tokens, position):
        shapes.add((tokens.shape, tokens.dtype))
        return successor(1, tokens, position)

    generate(model, None, np.array([[1]]), 9, context=4)
    assert shapes == {((1, 4), np.dtype(np.int32))}


def test_same_seed_same_text():
    flat = lambda params, tokens, position: jnp.zeros((tokens.shape[0], VOCABULARY))  # noqa: E731
    draws = [generate(flat, None, np.array([[1]]), 20, context=8, seed=seed).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def frequencies(logits, temperature, top_k, draws=4000):
    rows = jnp.broadcast_to(logits, (draws, len(logits)))
    tokens = choose(rows, jax.random.key(0), temperature, top_k)
    return np.bincount(tokens, minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_from_the_softmax_at_a_temperature(temperature):
    logits = jnp.array([0.0, 1.0, 2.0, -1.0])
    np.testing.assert_allclose(frequencies(logits, temperature, None), jax.nn.softmax(logits / temperature), atol=0.03)


def test_top_k_samples_only_the_most_likely():
    logits = jnp.array([0.0, 1.0, 2.0, -1.0])
    seen = frequencies(logits, 1.0, 2)
    assert seen[0] == seen[3] == 0
    np.testing.assert_allclose(seen[1:3], jax.nn.softmax(logits[1:3]), atol=0.03)
    assert frequencies(logits, 1.0, 1)[2] == 1


@pytest.mark.parametrize(
    ("prompt", "options", "word"),
    [
        (np.zeros((1, 0)), {}, "empty"),
        (np.ones((1, 2)), {"temperature": float("nan")}, "temperature"),
        (np.ones((1, 2)), {"temperature": -1.0}, "temperature"),
        (np.ones((1, 2)), {"top_k": 0}, "top_k"),
    ],
)
def test_illegal_arguments_are_refused(prompt, options, word):
    with pytest.raises(ConfigError, match=word):
        generate(successor, 1, prompt, 2, context=4, **options)
