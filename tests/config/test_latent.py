"""The rules of latent attention's fields, and what one of its blocks costs, counted by hand."""

import dataclasses

import pytest

from megajax.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.bert import BertConfig
from megajax.estimate.communication import block_sends
from megajax.estimate.flops import forward_flops
from megajax.models.transformer_costs import transformer_costs

MODEL = ModelConfig(
    layers=1,
    hidden=8,
    heads=2,
    head_size=6,
    vocabulary=128,
    sequence_length=16,
    norm="rmsnorm",
    positions="rotary",
    biases=False,
    kv_latent=5,
    query_latent=3,
    rotary_head_size=2,
    value_head_size=7,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_latent": 0},
            "query_latent = 3 is of latent attention, and kv_latent = 0: pass --kv-latent SIZE, or omit",
        ),
        (
            {"rotary_head_size": 6},
            "rotary_head_size, of the part of a head's 6 elements .* it is 6: pass --rotary-head",
        ),
        ({"rotary_head_size": None}, "it is None: pass --rotary-head-size 2"),
        ({"rotary_head_size": 3}, "rotary_head_size = 3 is odd: pass --rotary-head-size 4"),
        ({"kv_heads": 1}, "kv_heads = 1: omit --kv-heads"),
        ({"qkv_biases": True}, "pass --no-qkv-biases"),
        ({"attention_sinks": True}, "does not work with attention_sinks = True: pass --no-attention-sinks"),
        ({"lora": 4}, "does not work with lora = 4: pass --lora 0"),
        ({"rotary_fraction": 0.5}, "pass --rotary-fraction 1"),
    ],
)
def test_illegal_fields(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(MODEL, **changes).validate()


def test_bert_has_none():
    fields = dataclasses.asdict(MODEL) | {"qkv_biases": False}
    with pytest.raises(ConfigError, match="not supported by BERT"):
        BertConfig(**fields).validate()


def test_counts_by_hand():
    costs = transformer_costs(MODEL)
    down = {"query_down": 8 * 3, "key_value_down": 8 * (5 + 2)}
    up = {"query_up": 3 * 2 * 6, "key_value_up": 5 * 2 * (4 + 7), "attention_output": 2 * 7 * 8}
    flops = forward_flops(costs)
    assert {name: flops[name] for name in down | up} == {name: 2 * 16 * size for name, size in (down | up).items()}
    assert flops["attention_scores"] == 2 * 16 * 16 * 2 * 6 and flops["attention_values"] == 2 * 16 * 16 * 2 * 7
    assert costs.parameters == MODEL.parameters
    assert costs.block.whole == sum(down.values()) + 3 + 5 + 2 * 8 and costs.attention.sizes == (6, 7)
    kept = {mode: costs.kept_bytes(mode, samples=1, itemsize=1) for mode in ("none", "selective", "full")}
    # none keeps queries, keys and values too, what attention and MLP read, and the probabilities and the activation
    assert kept["none"] - kept["selective"] == 16 * (2 * 6 + 2 * 11) + 2 * 16 * 8 + 16 * 32 + 2 * 16 * 16
    sends = block_sends(ParallelConfig(tensor=2), costs)
    assert sends.forward[:2].tolist() == [1 + 10 / 8, 2] and sends.gradients[:2].tolist() == [2, 1 + 10 / 8]
    whole = block_sends(ParallelConfig(tensor=2, sequence_parallel=False), costs)
    assert whole.forward[2] == 2 and whole.gradients[2] == 1 + 10 / 8


def test_heads_are_split_over_tensor():
    run = RunConfig(MODEL, ParallelConfig(tensor=4, data=1), TrainConfig(global_batch_size=1))
    with pytest.raises(ConfigError, match="heads = 2 cannot be split over tensor = 4"):
        run.validate()
