"""A resumed run equals the uninterrupted run: bitwise on the same mesh, up to rounding on another."""

import functools
import shutil

import jax
import numpy as np
import pytest

from megajax.checkpoint import manager, reader
from megajax.checkpoint.directory import choose
from megajax.checkpoint.manager import Progress
from megajax.checkpoint.metadata import run_meta
from megajax.config import OutputConfig
from megajax.train.sinks import JsonLines
from tests import dense_experts, small
from tests.train import runs

HALF = 20


@functools.cache
def training_on(**kwargs):
    return small.training_of(runs.make_run(**kwargs, model=runs.DROPPING))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """40 uninterrupted steps, with a checkpoint after 20."""
    training = training_on(chunks=2)
    return runs.go(training.run, tmp_path_factory.mktemp("whole"), training=training, save_every=1000)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The first 20 of the 40 steps."""
    directory = tmp_path_factory.mktemp("half")
    training = training_on(chunks=2)
    result = runs.go(training.run, directory, training=training, stop=runs.StopAfter(HALF), save_every=1000)
    assert "step 20: the test says so: saving a checkpoint and stopping" in result.text
    assert len(result.rows) == HALF
    return directory


def load(path, training, tokenizer):
    return reader.load(path, training.run, training.state_layout, tokenizer)


def resumed(half, tmp_path, **kwargs):
    directory = tmp_path / "run"
    shutil.copytree(half, directory)
    training = training_on(**kwargs)
    return runs.go(training.run, directory, training=training, resume="auto", save_every=1000), training


@pytest.mark.slow
def test_a_resume_on_the_same_mesh_is_bitwise_equal(whole, half, tmp_path):
    result, _ = resumed(half, tmp_path, chunks=2)
    assert f"resume    from step {HALF}, the newest" in result.text
    assert f"after step {HALF}, {HALF * small.BATCH} samples, 0 skipped" in result.text
    timings = {"step_seconds", "tokens_per_second", "tflops_per_device", "mfu", "compiled", "goodput", "time"}
    plain = [[{k: v for k, v in row.items() if k not in timings} for row in r.rows] for r in (result, whole)]
    assert plain[0] == plain[1]  # losses, norms, rates, samples, of the 20 steps before and the 20 after
    for got, want in zip(jax.tree.leaves(result.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


OTHERS = [
    {"mesh": (8, 1, 1), "schedule": "gpipe", "microbatches": 2},
    {"mesh": (1, 4, 2), "schedule": "zb_v", "chunks": 2, "microbatches": 8},
    {"mesh": (1, 1, 1), "schedule": "1f1b", "microbatches": 1},
    {"mesh": (1, 4, 2), "chunks": 2, "microbatches": 8},
    {"mesh": (2, 4, 1), "schedule": "zb_h1", "microbatches": 8},
]


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_resume_on_another_mesh_has_equal_losses_up_to_rounding(whole, half, tmp_path, other):
    result, training = resumed(half, tmp_path, **other)
    assert "resume    resharded: " in result.text
    assert len(result.rows) == 40
    np.testing.assert_allclose(result.losses, whole.losses, rtol=1e-5)
    got = small.canonical(result.state.params, training)
    want = small.canonical(whole.state.params, training_on(chunks=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, want)


@pytest.mark.slow
def test_saving_on_another_mesh_and_restoring_changes_no_bit(half, tmp_path):
    """A state saved on one mesh, restored and saved on another and restored on the first is bitwise unchanged."""
    path, _ = choose(half / "checkpoints", "auto")
    tokenizer = run_meta(training_on(chunks=2).run, runs.Letters())["tokenizer"]
    first, at, _ = load(path, training_on(chunks=2), tokenizer)
    for number, other in enumerate(
        [OTHERS[0], {"mesh": (1, 4, 2), "schedule": "zb_v", "chunks": 2, "microbatches": 8}]
    ):
        training = training_on(**other)
        state, _, _ = load(path, training, tokenizer)
        checkpoints = manager.Checkpoints(
            tmp_path / str(number), OutputConfig(), run_meta(training.run, runs.Letters())
        )
        checkpoints.save(training.state_layout, state, at)
        assert "checkpoint saved" in checkpoints.close()[0]
        path, _ = choose(tmp_path / str(number), "auto")
    last, _, _ = load(path, training_on(chunks=2), tokenizer)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, last)


def test_the_log_continues_at_the_checkpoint(tmp_path):
    """Steps after the checkpoint, and a line truncated by a kill, are dropped."""
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": "nan"}\n{"step": 3, "loss": 3.0}\n{"step": 4, "lo')
    log = JsonLines(path, after=2)
    log.write({"step": 3, "loss": 5.0})
    log.file.close()
    *kept, written = path.read_text().splitlines()
    assert kept == ['{"step": 1, "loss": 1.0}', '{"step": 2, "loss": "nan"}']
    assert written.startswith('{"step": 3, "time": "2') and written.endswith('Z", "loss": 5.0}')


GROUPS = {"mesh": (4, 2, 1), "schedule": "1f1b", "expert": 4, "zero": 1}
WHOLE = {"mesh": (1, 1, 2), "schedule": "1f1b", "microbatches": 1}


@pytest.mark.slow
def test_experts_are_restored_by_another_number_of_replicas(tmp_path):
    """A state saved on expert 4 x pipe 2 is bitwise the same on expert 1 x tensor 2 x pipe 1."""
    first, other = (small.training_of(runs.make_run(**how, model=dense_experts.PLAIN)) for how in (GROUPS, WHOLE))
    state, meta = first.init_state(), run_meta(first.run, runs.Letters())
    checkpoints = manager.Checkpoints(tmp_path, OutputConfig(), meta)
    checkpoints.save(first.state_layout, state, Progress(3, 48))
    checkpoints.close()
    path, _ = choose(tmp_path, "auto")
    loaded, at, _ = load(path, other, meta["tokenizer"])
    up = state.params["blocks"]["feedforward"]["up"]
    assert at.step == 3 and up.sharding.shard_shape(up.shape)[3] == dense_experts.PLAIN.experts // 4
    got, want = small.canonical(loaded.params, other), small.canonical(state.params, first)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
def test_a_run_with_split_experts_resumes_with_all_on_each_replica(tmp_path):
    """Expert 4 x pipe 2 to expert 1 x tensor 2 x pipe 1."""

    def go(name, how, **more):
        run = runs.make_run(**how, steps=20, model=dense_experts.PLAIN)
        return runs.go(run, tmp_path / name, save_every=1000, **more)

    whole = go("whole", GROUPS)
    go("half", GROUPS, stop=runs.StopAfter(10))
    result = go("half", WHOLE, resume="auto")
    assert "resume    resharded: " in result.text and len(result.rows) == 20
    np.testing.assert_allclose(result.losses, whole.losses, rtol=1e-5)
