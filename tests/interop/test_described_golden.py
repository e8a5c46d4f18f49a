"""Families with a description: their logits are those that transformers computed (make_described_golden.py), also cached."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint import layout
from megajax.config import ConfigError
from megajax.interop.hugging_face.config import family_of_model, read_config
from megajax.interop.hugging_face.weights import Weights
from megajax.interop.safetensors import open_tensors
from megajax.ops.cached_attention import PADDING_POSITION, Cache
from tests import small
from tests.interop.make_described_golden import DESCRIBED, QUICK
from tests.interop.make_golden import LENGTH, tokens
from tests.interop.variants import change_keys

CACHED = 7  # tokens that are in the cache when the others follow


def through(model, params, tokens, cached: int):
    """The logits of all tokens, of which the first are cached before the others."""
    config, kinds = model.config, model.config.layer_kinds
    logits, caches = [], [None] * config.layers
    for start, stop in ((0, cached), (cached, tokens.shape[1])):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (len(tokens), stop - start))
        microbatch = {"tokens": tokens[:, start:stop], "positions": positions}
        x = model.embed(params["shared"], microbatch)
        for layer in range(config.layers):
            stack = params["blocks"][kinds[layer]] if kinds else params["blocks"]
            row = kinds[:layer].count(kinds[layer]) if kinds else layer
            own = jax.tree.map(lambda leaf: leaf[row], stack)  # noqa: B023
            if start == 0:
                arrays = {name: jnp.zeros(one.shape) for name, one in model.cache_arrays(len(tokens), cached).items()}
                of = jnp.full((len(tokens), cached), PADDING_POSITION)
            else:
                arrays, of = caches[layer], jnp.broadcast_to(jnp.arange(cached), (len(tokens), cached))
            x, caches[layer] = model.block_cached(own, x, Cache(arrays, of), microbatch, jnp.int32(layer))
        logits.append(model.logits(params["shared"], x)[..., : config.vocabulary])
    return jnp.concatenate(logits, 1)


def golden(family: str):
    """The model, its parameters, and the logits of transformers."""
    directory = DESCRIBED / family
    found, config = read_config(directory)
    assert family_of_model(config)[0].name == found.name == family
    config = dataclasses.replace(config, sequence_length=LENGTH)
    model = small.build_model(config)
    shapes = layout.named(jax.eval_shape(model.init, jax.random.key(0)))
    weights = Weights(directory, open_tensors(directory), family, config, list(shapes))
    whole = {name: tuple(slice(0, size) for size in leaf.shape) for name, leaf in shapes.items()}
    params = layout.nest({name: weights.region(name, whole[name], leaf.shape) for name, leaf in shapes.items()})
    return model, params, np.load(directory / "logits.npy")


SLOW = ("phi3", "granite", "qwen2_moe", "gpt_oss", "deepseek_v2", "mamba2", "granitemoehybrid")
CACHED_QUICK = ("gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("family", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in QUICK])
def test_logits_are_those_of_transformers(family):
    """Without a cache."""
    model, params, wanted = golden(family)
    kinds, layers = model.config.layer_kinds, model.config.layers

    def run(params, tokens):
        x = model.embed(params["shared"], {"tokens": tokens})
        if kinds is None:
            step = lambda x, one: (model.block(one[0], x, {"tokens": tokens}, one[1]), None)  # noqa: E731
            x, _ = jax.lax.scan(step, x, (params["blocks"], jnp.arange(layers)))
        for layer, kind in enumerate(kinds or ()):
            own = jax.tree.map(lambda leaf: leaf[kinds[:layer].count(kind)], params["blocks"][kind])  # noqa: B023
            x = model.block(own, x, {"tokens": tokens}, jnp.int32(layer))
        return model.logits(params["shared"], x)[..., : model.config.vocabulary]

    np.testing.assert_allclose(jax.jit(run)(params, tokens()), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in CACHED_QUICK else pytest.mark.slow) for one in QUICK]
)
def test_cached_logits_are_those_of_transformers(family):
    """Of the last tokens after the first ones are in the cache."""
    model, params, wanted = golden(family)
    found = jax.jit(lambda params, tokens: through(model, params, tokens, CACHED))(params, tokens())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def with_keys(family: str, folder, **keys):
    """A copy of the directory's config.json with other values, null too."""
    shutil.copy(DESCRIBED / family / "config.json", folder)
    change_keys(folder, keys)
    return folder


def test_a_null_switch_is_off_as_in_transformers(tmp_path):
    model = read_config(with_keys("deepseek_v3", tmp_path, norm_topk_prob=None, rope_interleave=None))[1]
    assert (model.router_normalize, model.rotary_pairs) == (False, "halves")


@pytest.mark.parametrize(
    ("family", "key"), [("deepseek_v3", "first_k_dense_replace"), ("granitemoehybrid", "num_local_experts")]
)
def test_a_null_number_that_the_model_needs_is_one_line(family, key, tmp_path):
    with pytest.raises(ConfigError, match=f"config.json has no {key}: .* give a complete file"):
        read_config(with_keys(family, tmp_path, **{key: None}))


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("deepseek_v3", {"head_dim": 2}),  # the size of transformers' rotation, whatever qk_rope_head_dim is
        ("gemma2", {"model_type": "gemma3_text", "attn_logit_softcapping": 3.0}),  # which its attention does not use
        ("qwen3_next", {"hidden_act": "gelu_new"}),  # of the mixer's convolution too
        ("granitemoehybrid", {"hidden_act": "gelu_new"}),
    ],
)
def test_a_value_of_which_transformers_computes_more_or_less_is_refused(family, keys, tmp_path):
    with pytest.raises(ConfigError, match=f"{[*keys][-1]} = .* is not supported"):
        read_config(with_keys(family, tmp_path, **keys))
