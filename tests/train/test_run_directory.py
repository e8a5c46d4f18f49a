"""A run's directory: one run at a time, and what is said when it vanishes."""

import io
import json
import shutil

import pytest
from rich.console import Console

from megajax.checkpoint import manager
from megajax.checkpoint.manager import Checkpoints
from megajax.checkpoint.metadata import Progress
from megajax.config import ConfigError, OutputConfig
from megajax.train.run_directory import RunDirectory
from tests import small
from tests.checkpoint.test_lock import Holder
from tests.train import runs
from tests.train.test_logging import record


def content(directory) -> dict:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_directory_that_another_run_writes_is_left_alone(tmp_path):
    """Neither its log nor its checkpoints, unfinished ones included, are touched."""
    for name in ("step_00000004", "step_00000008", "step_00000012.unfinished"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "file").write_text(name)
    (tmp_path / "log.jsonl").write_text('{"step": 12}\n')
    (tmp_path / "config.toml").write_text("")
    holder = Holder(tmp_path, lease=20.0)
    before = content(tmp_path)
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    try:
        with pytest.raises(ConfigError, match=f"is in use by process {holder.process.pid} on "):
            RunDirectory(run, OutputConfig(run_dir=str(tmp_path), resume="auto"), runs.Letters())
        assert content(tmp_path) == before
    finally:
        holder.kill()
    directory = RunDirectory(run, OutputConfig(run_dir=str(tmp_path), resume="auto"), runs.Letters())
    assert directory.messages[-1].startswith("resume    from step 8")
    assert not (tmp_path / "checkpoints" / "step_00000012.unfinished").exists()
    directory.close()
    assert not (tmp_path / "run.lock").exists()


def test_a_wrong_step_leaves_no_directory_behind(tmp_path):
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    with pytest.raises(ConfigError, match="no checkpoint of step 5"):
        RunDirectory(run, OutputConfig(run_dir=str(tmp_path / "new"), resume="5"), runs.Letters())
    assert not (tmp_path / "new").exists()


def test_a_directory_that_is_not_there_is_said(tmp_path):
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    output = OutputConfig(run_dir=str(tmp_path / "new"), resume="auto")
    for count in (1, 0):
        directory = RunDirectory(run, output, runs.Letters())
        directory.close()
        assert len([text for text in directory.messages if "does not exist and is created" in text]) == count


def test_a_directory_that_vanishes_in_mid_run_is_said_and_created_again(tmp_path, monkeypatch):
    monkeypatch.setattr("megajax.train.log_file.PATH_CHECK_SECONDS", 0.0)
    path, target, state = tmp_path / "run", *small.small_state()
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    directory, text = RunDirectory(run, OutputConfig(run_dir=str(path)), runs.Letters()), io.StringIO()
    with directory.open_log(Progress()) as log:
        log.console = Console(file=text, width=300)
        log.step(record(1))
        directory.checkpoints.save(target, state, Progress(step=1))
        directory.checkpoints.wait()
        shutil.rmtree(path)
        assert directory.checkpoints.poll() == []  # it is looked up every two seconds, and before a save
        for line in directory.checkpoints.save(target, state, Progress(step=2)) + directory.checkpoints.wait():
            log.message(line)
        log.step(record(2))
        assert directory.close() == []
    says, saved = text.getvalue().splitlines()[1:3]
    assert f"the run directory {path} has vanished and is created again" in says and "step 2: checkpoint saved" in saved
    assert manager.complete_steps(path / "checkpoints") == [2] and (path / "config.toml").exists()
    assert json.loads((path / "log.jsonl").read_text())["step"] == 2
    assert "has vanished" in (path / "logs" / "process_0.log").read_text()


def test_checkpoints_that_vanish_are_said(tmp_path):
    target, state = small.small_state()
    checkpoints = Checkpoints(tmp_path / "checkpoints", OutputConfig(), {})
    checkpoints.save(target, state, Progress(step=1))
    checkpoints.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    (text,) = checkpoints.save(target, state, Progress(step=2))
    assert f"{tmp_path / 'checkpoints'} has vanished, with the checkpoints in it, and is created again" in text
    assert "step 2: checkpoint saved" in checkpoints.close()[0]
