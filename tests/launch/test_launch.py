"""The launcher with processes that only pretend to train; tests/launch/test_survival.py has those that train."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from megajax.config import ConfigError
from megajax.launch import __main__ as launcher
from megajax.launch.elastic import layouts, processes_per_node, read_request
from megajax.launch.options import read_options
from megajax.launch.rendezvous import Generation, Node, Rendezvous

ROOT = pathlib.Path(__file__).parents[2]


class Launched:
    """Agents of one run on this machine, with one process each."""

    def __init__(self, directory: pathlib.Path, words: str, timeout: float = 8):
        """A run in `directory`.

        Args:
          words: the launcher's options, and after "--" the training command's.
          timeout: seconds after which a silent node or process counts as lost; long where none is to be lost, since a
            loaded machine may not run one for several seconds.
        """
        self.directory, self.words, self.timeout, self.agents = directory, words, timeout, []

    def start(self) -> subprocess.Popen:
        """Starts another agent."""
        own, _, command = self.words.partition(" -- ")
        own += f" --node-timeout {self.timeout} --hang-timeout {self.timeout}"
        own += " --join-wait 600 --address 127.0.0.1 -- tests.launch.fake_worker"
        command += " --devices cpu:1 --pipe 1 --tensor 1"
        words = [*own.split(), "--run-dir", str(self.directory), *command.split()]
        self.agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "megajax.launch", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
            )
        )
        return self.agents[-1]

    def do(self, rank: int, what: str) -> None:
        """Gives a process a command."""
        path = self.directory / f".do-{rank}"
        path.write_text(what)
        path.replace(self.directory / f"do-{rank}")

    def starts(self) -> list[list[str]]:
        """Rank, number of processes, data, resume and pid of all starts."""
        path = self.directory / "starts"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def until_generation(self, number: int, processes: int) -> None:
        """Waits until a generation of this many processes has started, all of them."""
        deadline = time.monotonic() + 200

        def done():
            newest = sorted((self.directory / "launch").glob("generation-*.json"))
            ours = self.starts()[-processes:]
            return (
                len(newest) == number
                and [row[1] for row in ours] == [str(processes)] * processes
                and sorted(row[0] for row in ours) == [str(rank) for rank in range(processes)]
            )

        while not done():
            assert time.monotonic() < deadline, (self.starts(), [agent.poll() for agent in self.agents], self.logs())
            time.sleep(0.05)

    def logs(self) -> str:
        """What all agents have logged."""
        return "".join(path.read_text() for path in sorted((self.directory / "launch").glob("agent-*.log")))

    def close(self) -> list[int]:
        """Waits for the agents; returns their exit codes, and checks that no process is left."""
        codes = [agent.wait(200) for agent in self.agents]
        for agent in self.agents:
            agent.stderr.close()
        pids = [int(row[4]) for row in self.starts()]
        assert not [pid for pid in pids if running(pid)]
        return codes


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_a_run_goes_on_after_failures_hangs_and_lost_and_new_nodes(tmp_path):
    """Three nodes; a process fails, the leader and its process are killed, a node is added, a process is stopped."""
    run = Launched(tmp_path, "--nodes 2:3 -- --steps 100000")
    first = run.start()
    while not list((tmp_path / "launch" / "nodes").glob("*.json")):
        time.sleep(0.05)
    run.start(), run.start()
    run.until_generation(1, 3)
    run.do(1, "exit 3")
    run.until_generation(2, 3)
    assert "process 1 ended with exit code 3" in run.logs()
    leader_pid = next(int(row[4]) for row in run.starts()[-3:] if row[0] == "0")
    first.kill()
    run.until_generation(3, 2)
    assert not running(leader_pid)
    assert "is gone" in run.logs() and run.starts()[-1][2] == "2"  # data
    run.start()
    run.until_generation(4, 3)
    assert int((tmp_path / "saved").read_text()) > 0 and "saves and stops, to resume with 3" in run.logs()
    run.do(2, "stop")
    run.until_generation(5, 3)
    assert "process 2 hangs in step" in run.logs()
    run.do(0, "crash")
    run.until_generation(6, 3)
    assert "process 0 was killed by SIGKILL" in run.logs()
    for agent in run.agents[1:]:
        agent.send_signal(signal.SIGTERM)
    assert run.close() == [-signal.SIGKILL, 0, 0, 0]
    assert {row[3] for row in run.starts()} == {"auto"}


@pytest.mark.slow
def test_a_node_that_is_told_to_leave_saves_and_the_others_go_on(tmp_path):
    run = Launched(tmp_path, "--nodes 1:2 -- --steps 300")
    agents = [run.start(), run.start()]
    run.until_generation(1, 2)
    agents[1].send_signal(signal.SIGINT)
    run.until_generation(2, 1)
    assert int((tmp_path / "saved").read_text()) > 0
    assert run.close() == [0, 0]
    assert "the run has ended with exit code 0" in run.logs()


@pytest.mark.parametrize(
    ("command", "code", "message"), [("exit 2", 2, "would end the same way"), ("exit 3", 3, "2 fail")]
)
def test_a_failure_that_would_come_again_ends_the_run_on_all_nodes(tmp_path, command, code, message):
    """A user's mistake at once; others when they have come too often without a further step."""
    run = Launched(tmp_path, "--nodes 2 --max-failures 1 -- --steps 100000", timeout=150)
    run.start(), run.start()
    run.do(1, command)
    while code == 3 and all(agent.poll() is None for agent in run.agents):
        run.do(1, command)
        time.sleep(0.1)
    assert run.close() == [code, code]
    assert message in run.logs()


def node(name: str, joined: float) -> Node:
    return Node(name, "host", joined, "127.0.0.1")


def test_only_one_agent_creates_a_generation(tmp_path):
    first, second = (Rendezvous(tmp_path, node(name, index), 10) for index, name in enumerate("ab"))
    proposals = [Generation(1, [name], "host:1", []) for name in "ab"]
    assert [first.propose(proposals[0]), second.propose(proposals[1])] == [True, False]
    assert second.generation(1) == proposals[0] and second.newest_number() == 1
    first.end(1, 3, "first"), second.end(1, 0, "second")
    assert second.ended() == (3, "first")
    assert Rendezvous(tmp_path, node("c", 2), 10).ended() is None  # of an earlier run in the directory


def test_a_node_is_alive_while_its_counter_changes(tmp_path):
    old, own = Rendezvous(tmp_path, node("old", 0), 0.2), Rendezvous(tmp_path, node("new", 1), 0.2)
    own.observe()
    assert [one.name for one in own.alive()] == ["new"]  # the other's file may be of a process that died long ago
    old.publish()
    own.observe()
    assert [one.name for one in own.alive()] == ["old", "new"]
    time.sleep(0.3)
    own.observe()
    assert [one.name for one in own.alive()] == ["new"]


FAKE = "tests.launch.fake_worker"


@pytest.mark.parametrize(
    ("words", "nodes", "devices", "data"),
    [
        ("", (1, 4), 1, {4: 1, 3: 3, 2: 1, 1: 1}),  # tensor and pipe are 2 on four devices: only four are enough
        ("--pipe 1 --tensor 1", (1, 5), 1, {4: 4, 3: 3, 2: 2, 1: 1}),  # 5 does not divide the batch of 12
        ("--data 3", (1, 4), 1, {3: 3, 2: 2, 1: 1}),
        ("--pipe 2 --tensor 2", (1, 3), 2, {2: 1}),
    ],
)
def test_data_is_the_degree_that_changes(words, nodes, devices, data):
    request = read_request(FAKE, words.split())
    found = layouts(request, *nodes, devices)
    if not words:
        data = {4: 1}
    assert {count: int(arguments[1]) for count, arguments in found.items()} == data
    degrees = {tuple(arguments[2:]) for arguments in found.values()}
    assert len(degrees) == 1  # pipe and tensor


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        ("", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        ("--devices gpu", {"CUDA_VISIBLE_DEVICES": "GPU-7c,GPU-12"}, 2),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, 1),
        ("--devices cpu:4", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1),
    ],
)
def test_by_default_a_host_has_a_process_for_each_gpu(words, environment, expected):
    assert processes_per_node(read_request(FAKE, words.split()), environment) == expected


@pytest.mark.parametrize(
    ("option", "visible"),
    [("", ["0", "2", "3", "5"]), ("--processes-per-node 2", ["0,2", "3,5"]), ("--processes-per-node 1", ["0,2,3,5"])],
)
def test_each_process_sees_its_own_gpus(option, visible, monkeypatch, tmp_path):
    """The second host's processes: their ranks follow those of the first."""
    made = []

    class FakeAgent:
        def __init__(self, options, directory, legal, commands, resume):
            made.append((options, commands))

        def run(self):
            return 0

    monkeypatch.setattr(launcher, "Agent", FakeAgent)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3,5")
    words = f"--nodes 2 {option} -- {FAKE} --run-dir {tmp_path} --pipe 2 --tensor 4 --global-batch-size 12"
    assert launcher.main(words.split()) == 0
    (options, commands), count = made[0], len(visible)
    assert options.processes_per_node == count
    started = commands(Generation(1, ["first", "second"], "first:1", ["--data", "1"]), count)
    assert list(started) == [count + index for index in range(count)]
    for (rank, (line, environment)), gpus in zip(started.items(), visible, strict=True):
        assert environment["CUDA_VISIBLE_DEVICES"] == gpus
        assert line[-4:] == ["--processes", str(2 * count), "--process-id", str(rank)]


def test_no_legal_number_of_nodes_is_an_error():
    with pytest.raises(ConfigError, match="global_batch_size = 12 is not a multiple"):
        layouts(read_request(FAKE, ["--pipe", "1"]), 5, 5, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nodes 2:4", "no training command"),
        ("--nodes 4:2 -- experiments.gpt3", "--nodes: '4:2' is not MIN:MAX"),
        ("--nodes two -- experiments.gpt3", "--nodes: 'two' is not MIN:MAX"),
        ("--node-timeout -1 -- experiments.gpt3", "--node-timeout: -1.0 must be a number, above 0"),
        ("--processes-per-node 0 -- experiments.gpt3", "--processes-per-node: 0 must be a whole number, 1 or more"),
        ("--processes-per-node many -- experiments.gpt3", "--processes-per-node: 'many' is not a whole number"),
        ("--no-such 1 -- experiments.gpt3", "there is no option --no-such"),
    ],
)
def test_wrong_options_are_named(words, message):
    with pytest.raises(ConfigError, match=message):
        read_options(words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("experiments.gpt3", "pass --run-dir DIR"),
        ("experiments.no_such", "cannot import experiments.no_such"),
        ("experiments.gpt3 --no-such", "there is no option --no-such"),
        ("megajax.config.cli", "has no EXPERIMENT"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(words, message, tmp_path):
    command = [sys.executable, "-m", "megajax.launch", "--", *words.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)})
    assert run.returncode == 2 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1, run.stderr
    assert message in run.stderr
