"""Frozen parameters: no gradient, no optimizer state, unchanged bit for bit, on any layout."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax import pipelined_loss
from megajax.checkpoint.layout import named, to_canonical
from megajax.config import ConfigError
from megajax.pipeline.options import ExecutorOptions
from megajax.pipeline.stage import Stack
from megajax.pipeline.trained import merge, overlaid, split, trained_mask
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests import small

MODEL = dataclasses.replace(small.LLAMA, layers=4, vocabulary=256)
FREEZE = ("shared/embedding/*", "blocks/*/kernel", "blocks*/attention_norm/scale")
LAYOUTS = {
    "interleaved": {"mesh": (1, 2, 2), "chunks": 2},
    "zero3": {"mesh": (2, 2, 1), "schedule": "zb_v", "chunks": 2, "zero": 3},
    "uneven": {"mesh": (2, 2, 1), "schedule": "1f1b", "zero": 1, "model": dataclasses.replace(MODEL, layers=3)},
    "early": {"mesh": (1, 2, 1), "schedule": "zb_h1", "recompute": "none"},
    "merged": {"mesh": (1, 4, 1), "schedule": "1f1b", "microbatches": 8},
    "experts": {
        "mesh": (2, 2, 1),
        "schedule": "1f1b",
        "model": dataclasses.replace(MODEL, experts=4, moe_layer_freq="2", balance_loss=0.01),
    },
}


def training_of(freeze=FREEZE, train=None, **layout):
    run = small.make_run(**{"model": MODEL} | layout, train={"freeze": freeze} | (train or {}))
    return make_training(run, make_mesh(run.parallel))


def canonical(training, tree):
    return {name: np.asarray(leaf) for name, leaf in to_canonical(tree, training.where).items()}


@pytest.mark.parametrize(
    "layout, in_place",
    [
        pytest.param("interleaved", False, marks=pytest.mark.slow),
        pytest.param("zero3", False, marks=pytest.mark.slow),
        pytest.param("uneven", False, marks=pytest.mark.slow),
        pytest.param("early", True, marks=pytest.mark.slow),
        pytest.param("uneven", True, marks=pytest.mark.slow),
        ("merged", True),
    ],
)
def test_gradients_are_those_of_a_run_that_trains_all(layout, in_place, monkeypatch):
    """`in_place`: as on GPUs; a forward then writes to the stash early, and gradients that are matmuls are in fp32."""
    monkeypatch.setattr("megajax.train.step.updates_in_place", lambda device: in_place)
    model = LAYOUTS[layout].get("model", MODEL)
    loss, whole = small.expected(model)
    training, whole = training_of(**LAYOUTS[layout]), named(whole)
    assert training.executor_options.in_place == in_place
    params = small.place(training, small.busy_params(model))
    found_loss, found = training.loss_and_gradients(params, small.make_batch(training.run))
    found = canonical(training, found)
    mask = trained_mask(training.model, FREEZE)
    assert found.keys() == {name for name, flag in named(mask).items() if flag} < whole.keys()
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-6)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, whole[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", pytest.param("experts", marks=pytest.mark.slow)])
def test_a_step_leaves_frozen_parameters_and_has_state_for_the_others_alone(layout):
    training = training_of(**LAYOUTS[layout])
    state = training.init_state()
    before = jax.tree.map(np.asarray, state.params)
    for seed in range(2):
        state, metrics = training.train_step(state, small.make_batch(training.run, seed))
    (own, frozen), (new, kept) = (split(tree, training.trained) for tree in (before, state.params))
    for name, leaf in named(frozen).items():
        assert np.array_equal(leaf, np.asarray(named(kept)[name])), name
    assert all(
        not np.array_equal(leaf, np.asarray(named(new)[name])) or "router" in name for name, leaf in named(own).items()
    )
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in jax.tree.leaves(own))
    if layout == "experts":
        assert np.isfinite(np.asarray(metrics["expert_load"])).any()


def test_they_are_stored_in_the_type_that_is_computed_with():
    training = training_of(mesh=(2, 1, 1), zero=1, train={"precision": "bf16"})
    own, frozen = split(training.state_shapes.params, training.trained)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(own)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}
    specs = [leaf.spec for leaf in jax.tree.leaves(split(training.params_sharding, training.trained)[1])]
    assert not any("data" in spec for spec in specs)  # ZeRO-1 would gather them in every step


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_weight_is_copied_to_the_stash(recompute):
    model = small.build_model(MODEL, recompute=recompute)
    weights = jax.tree.map(lambda leaf: jnp.asarray(leaf[:1]), small.busy_params(MODEL)["blocks"])
    microbatch = {"tokens": jnp.zeros((2, 16), jnp.int32), "sample": jnp.zeros(2, jnp.uint32)}
    x, microbatch = jnp.zeros((2, 16, 32)), model.prepare_microbatch(microbatch)
    mask = trained_mask(model, ("blocks/*kernel",))
    stashed = lambda trained: collections.Counter(  # noqa: E731
        leaf.shape
        for leaf in jax.tree.leaves(
            jax.eval_shape(
                lambda: Stack(model.block, weights, 1, options=ExecutorOptions(trained=trained)).empty_stash(
                    1, x, microbatch
                )
            )
        )
    )
    assert stashed(mask) <= stashed(None)  # with fewer arrays, where only a weight's gradient reads them


@pytest.mark.slow
def test_a_pipeline_that_never_drains():
    training = training_of(mesh=(1, 2, 1), schedule="pipedream_2bw")
    state, before = training.init_state(), None
    before = jax.tree.map(np.asarray, split(state.params, training.trained)[1])
    for seed in range(3):
        state, _ = training.train_step(state, small.make_batch(training.run, seed))
    after = split(state.params, training.trained)[1]
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, np.asarray(b)), before, after))


def test_trees_are_split_and_merged():
    tree = {"a": {"b": 1, "c": 2}, "d": {"e": 3}}
    mask = {"a": {"b": True, "c": False}, "d": {"e": False}}
    own, frozen = split(tree, mask)
    assert own == {"a": {"b": 1}, "d": {}} and frozen == {"a": {"c": 2}, "d": {"e": 3}}
    assert merge(own, frozen) == tree
    assert merge(*split(tree, None)) == tree
    assert overlaid(tree, {"a": {"b": 5}, "d": {}}) == tree | {"a": {"b": 5, "c": 2}} and tree["a"]["b"] == 1


def test_mistakes():
    with pytest.raises(ConfigError, match=r"freeze = blocks/atention/\* matches no parameter.*blocks/attention/"):
        training_of(("blocks/atention/*",))
    with pytest.raises(ConfigError, match=r"freeze = \* leaves no parameter to train"):
        training_of(("*",))


@pytest.mark.slow
def test_a_pipelined_loss_has_zero_gradients_of_them():
    model = dataclasses.replace(small.MODEL, lora=2)
    canonical, rows = small.busy_params(model), small.make_batch(small.make_run(microbatches=1, model=model))
    rows = {name: array.reshape(-1, *array.shape[2:]) for name, array in rows.items()}
    loss = pipelined_loss(model, "zb_h1", jax.make_mesh((2, 2), ("data", "pipe")), microbatches=2)
    value, gradients = jax.jit(jax.value_and_grad(loss))(loss.place(canonical), rows)
    expected, whole = small.expected(model)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    mask, whole = named(trained_mask(loss.model)), named(whole)
    for name, gradient in named(loss.canonical(gradients)).items():
        wanted = whole[name] if mask[name] else np.zeros_like(whole[name])
        np.testing.assert_allclose(gradient, wanted, rtol=2e-5, atol=2e-6, err_msg=name)
    assert any(mask.values()) and not all(mask.values())
