"""Trackers: what their libraries are given, and that one that fails, is slow or blocks costs the training nothing."""

import functools
import io
import itertools
import json
import math
import statistics
import sys
import time
import types

import jax
import pytest
from rich.console import Console

from megajax import OutputConfig
from megajax.checkpoint.directory import complete_steps
from megajax.config import ConfigError
from megajax.config.output import TRACKERS
from megajax.train import run_directory
from megajax.train import trainer as trainer_module
from megajax.train.callbacks import Callbacks
from megajax.train.logging import RunLog
from megajax.train.sinks import read_steps
from megajax.train.tracking import tracker as tracker_module
from megajax.train.tracking.tracker import QUEUE, Tracker, request_of, require_library
from megajax.train.trainer import Trainer
from tests.train import test_loop
from tests.train.test_callbacks import Fixed, Watcher
from tests.train.test_logging import record
from tests.train.test_loop import MeanTraining, run_loop
from tests.train.test_trainer import Batches, make_run

WAIT = 2.0  # --track-wait where the library blocks, which it does for an hour
LONG = 300.0  # where it does not: on a busy machine its process may start late


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Runs the fake library; a function that sets how it fails, and one that reads what it was given."""
    path = tmp_path / "given"
    path.write_text("")
    monkeypatch.setattr(tracker_module, "PROCESS", "tests.train.fake_tracker")
    monkeypatch.setattr(run_directory, "require_library", lambda library: None)
    monkeypatch.setenv("FAKE_TRACKER_FILE", str(path))
    monkeypatch.setenv("FAKE_TRACKER", "")
    return types.SimpleNamespace(
        fails=lambda how: monkeypatch.setenv("FAKE_TRACKER", how),
        given=lambda: [json.loads(line) for line in path.read_text().splitlines()],
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Trainers of one run have the same compiled step."""
    make, made = trainer_module.make_training, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "make_training", lambda run, *args: made.setdefault(run, make(run, *args)))
        yield


def trainer(directory, callbacks=(), **output):
    run = make_run()
    output = OutputConfig(run_dir=str(directory), tensorboard=False, track="wandb", **output)
    return Trainer(run, data=Batches(run), output=output, callbacks=callbacks, devices=jax.devices()[:1])


def make_tracker(wait=LONG) -> Tracker:
    request = {"library": "wandb", "name": "a", "id_file": None, "resumes": False, "config": {}, "wait": wait}
    return Tracker(request)


def records_of(lines) -> list[dict]:
    return [one for line in lines for one in line.get("records", [])]


def test_a_run_is_tracked_and_continued(tmp_path, fake, capsys):
    """All records with their validations, the configuration, the end; the id is kept and a resumed run has it again."""
    stop = Watcher(on_step=lambda control, record: control.stop("enough") if record["step"] == 2 else None)
    trainer(tmp_path / "run", [stop], track_artifacts="last", track_project="p").fit(evaluations=[Fixed()])
    (start, *rest, artifact, end) = fake.given()
    assert start["known"] is None and start["request"]["name"] == "run" and start["request"]["project"] == "p"
    assert start["request"]["config"]["config"]["train"]["steps"] == 6 and start["request"]["after"] == 0
    logged = read_steps(tmp_path / "run" / "log.jsonl")
    found = records_of(rest)
    assert [one["step"] for one in found] == [1, 2, 3] and found[2]["own"] == 1.0
    assert [one["loss"] for one in found] == [one["loss"] for one in logged]
    assert artifact["artifact"].endswith("step_00000003") and "state" in artifact["files"]
    assert end == {"state": "stopped", "reason": "enough"}
    assert json.loads((tmp_path / "run" / "tracker.json").read_text()) == {"wandb": "id of run"}
    assert "track     wandb: here" in capsys.readouterr().out
    trainer(tmp_path / "run", resume="auto").fit()
    again = fake.given()[len(rest) + 3 :]
    assert again[0]["known"] == "id of run" and again[0]["request"]["after"] == 3
    assert [one["step"] for one in records_of(again)] == [4, 5, 6]
    assert again[-1] == {"state": "finished", "reason": None}


def test_an_error_and_all_checkpoints_are_tracked(tmp_path, fake):
    def fail(control, record):
        if record["step"] == 4:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trainer(tmp_path / "run", [Watcher(on_step=fail)], track_artifacts="all", save_every=2).fit()
    lines = fake.given()
    assert lines[-1] == {"state": "failed", "reason": "KeyError: 'mine'"}
    assert [line["artifact"][-1] for line in lines if "artifact" in line] == ["2"]


FAILURES = {  # how: (a line of the log, whether all records are lost)
    "raises at the start": ("wandb fails: ValueError: no key; training continues", True),
    "raises": ("wandb fails: OSError: no network; training continues", False),
    "dies": ("wandb fails: its process ended with exit code 7; training continues", True),
    "blocks at the start": (f"wandb had not ended {WAIT:g} s after the run and was killed", True),
    "blocks": (f"wandb had not ended {WAIT:g} s after the run and was killed", True),
    "blocks at the end": (f"wandb had not ended {WAIT:g} s after the run and was killed", False),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_tracker_is_a_line_and_never_waited_for(fake, how):
    """20,000 records go in at once, although the library never returns; the end takes no longer than the limit."""
    fake.fails(how)
    text, wait = io.StringIO(), WAIT if how.startswith("blocks") else LONG
    tracker = make_tracker(wait)
    with RunLog(20_000, 10**6, console=Console(file=text, width=300), tracker=tracker) as log:
        start = time.perf_counter()
        for step in range(1, 20_001):
            log.tracker.write(record(step))
            for line in log.tracker.messages():
                log.message(line)
        taken = time.perf_counter() - start
        tracker.on_end(None, types.SimpleNamespace(stopped=None))
        end = time.perf_counter()
    ended = time.perf_counter() - end
    lines, (said, all_lost) = text.getvalue().splitlines(), FAILURES[how]
    assert sum(said in line for line in lines) == 1, lines
    assert taken < 10.0  # 0.5 ms for a record, on a busy machine
    assert ended < wait + 3.0
    lost = next(line for line in lines if "of 20000 records of steps were not logged" in line)
    assert not all_lost or "20000 of 20000" in lost
    assert sum("too slow" in line for line in lines) <= 1 and len(lines) <= 5


def test_a_slow_tracker_drops_records_and_the_run_ends_in_time(fake):
    """A second for each batch: the queue overflows once, which is said once and counted."""
    fake.fails("slow")
    tracker, count = make_tracker(wait=30.0), 5 * QUEUE
    for step in range(1, count + 1):
        tracker.write(record(step))
    (warning,) = [line for line in tracker.messages() if "warning" in line]
    assert warning == "warning: wandb is too slow: records of steps are dropped; training continues"
    tracker.on_end(None, types.SimpleNamespace(stopped=None))
    (line,) = [line for line in tracker.close() if "not logged" in line]
    logged = records_of(fake.given())
    assert f"warning: wandb: {count - len(logged)} of {count} records" in line
    assert tracker.dropped == count - len(logged) > 0 and len(logged) >= QUEUE
    assert fake.given()[-1]["state"] == "finished"


def test_numbers_that_are_not_finite_arrive(fake):
    tracker = make_tracker()
    tracker.write(record(1, loss=math.nan, grad_norm=math.inf))
    tracker.close()
    ((found,),) = [line["records"] for line in fake.given() if "records" in line]
    assert math.isnan(found["loss"]) and found["grad_norm"] == math.inf
    assert fake.given()[-1] == {"state": "failed", "reason": None}  # nobody said how the run ended


def test_a_killed_training_leaves_a_failed_run_and_no_process(fake):
    tracker = make_tracker()
    tracker.write(record(1))
    while not records_of(fake.given()):
        time.sleep(0.05)
    tracker._process.stdin.close()  # as the system does when the training's process ends
    assert tracker._process.wait(20) == 0
    assert fake.given()[-1] == {"state": "failed", "reason": "the training's process has ended"}


def test_a_run_trains_and_saves_with_a_tracker_that_blocks(tmp_path, fake, capsys):
    fake.fails("blocks at the start")
    result = trainer(tmp_path / "run", track_wait=0.5).fit()
    assert result.metrics["step"] == 6 and complete_steps(tmp_path / "run" / "checkpoints") == [6]
    assert "wandb had not ended 0.5 s after the run" in capsys.readouterr().out


def test_a_library_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "trackio").mkdir()  # as offline runs leave one called wandb
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ConfigError, match=r"track = trackio needs trackio, .*pip install 'megajax\[trackio\]'"):
        require_library("trackio")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"track_project": "a"}, "track_project = 'a' has no tracker"),
        ({"track_artifacts": "all"}, "track_artifacts = 'all' has no tracker"),
        ({"track": "wandb", "track_artifacts": "last"}, "has no checkpoints: pass --run-dir"),
        ({"track": "comet"}, "track"),
        ({"track": "wandb", "track_wait": 0.0}, "track_wait"),
    ],
)
def test_options_without_an_effect_are_refused(output, said):
    with pytest.raises(ConfigError, match=said):
        OutputConfig(**output).validate()


class Sleeping(MeanTraining):
    """Steps of 20 ms."""

    def train_step(self, state, batch, hold):
        time.sleep(0.02)
        return state, {"loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3, "loss_scale": 1.0, "skipped": 0}


class EverySecondBlock:
    """A tracker that gets the records of every second ten steps."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.seconds, self._start = tracker, 0.0, 0.0

    def write(self, record):
        self._start = time.perf_counter()
        if record["step"] // 10 % 2:
            self.tracker.write(record)

    def messages(self):
        found = self.tracker.messages()
        self.seconds += time.perf_counter() - self._start
        return found

    def close(self):
        return self.tracker.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", *FAILURES, "slow", "wandb", "mlflow", "trackio"])
def test_steps_take_as_long_as_without_a_tracker(tmp_path, monkeypatch, request, how):
    """In one run, steps with and without their records tracked, by a fake or a real library."""
    if how in TRACKERS:
        pytest.importorskip(how)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    else:
        request.getfixturevalue("fake").fails(how)
    output = OutputConfig(run_dir=str(tmp_path), track=how if how in TRACKERS else "wandb", track_wait=5.0)
    times, tracker = [], EverySecondBlock(Tracker(request_of(output, "first", {"config": {}}, 0)))
    watcher = Watcher(on_step=lambda control, record: times.append(time.perf_counter()))
    monkeypatch.setattr(test_loop, "MeanTraining", Sleeping)
    monkeypatch.setattr(test_loop, "EventLog", functools.partial(test_loop.EventLog, tracker=tracker))
    steps = {"steps": 800, "validation_batches": 0, "log_every": 10**6}
    run_loop(hooks={"callbacks": Callbacks([watcher])}, **steps)
    taken = [(step // 10 % 2, after - before) for step, (before, after) in enumerate(itertools.pairwise(times), 1)]
    # The fast ones: the others wait for whatever else the machine does.
    without, tracked = (
        statistics.quantiles([one for kind, one in taken if kind == which], n=20)[0] for which in (0, 1)
    )
    ratio, own = tracked / without, tracker.seconds / (times[-1] - times[0])
    print(
        f"{how or 'works'}: steps with a tracker take {ratio:.4f} of {1e3 * without:.2f} ms; {own:.3%} in its functions"
    )
    assert own <= 0.005  # of half of the steps
    assert ratio <= 1.01
