"""Checkpoints: canonical layout, refused configurations, damaged files, full and read-only disks."""

import dataclasses
import gc
import logging
import os
import pathlib
import resource
import shutil
import signal
import sys
import threading
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.serialization import tensorstore_utils as orbax_utils

from megajax.checkpoint import inspect, layout, libraries, reader, writer
from megajax.checkpoint.directory import choose, complete_steps
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.checkpoint.metadata import run_meta
from megajax.config import ConfigError, DataConfig, OutputConfig
from megajax.data.tokenizers import tokenizer_hash
from tests import small
from tests.train import runs

MESH = {"mesh": (2, 2, 2), "schedule": "zb_v", "chunks": 2}  # "v" placement: the dealt order is furthest from canonical


@pytest.fixture(scope="module")
def training():
    return small.training_of(runs.make_run(**MESH))


@pytest.fixture(scope="module")
def state(training):
    """A state whose numbers all differ, including the optimizer's."""
    return small.random_state(training)


@pytest.fixture(scope="module")
def written(training, state, tmp_path_factory):
    """A directory with checkpoints of steps 3 and 6."""
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    checkpoints = Checkpoints(directory, OutputConfig(), run_meta(training.run, runs.Letters()))
    for step in (3, 6):
        checkpoints.save(training.state_layout, state, Progress(step=step, samples=16 * step, skipped=1))
    assert "step 6: checkpoint saved" in checkpoints.close()[-1]
    return directory


@pytest.fixture
def copy(written, tmp_path):
    return pathlib.Path(shutil.copytree(written, tmp_path / "checkpoints"))


def load(path, training, tokenizer=None):
    return reader.load(
        path, training.run, training.state_layout, run_meta(training.run, tokenizer or runs.Letters())["tokenizer"]
    )


def newest(directory) -> pathlib.Path:
    return choose(directory, "auto")[0]


def test_weights_are_stored_in_the_layout_of_init(training, tmp_path):
    """Read by orbax without a mesh, they equal arrays such as `PipelineModel.init` returns layer by layer."""
    checkpoints = Checkpoints(tmp_path, OutputConfig(), run_meta(training.run, runs.Letters()))
    checkpoints.save(training.state_layout, small.busy_state(training), Progress())
    checkpoints.close()
    tree = ocp.PyTreeCheckpointHandler().restore(newest(tmp_path) / "state")
    jax.tree.map(np.testing.assert_array_equal, tree["params"], small.busy_params(training.run.model))
    assert set(tree) == {"params", "optimizer_state", "loss_scale"}
    assert jax.tree.structure(tree["optimizer_state"]["mu"]) == jax.tree.structure(tree["params"])


@pytest.mark.slow
def test_the_initial_weights_are_those_of_init(training):
    """Layer by layer, on eight devices."""
    want = jax.jit(training.model.init)(jax.random.key(training.run.train.seed))
    found = small.canonical(training.init_state().params, training)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, want)


OTHERS = [
    MESH,
    pytest.param({"mesh": (1, 4, 2), "chunks": 2, "microbatches": 8}, marks=pytest.mark.slow),
    pytest.param({"mesh": (8, 1, 1), "schedule": "gpipe", "microbatches": 2}, marks=pytest.mark.slow),
    {"mesh": (1, 1, 1), "schedule": "1f1b"},
    pytest.param({"mesh": (1, 2, 4), "schedule": "1f1b", "train": {"precision": "bf16"}}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_every_array_is_restored_unchanged_on_every_mesh(written, training, state, other):
    other = small.training_of(runs.make_run(**other))
    got, at, _ = load(newest(written), other)
    assert at == Progress(step=6, samples=96, skipped=1)
    for leaf, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(other.state_sharding), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    arrays = [small.canonical_state(s, t) for s, t in ((got, other), (state, training))]
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def test_a_vocabulary_with_other_padding_is_restored(tmp_path):
    """3 does not divide 128 rows, so tensor 3 pads the vocabulary of 61 to 384; converting back gives the same arrays."""
    model = dataclasses.replace(runs.MODEL, heads=3, hidden=24, feedforward=96, sequence_length=12)
    two = small.training_of(runs.make_run((1, 1, 2), model=dataclasses.replace(model, heads=6), steps=4))
    model = two.run.model
    three = small.training_of(runs.make_run((1, 1, 3), model=model, steps=4))
    checkpoints = Checkpoints(tmp_path, OutputConfig(), run_meta(two.run, runs.Letters()))
    first = small.busy_state(two)
    checkpoints.save(two.state_layout, first, Progress(step=1))
    checkpoints.wait()
    state, _, _ = load(newest(tmp_path), three)
    assert state.params["shared"]["embedding"]["tokens"].shape[0] == 384
    checkpoints.save(three.state_layout, state, Progress(step=2))
    checkpoints.close()
    back, _, _ = load(newest(tmp_path), two)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, back)


def test_the_newest_and_every_kth_checkpoint_are_kept(tmp_path):
    target, state = small.small_state()
    checkpoints = Checkpoints(tmp_path, OutputConfig(run_dir="x", max_to_keep=2, keep_every=4), {})
    for step in range(1, 8):
        checkpoints.save(target, state, Progress(step=step))
    checkpoints.close()
    assert complete_steps(tmp_path) == [4, 6, 7]
    assert sorted(path.name[:13] for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in (4, 6, 7)]


# Kinds of damage: the change of the file, and the expected message.
DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "bit flipped": lambda path: path.write_bytes(flip(path.read_bytes())),
}


def flip(data: bytes) -> bytes:
    place = len(data) // 3
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_suggested(copy, training, damage):
    """Each file that the arrays are read from is damaged in turn."""
    path = newest(copy)
    files = [f for f in (path / "state").rglob("*") if f.is_file()]
    assert len(files) > 5
    for file in files:
        intact = file.read_bytes()
        DAMAGE[damage](file)
        with pytest.raises(ConfigError, match="pass --resume 3") as error:
            load(path, training)
        assert str(file.relative_to(path)) in str(error.value) and "\n" not in str(error.value)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(intact)
    load(path, training)


def test_damaged_checksums_and_metadata_are_detected(copy, training):
    path = newest(copy)
    for file in [*(path / "checksums").iterdir(), path / "meta" / "metadata"]:
        intact = file.read_bytes()
        for damage in DAMAGE.values():
            damage(file)
            with pytest.raises(ConfigError, match="pass --resume 3"):
                load(path, training)
            file.write_bytes(intact)
    load(path, training)


def test_without_another_checkpoint_none_is_suggested(copy, training):
    shutil.rmtree(copy / "step_00000003")
    (newest(copy) / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(ConfigError, match="manifest.ocdbt: missing; there is no earlier checkpoint"):
        load(newest(copy), training)


def test_another_model_is_refused_with_every_difference(written):
    other = runs.make_run(model=dataclasses.replace(runs.MODEL, layers=4, activation="swiglu", name="other"), chunks=2)
    with pytest.raises(ConfigError) as error:
        load(newest(written), small.training_of(other))
    message = str(error.value)
    assert "is of another model (test): layers was 8, is 4, activation was gelu, is swiglu;" in message
    assert "--run-dir" in message


def test_another_tokenizer_is_refused(written, training):
    class Other(runs.Letters):
        def encode(self, text):
            return super().encode(text[::-1])

    assert tokenizer_hash(Other()) != tokenizer_hash(runs.Letters())
    with pytest.raises(ConfigError, match="trained with tokenizer letters .hash .*, and this run.s is letters"):
        load(newest(written), training, Other())


def test_allowed_differences_are_reported(written):
    other = runs.make_run((8, 1, 1), schedule="gpipe", microbatches=2, train={"learning_rate": 1e-3})
    other = dataclasses.replace(other, data=DataConfig(text="other.txt"))
    meta = reader.read_meta(newest(written))
    messages = reader.compare(meta, other, meta["tokenizer"], newest(written))
    assert messages[0].startswith("resume    resharded: data was 2, is 8, pipe was 2, is 1")
    assert messages[1:] == [
        "resume    training options differ: learning_rate was 0.003, is 0.001",
        "resume    data differ: text was None, is other.txt",
    ]


def test_the_newest_complete_checkpoint_or_the_given_step_is_selected(copy, tmp_path):
    assert choose(tmp_path / "new", "no") == (None, "")
    path, messages = choose(tmp_path / "new", "auto")
    assert path is None and "starting from step 0" in messages
    path, messages = choose(copy, "auto")
    assert path.name == "step_00000006" and "from step 6, the newest" in messages
    assert choose(copy, "3")[0].name == "step_00000003"
    assert choose(tmp_path / "new", str(copy))[0] == path
    assert choose(tmp_path / "new", str(copy.parent))[0] == path
    assert choose(tmp_path / "new", str(copy / "step_00000003"))[0].name == "step_00000003"
    (copy / f"step_00000009{writer.TEMPORARY}").mkdir()  # a save that was killed
    assert choose(copy, "auto")[0] == path
    for resume, messages in [
        ("no", "--resume auto to resume from step 6"),
        ("5", "steps 3, 6"),
        ("/nowhere", "--resume auto"),
    ]:
        with pytest.raises(ConfigError, match=messages):
            choose(copy, resume)


def test_unfinished_saves_are_removed_and_later_checkpoints_are_moved(copy, training):
    (copy / f"step_00000009{writer.TEMPORARY}").mkdir()
    (copy / "step_00000001.deleting" / "state").mkdir(parents=True)
    checkpoints = Checkpoints(copy, OutputConfig(), run_meta(training.run, runs.Letters()))
    assert sorted(path.name for path in copy.iterdir()) == ["step_00000003", "step_00000006"]
    (messages,) = checkpoints.set_aside(after=3)
    assert messages.startswith("the checkpoint of step 6 is now called step_00000006.set-aside-")
    assert complete_steps(copy) == [3]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_refused(tmp_path, training):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot write checkpoints to .*Permission denied; pass --run-dir"):
        Checkpoints(tmp_path / "checkpoints", OutputConfig(), {})


def test_a_directory_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write checkpoints to .*file.*; pass --run-dir"):
        Checkpoints(tmp_path / "file" / "checkpoints", OutputConfig(), {})


@pytest.fixture
def command():
    """The process is prepared as by a command, until the end of the test."""
    names, hook = ("absl", "asyncio"), sys.unraisablehook
    filters = {name: list(logging.getLogger(name).filters) for name in names}
    replaced = {name: getattr(orbax_utils, name) for name in ("ts", "get_tensorstore_raw_bytes")}
    libraries.prepare_process()
    yield
    gc.collect()  # asyncio logs the errors of tasks when they are freed
    sys.unraisablehook = hook
    for name in names:
        logging.getLogger(name).filters[:] = filters[name]
    for name, value in replaced.items():
        setattr(orbax_utils, name, value)


@pytest.mark.slow
def test_saves_leak_no_object(tmp_path, command):
    """tensorstore's functions leave 24 lists a save in memory, and a dictionary for each array."""
    target, state = small.small_state()
    checkpoints = Checkpoints(tmp_path, OutputConfig(max_to_keep=1), {})
    counts = []
    for step in range(1, 13):
        checkpoints.save(target, state, Progress(step=step))
        checkpoints.wait()
        gc.collect()
        counts.append(len(gc.get_objects()))
    checkpoints.close()
    assert counts[-1] - counts[5] < 72  # 6 saves; 144 without the replacement, and some 40 of other libraries' caches
    assert complete_steps(tmp_path) == [12]


def test_leaves_that_the_layout_lacks_are_not_stored(tmp_path):
    """Such as the microbatches in flight of PipeDream-2BW, in tuples, whose places are in no name."""
    target, state = small.small_state()
    checkpoints = Checkpoints(tmp_path, OutputConfig(), {})
    checkpoints.save(target, {**state, "in_flight": ({"x": np.ones(3)}, {"x": np.zeros(3)})}, Progress(step=1))
    checkpoints.close()
    stored = layout.named(reader.arrays_in(tmp_path / "step_00000001"))
    assert set(stored) == set(layout.named(target.shapes))


def test_checkpoints_change_no_logger_warning_or_hook_of_the_process(training, state, tmp_path):
    def settings():
        loggers = [logging.root, *map(logging.getLogger, ("absl", "asyncio", "jax"))]
        return (
            [(logger.filters[:], logger.handlers[:], logger.level, logger.propagate) for logger in loggers],
            warnings.filters[:],
            (sys.unraisablehook, sys.excepthook, threading.excepthook, signal.getsignal(signal.SIGTERM)),
            (orbax_utils.ts, orbax_utils.get_tensorstore_raw_bytes),
        )

    before = settings()
    checkpoints = Checkpoints(tmp_path, OutputConfig(), run_meta(training.run, runs.Letters()))
    checkpoints.save(training.state_layout, state, Progress(step=1))
    checkpoints.close()
    load(newest(tmp_path), training)
    assert settings() == before


def test_a_failed_write_is_reported_and_a_later_save_succeeds(copy, training, state, caplog, command):
    """The limit on file sizes simulates a full disk: the kernel rejects the same write."""
    checkpoints = Checkpoints(copy, OutputConfig(), run_meta(training.run, runs.Letters()))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        checkpoints.save(training.state_layout, state, Progress(step=9))
        messages = checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(messages) == 1 and checkpoints.failed and len(messages[0]) < 350
    assert [record.message for record in caplog.records] == []  # no tracebacks of libraries
    for part in ("warning: step 9: checkpoint NOT saved", "File too large", "free", "the newest is of step 6"):
        assert part in messages[0]
    assert complete_steps(copy) == [3, 6]
    assert [path.name for path in copy.iterdir() if writer.TEMPORARY in path.name] == []  # the space is freed
    checkpoints.save(training.state_layout, state, Progress(step=12))
    assert "step 12: checkpoint saved" in checkpoints.close()[0] and not checkpoints.failed
    load(newest(copy), training)


def test_a_disk_that_is_full_for_another_process(tmp_path, training, state, monkeypatch):
    """A problem of another process fails the save here too, before the directory gets its final name."""
    checkpoints = Checkpoints(tmp_path, OutputConfig(), run_meta(training.run, runs.Letters()))
    full = lambda name, problem: {1: "No space left on device"} if name.endswith("write_own") else {}  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(writer, "gather_problems", full)
        checkpoints.save(training.state_layout, state, Progress(step=9))
        (message,) = checkpoints.wait()
    assert "step 9: checkpoint NOT saved" in message and "process 1: No space left on device (" in message
    assert list(tmp_path.iterdir()) == []
    checkpoints.save(training.state_layout, state, Progress(step=9))
    assert "step 9: checkpoint saved" in checkpoints.close()[0]
    load(newest(tmp_path), training)


def test_inspect_prints_the_checkpoints(written, capsys):
    assert inspect.main([str(written), "--verify", "--arrays"]) == 0
    out = capsys.readouterr().out
    for part in (
        "step_00000003",
        "step 6, 96 samples, 1 skipped",
        "test: layers 8, hidden 32, heads 4, vocabulary 61, sequence_length 16; tokenizer letters",
        "written on data 2 x pipe 2 x tensor 2, zb_v, fp32",
        "params/blocks/attention/qkv/kernel",
        "float32[8, 32, 4, 3, 8]",
    ):
        assert part in out
    assert out.count("every file is as it was written") == 2


def test_inspect_names_damaged_files(copy, capsys):
    (newest(copy) / "state" / "manifest.ocdbt").write_bytes(b"")
    assert inspect.main([str(copy), "--verify"]) == 2
    assert "DAMAGED: state/manifest.ocdbt: 0 bytes" in capsys.readouterr().out
    assert inspect.main(["/nowhere"]) == 2
    assert "there is no checkpoint in /nowhere" in capsys.readouterr().err
