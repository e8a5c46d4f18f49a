"""Four hosts, one process each, lose all processes and one host's memory; the run resumes without any checkpoint."""

import shutil
import signal

import numpy as np
import pytest

from megajax.checkpoint.directory import complete_steps
from megajax.config.output import MEMORY_VARIABLE
from tests.runtime.test_distributed import RATE, free_port
from tests.train.front_door import Run, rows

EVERY = 5
WORDS = (
    f"{RATE} --global-batch-size 12 --microbatch-size 1 --hidden 24 --zero 1 --devices cpu:1 --save-every 1000000 "
    f"--replicate-state {EVERY} --peer-timeout 600"
)


def start(path, hosts: list[int], name: str, words: str) -> list[Run]:
    """A process on each of the hosts; each has a memory of its own."""
    port = free_port()
    flags = f"--data {len(hosts)} --coordinator 127.0.0.1:{port} --processes {len(hosts)} --process-id"
    return [
        Run(
            path,
            f"{WORDS} {words} {flags} {number}",
            name=f"{name}_{number}",
            **{MEMORY_VARIABLE: str(path / f"memory{host}")},
        )
        for number, host in enumerate(hosts)
    ]


def kill_after(found: list[Run], directory, step: int) -> None:
    """Kills all processes at once, when the log has that step."""
    try:
        found[0].until(lambda: [row for row in rows(directory)[-1:] if row["step"] >= step], 900)
    finally:
        for run in found:
            run.process.send_signal(signal.SIGKILL)
        for run in found:
            run.process.wait()


def resumed_from(text: str) -> int:
    (line,) = [line for line in text.splitlines() if line.startswith("resume    from step")]
    assert "replicated in host memory" in line and "read from other hosts" in line
    return int(line.split()[3].rstrip(","))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_lost_host_costs_the_steps_since_the_last_replication(tmp_path):
    directory = tmp_path / "run"
    words = f"--steps 100000 --resume auto --run-dir {directory}"
    kill_after(start(tmp_path, [0, 1, 2, 3], "first", words), directory, 23)
    assert complete_steps(directory / "checkpoints") == []
    killed_at = rows(directory)[-1]["step"]

    shutil.rmtree(tmp_path / "memory2")  # host 2 is replaced by an empty one
    second = start(tmp_path, [0, 1, 2, 3], "second", words)
    kill_after(second, directory, killed_at + 23)
    begun = resumed_from(second[0].out)
    assert killed_at - 2 * EVERY <= begun <= killed_at and begun % EVERY == 0
    killed_again_at = rows(directory)[-1]["step"]

    shutil.rmtree(tmp_path / "memory1")  # host 1 is lost, and three resume
    third = start(tmp_path, [0, 2, 3], "third", words)
    third[0].until(lambda: rows(directory)[-1]["step"] > killed_again_at + 3, 900)
    third[1].process.send_signal(signal.SIGTERM)
    assert [run.wait(900) for run in third] == [0, 0, 0], [run.err for run in third]
    on_three = resumed_from(third[0].out)
    assert killed_again_at - 2 * EVERY <= on_three <= killed_again_at
    assert "resharded: data was 4, is 3" in third[0].out
    assert "goodput   " in third[0].out and "in 3 sessions" in third[0].out

    found = rows(directory)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    assert complete_steps(directory / "checkpoints") == [len(found)]
    assert [list(path.iterdir()) for path in tmp_path.glob("memory*")] == [[]] * 3  # the checkpoint has the state

    whole = start(tmp_path, [0, 1, 2, 3], "whole", f"--steps {len(found)} --run-dir {tmp_path}/whole")
    assert [run.wait(900) for run in whole] == [0] * 4, [run.err for run in whole]
    losses, undisturbed = ([row["loss"] for row in rows(path)] for path in (directory, tmp_path / "whole"))
    assert losses[:on_three] == undisturbed[:on_three]
    np.testing.assert_allclose(losses[on_three:], undisturbed[on_three:], rtol=1e-5)
