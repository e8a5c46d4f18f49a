"""Which layers are dense: the pattern's language, illegal fields, numbers of parameters and FLOPs, and where layers are."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig
from megajax.config.layer_kinds import pattern_of, read_pattern
from megajax.estimate import model_costs
from megajax.estimate.flops import forward_flops
from megajax.schedules.stages import StageLayers, loop, wave
from tests import small
from tests.dense_experts import ALTERNATING, FIRST_DENSE, UNEVEN

SEVEN = tuple("dense" if layer in (0, 1, 4) else "sparse" for layer in range(7))


@pytest.mark.parametrize(
    ("text", "kinds", "short"),
    [
        ("1", "111111", "1"),
        ("2", "101010", "([1]+[0])*3"),
        ("4", "100010", "[1]+[0]*3+[1]+[0]"),
        ("[0]*2+[1]*4", "001111", "[0]*2+[1]*4"),
        (" ( [0,1] ) * 3 ", "010101", "([0]+[1])*3"),
        ("([0]*2+[1])*2", "001001", "([0]*2+[1])*2"),
        ("[0,0,1,1,0,1]", "001101", "[0]*2+[1]*2+[0]+[1]"),
        ("[1]*2*3", "111111", "1"),
    ],
)
def test_patterns(text, kinds, short):
    found = read_pattern(text, 6)
    assert found == tuple("sparse" if kind == "1" else "dense" for kind in kinds)
    assert pattern_of(found) == short and read_pattern(short, 6) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9" * 5000, "has '999"),
        ("-1", "has '-', which no pattern has"),
        ("[0]*3+[1]*2", "has 5 layers, and layers = 6"),
        ("[0]*3+[1]*4", "has 7 layers, and layers = 6"),
        ("[2]*6", r"has '2' where '0' or '1' must be"),
        ("[0]*999999999999", "has no number after"),
        ("[0]*999999999", "has 999999999 layers or more"),
        ("(" * 3000, "more than 16 parentheses"),
        ("[0", "ends early"),
        ("([0]", "ends early"),
        ("[0]*6]", "cannot be read from ']' on"),
        ("__import__('os')", "has '_', which no pattern has"),
        ("", "ends early"),
    ],
)
def test_texts_that_are_no_pattern(text, message):
    with pytest.raises(ConfigError, match=f"moe_layer_freq = .*({message}).*pass --moe-layer-freq N, or") as found:
        read_pattern(text, 6)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (small.MODEL, {"dense_layers": 1}, "dense_layers = 1 does nothing without experts.*omit --dense-layers"),
        (small.MODEL, {"moe_layer_freq": "2"}, "moe_layer_freq = 2 does nothing without experts"),
        (UNEVEN, {"dense_layers": 8}, "leave none of layers = 8 with experts: pass --experts 0, or --dense-layers 7"),
        (UNEVEN, {"dense_layers": 5, "moe_layer_freq": "4"}, "none of layers = 8 .*, or --dense-layers 4 or fewer"),
        (UNEVEN, {"dense_layers": 1, "moe_layer_freq": "8"}, "none of layers = 8 .*, or --dense-layers 0\\."),
        (UNEVEN, {"moe_layer_freq": "[0]*8"}, "none of layers = 8 .*, or --moe-layer-freq 1"),
        (UNEVEN, {"dense_feedforward": 8}, "dense_feedforward = 8 does nothing where all layers have experts"),
        (
            UNEVEN,
            {"moe_layer_freq": "0"},
            "moe_layer_freq = 0 must be at least 1.*pass --moe-layer-freq 1 for all layers",
        ),
        (UNEVEN, {"dense_layers": 3, "layers": 20000}, "layers = 20000 is above 10000"),
        (FIRST_DENSE, {"dense_feedforward": 0}, "dense_feedforward = 0 must be"),
    ],
)
def test_illegal_fields(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(model, **changes).validate()


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (
            FIRST_DENSE,
            {"pipe": 2, "recompute_blocks": 2, "recompute": "full"},
            "recompute_blocks = 2 recomputes groups",
        ),
        (FIRST_DENSE, {"pipe": 2, "context": 2}, "context = 2 .* 3 of layers = 8 are dense.*pass --context 1"),
        (ALTERNATING, {"tensor": 16}, "cannot be split over tensor = 16"),
    ],
)
def test_layouts_that_cannot_run_them(model, layout, message):
    with pytest.raises(ConfigError, match=message):
        model.check_parallel(ParallelConfig(**layout))


def test_a_ring_needs_stages_with_one_order_of_kinds():
    ALTERNATING.check_parallel(ParallelConfig(pipe=2, chunks=2, context=2))
    FIRST_DENSE.check_parallel(ParallelConfig(context=2))


@pytest.mark.parametrize("model", [FIRST_DENSE, ALTERNATING])
def test_parameters_and_flops(model):
    """Of the arrays themselves; and of the two homogeneous models, by layers."""
    shapes = jax.eval_shape(small.build_model(model).init, jax.random.key(0))
    untrained = sum(shapes["blocks"]["sparse"]["feedforward"]["router"][name].size for name in ("bias", "losses"))
    padding = (shapes["shared"]["embedding"]["tokens"].shape[0] - model.vocabulary) * model.hidden
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes)) - untrained - padding
    costs = model_costs(model)
    assert total == model.parameters == costs.parameters
    kinds = {kind: model.layer_kinds.count(kind) for kind in ("dense", "sparse")}
    one = lambda config: forward_flops(model_costs(dataclasses.replace(config, layers=1)))  # noqa: E731
    dense = dataclasses.replace(small.MODEL, norm="rmsnorm", activation="swiglu", biases=False, feedforward=40)
    sparse = dataclasses.replace(model, dense_layers=0, moe_layer_freq="1", dense_feedforward=None)
    of_kind = {"dense": one(dense), "sparse": one(sparse)}
    logits = of_kind["dense"]["logits"]
    want = sum(count * (sum(of_kind[kind].values()) - logits) for kind, count in kinds.items()) + logits
    assert sum(forward_flops(costs).values()) == want
    expert = 3 * model.hidden * model.feedforward
    unused = kinds["sparse"] * (model.experts - model.experts_per_token) * expert
    assert model.active_parameters == model.parameters - unused


def test_where_layers_are():
    """Seven layers on two ranks with two chunks each: 2, 2, 2 and 1 of them."""
    for place in (loop, wave):
        where = StageLayers(7, 2, 2, place(2, 2), kinds=SEVEN)
        assert where.stage_kinds == (("dense",) * 2, ("sparse",) * 2, ("dense", "sparse"), ("sparse",))
        dense, sparse = where.of("dense"), where.of("sparse")
        assert (dense.counts, dense.numbers, dense.slots) == ((2, 0, 1, 0), (0, 1, 4), 2)
        assert (sparse.counts, sparse.numbers, sparse.slots) == ((0, 2, 1, 1), (2, 3, 5, 6), 2)
        assert not where.same_stages
    assert where.describe_kinds() == (
        "3 dense, 4 sparse layers; slots on each of 2 ranks: 4 dense, 4 sparse; 9 of 16 slots idle (56.2%)"
    )
    assert StageLayers(8, 2, 2, kinds=("dense", "sparse") * 4).same_stages


@pytest.mark.parametrize("place", [loop, wave])
def test_a_layout_and_back(place):
    from megajax.pipeline.layout import from_pipeline_layout, to_pipeline_layout

    where = StageLayers(7, 2, 2, place(2, 2), kinds=SEVEN)
    blocks = {
        "dense": {"w": 1 + np.arange(6.0).reshape(3, 2)},
        "sparse": {"w": 10 + np.arange(8.0).reshape(4, 2), "b": 1 + np.arange(4.0)},
    }
    there = to_pipeline_layout(blocks, where)
    assert there["dense"]["w"].shape == (2, 2, 2, 2)
    last = 0 if place is wave else 1  # the rank of the last stage
    np.testing.assert_array_equal(there["sparse"]["b"][1, last], [4, 0])
    np.testing.assert_array_equal(there["sparse"]["b"][0, 0], [0, 0])
    jax.tree.map(np.testing.assert_array_equal, from_pipeline_layout(there, where), blocks)
