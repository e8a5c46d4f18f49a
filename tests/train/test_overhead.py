"""Overhead of the trainer: Python and logging per step, and how long a save blocks training."""

import io
import threading
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks.checkpoints import MODELS, measure
from megajax.checkpoint import manager, reader, writer
from megajax.checkpoint.directory import choose
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.checkpoint.metadata import run_meta
from megajax.config import ModelConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.data.loader import Loader, TokenSamples
from megajax.estimate.gpus import Peak
from megajax.runtime.mesh import make_mesh
from megajax.runtime.preemption import Preemption
from megajax.train.loop import TrainerHooks, train
from megajax.train.replica_check import Checks
from megajax.train.run_directory import RunDirectory
from megajax.train.sinks import read_steps
from megajax.train.step import make_training
from tests import small
from tests.train import runs

STEPS = 1000


class Instant:
    """A training whose steps take no time."""

    takes_hold = True

    def __init__(self, run: RunConfig):
        self.run = run

    def init_state(self):
        return None

    def refilled(self, state, batch, consumed_samples):
        return state

    def train_step(self, state, batch, hold):
        return state, {"loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3, "loss_scale": 1.0, "skipped": 0}


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_costs_less_than_a_millisecond(tmp_path, terminal):
    """1% of a step of 100 ms, in processor time: loop, line or bar, JSON, TensorBoard, log file, signals, loader."""
    model = ModelConfig(layers=1, hidden=4, heads=1, vocabulary=50, sequence_length=16)
    run = RunConfig(model, ParallelConfig(), TrainConfig(steps=STEPS, global_batch_size=4, validation_batches=0))
    samples = TokenSamples(np.arange(16 * 500) % 50, 16, 0)
    log = RunDirectory(run, OutputConfig(run_dir=str(tmp_path), save_every=10**6), runs.Letters()).open_log(Progress())
    log.console = Console(file=io.StringIO(), force_terminal=terminal, width=150)
    loader = Loader(samples, 4, 4)
    with log, Preemption(minutes=1000) as preemption:
        start = time.process_time()
        hooks = TrainerHooks(preemption=preemption)
        train(Instant(run), loader, {}, log, Peak(1e12, "published"), hooks=hooks)
        taken = (time.process_time() - start) / STEPS
    assert len(read_steps(tmp_path / "log.jsonl")) == STEPS
    print(f"{1e3 * taken:.3f} ms a step")
    assert taken < 1e-3


@pytest.mark.slow
def test_training_continues_while_a_save_is_written(tmp_path, monkeypatch):
    """A save returns before any file is written, and what is written is the state at that time."""
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    training = small.training_of(run)
    checkpoints = Checkpoints(tmp_path, OutputConfig(), run_meta(run, runs.Letters()))
    state, batch = training.init_state(), small.make_batch(run)
    checkpoints.save(training.state_layout, state, Progress(step=1))
    checkpoints.wait()
    may_write = threading.Event()
    monkeypatch.setattr(manager, "write", lambda *args, **names: (may_write.wait(60), writer.write(*args, **names)))
    for step in (2, 3):  # the second save copies into the memory of the first one's copies
        state, _ = training.train_step(state, batch)
        kept = jax.tree.map(np.array, state)
        assert checkpoints.save(training.state_layout, state, Progress(step=step)) == []
        for _ in range(3):
            state, _ = training.train_step(state, batch)  # donates the saved state
            assert checkpoints.poll() == [] and not list(tmp_path.glob(f"step_{step:08d}*"))
        may_write.set()
        assert f"step {step}: checkpoint saved" in checkpoints.wait()[0]
        may_write.clear()
        path, _ = choose(tmp_path, "auto")
        back, _, _ = reader.load(path, run, training.state_layout, run_meta(run, runs.Letters())["tokenizer"])
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), back, kept)
    checkpoints.close()


@pytest.mark.slow
def test_a_save_blocks_training_for_less_than_a_tenth_of_its_time(tmp_path):
    """100 MB written to disk with nothing else running; the best of five saves, as the machine may be busy."""
    found = measure(MODELS[100], jax.devices()[:1], tmp_path, saves=6, steps=False)
    taken, waited, _ = min(found["rest"], key=lambda row: row[1] / row[0])
    print(f"{found['bytes'] / 1e6:.0f} MB: waited {waited:.3f} s of {taken:.2f} s")
    assert 80e6 < found["bytes"] < 150e6 and waited < 0.1 * taken


@pytest.mark.slow
def test_a_check_takes_less_time_than_a_step():
    """So `--check-every 100` costs less than 1%: comparing 100 MB on each of two devices, and timing both devices."""
    devices = jax.devices()[:2]
    run = RunConfig(MODELS[100], ParallelConfig(data=2), TrainConfig(precision="fp32", global_batch_size=8, steps=10))
    training = make_training(run, make_mesh(run.parallel, devices))
    state, rows = training.init_state(), (4, 2)
    tokens = np.zeros((*rows, run.model.sequence_length), np.int32)
    batch = {"tokens": tokens, "labels": tokens, "weights": np.ones(tokens.shape, np.float32)}
    batch["sample"] = np.zeros(rows, np.uint32)
    checks = Checks(100, training.state_layout)
    taken, steps = [], []
    for number in range(6):
        start = time.perf_counter()
        checks.run(state, number)
        taken.append(time.perf_counter() - start)
        start = time.perf_counter()
        state, metrics = training.train_step(state, batch)
        jax.block_until_ready(metrics)
        steps.append(time.perf_counter() - start)
    check, step = min(taken[1:]), min(steps[1:])
    print(
        f"check {1e3 * check:.1f} ms, step {1e3 * step:.1f} ms of 512 tokens: {check / step / 100:.3%} every 100 steps"
    )
    assert check < step
