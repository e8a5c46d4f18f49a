"""Thirty random events around a launched run: it goes on, loses nothing but the steps since the last save, leaves nobody.

MEGAJAX_TEST_EVENTS is their number, MEGAJAX_TEST_SEED chooses them.
"""

import os
import pathlib
import random
import shutil
import signal
import time

import pytest

from tests.launch.test_launch import Launched, running

EVENTS, SEED, NODES = 30, 5, 3
PATIENCE = 90 * max(1.0, os.getloadavg()[0] / os.cpu_count())  # seconds until the run makes steps again
FOREIGN = ["", "{", '{"name": "x"}', '{"code": 1}', "[1]", "\0" * 100, '{"number": 99, "members": "all"}', "[" * 90_000]
NAMES = ["nodes/x.json", "generation-000900.json", "generation-new.json", "end-000001.json", "end-x.json", "notes.txt"]
NEWER = '{"name": "n", "host": "h", "joined": 1.5, "address": "h", "count": 7, "rack": [1], "state": "resting"}'


class Soaked(Launched):
    """A run and its agents, with the events that may befall them."""

    def __init__(self, directory: pathlib.Path, chance: random.Random):
        super().__init__(directory, f"--nodes 1:{NODES} --max-failures 5 -- --steps 1000000")
        self.chance, self.launch, self.ended = chance, directory / "launch", []

    def workers(self) -> list[int]:
        """The pids of the training processes that run."""
        return [pid for pid in (int(row[4]) for row in self.starts()) if running(pid)]

    def saved(self) -> int:
        path = self.directory / "saved"
        return int(path.read_text()) if path.exists() else 0

    def kill_process(self):
        os.kill(self.chance.choice(self.workers()), signal.SIGKILL)

    def signal_process(self):
        """Of which the training saves and stops, or which end the process."""
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGSEGV, 36, 64]
        os.kill(self.chance.choice(self.workers()), self.chance.choice(numbers))

    def stop_process(self):
        os.kill(self.chance.choice(self.workers()), signal.SIGSTOP)

    def kill_node(self):
        self._end(signal.SIGKILL)

    def node_leaves(self):
        self._end(self.chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]))

    def _end(self, number: int):
        agent = self.chance.choice(self.agents)
        agent.send_signal(number)
        assert agent.wait(PATIENCE) == (-9 if number == signal.SIGKILL else 0), self.logs()[-3000:]
        agent.stderr.close()
        self.agents.remove(agent)
        self.start()

    def stop_node(self):
        """For longer than the others wait; then it goes on."""
        agent = self.chance.choice(self.agents)
        agent.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(1, 14))
        agent.send_signal(signal.SIGCONT)

    def foreign_files(self):
        for name in self.chance.sample(NAMES, 3):
            (self.launch / name).write_text(self.chance.choice(FOREIGN))
        (self.launch / "nodes" / "n.json").write_text(NEWER)

    def directory_vanishes(self):
        shutil.rmtree(self.launch, ignore_errors=True)

    def second_start(self):
        """It is a spare, and leaves."""
        agent = self.start()
        time.sleep(self.chance.uniform(0, 3))
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(PATIENCE) in (0, -signal.SIGTERM)  # the latter before it has joined
        agent.stderr.close()
        self.agents.remove(agent)

    def makes_steps(self, beyond: int) -> None:
        """Waits until the run has saved a later step."""
        deadline = time.monotonic() + PATIENCE
        while self.saved() <= beyond:
            assert time.monotonic() < deadline, (beyond, self.starts()[-5:], self.logs()[-4000:])
            assert all(agent.poll() is None for agent in self.agents), self.logs()[-4000:]
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_goes_on_after_thirty_random_events(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, which the agents would inherit
    chance = random.Random(int(os.environ.get("MEGAJAX_TEST_SEED", SEED)))
    run = Soaked(tmp_path, chance)
    kinds = [run.kill_process, run.signal_process, run.stop_process, run.kill_node, run.node_leaves, run.stop_node]
    kinds += [run.foreign_files, run.directory_vanishes, run.second_start, run.signal_process]
    for _ in range(NODES):
        run.start()
    try:
        run.makes_steps(0)
        for number in range(int(os.environ.get("MEGAJAX_TEST_EVENTS", EVENTS))):
            time.sleep(chance.uniform(0, 3))
            while not run.workers():
                time.sleep(0.1)
            event, starts, saved, before = chance.choice(kinds), len(run.starts()), run.saved(), time.monotonic()
            event()
            run.makes_steps(max(saved, run.saved()) + 10)
            resumed = [int(row[5]) for row in run.starts()[starts:]]
            assert all(step >= saved for step in resumed), (event.__name__, saved, resumed)
            print(f"{number}: {event.__name__}: {len(resumed)} starts, {time.monotonic() - before:.0f} s", flush=True)
    finally:
        for agent in run.agents:
            agent.send_signal(signal.SIGCONT)
            agent.send_signal(signal.SIGTERM)
        codes = run.close()
    assert set(codes) == {0}, run.logs()[-3000:]
    assert not list((run.launch / "nodes").glob("*-*-*.json"))
