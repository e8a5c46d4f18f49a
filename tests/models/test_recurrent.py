"""Recurrent mixers: the chunks compute the recurrence, documents do not mix, and cached tokens continue it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig
from megajax.models.interface import ModelContext
from megajax.models.mixers import recurrent
from megajax.models.mixers.recurrent import GatedDelta, Mamba2, inverse_of_lower
from megajax.ops.cached_attention import PADDING_POSITION, Cache
from tests import small

TOKENS = 11
MAMBA = dataclasses.replace(
    small.LLAMA,
    mixer="mamba2",
    feedforward=0,
    positions="none",
    kv_heads=None,
    recurrent_groups=2,
    recurrent_state=6,
    recurrent_chunk=4,
)
DELTA = dataclasses.replace(MAMBA, mixer="gated_delta", feedforward=48)
SLOW = pytest.mark.slow
MIXERS = pytest.mark.parametrize(
    ("mixer", "config"), [pytest.param(Mamba2, MAMBA, marks=SLOW), (GatedDelta, DELTA)], ids=["mamba2", "gated_delta"]
)


def make(mixer, config, seed: int = 0):
    """A mixer, and inputs [2, TOKENS, h]."""
    return mixer(config, jax.random.key(seed), ModelContext()), jax.random.normal(
        jax.random.key(1), (2, TOKENS, config.hidden)
    )


def run(mixer, y, **microbatch):
    return mixer(y, microbatch, jnp.int32(0), None)[0]


@MIXERS
def test_chunks_compute_the_recurrence(mixer, config):
    """Token by token, in fp64."""
    module, y = make(mixer, config)
    draw, shape = np.random.default_rng(0), (2, TOKENS, *module.heads)
    query, key = draw.normal(size=(2, 2, TOKENS, module.heads[0], config.recurrent_state))
    value, decay, weight = draw.normal(size=(*shape, 8)), -draw.random(shape), draw.random(shape)
    state = draw.normal(size=(2, *module.heads, 8, config.recurrent_state))

    def in_chunks(query, key, value, decay, weight, state):
        chunks = lambda x: recurrent._in_chunks(jnp.float32(x), config.recurrent_chunk)  # noqa: E731
        last = lambda x: jnp.moveaxis(chunks(x), 2, -1)  # noqa: E731
        left = recurrent._decays(last(decay), None)
        out, state = module.scan(chunks(query), chunks(key), chunks(value), last(weight), left, jnp.float32(state))
        return out.reshape(2, -1, *value.shape[2:])[:, :TOKENS], state

    got, last = jax.jit(in_chunks)(query, key, value, decay, weight, state)
    if mixer is GatedDelta:
        query, key = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
        query = query * config.recurrent_state**-0.5
    for token in range(TOKENS):
        q, k, v = query[:, token, :, None], key[:, token, :, None], value[:, token]
        state = state * np.exp(decay[:, token])[..., None, None]
        if mixer is GatedDelta:
            v = v - np.einsum("bgrpn,bgrn->bgrp", state, np.broadcast_to(k, (*v.shape[:-1], k.shape[-1])))
        state = state + (v * weight[:, token, :, :, None])[..., None] * k[..., None, :]
        np.testing.assert_allclose(got[:, token], (state * q[..., None, :]).sum(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last, state, rtol=1e-4, atol=1e-5)


@MIXERS
def test_documents_do_not_mix(mixer, config):
    """A sample of three documents, which end within chunks and at their ends, equals the documents apart."""
    module, y = make(mixer, config)
    document = jnp.array([[0] * 4 + [1] * 5 + [2] * 2, [7] * 3 + [8] * 7 + [9]])
    got = jax.jit(lambda y: run(module, y, document=document))(y)
    whole = jax.jit(lambda y: run(module, y))
    for row, ends in enumerate(((4, 9, 11), (3, 10, 11))):
        for start, stop in zip((0, *ends[:-1]), ends, strict=True):
            apart = whole(jnp.roll(y[row : row + 1], -start, 1))  # causal: what follows does not matter
            np.testing.assert_allclose(got[row, start:stop], apart[0, : stop - start], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mixer", "config"),
    [(Mamba2, MAMBA), pytest.param(GatedDelta, DELTA, marks=SLOW)],
    ids=["mamba2", "delta"],
)
def test_cached_tokens_continue(mixer, config):
    """After padding, in parts of 5, 5 and 1 tokens; the cache of nothing is not read."""
    module, y = make(mixer, config)
    whole, start = jax.jit(lambda y: run(module, y))(y), np.array([2, 0])
    shifted = jnp.stack([jnp.roll(one, first, 0) for one, first in zip(y, start, strict=True)])
    positions, found = np.maximum(np.arange(TOKENS) - start[:, None], PADDING_POSITION), []
    arrays = {
        "state": jnp.full((2, *module.heads, 8, config.recurrent_state), 7.0),
        "convolution": jnp.full((2, 3, 2, 2 * config.recurrent_state + 16), 7.0),
    }
    part = jax.jit(lambda y, microbatch, cache: module(y, microbatch, jnp.int32(0), None, cache))
    for first, last in ((0, 5), (5, 10), (10, 11)):
        cache = Cache(arrays, np.where(np.arange(TOKENS) < first, positions, PADDING_POSITION))
        out, arrays = part(shifted[:, first:last], {"positions": positions[:, first:last]}, cache)
        found.append(out)
    found = jnp.concatenate(found, 1)
    for row, first in enumerate(start):
        np.testing.assert_allclose(found[row, first:], whole[row, : TOKENS - first], rtol=1e-4, atol=1e-6)


def test_inverses_of_triangular_matrices():
    """Of ones below the diagonal, whose powers have elements of 1e18; and the gradient."""
    ones = jnp.tril(jnp.ones((64, 64)), -1)
    wanted = np.linalg.inv(np.eye(64) + np.asarray(ones, np.float64))
    np.testing.assert_allclose(inverse_of_lower(ones), wanted, rtol=0, atol=1e-6)
    lower, up = jnp.tril(jax.random.normal(jax.random.key(0), (7, 7)), -1), jax.random.normal(jax.random.key(1), (7, 7))
    of = lambda inverse: jax.grad(lambda lower: (inverse(lower) * up).sum())(lower)  # noqa: E731
    direct = of(lambda lower: jnp.linalg.inv(jnp.eye(7) + jnp.tril(lower, -1)))
    np.testing.assert_allclose(of(inverse_of_lower), direct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "changed", "layout", "message"),
    [
        (MAMBA, {"recurrent_groups": 3}, {}, "recurrent_groups = 3 does not divide the 4 heads: pass"),
        (MAMBA, {"lora": 2}, {}, "lora = 2 .* mixer = mamba2 does not have: pass --lora 0"),
        (MAMBA, {"experts": 4}, {}, "feedforward = 0 .* experts = 4 needs one: pass --feedforward SIZE"),
        (
            MAMBA,
            {"mixer": "none"},
            {},
            "mixer = none and feedforward = 0 leave a block nothing: pass --feedforward SIZE",
        ),
        (
            MAMBA,
            {"mixer": "none", "feedforward": 8, "norm_placement": "both"},
            {},
            "mixer = none leaves a block its MLP alone, and norm_placement = both .* pass --norm-placement pre",
        ),
        (
            MAMBA,
            {
                "layer_pattern": "a,b",
                "kind_fields": ("b.mixer=none",),
                "feedforward": 8,
                "experts": 4,
                "dense_layers": 1,
            },
            {},
            "dense_layers and moe_layer_freq choose among layers with MLPs",
        ),
        (MAMBA, {}, {"tensor": 4}, "recurrent_groups = 2 cannot be split over tensor = 4: pass"),
        (DELTA, {}, {"context": 2}, "context = 2 cuts sequences, and mixer = gated_delta .* pass --context 1"),
        (DELTA, {}, {"tensor_overlap": "ring"}, "tensor_overlap = ring cuts .* pass --tensor-overlap none"),
    ],
)
def test_illegal_mixers_are_refused(config, changed, layout, message):
    config = dataclasses.replace(config, **changed)
    with pytest.raises(ConfigError) as caught:
        config.validate()
        config.check_parallel(ParallelConfig(**layout))
    assert re.search(message, str(caught.value).replace("\n", " ")), caught.value


HYBRID = dataclasses.replace(
    DELTA,
    layers=5,
    mixer="attention",
    positions="rotary",
    kv_heads=2,
    attention_gate=True,
    layer_pattern="linear*2,full",
    kind_fields=("linear.mixer=gated_delta", "full.sliding_window=5"),
    recurrent_heads=6,
    experts=4,
    dense_layers=1,
)


def test_mixers_are_kinds_of_layers():
    """Also those that no period divides, with windows and experts."""
    HYBRID.validate()
    linear = ("gated_delta_dense", *["gated_delta_sparse"] * 3)
    assert HYBRID.layer_kinds == (*linear[:2], "attention_sparse", *linear[2:])
    for kind in set(HYBRID.layer_kinds):
        own = HYBRID.of_kind(kind)
        own.validate()
        assert own.layer_kinds is None and kind == f"{own.mixer}_{'sparse' if own.experts else 'dense'}"
    assert HYBRID.of_kind("attention_sparse").attention_windows == (None, 5)
    with pytest.raises(ConfigError, match="recompute_blocks = 5 .* 1 of layers = 5 are gated_delta_dense"):
        HYBRID.check_parallel(ParallelConfig(recompute_blocks=5))
    with pytest.raises(ConfigError, match="attention_gate = True .* tensor = 4 makes of kv_heads = 2: pass --tensor"):
        HYBRID.check_parallel(ParallelConfig(tensor=4))


ALONE = dataclasses.replace(
    MAMBA,
    layers=6,
    mixer="attention",
    feedforward=24,
    layer_pattern="M,F,A,F",
    kind_fields=("M.mixer=mamba2", "F.mixer=none"),
    activation="squared_relu",
    experts=4,
    shared_feedforward=16,
)


def test_layers_that_are_mlps_alone():
    """Then no other layer has an MLP, or experts."""
    ALONE.validate()
    assert ALONE.layer_kinds == ("mamba2", "none", "attention", "none", "mamba2", "none")
    for kind in set(ALONE.layer_kinds):
        own = ALONE.of_kind(kind)
        own.validate()
        assert own.mixer == kind and own.block_norms == 1
        assert (own.feedforward_size, own.experts) == ((24, 4) if kind == "none" else (0, 0))
    unused = 2 * (ALONE.hidden + ALONE.hidden) * 24 * 3  # two of four experts, in three layers
    assert ALONE.parameters - ALONE.active_parameters == unused


@pytest.mark.parametrize(
    "config", [MAMBA, DELTA, HYBRID, ALONE], ids=["mamba2", "gated_delta", "hybrid", "layers of one part"]
)
def test_parameters_are_counted(config):
    model = small.build_model(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    padding = 2 * (128 - config.vocabulary) * config.hidden
    sparse = sum(config.of_kind(kind).experts > 0 for kind in config.layer_kinds or ())
    measured = 6 * sparse  # what routers report is no parameter
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes)) - padding - measured
    assert count == config.parameters == model.costs().parameters
