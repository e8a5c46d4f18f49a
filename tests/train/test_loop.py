"""The loop: which samples it takes, when it validates, when it stops. The model is one number, pulled to the data."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from megajax.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.data.loader import Loader, TokenSamples
from megajax.estimate.gpus import Peak
from megajax.train.logging import RunLog
from megajax.train.loop import train
from megajax.train.precision import make_loss_scale
from megajax.train.step import TrainState

MODEL = ModelConfig(layers=1, hidden=4, heads=1, vocabulary=50, sequence_length=4)


class MeanTraining:
    """Learns the mean token by gradient descent; the gradient of the steps in `broken` is NaN."""

    def __init__(self, run: RunConfig, broken: tuple[int, ...] = ()):
        self.run, self.broken, self.taken, self.evaluated = run, broken, [], []

    def init_state(self) -> TrainState:
        return TrainState({"mean": jnp.float32(0)}, (), make_loss_scale(self.run.train))

    def loss(self, params, batch):
        return jnp.mean((params["mean"] - batch["labels"]) ** 2)

    def train_step(self, state: TrainState, batch):
        self.taken += batch["sample"].ravel().tolist()
        loss, gradient = jax.value_and_grad(self.loss)(state.params, batch)
        norm = jnp.nan if len(self.taken) // self.run.train.global_batch_size in self.broken else gradient["mean"]
        finite = jnp.isfinite(norm)
        params = {"mean": jnp.where(finite, state.params["mean"] - 0.25 * norm, state.params["mean"])}
        metrics = {"loss": loss, "grad_norm": abs(norm), "learning_rate": 0.25, "skipped": 1 - finite}
        scale = state.loss_scale
        state = dataclasses.replace(state, params=params, loss_scale=scale.update(finite))
        return state, metrics | {"loss_scale": scale.scale}

    def evaluate(self, params, batch):
        self.evaluated.append((len(self.taken), batch["sample"].ravel().tolist()))
        return self.loss(params, batch)


def run_loop(broken=(), validation_windows: int = 12, **settings):
    """(training, final state, what was printed) of 10 steps of 4 samples."""
    settings = {"global_batch_size": 4, "steps": 10, "warmup_steps": 0, "precision": "fp32"} | settings
    run = RunConfig(MODEL, ParallelConfig(), TrainConfig(**settings))
    run.validate()
    training = MeanTraining(run, broken)
    tokens = np.random.default_rng(0).integers(0, 50, 4 * 100 + 1)
    batches = Loader(TokenSamples(tokens, 4, 0), 4, run.microbatches)
    validation = Loader(TokenSamples(tokens[: 4 * validation_windows + 1], 4, None), 4, run.microbatches)
    text = io.StringIO()
    with RunLog(run.train.steps, console=Console(file=text, width=200)) as log:
        explain = lambda *step: "because it was asked to"  # noqa: E731
        state = train(training, batches, validation, log, Peak(1e12, "published"), explain=explain)
    return training, state, text.getvalue()


def test_it_learns_and_takes_every_sample_once_in_order():
    training, state, text = run_loop()
    assert training.taken == list(range(40))
    assert state.params["mean"] == pytest.approx(24.5, abs=5)
    assert text.count("step 10/10") == 1


def test_validation_comes_every_few_steps_and_after_the_last():
    training, _, text = run_loop(validation_every=4, validation_batches=2)
    assert [taken for taken, _ in training.evaluated] == [16, 16, 32, 32, 40, 40]
    assert [samples for _, samples in training.evaluated[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [line.split()[1] for line in text.splitlines() if "validation loss" in line] == ["4:", "8:", "10:"]


@pytest.mark.parametrize(("windows", "batches", "count"), [(12, 8, 3), (2, 8, 1), (12, 2, 2), (12, 0, 0)])
def test_a_small_validation_set_is_gone_through_once(windows, batches, count):
    training, _, _ = run_loop(validation_windows=windows, validation_batches=batches)
    assert len(training.evaluated) == count


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gradient_that_is_not_finite_ends_training(precision):
    with pytest.raises(ConfigError, match="step 3: .*not finite.*--learning-rate"):
        run_loop(broken=(3,), precision=precision)


def test_in_fp16_it_is_a_skipped_step():
    training, state, text = run_loop(broken=(1, 3), precision="fp16", initial_loss_scale=1024.0)
    assert len(training.taken) == 40
    assert state.loss_scale.scale == 512  # the first overflow uses up the hysteresis, the second halves
    assert text.count("step skipped") == 2
