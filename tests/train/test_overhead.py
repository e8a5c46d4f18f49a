"""What the trainer itself costs: Python and logging a step, and how little a save keeps the training waiting."""

import io
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from megajax.config import ModelConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.cost.hardware import Peak
from megajax.data.loader import Loader, TokenSamples
from megajax.train import checkpoint, digests, restore
from megajax.train.checkpoint import Checkpoints, Progress
from megajax.train.keep import Keeper
from megajax.train.loop import Companions, train
from megajax.train.saved_config import run_meta
from megajax.train.stop import Stop
from tests import small
from tests.train import runs

STEPS = 1000


class Instant:
    """A training whose steps take no time."""

    def __init__(self, run: RunConfig):
        self.run = run

    def init_state(self):
        return None

    def train_step(self, state, batch):
        return state, {"loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3, "loss_scale": 1.0, "skipped": 0}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_costs_less_than_a_millisecond(tmp_path, terminal):
    """1% of a 100 ms step, in processor time: loop, line or bar, JSON, TensorBoard, log file, signals, loader."""
    model = ModelConfig(layers=1, hidden=4, heads=1, vocabulary=50, sequence_length=16)
    run = RunConfig(model, ParallelConfig(), TrainConfig(steps=STEPS, global_batch_size=4, validation_batches=0))
    samples = TokenSamples(np.arange(16 * 500) % 50, 16, 0)
    keeper = Keeper(run, OutputConfig(run_dir=str(tmp_path), save_every=10**6), runs.Letters(), {})
    log = keeper.log(None)
    log.console = Console(file=io.StringIO(), force_terminal=terminal, width=150)
    loader = Loader(samples, 4, 4)
    with log, Stop(minutes=1000) as stop:
        begin = time.process_time()
        train(Instant(run), loader, loader, log, Peak(1e12, "published"), companions=Companions(stop=stop))
        taken = (time.process_time() - begin) / STEPS
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == STEPS
    print(f"{1e3 * taken:.3f} ms a step")
    assert taken < 1e-3


def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """On storage that takes its time, a save keeps the steps waiting for less than a tenth of it."""
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    training = small.training_of(run)
    keep = Checkpoints(tmp_path, OutputConfig(), run_meta(run, runs.Letters()))
    state, batch = training.init_state(), small.make_batch(run)
    keep.save(training, state, Progress(step=1))  # compiles the copies
    keep.wait()
    slow = digests.write_own
    monkeypatch.setattr(digests, "write_own", lambda *arguments: (time.sleep(4), slow(*arguments)))
    state, _ = training.train_step(state, batch)
    kept = jax.tree.map(np.array, state.params)
    begin = time.monotonic()
    assert keep.save(training, state, Progress(step=2)) == []
    waited, steps = time.monotonic() - begin, 0
    while not (said := keep.poll()):
        state, metrics = training.train_step(state, batch)  # uses the saved state's memory up
        steps += bool(np.isfinite(float(metrics["loss"])))
    assert "step 2: checkpoint saved" in said[0]
    taken = time.monotonic() - begin
    print(f"waited {waited:.2f} s of {taken:.2f} s, {steps} steps meanwhile")
    assert waited < 0.1 * taken and steps > 20
    keep.close()
    path, _ = checkpoint.choose(tmp_path, "auto")
    back, _, _ = restore.load(path, training, run_meta(run, runs.Letters())["tokenizer"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), back.params, kept)
