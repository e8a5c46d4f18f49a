"""Costs found by tracing a block, compared with the transformer's formulas and counts by hand."""

from functools import cache

import pytest

from experiments import own_model
from megajax.models.costs import Parameters
from megajax.models.traced_costs import traced_costs
from megajax.models.transformer_costs import transformer_costs
from tests import small
from tests.models.configs import MODELS


@cache
def traced(config):
    return traced_costs(small.build_model(config))


@MODELS
@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_values_kept_by_a_transformer_are_the_formulas(config, mode, tensor):
    sizes = {"samples": 3, "tensor": tensor}
    assert traced(config).kept_bytes(mode, **sizes) == transformer_costs(config).kept_bytes(mode, **sizes)


@MODELS
def test_flops_and_parameters_of_a_transformer_are_the_formulas(config):
    found, formula = traced(config), transformer_costs(config)
    products = lambda costs: sum(one.inputs * one.outputs for one in costs.matmuls)  # noqa: E731
    attention = 2 * config.sequence_length * config.heads * config.head_dimension  # for a token: scores, and values
    assert products(found) == products(formula) + attention
    assert found.block == formula.block
    assert found.shared.total == formula.shared.total
    assert found.vocabulary_width == formula.vocabulary_width
    assert [one.split for one in found.matmuls if one.split] == [one.split for one in formula.matmuls]
    assert (found.layers, found.hidden, found.sequence_length) == (3, config.hidden, config.sequence_length)


@MODELS
def test_recomputed_matmuls_of_a_transformer(config):
    """selective repeats queries times keys; full repeats all but the down projection (models/remat.py)."""
    matmuls = traced(config).matmuls
    assert [one.recomputed for one in matmuls].count(("selective", "full")) == 1
    assert [one.recomputed for one in matmuls].count(("full",)) == len(matmuls) - 2
    assert matmuls[-1].recomputed == ()


def test_costs_of_a_users_model_by_hand():
    """The denoiser: two matmuls of h x 4h; selective keeps the first one's result, full nothing but the input."""
    costs = own_model.Denoiser(own_model.DenoiserConfig(width=32)).costs()
    assert [(one.inputs, one.outputs, one.split) for one in costs.matmuls] == [(32, 128, "column"), (128, 32, "row")]
    assert costs.block == Parameters(split=2 * 32 * 128) and costs.shared == Parameters(whole=32 * 32)
    assert costs.parameters == 8 * 2 * 32 * 128 + 32 * 32
    assert (costs.hidden, costs.sequence_length, costs.vocabulary) == (32, 1, 0)
    assert costs.kept_bytes("full", samples=5) == 5 * 32 * 2
    assert costs.kept_bytes("selective", samples=5, tensor=2) == 5 * (32 + 128 // 2) * 2
    kept = {value.name: value.per_token for value in costs.kept_for_weights if "none" in value.modes}
    assert kept == {"gradient of matmul 0": 128, "gradient of matmul 1": 32}
