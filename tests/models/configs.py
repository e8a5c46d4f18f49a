"""The configurations that every model test uses: GPT's and llama's blocks, and one with the fields of later families."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from megajax.config import ModelConfig
from megajax.ops.vocabulary import VocabularySharding
from tests import small

GPT = ModelConfig(layers=3, hidden=32, heads=4, vocabulary=61, sequence_length=16)
LLAMA = ModelConfig(
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=2,
    feedforward=48,
    vocabulary=61,
    sequence_length=16,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    tied_embeddings=False,
    biases=False,
)
# Head size apart from hidden / heads, norms of queries and keys, biases on qkv only, part of a head rotated, a window.
QWEN = replace(
    LLAMA,
    head_size=12,
    query_key_norm=True,
    qkv_biases=True,
    activation="geglu",
    rotary_fraction=0.67,
    rotary_scaling="llama3",
    rotary_factor=4.0,
    rotary_original_length=8,
    sliding_window=5,
)
MODELS = pytest.mark.parametrize("config", [GPT, LLAMA, QWEN], ids=["gpt", "llama", "qwen"])


@cache
def drawn_params(config, deviation=0.03, tensor=1):
    """Random parameters in the shapes that `init` has for a group of `tensor` ranks; no bias is 0 and no scale is 1.

    NumPy's: a program that draws a model's initial values takes seconds to compile.
    """
    random = np.random.default_rng(8)

    def draw(path, leaf):
        noise = random.normal(0, deviation, leaf.shape).astype(np.float32)
        return noise + 1 if path[-1].key == "scale" else noise

    model = small.build_model(config, vocabulary=VocabularySharding(tensor))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)
