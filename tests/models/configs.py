"""The two configurations that every model test uses."""

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
MODELS = pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
