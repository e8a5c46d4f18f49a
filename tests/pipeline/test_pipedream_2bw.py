"""PipeDream-2BW: the update rule of the paper, no bubble, and convergence to the loss of 1F1B."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megajax.config import ConfigError
from megajax.estimate.memory import bytes_per_device
from megajax.models.interface import mean_loss
from megajax.schedules.registry import make_schedule
from megajax.schedules.simulate import simulate_lockstep
from megajax.train import step as step_module
from megajax.train.optimizer import make_optimizer
from tests import small


def batches_of(run, count):
    return [small.make_batch(run, seed) for seed in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "recompute", "layers", "in_place"),
    [
        ((1, 1, 1), "none", 2, False),  # without a pipeline the gradients are one step stale too
        ((2, 1, 2), "full", 2, False),
        ((1, 2, 1), "none", 8, False),
        ((2, 2, 2), "selective", 8, False),
        ((1, 4, 1), "full", 8, False),
        ((1, 4, 1), "selective", 6, False),
        ((2, 2, 2), "selective", 8, True),
        ((1, 4, 1), "full", 6, True),
    ],
)
def test_weights_follow_the_papers_update_rule(mesh, recompute, layers, in_place, monkeypatch):
    """W(t + 1) = W(t) - update(gradient of batch t - 1 at W(t - 1)), the unpipelined model's gradient."""
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: in_place)  # as on GPUs
    model = dataclasses.replace(small.MODEL, dropout=0.1, layers=layers)
    # With Adam's default epsilon a gradient that is only rounding error would make a full-size update.
    smooth = {"epsilon": 1e-2, "learning_rate": 0.1}
    run = small.make_run(mesh, schedule="pipedream_2bw", microbatches=8, model=model, recompute=recompute, train=smooth)
    training = small.training_of(run)
    state = training.init_state()
    batches = batches_of(run, 4)

    functions = small.build_model(model, recompute="none", dropout_seed=run.train.seed)
    gradient = jax.jit(jax.grad(lambda params, batch: mean_loss(functions, params, batch)))
    optimizer = make_optimizer(run.train, functions.decay_mask())
    versions = [jax.tree.map(jnp.asarray, small.canonical(state.params, training))] * 2
    optimizer_state = optimizer.init(versions[0])
    for batch in batches[:-1]:
        updates, optimizer_state = optimizer.update(gradient(versions[-2], batch), optimizer_state, versions[-1])
        versions.append(optax.apply_updates(versions[-1], updates))

    for step, batch in enumerate(batches):
        state, metrics = training.train_step(state, batch)
        want = versions[step + 1]
        for path, leaf in jax.tree.leaves_with_path(small.canonical(state.params, training)):
            target = np.asarray(dict(jax.tree.leaves_with_path(want))[path])
            np.testing.assert_allclose(leaf, target, rtol=1e-5, atol=1e-6, err_msg=f"step {step} {path}")
    assert int(metrics["skipped"]) == 0


@pytest.mark.slow
def test_losses_are_of_the_tokens_whose_head_ran_in_the_step():
    still = {"learning_rate": 1e-30, "minimum_learning_rate": 1e-30}
    run = small.make_run((1, 4, 1), schedule="pipedream_2bw", microbatches=8, train=still)
    training = small.training_of(run)
    state = training.init_state()
    functions = small.build_model(run.model, dropout_seed=run.train.seed)
    params = jax.tree.map(jnp.asarray, small.canonical(state.params, training))
    batches = batches_of(run, 2)
    losses = []
    for batch in batches:
        state, metrics = training.train_step(state, batch)
        losses.append(float(metrics["loss"]))

    def mean(*parts):
        joined = {name: np.concatenate([batch[name][low:high] for batch, low, high in parts]) for name in parts[0][0]}
        return float(mean_loss(functions, params, joined))

    # The last of 4 ranks runs 3 ticks behind: of each batch the head runs on 5 microbatches in its own step, 3 in the
    # next.
    assert losses[0] == pytest.approx(mean((batches[0], 0, 5)), rel=1e-5)
    assert losses[1] == pytest.approx(mean((batches[0], 5, 8), (batches[1], 0, 5)), rel=1e-5)


def counting(run, seed):
    """Samples whose tokens count up from a random start."""
    batch = small.make_batch(run, seed)
    tokens = (batch["tokens"][..., :1] + np.arange(run.model.sequence_length + 1)) % run.model.vocabulary
    return {**batch, "tokens": tokens[..., :-1].astype(np.int32), "labels": tokens[..., 1:].astype(np.int32)}


@pytest.mark.slow
def test_it_converges_to_the_loss_of_1f1b():
    """The gradient is one step stale, so the loss curve differs, but its end does not."""
    ends = {}
    for schedule in ("pipedream_2bw", "1f1b"):
        run = small.make_run((1, 2, 1), schedule=schedule, microbatches=2, train={"steps": 300, "learning_rate": 5e-3})
        training = small.training_of(run)
        state, losses = training.init_state(), []
        for step in range(300):
            state, metrics = training.train_step(state, counting(run, step))
            losses.append(float(metrics["loss"]))
        ends[schedule] = np.mean(losses[-5:])
    assert losses[0] > 4 and max(ends.values()) < 0.1, ends


@pytest.mark.parametrize("pipe", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_returns_gradients_like_the_parameters(pipe):
    """Also without a pipeline: one rank sends nothing."""
    run = small.make_run((1, pipe, 1), schedule="pipedream_2bw", microbatches=2)
    training = small.training_of(run)
    batch, program = small.make_batch(run), training.pipeline

    def step(params):
        return program.step(params, batch, jnp.float32(1), program.start(params, batch))[2]

    with jax.set_mesh(training.mesh):
        params = small.place(training, small.busy_params(small.MODEL))
        gradients = jax.eval_shape(step, params)
    assert jax.tree.map(np.shape, gradients) == jax.tree.map(np.shape, params)


def test_a_step_has_no_bubble():
    schedule = make_schedule("pipedream_2bw", stages=4, microbatches=8)
    assert len(schedule.ticks) == 8
    assert simulate_lockstep(schedule).bubble == 0
    for rank in range(4):
        works = sorted(work for row in schedule.ticks for work in row[rank])
        assert [(work.op, work.microbatch) for work in works] == [(op, m) for op in "BF" for m in range(8)]


def test_the_memory_model_has_the_bytes_of_what_is_in_flight():
    run = small.make_run((1, 4, 1), schedule="pipedream_2bw", microbatches=8)
    training = small.training_of(run)
    with jax.set_mesh(training.mesh):
        params = small.place(training, small.busy_params(small.MODEL))
        carry = jax.eval_shape(training.pipeline.start, params, small.make_batch(run)).carry  # [data, pipe, ...]
    on_a_rank = lambda *trees: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(trees)) / 4  # noqa: E731
    parts = bytes_per_device(run)
    assert parts["stash"] == on_a_rank(carry.stash)
    assert parts["gradients"] == on_a_rank(carry.block_gradients, carry.shared_gradients)
    assert parts["inboxes"] == on_a_rank(carry.activations, carry.gradients)


@pytest.mark.slow
def test_what_is_in_flight_has_one_sharding_from_the_first_step_on():
    """Otherwise the first step replicates all weights on every device, and the second step is recompiled."""
    run = small.make_run((1, 2, 2), schedule="pipedream_2bw", microbatches=2)
    training = small.training_of(run)
    state, shardings = training.init_state(), []
    for batch in batches_of(run, 2):
        state, _ = training.train_step(state, batch)
        shardings.append(jax.tree.map(lambda a: a.sharding, state))
    assert shardings[0] == shardings[1] and training._train._cache_size() == 1

    compiled = training.compile_train_step(*training.step_shapes())
    device = training.mesh.devices.flat[0]
    on = lambda a: sum(shard.data.nbytes for shard in a.addressable_shards if shard.device == device)  # noqa: E731
    stored = sum(on(a) for a in jax.tree.leaves(state)) + sum(a.nbytes for a in jax.tree.leaves(batch))
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(stored, rel=0.01)
    weights = state.in_flight.weights["blocks"]["feedforward"]["up"]["kernel"]
    assert on(weights) * 4 == weights.nbytes  # over pipe and tensor


def test_unsupported_settings_are_refused():
    with pytest.raises(ConfigError, match="fp16 does not work with pipedream_2bw"):
        small.make_run((1, 2, 1), schedule="pipedream_2bw", train={"precision": "fp16"})
    with pytest.raises(
        ConfigError,
        match="takes at least 6 microbatches on 4 stages, not 4: pass --global-batch-size 24 or more",
    ):
        small.make_run((1, 4, 1), schedule="pipedream_2bw", microbatches=4)
