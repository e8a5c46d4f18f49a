"""Training that ends by an error: the last step is logged; no save in progress, nor one that is due, is lost."""

import types

import pytest

from megajax import OutputConfig, ParallelConfig, RunConfig, TrainConfig, Trainer, preset
from megajax.config import ConfigError
from megajax.data.loader import Loader
from megajax.train import loop, trainer
from tests.train.test_loop import BATCH, Evaluated, MeanTraining, Records, run_loop


class Saves:
    """The loop's checkpoints; remembers the steps that were saved, and those that were waited for."""

    def __init__(self, every: int):
        self.output, self.failed, self.saved, self.waited = types.SimpleNamespace(save_every=every), False, [], []
        self.completed = []

    def save(self, layout, state, progress):
        self.saved.append(progress.step)
        return []

    def wait(self):
        self.waited += self.saved[-1:]
        return []

    def poll(self):
        return []


class Fault(Exception):
    """Of a user's code."""


def broken_data(monkeypatch, step: int, error: BaseException):
    """The batch of `step` cannot be read."""
    read = Loader.batch

    def batch(self, consumed):
        if consumed == (step - 1) * BATCH:
            raise error
        return read(self, consumed)

    monkeypatch.setattr(Loader, "batch", batch)


@pytest.mark.parametrize("error", [Fault("the file server is gone"), ConfigError("the data ended"), StopIteration()])
@pytest.mark.parametrize("processes", [1, 2])
def test_no_next_batch_loses_no_step_and_no_save_that_is_due(monkeypatch, error, processes):
    """The last step is logged and saved: of several processes, where all save after it."""
    monkeypatch.setattr(loop.jax, "process_count", lambda: processes)
    for step, due in ((7, True), (8, False)):
        checkpoints, sink = Saves(every=3), Records()
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            broken_data(patch, step, error)
            run_loop(hooks={"checkpoints": checkpoints}, sinks=[sink], validation_batches=0)
        assert [record["step"] for record in sink.records] == list(range(1, step))
        last = [step - 1] if due or processes == 1 else []
        assert checkpoints.saved == sorted({3, 6, *last})
        assert checkpoints.waited == (last if processes == 1 else [])


def test_a_save_that_is_due_is_begun_before_an_evaluation_that_fails():
    class Fails(Evaluated):
        def run(self, state, step):
            raise Fault

    checkpoints = Saves(every=3)
    with pytest.raises(Fault):
        run_loop(hooks={"evaluations": (Fails([]),), "checkpoints": checkpoints}, validation_batches=0)
    assert checkpoints.saved == [3]


def test_the_last_checkpoint_is_saved_before_the_last_evaluation():
    class Fails(Evaluated):
        def run(self, state, step):
            raise Fault

        def due(self, step):
            return False

    checkpoints = Saves(every=100)
    with pytest.raises(Fault):
        run_loop(hooks={"evaluations": (Fails([]),), "checkpoints": checkpoints}, validation_batches=0)
    assert checkpoints.saved == checkpoints.waited == [10]


def test_a_step_is_logged_if_the_next_one_cannot_be_dispatched(monkeypatch):
    """The sixth step is dispatched while the fifth runs."""
    step, sink = MeanTraining.train_step, Records()

    def fails(self, state, batch, hold):
        if int(batch["sample"].ravel()[0]) == 5 * BATCH:
            raise Fault("out of memory")
        return step(self, state, batch, hold)

    monkeypatch.setattr(MeanTraining, "train_step", fails)
    with pytest.raises(Fault, match="out of memory"):
        run_loop(sinks=[sink], validation_batches=0)
    assert [record["step"] for record in sink.records] == list(range(1, 6))


RUN = RunConfig(
    preset("tiny"), ParallelConfig(data=8, microbatch_size=1), TrainConfig(global_batch_size=8, precision="fp32")
)


@pytest.mark.parametrize(
    ("error", "processes", "waits"),
    [
        (Fault("of a user"), 1, True),
        (KeyboardInterrupt(), 1, True),
        (RuntimeError("Gloo all-reduce failed"), 1, True),
        (RuntimeError("Gloo all-reduce failed: Connection reset by peer"), 2, False),
        (Fault("of a user"), 2, True),
    ],
)
def test_a_run_that_fails_waits_for_the_save_in_progress(tmp_path, monkeypatch, error, processes, waits):
    """Unless that needs a process that is gone. The run directory's lock is free afterwards."""
    run = Trainer(RUN, output=OutputConfig(run_dir=str(tmp_path), tensorboard=False))
    closed = []
    monkeypatch.setattr(run.directory.checkpoints, "close", lambda: closed.append(True) or ["step 5: checkpoint saved"])

    def train(*arguments, **settings):
        monkeypatch.setattr(trainer.jax, "process_count", lambda: processes)
        raise error

    monkeypatch.setattr(trainer, "train", train)
    with pytest.raises(type(error)):
        run.fit()
    assert closed == [True] * waits and not (tmp_path / "run.lock").exists()
    assert ("step 5: checkpoint saved" in (tmp_path / "logs" / "process_0.log").read_text()) == waits
