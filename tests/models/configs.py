"""The configurations that every model test uses: GPT's and llama's blocks, and one with the fields of later families."""

from dataclasses import replace

import pytest

from megajax.config import ModelConfig

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
