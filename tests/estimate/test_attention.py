"""Which attention runs on a card, on paper: cuDNN's where docs/parallelism.md says that it can."""

import dataclasses

import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.attention import with_attention
from megajax.estimate.gpus import card


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "runs"),
    [
        ("gpt3-175b", "a100-80gb", "bf16", "cudnn"),  # heads of 128
        ("gpt3-530b", "a100-80gb", "bf16", "xla"),  # of 160: from Hopper on
        ("gpt3-530b", "h100-80gb", "bf16", "cudnn"),
        ("gpt3-175b", "h100-80gb", "fp32", "xla"),
        ("gpt2-xl", "h100-80gb", "bf16", "xla"),  # dropout
    ],
)
def test_auto(model, gpu, precision, runs):
    run = RunConfig(preset(model), ParallelConfig(), TrainConfig(precision=precision))
    assert with_attention(run, card(gpu)).parallel.attention == runs
    plain = dataclasses.replace(run, parallel=ParallelConfig(attention="xla"))
    assert with_attention(plain, card(gpu)) == plain


def test_cudnn_where_it_cannot_run():
    run = RunConfig(preset("gpt3-530b"), ParallelConfig(attention="cudnn"), TrainConfig())
    with pytest.raises(ConfigError, match="attention = cudnn, but cuDNN's head size is a multiple of 8 up to 128"):
        with_attention(run, card("a100-80gb"))
