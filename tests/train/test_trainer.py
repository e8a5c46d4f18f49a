"""`Trainer` with the user's data: run directory, resume and validation."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.config import ConfigError, OutputConfig, RunConfig
from megajax.data.user_samples import Samples
from megajax.train import trainer as trainer_module
from megajax.train.sinks import read_steps
from megajax.train.trainer import Trainer
from megajax.train.validation import Scores
from tests import small
from tests.train import runs

TRAIN = {"steps": 6, "warmup_steps": 1, "log_every": 1, "validation_batches": 2, "validation_every": 3}


class Batches:
    """The random tokens, from a class such as a user writes."""

    def __init__(self, run: RunConfig, shape: tuple[int, ...] = ()):
        self.loader, self.shape, self.consumed = runs.loader_of(run), shape, []

    def batch(self, consumed_samples: int) -> dict:
        self.consumed.append(consumed_samples)
        batch = self.loader.batch(consumed_samples)
        return {name: a.reshape(self.shape + a.shape[2:]) for name, a in batch.items()} if self.shape else batch


def make_run(mesh=(1, 1, 1)) -> RunConfig:
    return runs.make_run(
        mesh,
        schedule="interleaved_1f1b",
        recompute="full",
        train=TRAIN,
        model=dataclasses.replace(small.MODEL, layers=2, hidden=16),
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Trainers of one run have the same compiled step."""
    make, made = trainer_module.make_training, {}

    def first(run, *args):
        if run not in made:
            made[run] = make(run, *args)
        return made[run]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "make_training", first)
        yield made


@pytest.mark.slow
def test_a_run_of_the_users_batches_stops_resumes_and_ends_as_one_run(tmp_path, capsys):
    run = make_run()
    batches = Batches(run)
    whole = Trainer(run, data=batches, devices=jax.devices()[:1]).fit()
    assert batches.consumed[:6] == [small.BATCH * step for step in range(6)]
    assert whole.metrics["step"] == 6 and whole.stopped is None and whole.metrics["samples"] == 6 * small.BATCH
    assert "batches of Batches" in capsys.readouterr().out
    output = OutputConfig(run_dir=str(tmp_path), exit_after_minutes=1e-6, tensorboard=False)
    part = Trainer(run, data=Batches(run), output=output, devices=jax.devices()[:1]).fit()
    assert part.metrics["step"] == 1 and part.stopped == "--exit-after-minutes 1e-06 are over"
    output = dataclasses.replace(output, exit_after_minutes=None, resume="auto")
    rest = Trainer(run, data=Batches(run), output=output, devices=jax.devices()[:1]).fit()
    assert rest.metrics["loss"] == whole.metrics["loss"]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), rest.state.params, whole.state.params
    )
    rows = read_steps(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    again = Trainer(run, data=Batches(run), output=output, devices=jax.devices()[:1]).fit()
    assert again.stopped is None  # no step was left: the metrics are those of the last one
    assert (again.metrics["step"], again.metrics["loss"]) == (6, rest.metrics["loss"])


def test_a_run_on_samples_stops_and_resumes_as_one_run_of_batches(tmp_path, capsys):
    """A function with a state of its own gives the samples of the batches one at a time."""
    run, devices = make_run(), jax.devices()[:1]
    whole = Trainer(run, data=Batches(run), validation_data=Batches(run), devices=devices).fit()
    rows = runs.loader_of(run).rows(np.arange(8 * small.BATCH))

    def source(at):
        while at[0] < len(rows["tokens"]):
            at[0] += 1
            yield {name: array[at[0] - 1] for name, array in rows.items() if name != "sample"}

    def fit(**output):
        at = [0]
        data = Samples(lambda: source(at), data_state=(lambda: at[0], lambda state: at.__setitem__(0, state)))
        valid = [{name: array[n] for name, array in rows.items()} for n in range(2 * small.BATCH)]
        output = OutputConfig(run_dir=str(tmp_path), tensorboard=False, **output)
        return Trainer(run, data=data, validation_data=valid, output=output, devices=devices).fit()

    assert fit(exit_after_minutes=1e-6).metrics["step"] == 1
    assert "samples of function, in its order (its state is saved)" in capsys.readouterr().out
    rest = fit(resume="auto")
    assert "data continues from its state in the checkpoint" in capsys.readouterr().out
    assert rest.metrics["loss"] == whole.metrics["loss"]
    few = [{name: array[n] for name, array in rows.items()} for n in range(10)]
    with pytest.raises(ConfigError, match="data ended after 10 samples, and the run needs"):
        Trainer(run, data=few, devices=devices)
    same = [one | {"labels": one["tokens"]} for one in few]
    with pytest.raises(ConfigError, match=r"'labels' are its 'tokens'.*give tokens = ids\[:-1\], labels = ids\[1:\]"):
        Trainer(run, data=Samples(same, epochs=None), devices=devices).fit()
    with pytest.raises(ConfigError, match="Batches gives batches by the samples consumed, not samples"):
        Trainer(run, data=Samples(Batches(run), epochs=2), devices=devices)


def test_batches_of_another_shape_are_refused_in_one_line():
    run = make_run()
    trainer = Trainer(run, data=Batches(run, shape=(2, 8)), devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"has shape \(2, 8.*\[4 microbatches, 4 samples, ...\]") as error:
        trainer.fit()
    assert "\n" not in str(error.value)


def test_too_few_devices_are_refused_before_anything_is_built():
    with pytest.raises(ConfigError):
        Trainer(make_run((2, 1, 1)), data=Batches(make_run()), devices=jax.devices()[:1])


def test_the_users_validation_batches_and_evaluations(tmp_path, capsys):
    """The loss of a validation after the last step is that of the trained parameters."""

    class Steps:
        due = staticmethod(lambda step: step == 4)
        run = staticmethod(lambda state, step: Scores([f"seen at {step}"], {"own/step": step}))

    run = make_run()
    output = OutputConfig(log_jsonl=str(tmp_path / "log.jsonl"))
    trainer = Trainer(run, data=Batches(run), validation_data=Batches(run), output=output, devices=jax.devices()[:1])
    state = trainer.fit(evaluations=[Steps()]).state
    rows = read_steps(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows if "validation/loss" in row] == [3, 6]
    assert [row["step"] for row in rows if "own/step" in row] == [4, 6]
    losses = [
        float(trainer.training.evaluate(state.params, runs.loader_of(run).batch(n * small.BATCH))) for n in (0, 1)
    ]
    assert rows[-1]["validation/loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert rows[-1]["validation/perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)
    out = capsys.readouterr().out
    assert "step 4: seen at 4" in out and f"step 6: validation loss {np.mean(losses):.4f} per token, perplexity" in out


def test_an_argument_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="Trainer has no argument validation: did you mean validation_data"):
        Trainer(make_run(), validation=None)
