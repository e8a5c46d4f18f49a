"""The slow process is named by what it does without the others."""

import pytest

from megajax.train.stragglers import HostTimes, Stragglers, slow_processes
from tests.runtime.test_distributed import free_port
from tests.train.front_door import Run, rows


def times(**changed: float) -> dict[int, HostTimes]:
    """Four processes; the third has other times."""
    usual = {"step": 10, "data": 0.001, "probe": 0.003, "device": 5}
    found = {process: HostTimes(**usual, host=f"node{process}") for process in range(4)}
    return found | {2: HostTimes(**usual | changed, host="node2")}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"probe": 0.0044}, None),
        ({"probe": 0.006}, "a matmul on its device 5 takes 6.00 ms, the median of 4 processes is 3.00 ms"),
        ({"data": 0.2}, "waiting for data takes its host 200.00 ms, the median of 4 processes is 1.00 ms"),
        ({"data": 0.003}, None),  # three times the median, and nothing in a step of a second
        ({"probe": 0.001}, None),
    ],
)
def test_a_process_slower_than_the_median_is_named(changed, words):
    lines = slow_processes(times(**changed), step=10, step_seconds=1.0)
    if words is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"warning: step 10: process 2 on node2 is slow: {words}")


def test_of_two_processes_the_slower_is_named():
    two = {process: own for process, own in times(probe=0.1).items() if process in (1, 2)}
    assert "process 2 on node2" in slow_processes(two, 1, 1.0)[0]
    assert slow_processes({0: times()[0]}, 1, 1.0) == []


def test_one_process_measures_itself_and_has_nothing_to_say():
    import jax

    stragglers = Stragglers(jax.local_devices()[:2], "here")
    stragglers.add_data(0.5)
    assert stragglers.measure(3) == []


SLOW_DATA = """
import sys
import time
from megajax.data.prefetch import Prefetch

usual = Prefetch.batch

def slow(self, consumed_samples):
    time.sleep(0.3)
    return usual(self, consumed_samples)

if sys.argv[sys.argv.index("--process-id") + 1] == "1":  # all processes have the same options
    Prefetch.batch = slow
"""


@pytest.mark.slow
def test_a_process_whose_data_are_slow_is_named(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    port = free_port()
    flags = f"--data 2 --devices cpu:1 --coordinator 127.0.0.1:{port} --processes 2 --steps 12 --check-every 3"
    flags += f" --run-dir {tmp_path}/run --import {tmp_path}/slow.py --process-id"
    found = [Run(tmp_path, f"{flags} {i}", name=f"process_{i}") for i in range(2)]
    assert [run.wait() for run in found] == [0, 0], [run.err for run in found]
    assert "process 1 on " in found[0].out and "is slow: waiting for data takes its host 30" in found[0].out
    assert "process 0 on" not in found[0].out and "is slow" not in found[1].out
    assert len(rows(tmp_path / "run")) == 12 and 0 < rows(tmp_path / "run")[-1]["goodput"] < 1
