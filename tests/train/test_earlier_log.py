"""A file of --log-jsonl that exists keeps its content; a run that has ended, and a Trainer that was used."""

import types

import pytest

from megajax import OutputConfig, ParallelConfig, RunConfig, TrainConfig, Trainer, preset
from megajax.checkpoint.manager import Progress
from megajax.config import ConfigError
from megajax.train import trainer
from megajax.train.earlier_log import keep_earlier, last_record
from megajax.train.run_directory import RunDirectory

RUN = RunConfig(
    preset("tiny"),
    ParallelConfig(data=8, microbatch_size=1),
    TrainConfig(global_batch_size=8, precision="fp32", steps=10, warmup_steps=1),
)
LINES = '{"after_step": 0}\n' + "".join(f'{{"step": {step}, "loss": {step}.5}}\n' for step in range(1, 8))


def open_log(directory, log, step, **output):
    """Opens the log of a run at a step, and closes it; returns its messages."""
    files = RunDirectory(RUN, OutputConfig(log_jsonl=str(log), tensorboard=False, **output), None)
    with files.open_log(Progress(step, 8 * step)):
        pass
    files.close()
    return files.messages


def test_the_log_of_an_earlier_run_is_renamed(tmp_path):
    log = tmp_path / "log.jsonl"
    for number in (1, 2):
        log.write_text(LINES)
        messages = open_log(tmp_path, log, 0)
        assert (tmp_path / f"log.jsonl.{number}").read_text() == LINES
        assert f"log       {log} is of an earlier run, and is now called log.jsonl.{number}" in messages
        assert log.read_text().count("\n") == 1  # the session


@pytest.mark.parametrize("content", ["import os\n", '{"a": 1}\n', "[" * 5000, "\0\0", '"step"\n', "\n\n"])
@pytest.mark.parametrize("step", [0, 3])
def test_a_file_that_is_no_log_is_refused(tmp_path, content, step):
    path = tmp_path / "model.py"
    path.write_text(content)
    with pytest.raises(ConfigError, match="model.py exists and is not a log of megajax: pass --log-jsonl"):
        open_log(tmp_path, path, step)
    assert path.read_text() == content


def test_a_resumed_run_appends_to_its_own_log_only(tmp_path):
    """Lines of steps that will be taken again are dropped; the log of the run that it resumes from is not its own."""
    log = tmp_path / "log.jsonl"
    log.write_text(LINES)
    for step in (3, 7):
        (tmp_path / f"run/checkpoints/step_{step:08d}/state").mkdir(parents=True)
    open_log(tmp_path, log, 3, run_dir=str(tmp_path / "run"), resume="3")
    assert log.read_text().startswith(LINES[: LINES.index('{"step": 4')]) and log.read_text().count("\n") == 5
    log.write_text(LINES)
    open_log(tmp_path, log, 7, run_dir=str(tmp_path / "other"), resume=str(tmp_path / "run"))
    assert (tmp_path / "log.jsonl.1").read_text() == LINES


@pytest.mark.parametrize("content", [None, ""])
def test_a_new_or_empty_file_and_a_device_are_written(tmp_path, content):
    log = tmp_path / "log.jsonl"
    if content is not None:
        log.write_text(content)
    assert keep_earlier(log, False) == [] and keep_earlier("/dev/null", False) == []
    assert not list(tmp_path.glob("*.1"))


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text(LINES)

    def refuses(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.rename", refuses)
    with pytest.raises(ConfigError, match="cannot rename the log .*Permission denied"):
        keep_earlier(tmp_path / "log.jsonl", False)


def test_the_last_record_of_a_log(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(
        LINES + '{"step": 8, "time": "now", "loss": "nan", "load": [0.5, "inf"], "mfu": null}\n{"step": 8, "lo'
    )
    found = last_record(log, 8)
    assert found.pop("loss") != 0 and found == {"step": 8, "load": [0.5, float("inf")], "mfu": None}
    assert last_record(log, 7)["loss"] == 7.5 and last_record(log, 9) == last_record(tmp_path / "none", 8) == {}


def started(training):
    """A state with the structure of a run's."""
    return types.SimpleNamespace(params=training.params_sharding)


def test_the_library_example_of_the_readme_runs_twice(tmp_path, monkeypatch):
    """The second start has no step left: its metrics are those of the log."""
    (tmp_path / "log.jsonl").write_text(LINES)
    monkeypatch.setattr(RunDirectory, "resume", lambda self, training: (started(training), Progress(7, 80)))
    monkeypatch.setattr(trainer, "train", lambda *arguments, resume, **settings: (resume[0], {}))
    run = Trainer(RUN, output=OutputConfig(run_dir=str(tmp_path), resume="auto", tensorboard=False))
    assert run.fit().metrics["loss"] == 7.5


def test_fit_is_called_once(monkeypatch):
    """A second call would start from step 0 and write over the first one's files."""
    monkeypatch.setattr(trainer, "train", lambda *arguments, **settings: (None, {"loss": 1.0}))
    run = Trainer(RUN)
    assert run.fit().metrics == {"loss": 1.0}
    with pytest.raises(ConfigError, match='was called before.*make a new Trainer.*resume="auto"'):
        run.fit()
