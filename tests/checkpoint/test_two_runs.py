"""The command of a run whose directory another run writes: refused on every process."""

import os

import pytest

from megajax.checkpoint.lock import LEASE
from tests.checkpoint.test_lock import Holder
from tests.runtime.test_distributed import MESH, ONE_DEVICE, free_port
from tests.train.front_door import Run, rows

pytestmark = pytest.mark.slow


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of the run directory, as the first run would."""
    (tmp_path / "run").mkdir()
    found = Holder(tmp_path / "run", LEASE)
    assert found.first == "locked"
    yield found
    found.kill()


@pytest.mark.parametrize("count", [1, 2])
def test_every_process_of_a_second_run_ends_with_one_line_and_code_2(tmp_path, holder, count):
    words = f"{MESH} --devices cpu:{8 // count} --steps 10 --resume auto --run-dir {tmp_path / 'run'}"
    if count > 1:
        words += f" --coordinator 127.0.0.1:{free_port()} --processes {count} --process-id"
    found = [Run(tmp_path, words + (f" {i}" if count > 1 else ""), name=f"process_{i}") for i in range(count)]
    assert [run.wait(900) for run in found] == [2] * count, [run.err for run in found]
    host = os.uname().nodename
    for run in found:
        lines = run.err.splitlines()
        assert len(lines) == 1, run.err
        assert lines[0].startswith(
            f"error: run directory {tmp_path / 'run'} is in use by process {holder.process.pid} on {host}: "
        )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_a_second_start_and_another_run_on_the_port_do_not_disturb_a_run(tmp_path):
    """Two processes train; both are started again, and two of another run with the same port."""
    words = f"{ONE_DEVICE.format(2)} --steps 100000 --coordinator 127.0.0.1:{free_port()} --processes 2 --process-id"
    first = [Run(tmp_path, f"{words} {i} --run-dir {tmp_path}/run", name=f"first_{i}") for i in range(2)]
    first[0].until(lambda: len(rows(tmp_path / "run")) > 5)
    again = [Run(tmp_path, f"{words} {i} --run-dir {tmp_path}/run", name=f"again_{i}") for i in range(2)]
    other = [Run(tmp_path, f"{words} {i} --run-dir {tmp_path}/other", name=f"other_{i}") for i in range(2)]
    assert [run.wait() for run in (*again, *other)] == [2] * 4, [run.err for run in (*again, *other)]
    assert all(run.err.count("\n") == 0 and run.err.startswith("error: ") for run in (*again, *other))
    step = len(rows(tmp_path / "run"))
    first[0].until(lambda: len(rows(tmp_path / "run")) > step + 5)
    first[0].process.terminate()
    assert [run.wait() for run in first] == [0, 0], [run.err for run in first]
