"""Real wandb, mlflow and trackio, each in its offline mode: what they have stored is read back. Skipped without them."""

import json
import math
import struct
import subprocess
import sys
import types

import jax
import pytest

from megajax import OutputConfig
from megajax.train.tracking.tracker import Tracker, request_of
from megajax.train.trainer import Trainer
from tests.train.test_callbacks import Fixed, Watcher
from tests.train.test_logging import record
from tests.train.test_trainer import Batches, make_run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Everything stays in the test's directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def go(directory, library, stop_after=None, **output):
    """Runs six steps, or fewer, with evaluations after the third and the sixth."""

    def ask(control, record):
        if record["step"] + 1 == stop_after:
            control.stop("enough")

    run, config = (
        make_run(),
        {"track": library, "track_project": "tests", "track_artifacts": "last", "track_wait": 120.0},
    )
    output = OutputConfig(run_dir=str(directory), tensorboard=False, **config, **output)
    watcher = Watcher(on_step=ask)
    Trainer(run, data=Batches(run), output=output, callbacks=[watcher], devices=jax.devices()[:1]).fit(
        evaluations=[Fixed()]
    )
    text = (directory / "logs" / "process_0.log").read_text()
    assert f"track     {library}: " in text and "warning" not in text, text
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines() if '{"step"' in line]


def sessions(directory, library):
    """Two sessions of one run, of four steps and of two; the records of log.jsonl."""
    go(directory, library, stop_after=4)
    return go(directory, library, resume="auto")


def wandb_records(directory) -> list:
    """All records of a run's offline sessions: LevelDB's log format (blocks of 32 KiB) after 7 bytes of a header."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        data, place, record = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if 2**15 - place % 2**15 < 7:  # the end of a block
                place += 2**15 - place % 2**15
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            record += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or the last part
                found.append(wandb_internal_pb2.Record.FromString(record))
                record = b""
    return found


def trackio_stored(project, name) -> dict:
    """The configuration and the rows of a run, read in a process of its own: trackio finds its directory at its import."""
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as store; project, name = sys.argv[1:]\n"
        "print(json.dumps({'config': store.get_run_config(project, name), 'rows': store.get_logs(project, name), "
        "'runs': [run['name'] for run in store.get_run_records(project)]}))"
    )
    run = subprocess.run([sys.executable, "-c", code, project, name], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_wandb(tmp_path):
    pytest.importorskip("wandb")
    logged = sessions(tmp_path / "first", "wandb")
    found = wandb_records(tmp_path / "first")
    runs = [one.run for one in found if one.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {json.loads((tmp_path / "first" / "tracker.json").read_text())["wandb"]}
    assert {(run.project, run.display_name) for run in runs} == {("tests", "first")}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["config"]["train"]["steps"] == 6 and config["config"]["output"]["track"] == "wandb"
    rows = []
    for one in found:
        if one.WhichOneof("record_type") == "history":
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
            rows.append((one.history.step.num, items))
    assert [(step, items["step"]) for step, items in rows] == [(step, step) for step in range(1, 7)]
    for (_, items), row in zip(rows, logged, strict=True):
        assert items["loss"] == row["loss"] and items["learning_rate"] == row["learning_rate"]
        assert ("own" in items) == (row["step"] in (3, 6))
    assert [one.exit.exit_code for one in found if one.WhichOneof("record_type") == "exit"] == [0, 0]
    artifacts = [one.artifact for one in found if one.WhichOneof("record_type") == "artifact"] or [
        one.request.log_artifact.artifact for one in found if one.request.HasField("log_artifact")
    ]
    assert [artifact.name[-13:] for artifact in artifacts] == ["step_00000004", "step_00000006"]


def test_mlflow(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    logged = sessions(tmp_path / "first", "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "first" / "tracker.json").read_text())["mlflow"]
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    assert run.data.params["config.train.steps"] == "6" and run.data.tags["after_step_4.config.output.resume"] == "auto"
    assert run.data.tags["reason"] == "enough"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(row["step"], row["loss"]) for row in logged]
    assert sorted(metric.step for metric in client.get_metric_history(run.info.run_id, "own")) == [3, 6]
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert names == {"step_00000004", "step_00000006"}
    files = {artifact.path for artifact in client.list_artifacts(run.info.run_id, "step_00000006")}
    assert "step_00000006/checksums" in files


def test_trackio(tmp_path):
    pytest.importorskip("trackio")
    logged = sessions(tmp_path / "first", "trackio")
    name = json.loads((tmp_path / "first" / "tracker.json").read_text())["trackio"]
    assert name.startswith("first-")
    stored = trackio_stored("tests", name)
    rows = stored["rows"]
    assert stored["runs"] == [name] and stored["config"]["config.train.steps"] == 6
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in logged]
    assert [row["step"] for row in rows if "own" in row] == [3, 6]


@pytest.mark.parametrize("library", ["wandb", "mlflow", "trackio"])
def test_steps_that_are_repeated_and_numbers_that_are_not_finite_are_logged(tmp_path, library):
    """A run that is killed after step 5 and resumes after step 2 logs steps 3 to 5 again; a failure is one."""
    pytest.importorskip(library)
    for after, resume in ((0, "no"), (2, "auto")):
        output = OutputConfig(run_dir=str(tmp_path), track=library, resume=resume, track_wait=120.0)
        tracker = Tracker(request_of(output, "first", {"config": {"train": {"steps": 6}}}, after))
        for step in range(after + 1, 6):
            tracker.write(record(step, loss=math.nan if step == 4 else float(step), grad_norm=math.inf))
        if resume == "no":
            tracker.on_exception(None, ValueError("mine"))
        else:
            tracker.on_end(None, types.SimpleNamespace(stopped=None))
        assert [line for line in tracker.close() if "warning" in line] == []
    if library == "wandb":
        found = wandb_records(tmp_path)
        assert [one.exit.exit_code for one in found if one.WhichOneof("record_type") == "exit"] == [1, 0]
        assert sum(one.WhichOneof("record_type") == "history" for one in found) == 8
    elif library == "mlflow":
        client = __import__("mlflow").MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        (run,) = client.search_runs([client.get_experiment_by_name("megajax").experiment_id])
        assert run.data.tags["reason"] == "ValueError: mine" and run.info.status == "FINISHED"
        history = client.get_metric_history(run.info.run_id, "loss")
        assert sorted(metric.step for metric in history) == [1, 2, 3, 3, 4, 4, 5, 5]
        assert all(math.isnan(metric.value) for metric in history if metric.step == 4)
    else:
        (name,) = json.loads((tmp_path / "tracker.json").read_text()).values()
        rows = trackio_stored("megajax", name)["rows"]
        assert sorted(row["step"] for row in rows) == [1, 2, 3, 3, 4, 4, 5, 5]


def test_wandb_without_a_key_is_a_line_and_the_run_trains(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run, output = make_run(), OutputConfig(run_dir=str(tmp_path / "first"), tensorboard=False, track="wandb")
    assert Trainer(run, data=Batches(run), output=output, devices=jax.devices()[:1]).fit().metrics["step"] == 6
    text = (tmp_path / "first" / "logs" / "process_0.log").read_text()
    assert text.count("wandb fails: UsageError: ") == 1 and "6 of 6 records of steps were not logged" in text
