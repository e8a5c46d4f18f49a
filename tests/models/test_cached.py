"""Cached decoding of a block: logits of every token equal those of the model that recomputes the whole sample."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.ops.cached_attention import PADDING_POSITION, Cache
from tests import small
from tests.models.configs import MODELS

LENGTHS = (16, 11, 3)  # tokens of the samples, which end together in slot 16
SLOTS = 16


def recomputed(model, params, tokens):
    """Logits [b, s, v] of whole samples [b, s]."""
    batch, block = {"tokens": tokens}, jax.jit(model.block)
    x = model.embed(params["shared"], batch)
    for layer in range(model.config.layers):
        x = block(jax.tree.map(lambda a: a[layer], params["blocks"]), x, batch, layer)  # noqa: B023
    return model.logits(params["shared"], x)


def cached(model, params, tokens, start, widths):
    """Logits [b, SLOTS, v] of right-aligned samples, `widths` slots at a time.

    Jitted for each width, not as a whole, whose program would have every layer of every width.
    """
    arrays = [
        {name: np.full(array.shape, 7.0, np.float32) for name, array in model.cache_arrays(len(tokens), SLOTS).items()}
        for _ in range(model.config.layers)
    ]
    block = jax.jit(
        lambda weights, x, arrays, before, *rest: model.block_cached(weights, x, Cache(arrays, before), *rest)
    )
    embed, read = jax.jit(model.embed), jax.jit(model.logits)
    slots, logits, first = np.arange(SLOTS), [], 0
    positions = np.maximum(slots - start[:, None], PADDING_POSITION)
    for width in widths:
        here = slice(first, first + width)
        batch = {"tokens": tokens[:, here], "positions": positions[:, here].astype(np.int32)}
        before = np.where(slots < first, positions, PADDING_POSITION).astype(np.int32)
        x = embed(params["shared"], batch)
        for layer in range(model.config.layers):
            weights = jax.tree.map(lambda a: a[layer], params["blocks"])  # noqa: B023
            x, entries = block(weights, x, arrays[layer], before, batch, layer)
            for name, array in model.cache_arrays(1, 1).items():
                at = [slice(None)] * len(array.shape)
                at[array.slot_axis] = here
                arrays[layer][name][tuple(at)] = entries[name]
        logits.append(read(params["shared"], x))
        first += width
    return np.concatenate(logits, axis=1)


@pytest.mark.slow  # quick: the text of transformers, in generate/test_hugging_face.py
@MODELS
@pytest.mark.parametrize("widths", [(16,), (8, 6, 1, 1)], ids=["at once", "chunks"])
def test_cached_logits_equal_recomputed_ones(config, widths):
    """For samples of different lengths; what is in hidden slots and in the padding has no influence."""
    config = dataclasses.replace(config, dropout=0.1)
    model = small.build_model(config, training=False)
    params = small.busy_params(dataclasses.replace(config, dropout=0.0))
    params = jax.tree.map(lambda a: 3 * a, params)  # so that attention is far from uniform
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (len(LENGTHS), SLOTS), np.int32)
    start = SLOTS - np.array(LENGTHS)
    got = cached(model, params, tokens, start, widths)
    # The model is causal: what follows a sample, here the same tokens again, does not change its logits.
    whole = jax.jit(lambda params, tokens: recomputed(model, params, tokens))
    for row, first in enumerate(start):
        want = np.asarray(whole(params, np.roll(tokens[row : row + 1], -first, axis=1)))[0, : SLOTS - first]
        largest = np.abs(want[:, : config.vocabulary]).max()
        assert largest > 1
        np.testing.assert_allclose(got[row, first:], want, rtol=1e-5, atol=1e-5 * largest)
