"""The launcher's agents among files of other programs and versions, without their directory, and with odd signals."""

import json
import os
import shutil
import signal
import time

import pytest

from megajax.launch import agent as agents
from megajax.launch.agent import GAVE_UP, Agent
from megajax.launch.options import read_options
from megajax.launch.rendezvous import RUNNING, STOPPED, WAITING, Generation, Node, Rendezvous
from megajax.launch.workers import Workers, _Worker, describe_code, signal_name
from megajax.runtime.heartbeat import VARIABLE, Heartbeat

OTHER = {"name": "b", "host": "node2", "joined": 2.0, "address": "node2", "count": 1}
START = {"number": 1, "members": ["a", "b"], "coordinator": "node1:1", "arguments": ["--data", "2"]}


def view(directory) -> Rendezvous:
    return Rendezvous(directory, Node("a", "node1", 1.0, "node1"), 60)


def others(seen: Rendezvous, path, data: dict) -> list[Node]:
    """The other live nodes after two writes of a file."""
    for count in (1, 2):
        path.write_text(json.dumps(data | {"count": count} if type(data.get("count")) is int else data))
        seen.observe()
    return [node for node in seen.alive() if node.name != "a"]


def test_a_node_of_a_newer_version_takes_part(tmp_path):
    seen = view(tmp_path)
    found = others(seen, tmp_path / "nodes" / "b.json", {**OTHER, "rack": 7, "state": "resting"})
    assert found == [Node(**{**OTHER, "count": 2}, state="resting")]


def test_a_generation_and_an_end_of_a_newer_version_are_read(tmp_path):
    seen = view(tmp_path)
    (tmp_path / "generation-000001.json").write_text(json.dumps({**START, "network": "ib0"}))
    (tmp_path / "end-000001.json").write_text(json.dumps({"code": 3, "reason": "why", "node": "b"}))
    assert seen.newest_number() == 1 and seen.generation(1) == Generation(**START)
    assert seen.ended() == (3, "why")


WRONG_NODES = [
    {},
    {**OTHER, "joined": "noon"},
    {**OTHER, "joined": float("nan")},
    {**OTHER, "count": None},
    {**OTHER, "leaving": 1},
    {**OTHER, "name": "a"},  # in the file b.json
    {name: value for name, value in OTHER.items() if name != "address"},
]


@pytest.mark.parametrize("data", WRONG_NODES)
def test_what_is_no_node_is_ignored(tmp_path, data):
    seen = view(tmp_path)
    assert others(seen, tmp_path / "nodes" / "b.json", data) == []


FOREIGN = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"9" * 5000, b'{"a": 1}', b'"text"']


@pytest.mark.parametrize("content", FOREIGN, ids=lambda content: content[:8].decode(errors="replace"))
def test_foreign_files_are_ignored(tmp_path, content):
    seen = view(tmp_path)
    for name in ("nodes/b.json", "generation-000007.json", "generation-x.json", "generation-.json", "end-000001.json"):
        (tmp_path / name).write_bytes(content)
    for name in ("nodes/c.json", "generation-000009.json", "end-000002.json"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "nodes" / "d.json")
    os.mkfifo(tmp_path / "generation-000008.json")
    seen.observe()
    assert [node.name for node in seen.alive()] == ["a"] and seen.ended() is None and seen.newest_number() == 0


def test_a_generation_is_created_beside_another_programs_file(tmp_path):
    seen = view(tmp_path)
    (tmp_path / "generation-000001.json").write_text("mine")
    number = seen.next_number()
    assert number == 2 and seen.propose(Generation(**{**START, "number": number}))
    assert seen.newest_number() == 2


def test_a_directory_that_vanishes_is_made_again_with_the_running_generation(tmp_path):
    """Nothing is started again."""
    seen, generation = view(tmp_path / "launch"), Generation(**START)
    assert seen.propose(generation) and seen.newest_number() == 1
    shutil.rmtree(tmp_path / "launch")
    assert seen.newest_number() == 1 and seen.next_number() == 2
    seen.publish()
    seen.keep(generation)
    new = Rendezvous(tmp_path / "launch", Node(**OTHER), 60)
    assert new.newest_number() == 1 and new.generation(1) == generation
    shutil.rmtree(tmp_path / "launch")
    seen.request_stop(1)
    assert seen.stop_requested(1)
    shutil.rmtree(tmp_path / "launch")
    seen.end(1, 0, "over")
    assert seen.ended() == (0, "over")


class FakeWorkers:
    """Processes that have ended with these exit codes."""

    training, running = True, False

    def __init__(self, codes=None, finished=False, step=18):
        self._codes, self.finished, self.step, self.killed = codes or {0: 0}, finished, step, 0

    def listen(self):
        pass

    def codes(self):
        return self._codes

    def hung(self, timeout):
        return []

    def kill(self):
        self.killed += 1


@pytest.fixture
def agent(tmp_path):
    """An agent whose processes run in generation 1; it starts processes that end at once."""
    options = read_options("--nodes 1 --wait-minutes 0.001 --address node1 -- experiments.gpt3".split())
    made = Agent(options, tmp_path / "launch", {1: ["--data", "1"]}, lambda generation, rank: {}, lambda: ["--resume"])
    generation = Generation(1, [made.own.name], "node1:1", [])
    assert made.rendezvous.propose(generation)
    made.generation, made.own.generation, made.own.state = generation, 1, RUNNING
    return made


def test_a_signal_to_a_process_does_not_end_the_run(agent, capsys):
    """All processes save and end with 0 in step 18 of many: the next generation resumes, and that is no failure."""
    agent.workers = FakeWorkers()
    agent._tick()
    assert agent.rendezvous.ended() is None and agent.own.state == STOPPED and agent.rendezvous.newest_number() == 2
    found = agent.rendezvous.generation(2)
    assert (found.failures, found.reached, found.arguments) == (0, 18, ["--data", "1", "--resume"])
    assert "have stopped in step 18, and the training has not ended" in capsys.readouterr().err


def test_the_end_of_the_training_ends_the_run(agent):
    agent.workers = FakeWorkers(finished=True)
    agent._tick()
    assert agent.rendezvous.ended() == (0, "the training has ended") and agent.rendezvous.newest_number() == 1


def test_processes_that_end_at_once_are_failures(agent):
    """Else a command that trains nothing would be started for ever."""
    agent.workers = FakeWorkers(step=0)
    agent._check_workers()
    assert agent.own.state == "failed" and "ended without a step" in agent.own.reason


@pytest.mark.parametrize("content", FOREIGN, ids=lambda content: content[:8].decode(errors="replace"))
def test_an_agent_goes_on_among_foreign_files(agent, content):
    running = FakeWorkers()
    running.running, running._codes = True, {}
    agent.workers, launch = running, agent.rendezvous.directory
    for name in ("nodes/b.json", "generation-000007.json", "generation-x.json", "end-000001.json", "notes.txt"):
        (launch / name).write_bytes(content)
    assert agent._tick() is None
    shutil.rmtree(launch)
    agent.rendezvous.published -= 1  # the time of the next write has come
    assert agent._tick() is None
    assert agent.own.state == RUNNING and not running.killed
    assert (launch / "generation-000001.json").exists() and list((launch / "nodes").iterdir())


def test_an_agent_without_its_directory_gives_up(agent, monkeypatch):
    """Not while its processes train."""
    monkeypatch.setattr(agents, "TICK", 0.001)
    agent._set(WAITING)
    shutil.rmtree(agent.rendezvous.directory)
    agent.rendezvous.directory.write_text("in the way")
    running = FakeWorkers()
    running.running = True
    agent.workers, agent._worked = running, time.monotonic() - 60
    assert agent._give_up(OSError("no")) is None
    agent.workers = FakeWorkers()
    assert agent.run() == GAVE_UP


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (36, "signal 36"), (34, "SIGRTMIN"), (64, "SIGRTMAX")])
def test_every_signal_has_a_name(number, name):
    assert signal_name(number) == name
    assert describe_code(3, -number, 7) == f"process 3 was killed by {name} in step 7"


def test_a_process_says_that_it_has_finished(tmp_path):
    """The file is written also where its directory has been cleaned up, and at the end at once."""
    path = tmp_path / "cleaned" / "heartbeat"
    heartbeat = Heartbeat({VARIABLE: str(path)})
    heartbeat.step = 7
    heartbeat.finish()
    found = json.loads(path.read_text())
    assert (found["step"], found["finished"]) == (7, True)


class Sleeping:
    """A process that runs."""

    @staticmethod
    def poll():
        return None


def test_a_full_disk_does_not_stop_the_heartbeat(tmp_path):
    """The file's time changes, and its content may be lost."""
    path, workers = tmp_path / "heartbeat", Workers({}, tmp_path)
    own = _Worker(0, Sleeping, path, heard=0.0)
    workers._workers.append(own)
    path.write_text('{"step": 5}')
    os.utime(path, (1, 1))
    workers.listen()
    first = own.heard
    os.utime(path)
    workers.listen()
    assert own.heard > first and workers.step == 5 and not workers.finished
    path.write_text("")
    os.utime(path, (2, 2))
    workers.listen()
    assert workers.step == 5 and workers.hung(60) == []


def test_signals_that_are_ignored_stay_so(agent, monkeypatch):
    """`nohup` ignores SIGHUP; otherwise it makes the node leave."""
    handlers = {signal.SIGHUP: signal.SIG_IGN}
    monkeypatch.setattr(agents.signal, "getsignal", lambda number: handlers.get(number, signal.SIG_DFL))
    monkeypatch.setattr(agents.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(agent, "_tick", lambda: 0)
    assert agent.run() == 0
    assert handlers[signal.SIGHUP] is signal.SIG_IGN and handlers[signal.SIGUSR1] == agent._receive


def test_a_signal_that_comes_after_the_stop_is_no_failure(agent):
    """The processes of another node were asked first, and all have stopped and saved."""
    agent.workers, agent._asked = FakeWorkers({0: -signal.SIGUSR1}), time.monotonic()
    agent.rendezvous.request_stop(1)
    agent._check_workers()
    assert agent.own.state == STOPPED


def test_nodes_are_not_lost_with_their_directory(tmp_path):
    """They write their files again; one that leaves removes its own."""
    own, other = Rendezvous(tmp_path / "launch", Node("a", "h", 1.0, "h"), 60), view_of(tmp_path / "launch", "b")
    for _ in range(2):
        other.publish()
        own.observe()
    shutil.rmtree(tmp_path / "launch")
    own.publish()
    own.observe()
    assert [node.name for node in own.alive()] == ["a", "b"]
    other.publish()
    own.observe()
    assert [node.name for node in own.alive()] == ["a", "b"]
    other.own.leaving = True
    other.publish()
    own.observe()
    other.leave()
    own.observe()
    assert [node.name for node in own.alive()] == ["a"]


def view_of(directory, name: str) -> Rendezvous:
    return Rendezvous(directory, Node(name, "h", 2.0, "h"), 60)
