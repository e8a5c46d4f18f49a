"""The fields of experts: illegal combinations, and the numbers of parameters."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.config import PRESETS, BertConfig, ConfigError, ParallelConfig
from megajax.estimate import model_costs
from megajax.estimate.flops import forward_flops
from tests import dense_experts, small

UNEVEN = dense_experts.UNEVEN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "shared_feedforward = 16 does nothing without experts: pass --shared-feedforward 0"),
        ({"expert_capacity": -1.0}, "expert_capacity = -1.0 must be"),
        ({"experts": 1}, "experts = 1 leaves a router no choice: pass --experts 0"),
        ({"experts_per_token": 7}, "experts_per_token = 7 is above experts = 6: pass --experts-per-token 6 or fewer"),
        ({"experts": -1}, "experts = -1 must be"),
        ({"experts": 0, "shared_feedforward": 0, "expert_biases": True}, "pass --no-expert-biases, or --experts 2"),
        ({"expert_weighted": "input", "expert_biases": True}, "pass --expert-weighted result"),
        ({"shared_feedforward": 0, "shared_gate": True}, "there is none: pass --shared-feedforward SIZE"),
        ({"router_scores": "sigmoid", "router_softmax": "after"}, "is of softmax scores, .*: pass --router-softmax"),
        ({"router_groups": 4}, "experts = 6 cannot be cut into router_groups = 4 .*: pass --router-groups"),
        ({"router_groups": 6}, "experts = 6 cannot be cut into router_groups = 6 of two or more"),
        ({"router_groups": 3, "experts_per_token": 3}, "router_group_choices = 1 of 3 groups of 2 .*: pass --router-g"),
        ({"router_softmax": "never"}, "router_softmax = 'never' is not known"),
    ],
)
def test_illegal_fields(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(UNEVEN, **changes).validate()


def test_bert_has_no_experts():
    fields = {field.name: getattr(small.BERT, field.name) for field in dataclasses.fields(small.BERT)}
    with pytest.raises(ConfigError, match="experts = 4 .* not by BERT: pass --experts 0"):
        BertConfig(**fields | {"experts": 4}).validate()


def test_capacity_needs_whole_samples():
    with pytest.raises(ConfigError, match="expert_capacity = 0.75 counts .* context = 2 splits: pass --context 1 or"):
        dense_experts.DROPPING.check_parallel(ParallelConfig(context=2))


def test_the_shared_width_is_split_over_tensor():
    with pytest.raises(ConfigError, match="shared_feedforward = 18 cannot be split over tensor = 4"):
        dataclasses.replace(UNEVEN, shared_feedforward=18).check_parallel(ParallelConfig(tensor=4))


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (
            UNEVEN,
            {"data": 6, "expert": 4},
            "expert = 4 does not divide data = 6, .*: pass --expert 1, 2, 3 or 6, or --data 4 or 8",
        ),
        (
            UNEVEN,
            {"data": 3, "context": 2, "expert": 4},
            r"expert = 4 does not divide data \* context = 3 \* 2 = 6, .*: pass --expert 1, 2, 3 or 6, or --data 2 or 4",
        ),
        (
            UNEVEN,
            {"data": 4, "expert": 4},
            "experts = 6 cannot be split over expert = 4 replicas: pass --expert 1, 2, 3 or 6",
        ),
        (small.MODEL, {"data": 4, "expert": 2}, "expert = 2 splits experts, but test has none: pass --expert 1"),
        (
            UNEVEN,
            {"data": 3, "tensor": 2, "expert": 4, "expert_tensor": 1},
            r"expert = 4 does not divide tensor \* data = 2 \* 3, .*: pass --expert 2 or 6, or --data 2 or 4",
        ),
        (
            UNEVEN,
            {"data": 2, "tensor": 2, "expert": 4, "expert_tensor": 1},
            "experts = 6 cannot be split over expert = 4 tensor ranks: pass --expert 2 or 6, or --experts 4 or 8",
        ),
        (
            UNEVEN,
            {"tensor": 2, "expert": 3, "expert_tensor": 1},
            "expert_tensor = 1 must be tensor = 2, or 1 where that divides expert = 3: pass --expert 2 or 4 with --expert-t",
        ),
        (
            UNEVEN,
            {"data": 2, "tensor": 4, "expert": 2, "expert_tensor": 2},
            "expert_tensor = 2 must be tensor = 4, or 1 .*, or leave --expert-tensor out",
        ),
        (
            UNEVEN,
            {"tensor": 2, "expert": 2, "expert_tensor": 1, "sequence_parallel": False},
            "expert_tensor = 1 exchanges the tokens .* pass --sequence-parallel",
        ),
    ],
)
def test_replicas_have_equal_numbers_of_experts(model, layout, message):
    layout = dict(layout)
    mesh = layout.pop("data", 1), 1, layout.pop("tensor", 1)
    with pytest.raises(ConfigError, match=message):
        small.make_run(schedule="1f1b", model=model, mesh=mesh, microbatches=1, **layout)


@pytest.mark.parametrize("config", [*dense_experts.MODELS.values(), PRESETS["moe-tiny"]])
def test_parameters_are_those_of_the_arrays(config):
    """Without the biases and losses of the router, which are not trained by gradients."""
    params = jax.eval_shape(small.build_model(config).init, jax.random.key(0))
    tables = params["shared"]["embedding"]
    padding = (tables["tokens"].shape[0] - config.vocabulary) * config.hidden
    router = params["blocks"]["feedforward"]["router"]
    measured = router["bias"].size + router["losses"].size
    total = sum(leaf.size for leaf in jax.tree.leaves(params)) - padding - measured
    assert config.parameters == total == model_costs(config).parameters
    expert = params["blocks"]["feedforward"]["up"].size + params["blocks"]["feedforward"]["down"].size
    unused = expert * (config.experts - config.experts_per_token) // config.experts
    assert config.active_parameters == total - unused


def test_flops_are_those_of_the_chosen_experts():
    config = UNEVEN
    flops = forward_flops(model_costs(config))
    tokens = 2 * config.layers * config.sequence_length * config.hidden
    assert flops["router"] == tokens * 6
    assert flops["experts_in"] == tokens * 3 * 2 * 24 and flops["experts_out"] == tokens * 3 * 24
    assert flops["mlp_in"] == tokens * 2 * 16 and flops["mlp_out"] == tokens * 16
    weights = config.active_parameters - config.sequence_length * config.hidden  # tied: the table is the head's matmul
    norms = (2 * config.layers + 1) * config.hidden
    without_attention = sum(flops.values()) - flops["attention_scores"] - flops["attention_values"]
    np.testing.assert_equal(without_attention, 2 * config.sequence_length * (weights - norms))
