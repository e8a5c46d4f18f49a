"""A run's directory: one run at a time, and messages about a directory that vanishes."""

import io
import shutil

import pytest
from rich.console import Console

from megajax.checkpoint.directory import complete_steps
from megajax.checkpoint.manager import Checkpoints
from megajax.checkpoint.metadata import Progress
from megajax.config import ConfigError, OutputConfig
from megajax.train.run_directory import RunDirectory
from megajax.train.sinks import read_steps
from tests import small
from tests.checkpoint.test_lock import Holder
from tests.disk import fill
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


def test_a_missing_directory_is_reported(tmp_path):
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    output = OutputConfig(run_dir=str(tmp_path / "new"), resume="auto")
    for count in (1, 0):
        directory = RunDirectory(run, output, runs.Letters())
        directory.close()
        assert len([text for text in directory.messages if "does not exist and is created" in text]) == count


def test_a_directory_that_vanishes_in_mid_run_is_reported_and_created_again(tmp_path, monkeypatch):
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
        messages = directory.checkpoints.poll()  # looks every two seconds, and before a save
        messages += directory.checkpoints.save(target, state, Progress(step=2))
        for line in messages + directory.checkpoints.wait():
            log.message(line)
        log.step(record(2))
        assert directory.close() == []
    vanished, saved = text.getvalue().splitlines()[1:3]
    assert (
        f"the run directory {path} has vanished and is created again" in vanished
        and "step 2: checkpoint saved" in saved
    )
    assert complete_steps(path / "checkpoints") == [2] and (path / "config.toml").exists()
    assert [row["step"] for row in read_steps(path / "log.jsonl")] == [2]
    assert "has vanished" in (path / "logs" / "process_0.log").read_text()


def test_vanished_checkpoints_are_reported(tmp_path):
    target, state = small.small_state()
    checkpoints = Checkpoints(tmp_path / "checkpoints", OutputConfig(), {})
    checkpoints.save(target, state, Progress(step=1))
    checkpoints.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    (text,) = checkpoints.save(target, state, Progress(step=2))
    assert f"{tmp_path / 'checkpoints'} has vanished, with the checkpoints in it, and is created again" in text
    assert "step 2: checkpoint saved" in checkpoints.close()[0]


def test_logs_and_saves_continue_after_the_disk_was_full(small_disk):
    """On a real full disk: all logs drop records, the save fails in one line, and both work again when there is room."""
    path, target, state = small_disk / "run", *small.small_state()
    run, text = runs.make_run((1, 1, 1), schedule="1f1b"), io.StringIO()
    directory = RunDirectory(run, OutputConfig(run_dir=str(path)), runs.Letters())
    with directory.open_log(Progress()) as log:
        log.console = Console(file=text, width=300)
        for step in range(1, 91):
            if step == 31:
                fill(small_disk / "filler")
            if step == 61:
                (small_disk / "filler").unlink()
            log.step(record(step))
            if step % 10 == 0:
                messages = directory.checkpoints.save(target, state, Progress(step=step))
                for line in messages + directory.checkpoints.wait():
                    log.message(line)
        assert directory.close() == []
    messages = [line for line in text.getvalue().splitlines() if "checkpoint saved" not in line and "loss" not in line]
    assert [line.partition(":")[0] for line in messages] == [
        "warning",
        *["warning"] * 3,
        "logs are written again; records dropped so far",
    ]
    assert sum("checkpoint NOT saved" in line and "No space left on device" in line for line in messages) == 3
    assert sum("log records are dropped" in line for line in messages) == 1
    assert complete_steps(path / "checkpoints") == [70, 80, 90]
    steps = [row["step"] for row in read_steps(path / "log.jsonl")]
    assert set(range(1, 31)) | set(range(62, 91)) <= set(steps) and steps == sorted(set(steps)) and len(steps) < 90
    assert "step 90" in (path / "logs" / "process_0.log").read_text()
