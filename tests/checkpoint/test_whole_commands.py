"""The same command twice at once, and a run on a disk that fills up: whole commands."""

import json
import pathlib
import signal
import time

import pytest

from megajax.checkpoint import checksums
from megajax.checkpoint.directory import NAME, complete_steps
from tests.disk import fill
from tests.train.front_door import Run, rows

pytestmark = pytest.mark.slow
WORDS = "--devices cpu:1 --steps {} --save-every 50 --resume auto --run-dir {}"


@pytest.fixture
def first(tmp_path):
    """A run that has logged some steps and saved."""
    run = Run(tmp_path, WORDS.format(10**6, tmp_path / "run"), name="first")
    run.until(lambda: complete_steps(tmp_path / "run" / "checkpoints"), seconds=900)
    yield run
    run.process.kill()
    run.process.wait()


def is_intact(directory: pathlib.Path) -> None:
    """The log has every step once and no NUL byte, and all checkpoints are as they were written."""
    steps = [row["step"] for row in rows(directory)]
    assert steps == list(range(1, len(steps) + 1)) and b"\0" not in (directory / "log.jsonl").read_bytes()
    for step in complete_steps(directory / "checkpoints"):
        assert checksums.problems(directory / "checkpoints" / NAME.format(step)) == []


def test_a_killed_run_is_intact_and_resumes_at_once(tmp_path, first):
    """Its lock, which names a dead process of this host, is no obstacle."""
    directory = tmp_path / "run"
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert (directory / "run.lock").exists()
    is_intact(directory)
    newest = complete_steps(directory / "checkpoints")[-1]
    second = Run(tmp_path, WORDS.format(newest + 20, directory), name="second")
    assert second.wait(900) == 0, second.err
    assert f"resume    from step {newest}, the newest" in second.out
    is_intact(directory)
    assert not (directory / "run.lock").exists()


def test_a_run_continues_on_a_full_disk_and_logs_and_saves_when_there_is_room(tmp_path, small_disk):
    directory, filler = small_disk / "run", small_disk / "filler"
    run = Run(tmp_path, f"--devices cpu:1 --steps 1000000 --save-every 200 --max-to-keep 1 --run-dir {directory}")
    run.until(lambda: complete_steps(directory / "checkpoints"))
    saved = complete_steps(directory / "checkpoints")
    fill(filler)
    run.until(lambda: run.out.count("checkpoint NOT saved") >= 2 and "log records are dropped" in run.out)
    assert run.process.poll() is None and complete_steps(directory / "checkpoints") == saved
    count = len(rows(directory))
    filler.unlink()
    run.until(lambda: complete_steps(directory / "checkpoints")[-1] > saved[-1])
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.err == ""
    found = rows(directory)
    steps = [row["step"] for row in found]
    assert len(steps) > count and steps == sorted(set(steps)) and len(steps) < steps[-1]
    assert complete_steps(directory / "checkpoints") == [steps[-1]]
    lines = [line for line in run.out.splitlines() if "log records are dropped" in line or "logs are written" in line]
    assert len(lines) == 2 and lines[0].startswith("warning: cannot write ") and "No space left on device" in lines[0]
    assert lines[1].startswith("logs are written again; records dropped so far: ")


def test_a_run_whose_last_save_fails_ends_with_one_line_and_code_2(tmp_path, small_disk):
    directory = small_disk / "run"
    run = Run(tmp_path, f"--devices cpu:1 --steps 1000000 --save-every 100000 --run-dir {directory}")
    run.until(lambda: len(rows(directory)) > 5)
    fill(small_disk / "filler")
    time.sleep(1)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 2
    assert len(run.err.splitlines()) == 1, run.err
    assert run.err.startswith("error: step ") and "checkpoint NOT saved" in run.err and "No space left" in run.err


def test_a_log_on_a_full_device_does_not_stop_a_run(tmp_path):
    run = Run(tmp_path, f"--devices cpu:1 --steps 30 --run-dir {tmp_path / 'run'} --log-jsonl /dev/full")
    assert run.wait() == 0, run.err
    assert run.err == "" and complete_steps(tmp_path / "run" / "checkpoints") == [30]
    lines = [line for line in run.out.splitlines() if "dropped" in line]
    assert lines == [
        "warning: cannot write /dev/full: No space left on device: log records are dropped until a write succeeds",
        "warning: records dropped: 30 of full",
    ]


def test_memory_does_not_grow_over_saves_validations_and_steps(tmp_path):
    """A soak: after the first third, resident memory stays within 8 MB; 40 kB were lost in each of the 600 saves."""
    directory = tmp_path / "run"
    words = "--devices cpu:1 --steps 9000 --save-every 15 --validation-every 100 --validation-batches 1 --max-to-keep 1"
    run = Run(tmp_path, f"{words} --run-dir {directory}")

    def resident() -> float:
        return int(pathlib.Path(f"/proc/{run.process.pid}/statm").read_text().split()[1]) * 4096 / 1e6

    found = []
    for step in range(3000, 9000, 500):
        run.until(lambda: last_step(directory) >= step, seconds=1200)  # noqa: B023
        if run.process.poll() is None:
            found.append(resident())
    assert run.wait(600) == 0, run.err
    print("MB of resident memory every 500 steps from step 3000:", [round(value) for value in found])
    assert max(found[-3:]) - max(found[:3]) < 8


def last_step(directory: pathlib.Path) -> int:
    """The newest step in the log, without reading all of it."""
    path = directory / "log.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 5000))
        lines = file.read().splitlines()[:-1]
    return json.loads(lines[-1])["step"] if len(lines) > 1 else 0
