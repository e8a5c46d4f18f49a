"""Batch ramps: few compiled programs, with the losses and samples of one program per batch size."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.data import ramp
from megajax.data.loader import PADDING
from megajax.data.prefetch import Prefetch
from megajax.data.ramp import RampedLoader, padded_sizes
from tests import small
from tests.train import runs

# 1, 2, 3, ... 23, 24 samples in microbatches of one sample on each of 1 or 2 replicas, 12 samples of each size.
TRAIN = {"global_batch_size": 24, "steps": 14, "batch_ramp": (2, 2, 264), "precision": "fp32", "validation_batches": 0}


def ramped_run(mesh=(1, 2, 1), train=None, **parallel) -> RunConfig:
    data, pipe, tensor = mesh
    layout = ParallelConfig(data=data, pipe=pipe, tensor=tensor, schedule="1f1b", **parallel)
    settings = {"warmup_steps": 4, "learning_rate": 3e-3, "log_every": 1}
    model = dataclasses.replace(small.MODEL, layers=2, hidden=16, dropout=0.1)
    run = RunConfig(model, layout, TrainConfig(**settings | TRAIN | (train or {})))
    run.validate()
    return run


def loader_of(run: RunConfig) -> RampedLoader:
    return RampedLoader(runs.loader_of(run), run)


@pytest.mark.parametrize("pipe", [1, 8])
def test_98_batch_sizes_take_eight_programs_and_little_waste(pipe):
    """GPT-3 175B's ramp. Time of a size: proportional to (padded samples + bubble) / samples."""
    train = TrainConfig(global_batch_size=1568, steps=93_000, batch_ramp=(16, 16, 5_859_375), precision="fp32")
    run = RunConfig(small.MODEL, ParallelConfig(data=16, pipe=pipe, schedule="1f1b"), train)
    sizes = padded_sizes(run)
    assert list(sizes) == list(range(16, 1569, 16))
    assert len(set(sizes.values())) == 8 and set(sizes.values()) <= set(sizes)
    assert all(size <= padded for size, padded in sizes.items())
    bubble = 16 * (pipe - 1)
    wasted = sum((padded + bubble) / size for size, padded in sizes.items()) / sum((s + bubble) / s for s in sizes) - 1
    assert wasted < (0.22 if pipe == 1 else 0.16)


def test_the_chosen_sizes_are_the_best_of_all_choices():
    """Compared with every pair of programs in addition to the largest."""
    run = ramped_run()
    sizes, bubble = list(range(2, 25, 2)), 1

    def time(chosen):
        return sum((min(c for c in chosen if c >= s) + bubble) / s for s in sizes)

    best = min(time((a, b, 24)) for a in sizes for b in sizes if a < b < 24)
    assert time(set(padded_sizes(run, most=3).values())) == pytest.approx(best)
    assert padded_sizes(run, most=12) == {size: size for size in sizes}


def test_padding_has_no_weight_and_keeps_the_samples_where_they_were():
    run = ramped_run((2, 1, 1))
    padded, plain = loader_of(run).loaders[4], runs.loader_of(run).resized(4, 2)
    padded.padded_microbatches = 5
    got, want = padded.batch(6), plain.batch(6)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name][:2], array)
        assert got[name].shape == (5, *array.shape[1:])
    assert not got["weights"][2:].any() and (got["sample"][2:] == PADDING).all()
    training = small.training_of(run)
    with Prefetch(padded, training.batch_sharding) as batches:
        placed = batches.batch(6)
    for name, array in got.items():
        np.testing.assert_array_equal(np.asarray(placed[name]), array)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 2)])
def test_a_padded_batch_has_the_loss_and_gradients_of_the_batch(mesh):
    run = ramped_run(mesh, {"batch_ramp": (8, 8, 264)})
    training = small.training_of(run)
    each = run.parallel.data
    loader = runs.loader_of(run)
    plain, padded = loader.resized(8, 8 // each).batch(0), loader.resized(8, 8 // each, 12 // each).batch(0)
    params = small.place(training, jax.tree.map(np.asarray, small.busy_params(run.model)))
    (loss, gradients), (expected, wanted) = (training.loss_and_gradients(params, b) for b in (padded, plain))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    small.assert_gradients_close(jax.tree.map(np.asarray, gradients), jax.tree.map(np.asarray, wanted), rtol=1e-6)


def run_ramp(run: RunConfig, directory, programs: int, monkeypatch) -> list[dict]:
    """The log of a ramped run with at most `programs` compiled steps."""
    monkeypatch.setattr(ramp.padded_sizes, "__defaults__", (programs,))
    training = small.training_of(run)
    result = runs.go(run, directory, training=training, loader=loader_of(run), tensorboard=False)
    assert training._train._cache_size() == programs
    assert sum(row["compiled"] for row in result.rows) == programs
    assert all((row["tokens_per_second"] is None) == bool(row["compiled"]) for row in result.rows)
    return result.rows


@pytest.mark.slow
def test_a_ramp_compiles_few_programs_and_marks_their_steps(tmp_path, monkeypatch):
    """4 batch sizes in 2 programs."""
    rows = run_ramp(ramped_run(train={"batch_ramp": (6, 6, 264)}), tmp_path, 2, monkeypatch)
    assert {row["batch"] for row in rows} == {6, 12, 18, 24}


@pytest.mark.slow
def test_padded_batches_train_as_a_program_for_each_batch_size_does(tmp_path, monkeypatch):
    """12 batch sizes in 3 programs, with the losses, learning rates and samples of 12 programs."""
    padded, plain = (run_ramp(ramped_run(), tmp_path / str(count), count, monkeypatch) for count in (3, 12))
    assert len({row["batch"] for row in plain}) == 12 and len(padded) == len(plain)
    for name in ("step", "batch", "samples", "learning_rate"):
        assert [row[name] for row in padded] == [row[name] for row in plain], name
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[name] for row in padded], [row[name] for row in plain], rtol=2e-5)
