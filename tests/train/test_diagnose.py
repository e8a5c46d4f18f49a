"""Explanations of a step that is not finite: the microbatch and sample, the layer, the parameter."""

import copy
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.directory import complete_steps
from megajax.config import ConfigError
from megajax.data.ramp import RampedLoader
from megajax.train import diagnose
from megajax.train.logging import SpikeDetector
from tests import dense_experts, small
from tests.train import runs

MESH = {"mesh": (2, 2, 1), "schedule": "1f1b", "microbatches": 4, "recompute": "full"}


@pytest.fixture(scope="module")
def training():
    return small.training_of(runs.make_run(**MESH, steps=12, model=small.MODEL))


@pytest.fixture(scope="module")
def params():
    return small.busy_params(small.MODEL)


def changed(params, change):
    """A copy, after `change` of it."""
    params = jax.tree.map(np.array, params)
    change(params)
    return params


def explain(training, params, batch=None, scale=1.0):
    batch = batch or small.make_batch(training.run)
    return diagnose.explain(training, small.place(training, params), batch, scale)


@pytest.mark.parametrize("layer", [0, 5, 7])
def test_a_weight_that_is_not_finite_is_named(training, params, layer):
    def poison(params):
        params["blocks"]["attention"]["qkv"]["kernel"][layer, 3, 1, 0, 2] = math.nan

    assert explain(training, changed(params, poison)) == (
        f"the weights themselves are not finite: layer {layer}, attention/qkv/kernel"
    )


def test_further_non_finite_parameters_are_counted(training, params):
    def poison(params):
        params["blocks"]["feedforward"]["down"]["kernel"][2:4] = math.inf
        params["shared"]["embedding"]["tokens"][5, 5] = -math.inf

    assert explain(training, changed(params, poison)) == (
        "the weights themselves are not finite: layer 3, feedforward/down/kernel, and 2 more"
    )


@pytest.mark.slow
@pytest.mark.parametrize("sample", [0, 6, 15])
def test_a_poisoned_sample_is_named(training, params, sample):
    batch = small.make_batch(training.run)
    batch["weights"][sample // 4, sample % 4, 7] = math.nan
    assert explain(training, params, batch) == (
        f"microbatch {sample // 4 + 1} of 4, sample {sample} of the run: the loss weights in the data are not finite"
    )


@pytest.fixture(scope="module")
def of_a_v():
    """The training on a V of two ranks, whose layers 0, 1, 6 and 7 are on rank 0."""
    return small.training_of(runs.make_run(**MESH | {"schedule": "zb_v", "chunks": 2}, steps=12, model=small.MODEL))


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "rank"), [(0, 0), (2, 1), (7, 0)])
def test_the_layer_and_its_rank_in_a_v_are_named(of_a_v, params, layer, rank):
    check_overflow(of_a_v, params, layer, rank)


def test_the_layer_whose_output_overflows_is_named(training, params):
    check_overflow(training, params, layer=7, rank=1)


def check_overflow(training, params, layer, rank):
    """The weight is finite but so large that its layer's output overflows in fp32."""

    def overflow(params):
        params["blocks"]["feedforward"]["down"]["bias"][layer] = 3e38
        params["blocks"]["attention"]["output"]["bias"][layer] = 3e38

    text = explain(training, changed(params, overflow))
    assert text == (
        "no sample is to blame, each of samples 0, 8, 15 of the run does it alone: "
        f"the output of layer {layer} (pipeline rank {rank}) is not finite; its input and its weights are"
    )


def test_a_gradient_that_overflows_is_named(training, params):
    """The forward is finite; multiplied by the loss scale the gradients are not."""

    def steepen(params):
        params["shared"]["head"]["norm"]["scale"] *= 50

    text = explain(training, changed(params, steepen), scale=3e38)
    does = "no sample is to blame, each of samples 0, 8, 15 of the run does it alone: "
    assert text.startswith(does + "the forward is finite, the gradient of ")


def test_a_batch_whose_labels_do_not_count_is_no_matter_of_hardware(training, params):
    batch = small.make_batch(training.run)
    for changed in ({"weights": np.zeros_like(batch["weights"])}, {"labels": np.full_like(batch["labels"], -100)}):
        assert explain(training, params, batch | changed) == (
            "no label of this batch counts: all loss weights are 0, and the mean over them is 0 / 0; mend the data"
        )


def spoiled(training, spoil):
    """The training, of which `spoil(x)` has replaced every block's output; nothing is compiled before it is called."""
    broken = copy.copy(training)
    block = lambda weights, x, microbatch, layer: spoil(training.functions.block(weights, x, microbatch, layer))  # noqa: E731
    broken.functions = dataclasses.replace(training.functions, block=block)
    broken._gradients = jax.jit(broken._loss_and_gradients, static_argnums=3)
    return broken


@pytest.mark.slow
def test_a_broken_replica_and_a_broken_stage_are_not_blamed_on_a_sample(of_a_v, params):
    where = lambda axis: lambda x: jnp.where(jax.lax.axis_index(axis) == 1, jnp.nan, x)  # noqa: E731
    assert explain(spoiled(of_a_v, where("data")), params).startswith(
        "replica 1 of 2 computes what others do not, of copies of one sample: check its hardware: the output of layer 0 "
    )
    assert explain(spoiled(of_a_v, where("pipe")), params) == (
        "no sample is to blame, each of samples 0, 8, 15 of the run does it alone: "
        "the output of layer 2 (pipeline rank 1) is not finite; its input and its weights are"
    )


def test_an_expert_is_named():
    run = small.make_run((1, 2, 1), schedule="zb_v", chunks=2, model=dense_experts.FIRST_DENSE)
    training = small.training_of(run)

    def poison(params):
        params["blocks"]["sparse"]["feedforward"]["up"][2, 4, 0, 1, 3] = math.nan
        params["blocks"]["sparse"]["feedforward"]["down"][2, 5] = math.inf

    place = small.place(training, changed(dense_experts.params_of(run.model), poison))
    assert diagnose.not_finite(training, place) == [
        "layer 5, feedforward/down, expert 5",
        "layer 5, feedforward/up, expert 4",
    ]


def test_a_step_that_is_finite_when_repeated_is_reported(training, params):
    assert explain(training, params) == "the same step, run again, is finite: check the hardware"


class Poisoned(RampedLoader):
    """The third batch's microbatch 2 has a weight that is not finite."""

    def batch(self, consumed_samples):
        batch = super().batch(consumed_samples)
        if consumed_samples == 2 * small.BATCH:
            batch["weights"][1, 2, 0] = math.inf
        return batch


def loader_of(training):
    return Poisoned(runs.loader_of(training.run), training.run)


NAMED = "microbatch 2 of 4, sample 38 of the run: the loss weights in the data are not finite"


@pytest.mark.slow
def test_a_poisoned_batch_is_skipped_named_and_counted(training, tmp_path):
    """The run continues as if the batch were not in the data."""
    skipping = copy.copy(training)  # with the same compiled step
    run = dataclasses.replace(training.run, train=dataclasses.replace(training.run.train, nonfinite="skip"))
    skipping.run = run
    result = runs.go(run, tmp_path / "a", training=skipping, loader=loader_of(training), save_every=4)
    assert f"warning: step 3: {NAMED}" in result.text
    assert "warning: step 3: loss is nan, gradient norm is nan, step skipped" in result.text
    assert [row["skipped_steps"] for row in result.rows] == [0, 0] + [1] * 10
    assert (result.rows[2]["loss"], result.rows[2]["grad_norm"]) == ("nan", "nan")
    assert (result.rows[-1]["skipped_steps"], result.rows[-1]["bad_steps"]) == (1, 1)
    assert np.isfinite(result.losses[3:]).all()
    assert "skipped 1  not finite 1" in result.text
    rest = runs.go(run, tmp_path / "a", training=skipping, loader=loader_of(training), resume="4")
    assert "after step 4, 64 samples, 1 skipped step" in rest.text
    assert (rest.rows[-1]["skipped_steps"], rest.rows[-1]["bad_steps"]) == (1, 1)
    np.testing.assert_array_equal(rest.losses[3:], result.losses[3:])


@pytest.mark.slow
def test_a_skipped_step_leaves_what_a_loop_without_dispatch_ahead_leaves(training, tmp_path):
    """The step after it, which the devices already had, is run again: same losses, same state, same counts."""
    results = []
    for name, ahead in (("ahead", True), ("one by one", False)):
        skipping = copy.copy(training)
        skipping.run = dataclasses.replace(
            training.run, train=dataclasses.replace(training.run.train, nonfinite="skip")
        )
        if not ahead:
            skipping.takes_hold = False
        results.append(runs.go(skipping.run, tmp_path / name, training=skipping, loader=loader_of(training)))
    times = ("step_seconds", "tokens_per_second", "tflops_per_device", "mfu", "compiled", "goodput", "time")
    rows = [[{k: v for k, v in row.items() if k not in times} for row in result.rows] for result in results]
    assert rows[0] == rows[1] and rows[0][2]["skipped_steps"] == 1 and len(rows[0]) == 12
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, result.state) for result in results))


@pytest.mark.slow
def test_a_non_finite_step_stops_the_run_and_saves_the_previous_state(tmp_path):
    """On one device, where everything compiles faster."""
    model = dataclasses.replace(small.MODEL, layers=2, hidden=16)
    training = small.training_of(runs.make_run((1, 1, 1), schedule="1f1b", steps=12, model=model))
    with pytest.raises(ConfigError, match=f"step 3: loss nan, .*{NAMED}.*--nonfinite skip"):
        runs.go(training.run, tmp_path, training=training, loader=loader_of(training))
    assert complete_steps(tmp_path / "checkpoints") == [2]
    result = runs.go(training.run, tmp_path, training=training, resume="auto")  # with a good batch
    assert [row["step"] for row in result.rows] == list(range(1, 13))


def test_a_loss_spike_is_flagged():
    spikes, random = SpikeDetector(8.0), np.random.default_rng(0)
    for step in range(1, 200):
        assert spikes.flag(step, 3 - 0.001 * step + 0.02 * random.normal()) is None
    assert spikes.flag(200, math.nan) is None  # has a warning of its own
    text = spikes.flag(201, 4.5)
    assert text.startswith("step 201: loss spike: 4.5000 is ") and "standard deviations above 2.8" in text
    assert SpikeDetector(8.0).flag(1, 100.0) is None  # nothing to compare with
