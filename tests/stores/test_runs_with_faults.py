"""Runs in object stores whose requests are delayed, refused, cut and lost: nothing is lost, and a resumed run is equal."""

import json
import signal
import time

import pytest

from tests.stores.servers import FAULTS, Store, environment_of, missing, no_fault, random_faults
from tests.train.front_door import Run, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(missing()), reason=f"not installed: {missing()}: pip install 'megajax[stores,store_servers]'"
    ),
]
WORDS = "--devices cpu:2 --steps {steps} --save-every {every} --log-every 1 --resume auto --run-dir {place} {layout}"
FIRST, SECOND = "--data 2 --pipe 1 --tensor 1", "--pipe 2 --data 1 --tensor 1"
STEPS = 40


@pytest.fixture(scope="module", params=("s3", "gs"))
def store(request):
    found = Store(request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed")
    run = Run(path, WORDS.format(steps=STEPS, every=10, place=path / "run", layout=FIRST))
    assert run.wait() == 0, run.err
    return [row["loss"] for row in rows(path / "run")]


def in_store(store, place: str):
    """(complete steps, problems of their files, rows of the log, other folders) of a run, read without faults."""
    from megajax.checkpoint import checksums
    from megajax.checkpoint.directory import NAME, complete_steps
    from megajax.checkpoint.mirror import snapshot
    from megajax.checkpoint.object_store import children
    from megajax.checkpoint.object_store import place as place_of

    with environment_of(store.direct):
        directory = place_of(place)
        steps = complete_steps(directory / "checkpoints")
        found = [line for step in steps for line in checksums.problems(directory / "checkpoints" / NAME.format(step))]
        folders = [path.name for path in children(directory / "checkpoints")]
        local = snapshot(directory)
        log = local / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return steps, found, [line for line in lines if "step" in line], folders


CASES = {  # name: kinds of faults, share of the requests, seconds after a save until the run is killed, in the next one
    "delays": (("delay",), 0.2, None),
    "503": (("503",), 0.12, 2.0),
    "half": (("half",), 0.1, 1.0),
    "drop": (("drop",), 0.12, None),
    "lost": (("lost answer",), 0.1, 3.0),
    "all": (FAULTS, 0.12, 1.5),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_faults_loses_no_checkpoint_and_resumes_equal(tmp_path, store, undisturbed, case):
    kinds, share, killed_after = CASES[case]
    place = f"{store.scheme}://bucket/runs/{case}"
    store.proxy.counts.clear()
    store.proxy.fault = random_faults(kinds, share, seed=len(case))
    settings = {"steps": STEPS, "every": 10, "place": place}
    run = Run(tmp_path, WORDS.format(**settings, layout=FIRST), "first", **store.environment)
    run.until(lambda: "checkpoint saved" in run.out, 400)
    time.sleep(killed_after or 0)
    run.process.send_signal(signal.SIGKILL if killed_after else signal.SIGTERM)
    code = run.wait(400)
    assert code == (-signal.SIGKILL if killed_after else 0) or "step 40/40" in run.out, run.err
    steps, found, _, _ = in_store(store, place)
    assert found == []
    second = Run(tmp_path, WORDS.format(**settings, layout=SECOND), "second", **store.environment)
    assert second.wait(500) == 0, second.err
    store.proxy.fault = no_fault
    print(case, store.scheme, "killed" if killed_after else "stopped", steps, dict(store.proxy.counts))
    resumed = steps[-1] if steps else 0
    message = f"from step {resumed}, the newest" if steps else "starting from step 0"
    assert message in second.out, (second.out, second.err)
    assert "Traceback" not in run.err + second.err
    steps, found, log, folders = in_store(store, place)
    assert found == [] and steps[-1] == STEPS and len(steps) <= 3, (steps, second.out)
    assert len(folders) <= len(steps) + second.out.count("NOT saved") + 1, folders
    # Before a checkpoint is complete its lines are in the store: none is lost, whenever the run was killed.
    assert [row["step"] for row in log] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in log] == pytest.approx(undisturbed, rel=2e-5)
