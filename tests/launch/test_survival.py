"""A training run of four nodes on this machine, whose processes and nodes are killed and stopped at random moments."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from megajax.checkpoint.directory import complete_steps
from tests.train.front_door import ROOT, SMALL, rows

KILLS, NODES, SAVE_EVERY = 20, 4, 5
# The learning rate does not depend on the number of steps. Twelve samples are whole for 1, 2, 3 and 4 replicas.
TRAINING = (
    f"{SMALL} --layers 1 --pipe 1 --tensor 1 --global-batch-size 12 --microbatch-size 1 --devices cpu:1 --no-tensorboard "
    f"--learning-rate-decay constant --warmup-steps 1 --save-every {SAVE_EVERY}"
)
# A process must train again after this long. The machine may have other work.
SECONDS = 60 * max(1.0, os.getloadavg()[0] / os.cpu_count())


class Survivors:
    """The agents, and what can be seen of the run from outside."""

    def __init__(self, directory: pathlib.Path):
        """`directory`: of the test; the run's is in it."""
        self.directory, self.run, self.agents, self.count = directory, directory / "run", [], 0
        self.text = directory / "text.txt"
        self.text.write_text("All the world's a stage, and all the men and women merely players. " * 100)
        self.environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}

    def command(self, steps: int, run: pathlib.Path) -> list[str]:
        """The experiment and its options."""
        return ["experiments.gpt3", "--text", str(self.text), *f"{TRAINING} --steps {steps} --run-dir {run}".split()]

    def add(self) -> None:
        """Starts an agent."""
        options = f"--nodes 2:{NODES} --node-timeout 10 --hang-timeout 15 --max-failures 100 --join-wait 600"
        slow = ["--import", str(ROOT / "tests" / "launch" / "slow_steps.py")]
        words = [*options.split(), "--address", "127.0.0.1", "--", *self.command(10**6, self.run), *slow]
        self.count += 1
        with open(self.directory / f"agent-{self.count}.txt", "w") as out:
            agent = subprocess.Popen(
                [sys.executable, "-m", "megajax.launch", *words],
                cwd=ROOT,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(agent)

    def worker(self, agent: subprocess.Popen) -> int | None:
        """The pid of the agent's training process, if it has one."""
        children = pathlib.Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def generation(self) -> dict | None:
        """The newest."""
        found = sorted((self.run / "launch").glob("generation-*.json"))
        return json.loads(found[-1].read_text()) if found else None

    def trains(self, after: float, beyond: int) -> bool:
        """Whether a generation that is newer than the time `after` has made a step after `beyond`."""
        found, log = sorted((self.run / "launch").glob("generation-*.json")), self.run / "log.jsonl"
        if not found or found[-1].stat().st_mtime < after or not log.exists():
            return False
        made = rows(self.run)
        return log.stat().st_mtime > found[-1].stat().st_mtime and bool(made) and made[-1]["step"] > beyond

    def wait_to_train(self, after: float, beyond: int, seconds: float) -> float:
        """Waits for it; returns the seconds."""
        start = time.monotonic()
        while not self.trains(after, beyond):
            assert time.monotonic() - start < seconds, self.report()
            assert [agent for agent in self.agents if agent.poll() is None], self.report()
            time.sleep(0.1)
        return time.monotonic() - start

    def report(self) -> str:
        """The ends of all outputs."""
        files = sorted(self.directory.glob("agent-*.txt"))
        return "\n".join(f"{path.name}\n{path.read_text()[-1500:]}" for path in files)

    def stop(self) -> list[int]:
        """Tells all nodes to save and leave."""
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)
        return [agent.wait(300) for agent in self.agents]


def processes_of(run: pathlib.Path) -> list[str]:
    """Command lines of all processes that mention the run."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if str(run) in words:
            found.append(words)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_survives_kills_of_processes_and_nodes_and_a_hung_process(tmp_path):
    """Its losses are those of an undisturbed run, and it never resumes from a step before the newest checkpoint."""
    moments, run, taken = random.Random(12), Survivors(tmp_path), []
    kills = int(os.environ.get("MEGAJAX_TEST_KILLS", KILLS))
    started = time.time()
    for _ in range(NODES):
        run.add()
    try:
        run.wait_to_train(started, 1, 300 + 4 * SECONDS)
        for kill in range(int(os.environ.get("MEGAJAX_TEST_KILLS", KILLS))):
            time.sleep(moments.uniform(0, 8))
            victim = moments.choice(run.agents)
            if kill % 5 == 0:  # the node of process 0
                first = run.generation()["members"][0]
                victim = next((agent for agent in run.agents if f"-{agent.pid}-" in first), victim)
            worker, whole_node, hangs = run.worker(victim), kill % 3 == 1, kill % 10 in (3, 6)
            if worker is None:
                whole_node = True
            saved = complete_steps(run.run / "checkpoints")
            made, now = rows(run.run), time.time()
            if whole_node:
                victim.kill()
                victim.wait()
                run.agents.remove(victim)
            else:
                os.kill(worker, signal.SIGSTOP if hangs else signal.SIGKILL)
            newest = saved[-1] if saved else 0
            taken.append(run.wait_to_train(now, newest, 2 * SECONDS))
            resumed = re.findall(r"resume    after step (\d+)", (run.run / "logs" / "process_0.log").read_text())
            assert newest == 0 or int(resumed[-1]) >= newest, run.report()
            print(f"kill {kill}: node {whole_node} hang {hangs}, {taken[-1]:.0f} s, {len(made)} steps, {newest} saved")
            fewer = len(run.agents) < NODES and moments.random() < 0.5
            if kill + 1 < kills and (len(run.agents) < 3 or fewer):
                run.add()
    finally:
        codes = run.stop()
        print(run.report())
    assert set(codes) == {0}
    assert max(taken) < SECONDS, taken
    assert processes_of(run.run) == []
    logs = "".join(path.read_text() for path in (run.run / "launch").glob("agent-*.log"))
    assert "hangs in step" in logs or len(taken) < 8
    made = rows(run.run)
    assert [row["step"] for row in made] == list(range(1, len(made) + 1))
    alone = tmp_path / "alone"
    subprocess.run(
        [sys.executable, "-m", *run.command(len(made), alone)], cwd=ROOT, env=run.environment, check=True, timeout=900
    )
    np.testing.assert_allclose([row["loss"] for row in made], [row["loss"] for row in rows(alone)], rtol=1e-4)
