"""A run that is killed or receives a signal at any moment."""

import os
import random
import shutil
import signal
import time

import pytest

from megajax.checkpoint import checksums, writer
from megajax.checkpoint.directory import NAME, complete_steps
from tests.train.front_door import Run, rows

WORDS = "--devices cpu:1 --steps {steps} --save-every {every} --resume auto --run-dir {directory}"


def kill_and_resume(tmp_path, kills: int, steps: int) -> int:
    """Kills a run that many times, mostly during a save, then lets it finish. Returns the number of kills during a save."""
    directory, chance, during_save = tmp_path / "run", random.Random(7), 0
    checkpoints = directory / "checkpoints"
    for number in range(kills + 1):
        # The last run, which ends, need not save all the time.
        words = WORDS.format(steps=steps, every=3 if number < kills else 10**6, directory=directory)
        run = Run(tmp_path, words, name=f"run{number}", **own_cache(tmp_path))
        newest = complete_steps(checkpoints)[-1:]
        if number == kills:
            assert run.wait() == 0, run.err
        else:
            begun = newest[0] if newest else 0
            run.until(lambda: "compiling" in run.out and len(rows(directory)) > begun)  # noqa: B023
            time.sleep(chance.uniform(0, 0.5))
            if number % 2:
                run.until(lambda: unfinished(checkpoints))
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()
            during_save += unfinished(checkpoints)
        message = f"from step {newest[0]}, the newest" if newest else "starting from step 0"
        assert message in run.out
        for step in complete_steps(checkpoints):
            assert checksums.problems(checkpoints / NAME.format(step)) == []
    assert [row["step"] for row in rows(directory)] == list(range(1, steps + 1))
    print(f"{during_save} of {kills} kills during a save")
    return during_save


def own_cache(tmp_path) -> dict[str, str]:
    """The environment of a process whose kill may leave a damaged entry in the compilation cache of this directory only."""
    return {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}


def unfinished(checkpoints) -> bool:
    """Whether a save is in progress, or was when the run was killed."""
    return any(writer.TEMPORARY in path.name for path in checkpoints.iterdir())


def losses(directory):
    return [row["loss"] for row in rows(directory)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed")
    run = Run(path, WORDS.format(steps=400, every=1000, directory=path / "run"))
    assert run.wait() == 0, run.err
    return path


@pytest.mark.slow
def test_a_run_killed_at_two_moments_has_the_losses_of_an_undisturbed_run(tmp_path, undisturbed):
    """Every resume starts from a complete checkpoint, and finally every loss equals that of an undisturbed run."""
    shutil.copytree(os.environ["JAX_COMPILATION_CACHE_DIR"], tmp_path / "compiled")
    kill_and_resume(tmp_path, kills=2, steps=400)
    assert losses(tmp_path / "run") == losses(undisturbed / "run")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_killed_at_25_moments_has_the_losses_of_an_undisturbed_run(tmp_path):
    """As above, 25 times, with enough steps that no run finishes before it is killed."""
    steps = 1200
    assert kill_and_resume(tmp_path, kills=25, steps=steps) >= 8
    whole = Run(tmp_path, WORDS.format(steps=steps, every=10**6, directory=tmp_path / "whole"), name="whole")
    assert whole.wait() == 0, whole.err
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_saves_and_exits(tmp_path, number=signal.SIGTERM):
    """The run exits after the step and the save with code 0, and the next start resumes there."""
    words = WORDS.format(steps=10**6, every=10**6, directory=tmp_path / "run")
    run = Run(tmp_path, words)
    run.until(lambda: len(rows(tmp_path / "run")) >= 5)
    run.process.send_signal(number)
    start = time.monotonic()
    assert run.wait() == 0, run.err
    assert time.monotonic() - start < 10  # a step takes milliseconds, the first save about a second
    assert f"{number.name} received: saving a checkpoint and stopping" in run.out
    last = rows(tmp_path / "run")[-1]["step"]
    assert complete_steps(tmp_path / "run" / "checkpoints") == [last]
    assert f"step {last}: checkpoint saved" in run.out
    assert run.err == ""
