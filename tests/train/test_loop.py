"""The loop: which samples it takes, when it dispatches, validates and stops. The model is one number, the mean token."""

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
from megajax.train.loop import TrainerHooks, train
from megajax.train.precision import make_loss_scale
from megajax.train.step import TrainState
from megajax.train.validation import Scores, validation_loss

MODEL = ModelConfig(layers=1, hidden=4, heads=1, vocabulary=50, sequence_length=4)
TOKENS = np.random.default_rng(0).integers(0, 50, 4 * 100 + 1)


BATCH = 4


class MeanTraining:
    """Learns the mean token by gradient descent; the gradient of the steps in `broken` is NaN.

    Attributes:
      taken: samples of the steps that were not held.
      events: ("dispatch", first sample) of every step, ("validate", samples taken); the log adds ("log", step).
    """

    takes_hold = True

    def __init__(self, run: RunConfig, broken: tuple[int, ...] = ()):
        self.run, self.broken, self.taken, self.evaluated, self.events = run, broken, [], [], []

    def init_state(self) -> TrainState:
        return TrainState({"mean": jnp.float32(0)}, (), make_loss_scale(self.run.train))

    def loss(self, params, batch):
        return jnp.mean((params["mean"] - batch["labels"]) ** 2)

    def refilled(self, state: TrainState, batch, consumed_samples: int) -> TrainState:
        return state

    def stored(self, state: TrainState):
        return None, state

    def train_step(self, state: TrainState, batch, hold):
        first = int(batch["sample"].ravel()[0])
        self.events.append(("dispatch", first // BATCH + 1))
        loss, gradient = jax.value_and_grad(self.loss)(state.params, batch)
        norm = jnp.nan if first // BATCH + 1 in self.broken else gradient["mean"]
        finite = jnp.isfinite(norm)
        params = {"mean": jnp.where(finite, state.params["mean"] - 0.25 * norm, state.params["mean"])}
        metrics = {"loss": loss, "grad_norm": abs(norm), "learning_rate": 0.25, "skipped": 1 - finite}
        metrics["loss_scale"] = state.loss_scale.scale
        if hold is not None and int(hold):
            return state, metrics
        self.taken += batch["sample"].ravel().tolist()
        return dataclasses.replace(state, params=params, loss_scale=state.loss_scale.update(finite)), metrics

    def loss_weight(self, batch):
        return float(batch["weights"].sum())

    def evaluate(self, params, batch):
        self.evaluated.append((len(self.taken), batch["sample"].ravel().tolist()))
        self.events.append(("validate", len(self.taken) // BATCH))
        return self.loss(params, batch)


class EventLog(RunLog):
    """Adds the steps that it logs to a training's events."""

    events: list

    def step(self, record, **how):
        self.events.append(("log", record["step"]))
        super().step(record, **how)


def run_loop(broken=(), validation_windows: int = 12, explain=None, sinks=(), hooks=None, **settings):
    """(training, final state, printed text) of 10 steps of 4 samples."""
    settings = {"global_batch_size": BATCH, "steps": 10, "warmup_steps": 0, "precision": "fp32"} | settings
    run = RunConfig(MODEL, ParallelConfig(), TrainConfig(**settings))
    run.validate()
    training = MeanTraining(run, broken)
    batches = Loader(TokenSamples(TOKENS, 4, 0), BATCH, run.microbatches)
    validation = Loader(TokenSamples(TOKENS[: 4 * validation_windows + 1], 4, None), BATCH, run.microbatches)
    text = io.StringIO()
    with EventLog(run.train.steps, console=Console(file=text, width=200), sinks=sinks) as log:
        log.events = training.events
        explain = explain or (lambda *step: "because the test says so")
        hooks = TrainerHooks(**(hooks or {}))
        peak = Peak(1e12, "published")
        state, record = train(training, batches, {"validation": validation}, log, peak, hooks=hooks, explain=explain)
    assert record["step"] == training.events[-1][1] or training.evaluated
    return training, state, text.getvalue()


def expected_mean(skipped=()) -> float:
    """The parameter after 10 steps, in numpy."""
    samples, mean = TokenSamples(TOKENS, 4, 0), np.float32(0)
    for step in range(10):
        labels = np.stack([samples.window(BATCH * step + i)[1:] for i in range(BATCH)])
        mean -= 0 if step + 1 in skipped else 0.25 * 2 * np.mean(mean - labels)
    return mean


def test_a_step_is_dispatched_before_the_metrics_of_the_last_one_are_read():
    training, _, _ = run_loop(validation_batches=0)
    inner = [event for n in range(2, 10) for event in (("dispatch", n + 1), ("log", n))]
    assert training.events == [("dispatch", 1), ("dispatch", 2), ("log", 1), *inner, ("log", 10)]


def test_a_step_is_not_dispatched_before_a_validation_of_the_previous_state():
    training, _, _ = run_loop(validation_every=4, validation_batches=1)
    place = training.events.index(("validate", 4))
    assert training.events[place - 3 : place + 3] == [
        ("dispatch", 4),
        ("log", 3),
        ("log", 4),
        ("validate", 4),
        ("dispatch", 5),
        ("dispatch", 6),
    ]


def test_a_step_after_a_skipped_one_is_dispatched_again():
    """It was dispatched before the host read the metrics, and left the state unchanged."""
    seen = []
    explain = lambda training, params, batch, scale: (  # noqa: E731
        seen.append((float(params["mean"]), batch["sample"].ravel().tolist())) or "because"
    )
    training, state, text = run_loop(broken=(3, 4, 10), nonfinite="skip", validation_batches=0, explain=explain)
    dispatched = [number for kind, number in training.events if kind == "dispatch"]
    assert dispatched == [1, 2, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10]
    assert [number for kind, number in training.events if kind == "log"] == list(range(1, 11))
    assert training.taken == list(range(40))
    assert float(state.params["mean"]) == pytest.approx(expected_mean(skipped=(3, 4, 10)), rel=1e-5)
    assert [samples for _, samples in seen] == [[8, 9, 10, 11], [12, 13, 14, 15], [36, 37, 38, 39]]
    assert seen[0][0] == seen[1][0]  # explained with the parameters that the step had
    assert text.count("step skipped") == 3


def test_a_stop_ends_the_run_after_the_step_that_was_dispatched():
    class StopAfter4:
        reason, calls = None, []

        def after(self, step):
            self.calls.append(step)
            self.reason = "the test says so" if step == 4 else None
            return self.reason

    preemption = StopAfter4()
    training, _, text = run_loop(hooks={"preemption": preemption}, validation_batches=0)
    assert preemption.calls == [1, 2, 3, 4]  # once per step, in order, as several processes require
    assert training.taken == list(range(16)) and training.events[-1] == ("log", 4)
    assert "step 4: the test says so: saving a checkpoint and stopping" in text


def test_training_uses_every_sample_once_in_order():
    training, state, text = run_loop()
    assert training.taken == list(range(40))
    assert state.params["mean"] == pytest.approx(expected_mean(), rel=1e-5)
    assert text.count("step 10/10") == 1


def test_validation_runs_every_few_steps_and_after_the_last():
    training, _, text = run_loop(validation_every=4, validation_batches=2)
    assert [taken for taken, _ in training.evaluated] == [16, 16, 32, 32, 40, 40]
    assert [samples for _, samples in training.evaluated[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [line.split()[1] for line in text.splitlines() if "validation loss" in line] == ["4:", "8:", "10:"]


@pytest.mark.parametrize(("windows", "batches", "count"), [(12, 8, 3), (2, 8, 1), (12, 2, 2), (12, 0, 0)])
def test_a_small_validation_set_is_read_once(windows, batches, count):
    training, _, _ = run_loop(validation_windows=windows, validation_batches=batches)
    assert len(training.evaluated) == count


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gradient_that_is_not_finite_ends_training(precision):
    with pytest.raises(ConfigError, match="step 3: .*not finite.*--learning-rate"):
        run_loop(broken=(3,), precision=precision)


def test_in_fp16_a_non_finite_gradient_skips_the_step():
    training, state, text = run_loop(broken=(1, 3), precision="fp16", initial_loss_scale=1024.0)
    assert len(training.taken) == 40
    assert state.loss_scale.scale == 512  # the first overflow uses up the hysteresis, the second halves
    assert text.count("step skipped") == 2


def test_the_validation_is_the_mean_over_tokens():
    """Of two batches with three tokens and one that count, by hand."""

    class Batches:
        batches_of_an_epoch, global_batch_size = 2, 1

        def batch(self, start):
            return {"weights": np.array([[[1, 1, 1], [1, 0, 0]][start]]), "loss": [2.0, 6.0][start]}

    class Reads:
        run = RunConfig(MODEL, ParallelConfig(), TrainConfig(validation_batches=5))
        loss_weight = staticmethod(lambda batch: float(batch["weights"].sum()))
        evaluate = staticmethod(lambda params, batch: batch["loss"])

    state = TrainState({}, (), make_loss_scale(Reads.run.train))
    assert validation_loss(Reads, state, Batches()) == (3 * 2.0 + 1 * 6.0) / 4


class Evaluated:
    """An evaluation after every third step: the parameter."""

    def __init__(self, events):
        self.events = events

    def due(self, step):
        return step % 3 == 0

    def run(self, state, step):
        self.events.append(("evaluate", step))
        return Scores((f"the mean is {float(state.params['mean']):.3f}",), {"own/mean": float(state.params["mean"])})


class Records:
    """A sink of `RunLog` in memory."""

    file = type("File", (), {"problem": None, "close": staticmethod(lambda: None)})

    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)


def test_an_evaluation_runs_when_it_is_due_and_after_the_last_step():
    """On the state after that step; a record has the values, and no step is dispatched before."""
    events, sink = [], Records()
    hooks = {"evaluations": (Evaluated(events),)}
    training, state, text = run_loop(hooks=hooks, sinks=[sink], validation_every=6, validation_batches=1)
    assert events == [("evaluate", step) for step in (3, 6, 9, 10)]
    assert [record["step"] for record in sink.records] == list(range(1, 11))
    names = [{name for name in record if "/" in name} for record in sink.records]
    validated = {"validation/loss", "validation/perplexity"}
    own = {3: {"own/mean"}, 6: {"own/mean"} | validated, 9: {"own/mean"}, 10: {"own/mean"} | validated}
    assert names == [own.get(step, set()) for step in range(1, 11)]
    assert sink.records[9]["own/mean"] == float(state.params["mean"])
    assert f"step 10: the mean is {sink.records[9]['own/mean']:.3f}" in text
    order = [event for event in training.events if event[1] in (3, 4, 5)]
    assert order == [("dispatch", 3), ("log", 3), ("dispatch", 4), ("dispatch", 5), ("log", 4), ("log", 5)]


def test_a_record_is_written_if_an_evaluation_fails():
    class Fails(Evaluated):
        def run(self, state, step):
            raise ConfigError("no")

    sink = Records()
    with pytest.raises(ConfigError, match="no"):
        run_loop(hooks={"evaluations": (Fails([]),)}, sinks=[sink], validation_batches=0)
    assert [record["step"] for record in sink.records] == [1, 2, 3]
