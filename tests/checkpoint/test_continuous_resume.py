"""PipeDream-2BW resumes with the batch that was in flight: its steps are those of a run that was not stopped."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.checkpoint.layout import named
from tests import small
from tests.train import runs

pytestmark = pytest.mark.slow

MODEL = dataclasses.replace(runs.DROPPING, layers=5)  # uneven stages
STEPS = 7


def make_run(mesh, schedule="pipedream_2bw", **more):
    train = {"learning_rate": 0.05, **more.pop("train", {})}
    return runs.make_run(mesh, STEPS, train, schedule=schedule, microbatches=2, model=MODEL, **more)


def params_of(training, result):
    return {name: leaf for name, leaf in named(small.canonical(result.state.params, training)).items()}


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ((1, 2, 1), {"train": {"precision": "bf16"}}),
        ((1, 2, 2), {}),
        ((2, 1, 1), {"zero": 1}),
        ((1, 2, 1), {"recompute": "full"}),
    ],
    ids=str,
)
def test_bit_for_bit_on_the_same_layout(mesh, more, tmp_path):
    run = make_run(mesh, **more)
    training = small.training_of(run)
    whole = runs.go(run, tmp_path / "whole", training=training)
    for stops in (1, 3):  # after the first step, which makes no update; and twice more
        runs.go(run, tmp_path / "stopped", training=training, stop=runs.StopAfter(stops), resume="auto")
    resumed = runs.go(run, tmp_path / "stopped", training=training, resume="auto")
    assert len(resumed.rows) == STEPS and "after step 4" in resumed.text
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    assert [row["grad_norm"] for row in resumed.rows] == [row["grad_norm"] for row in whole.rows]
    assert all(row["grad_norm"] > 0 for row in resumed.rows[1:])
    got, want = params_of(training, resumed), params_of(training, whole)
    for name, leaf in want.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def test_on_another_layout_and_from_and_to_another_schedule(tmp_path):
    first = make_run((1, 2, 1))
    whole = runs.go(first, tmp_path / "whole")
    runs.go(first, tmp_path / "moved", stop=runs.StopAfter(4))
    other = make_run((2, 2, 2))  # with as many stages the losses of a step are of the same microbatches
    moved = runs.go(other, tmp_path / "moved", stop=runs.StopAfter(2), resume="auto")
    np.testing.assert_allclose(moved.losses, whole.losses[:6], rtol=2e-5)
    norms = [[row["grad_norm"] for row in result.rows[:6]] for result in (moved, whole)]
    np.testing.assert_allclose(*norms, rtol=1e-4)
    drained = make_run((1, 2, 1), "1f1b")
    ended = runs.go(drained, tmp_path / "moved", resume="auto")
    assert len(ended.rows) == STEPS and "in flight" not in ended.text
    runs.go(drained, tmp_path / "from", stop=runs.StopAfter(3))
    started = runs.go(first, tmp_path / "from", resume="auto")
    assert "resume    no batch is in flight in this checkpoint: the first step makes no update" in started.text
    assert started.rows[3]["grad_norm"] == 0 and all(row["grad_norm"] > 0 for row in started.rows[4:])


def test_what_is_stored_is_the_version_of_the_batch_in_flight():
    training = small.training_of(make_run((1, 2, 1)))
    state, versions = training.init_state(), []
    for step in range(3):
        versions.append(small.canonical(state.params, training))
        state, _ = training.train_step(state, small.make_batch(training.run, step))
        layout, stored = training.stored(state)
        assert named(stored).keys() == named(layout.shapes).keys()
        held = small.canonical(stored.in_flight, training)
        jax.tree.map(np.testing.assert_array_equal, held, versions[step])
        assert training.refilled(state, pytest.fail, 0) is state  # it is full
