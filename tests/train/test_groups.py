"""Groups of parameters, the average of the weights, and schedules of the user's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megajax.config import ConfigError, TrainConfig
from megajax.ops.optimizers.groups import decay_mask, matches, rate_multipliers
from megajax.runtime.mesh import make_mesh
from megajax.train.lr_schedule import SamplesSchedule, rate_of, samples_after, updates_before
from megajax.train.step import make_training
from tests import small

TREE = {"blocks": {"attention": {"kernel": 1, "bias": 2}, "mlp": {"kernel": 3}}, "shared": {"table": 4}}


def training_of(mesh=(2, 1, 1), rate_at=None, make=None, **train):
    run = small.make_run(mesh, train=train, model=dataclasses.replace(small.MODEL, layers=2), zero=int(mesh[0] > 1))
    return make_training(run, make_mesh(run.parallel), optimizer=make, rate_at=rate_at)


def test_patterns_match_paths_and_folders():
    assert matches("blocks/attention", "blocks/attention/kernel") and matches("*/bias", "blocks/attention/bias")
    assert matches("blocks/*/kernel", "blocks/a/b/kernel") and not matches("attention", "blocks/attention/kernel")
    assert not matches("blocks/att", "blocks/attention/kernel")


def test_the_last_pattern_that_matches_counts():
    got = rate_multipliers((("blocks", 0.5), ("*/bias", 2.0)), TREE)
    assert got["blocks"] == {"attention": {"kernel": 0.5, "bias": 2.0}, "mlp": {"kernel": 0.5}}
    assert got["shared"] == {"table": 1.0}
    mask = jax.tree.map(lambda _: True, TREE)
    assert decay_mask(("shared",), mask) == {**mask, "shared": {"table": False}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lr_multiplier": ("layers=0.1",)},
            r"lr_multiplier = layers matches no parameter: pass --lr-multiplier .* of ",
        ),
        ({"no_weight_decay": ("x",)}, r"no_weight_decay = x matches no parameter: .*blocks/attention/qkv/kernel"),
        ({"lr_multiplier": ("blocks",)}, "lr_multiplier = blocks must be PATTERN=NUMBER"),
        ({"lr_multiplier": ("blocks=-1",)}, "with a number from 0"),
        ({"ema_validation": True}, "no averaged weights: pass --ema-decay"),
    ],
)
def test_wrong_groups_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        training_of(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "optimizer", ["adamw", "lion", pytest.param("adafactor", marks=pytest.mark.slow), "muon", "the user's"]
)
def test_updates_are_multiplied_and_not_decayed(optimizer):
    """The rates of two groups, against the same optimizer without groups."""
    own = (
        (lambda c: optax.lion(c.learning_rate, weight_decay=0.1, mask=c.decay_mask))
        if optimizer == "the user's"
        else None
    )
    named = {} if own else {"optimizer": optimizer}
    groups = {"lr_multiplier": ("blocks=0.25", "*/attention=3"), "no_weight_decay": ("blocks/feedforward",)}
    one, other = (training_of(make=own, **named, **more) for more in ({}, groups))
    params = small.place(one, small.busy_params(one.run.model))
    gradients = jax.tree.map(lambda leaf: 0.1 * jnp.sin(jnp.arange(leaf.size).reshape(leaf.shape)), params)
    with jax.set_mesh(one.mesh):
        usual, got = (t.optimizer.update(gradients, t.optimizer.init(params), params)[0] for t in (one, other))
    rate = float(one.rate_at(jnp.int32(small.BATCH)))
    undecayed = jax.tree.map(lambda p: rate * 0.1 * p, params["blocks"]["feedforward"])
    factor = jax.tree.map(lambda _: 0.25, usual["blocks"])
    factor["attention"] = jax.tree.map(lambda _: 3.0, usual["blocks"]["attention"])
    want = jax.tree.map(lambda f, u: f * u, factor, usual["blocks"])
    kernel = lambda tree: tree["feedforward"]["up"]["kernel"]  # noqa: E731
    want["feedforward"]["up"]["kernel"] = 0.25 * (kernel(usual["blocks"]) + kernel({"feedforward": undecayed}))
    down = want["feedforward"]["down"]
    down["kernel"] = 0.25 * (usual["blocks"]["feedforward"]["down"]["kernel"] + undecayed["down"]["kernel"])
    small.assert_gradients_close(got["blocks"], jax.tree.map(np.asarray, want), 1e-5)
    small.assert_gradients_close(got["shared"], jax.tree.map(np.asarray, usual["shared"]), 1e-6)


@pytest.mark.slow
def test_the_average_is_optaxs_and_is_left_by_skipped_steps():
    training = training_of((2, 1, 1), ema_decay=0.9, nonfinite="skip")
    state = training.init_state()
    for leaf, average in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.ema), strict=True):
        assert leaf.sharding == average.sharding
    want = jax.tree.map(np.asarray, state.params)
    for step in range(3):
        state, _ = training.train_step(state, small.make_batch(training.run, step))
        want = optax.incremental_update(jax.tree.map(np.asarray, state.params), want, 0.1)
    small.assert_gradients_close(jax.tree.map(np.asarray, state.ema), want, 1e-6)
    want = jax.tree.map(np.asarray, state.ema)
    batch = small.make_batch(training.run, 3)
    state, metrics = training.train_step(state, batch | {"weights": batch["weights"] * np.float32("nan")})
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.ema), want)


@pytest.mark.parametrize("ramp", [(), (4, 4, 100)])
def test_updates_before_is_the_inverse_of_samples_after(ramp):
    train = TrainConfig(global_batch_size=16, steps=30, batch_ramp=ramp, warmup_steps=1)
    for count in range(40):
        assert int(updates_before(train, samples_after(train, jnp.int32(count)))) == count


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["updates", "samples"])
def test_a_schedule_is_used_and_logged(unit):
    train = TrainConfig(global_batch_size=small.BATCH)
    schedule = optax.piecewise_constant_schedule(1e-2, {2: 0.1} if unit == "updates" else {2 * small.BATCH + 1: 0.1})
    training = training_of(
        rate_at=rate_of(train, schedule if unit == "updates" else SamplesSchedule(schedule)),
        make=lambda c: optax.sgd(c.learning_rate),
    )
    state, logged, moved = training.init_state(), [], []
    for step in range(4):
        before = np.asarray(state.params["shared"]["head"]["norm"]["bias"])
        state, metrics = training.train_step(state, small.make_batch(training.run, step))
        logged.append(float(metrics["learning_rate"]))
        moved.append(np.abs(np.asarray(state.params["shared"]["head"]["norm"]["bias"]) - before).max())
    assert logged == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])
    assert moved[1] > 3 * moved[2] > 0


def test_a_schedule_that_returns_no_number_is_one_line():
    with pytest.raises(ConfigError, match="schedule: the function returned .*, not a scalar"):
        rate_of(TrainConfig(), lambda count: jnp.ones(3) * count)


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_an_optimizer_that_optax_lacks_is_one_line(name):
    with pytest.raises(ConfigError, match=rf"optimizer = {name} is not in optax: .*Trainer\(optimizer=...\)"):
        training_of(optimizer=name)
