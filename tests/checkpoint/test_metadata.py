"""Metadata: checkpoints of format 1, other data, and files that are not a checkpoint's metadata."""

import copy
import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from megajax.checkpoint import inspect, layout, metadata, reader
from megajax.checkpoint.metadata import Progress
from megajax.config import ConfigError, DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from tests import small

# Written by commit 74d2b5a on Python 3.11 and jax 0.10.2: two steps of two samples, layers 2, hidden 8.
FORMAT_1 = pathlib.Path(__file__).parent / "format_1" / "step_00000002"
MODEL = ModelConfig(name="tiny", layers=2, hidden=8, heads=2, vocabulary=257, sequence_length=8)
TRAIN = {"global_batch_size": 2, "steps": 3, "learning_rate": 4e-3, "minimum_learning_rate": 4e-4, "warmup_steps": 0}
REST = {
    "beta2": 0.98,
    "seed": 5,
    "precision": "fp32",
    "log_every": 1,
    "validation_every": 1000,
    "validation_batches": 0,
}
TOKENIZER = {"name": "byte", "hash": "bd963101fd0c2156"}


def make_run(pipe: int = 1) -> RunConfig:
    parallel = ParallelConfig(pipe=pipe, microbatch_size=2 // pipe, schedule="interleaved_1f1b")
    return RunConfig(MODEL, parallel, TrainConfig(**TRAIN, **REST))


@pytest.fixture
def raw():
    return json.loads((FORMAT_1 / "meta" / "metadata").read_text())


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_checkpoint_of_format_1_is_restored(pipe):
    """The arrays equal those read by orbax, and no equal setting is reported as different."""
    run = make_run(pipe)
    training = small.training_of(run)
    state, progress, messages = reader.load(FORMAT_1, run, training.state_layout, TOKENIZER)
    assert progress == Progress(step=2, samples=4, skipped=0, nonfinite=0)
    assert messages == ([] if pipe == 1 else ["resume    resharded: pipe was 1, is 2, microbatch_size was 2, is 1"])
    stored = layout.named(ocp.PyTreeCheckpointHandler().restore(FORMAT_1 / "state"))
    restored = layout.to_canonical(state, training.where)
    assert restored.keys() == stored.keys()
    for name, array in restored.items():
        rows = np.asarray(stored[name]).shape[0] if np.ndim(stored[name]) else None
        np.testing.assert_array_equal(np.asarray(array)[:rows] if rows else array, stored[name], err_msg=name)
    assert all(np.isfinite(leaf).all() for leaf in map(np.asarray, jax.tree.leaves(state)))


def test_renamed_fields_of_format_1_are_read(raw):
    raw["config"]["parallel"]["offload"], raw["config"]["train"]["block_matmuls"] = "stash", "fp8"
    raw["config"]["train"]["bad_step"], raw["progress"]["bad"] = "skip", 3
    meta = metadata.parse(raw)
    assert meta["progress"] == Progress(step=2, samples=4, skipped=0, nonfinite=3)
    messages = metadata.differences(meta, make_run(), TOKENIZER)
    assert messages == [
        "resume    resharded: offload_activations was True, is False",
        "resume    training options differ: matmul_dtype was fp8, is None, nonfinite was skip, is stop",
    ]


def test_format_1_is_verified_by_its_own_checksums(tmp_path, capsys):
    path = pathlib.Path(shutil.copytree(FORMAT_1, tmp_path / FORMAT_1.name))
    assert inspect.main([str(path), "--verify", "--arrays"]) == 0
    assert "every file is as it was written" in capsys.readouterr().out
    (path / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(ConfigError, match=r"is damaged: state/manifest.ocdbt: missing"):
        reader.verify(path)


def test_other_data_are_reported_and_another_tokenizer_is_refused(raw):
    run = dataclasses.replace(
        make_run(), data=DataConfig(data_path=("0.3", "b"), data_cache="cache", tokenizer="x.json")
    )
    meta = metadata.parse(raw)
    assert metadata.differences(meta, run, TOKENIZER) == []  # format 1 does not store the data
    stored = dataclasses.replace(run, data=DataConfig(data_path=("a",)))
    meta["config"] = json.loads(json.dumps(dataclasses.asdict(stored)))
    assert metadata.differences(meta, run, TOKENIZER) == ["resume    data differ: data_path was ['a'], is ('0.3', 'b')"]
    assert metadata.differences(meta, stored, TOKENIZER) == []
    with pytest.raises(ConfigError, match=r"trained with tokenizer byte \(hash bd.*pass --tokenizer byte"):
        metadata.differences(meta, run, {"name": "byte", "hash": "0"})
    assert metadata.differences(metadata.parse(raw), run, TOKENIZER | {"name": "moved.json"}) == []  # the same file


def test_a_checkpoint_of_a_run_with_users_batches_has_no_tokenizer():
    assert metadata.run_meta(make_run(), None)["tokenizer"] == {"name": "none", "hash": ""}


WRONG = {
    "[1, 2]": "is a JSON list, not an object",
    "5": "is a JSON int, not an object",
    "{}": "has no format",
    '{"format": 2}': "has no megajax",
    '{"format": "2"}': "format in its metadata is a str, not a int",
    '{"params": ': "is not a complete megajax checkpoint",
    "\udcff": "is not a complete megajax checkpoint",
    '{"format": 3, "megajax": "9.0"}': "newer megajax .9.0.*install megajax 9.0",
}


@pytest.mark.parametrize("text", WRONG)
def test_other_json_is_one_error_line_with_exit_code_2(tmp_path, capsys, text):
    (tmp_path / "state").mkdir()
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "metadata").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=WRONG[text]):
        reader.read_meta(tmp_path)
    assert inspect.main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_every_missing_or_wrong_field_is_named(raw):
    new = json.loads(json.dumps(raw | {"format": 2}))
    new["progress"] = {"step": 1, "samples": 2, "skipped": 0, "nonfinite": 0}
    metadata.parse(new)
    paths = [(name,) for name in metadata.REQUIRED if name != "format"]
    paths += [(section, name) for section, fields in metadata.REQUIRED_PARTS.items() for name in fields]
    for path in paths:
        for wrong in ("missing", None, [1]):
            broken = copy.deepcopy(new)
            table = broken if len(path) == 1 else broken[path[0]]
            if wrong == "missing":
                del table[path[-1]]
            else:
                table[path[-1]] = wrong
            with pytest.raises(ValueError, match=".".join(path)):
                metadata.parse(broken)
