"""The balance of experts in the log: by hand, in both files, and in a training step."""

import dataclasses
import json
import math

import numpy as np
import pytest

from megajax.models.moe import move_biases
from megajax.train.expert_load import describe_load, load_record
from megajax.train.sinks import JsonLines, TensorBoard
from tests import dense_experts, small
from tests.train.test_logging import record
from tests.train.test_sinks import read_events

METRICS = {"expert_load": np.float32([[2, 2, 2, 2], [4, 4, 0, 0]]), "router_losses": np.float32([[1, 3], [2, 5]])}


def test_a_record_by_hand():
    """The first layer is even; the second uses two of four experts: entropy log 2 of log 4."""
    row = load_record(METRICS)
    assert row["balance_loss"] == 1.5 and row["router_z_loss"] == 4
    assert row["expert_entropy"] == pytest.approx(0.75) and row["worst_expert_share"] == 0.5
    assert row["layer_expert_entropy"] == pytest.approx([1, 0.5])
    assert row["layer_worst_expert_share"] == [0.25, 0.5] and row["layer_balance_loss"] == [1, 2]
    assert describe_load(row) == ["balance loss 1.500", "expert entropy 0.750", "worst expert share 50.0%"]
    row = load_record(METRICS | {"dropped_choices": np.float32([0, 2])})
    assert (row["dropped_choices"], row["dropped_share"], row["layer_dropped_share"]) == (2, 0.125, [0, 0.25])
    assert describe_load(row)[-2:] == ["worst expert share 50.0%", "dropped choices 12.5%"]
    assert load_record({}) == {} and describe_load({}) == []


def test_files_have_each_layer(tmp_path):
    """A layer's value in TensorBoard has a tag of its own; JSON has a list, NaN as text."""
    row = record(**METRICS, loss=1.0)
    row["layer_balance_loss"] = [1.0, math.nan]
    lines, board = JsonLines(tmp_path / "log.jsonl"), TensorBoard(tmp_path / "events")
    for sink in (lines, board):
        sink.write(row)
        sink.file.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["layer_balance_loss"] == [1.0, "nan"]
    (path,) = (tmp_path / "events").iterdir()
    values = {value.tag: value.simple_value for event in read_events(path) for value in event.summary.value}
    assert values["layer_worst_expert_share/1"] == 0.5 and values["balance_loss"] == 1.5


def test_biases_move_towards_the_mean_load():
    """By 2408.15664; the other updates stay as they are."""
    updates = {
        "blocks": {"feedforward": {"router": {"bias": np.zeros((1, 4)), "kernel": np.ones(2)}, "up": np.ones(3)}}
    }
    moved = move_biases(updates, np.float32([[5, 3, 2, 2]]), 0.25)["blocks"]["feedforward"]
    np.testing.assert_array_equal(moved["router"]["bias"], [[-0.25, 0, 0.25, 0.25]])
    assert moved["up"].all() and moved["router"]["kernel"].all()


@pytest.mark.slow
def test_a_step_moves_the_biases_and_measures():
    """By 2408.15664: the biases move by the rate towards real tokens' mean load; the router's `losses` never change."""
    config = dataclasses.replace(dense_experts.UNEVEN, layers=2)
    training = small.training_of(small.make_run(microbatches=2, model=config))
    state = training.init_state()
    before = small.canonical(state.params, training)["blocks"]["feedforward"]["router"]
    batch = small.make_batch(training.run)
    state, metrics = training.train_step(state, batch)
    after = small.canonical(state.params, training)["blocks"]["feedforward"]["router"]
    load = np.asarray(metrics["expert_load"])
    assert load.shape == (config.layers, config.experts)
    np.testing.assert_array_equal(load.sum(1), (1 - batch["padding_mask"]).sum() * config.experts_per_token)
    want = before["bias"] + config.balance_bias_rate * np.sign(load.mean(1, keepdims=True) - load)
    np.testing.assert_allclose(after["bias"], want, rtol=1e-6)
    np.testing.assert_array_equal(after["losses"], 0)
    assert np.isfinite(metrics["router_losses"]).all() and metrics["router_losses"].shape == (config.layers, 2)
