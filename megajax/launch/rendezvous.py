"""The agents of a run agree through files in a directory that all hosts share: there is no server whose loss ends the run.

nodes/NODE.json            an agent's state, rewritten about twice a second; only its agent writes it
generation-000007.json     one start of the training processes: the nodes in order of their ranks, the coordinator's address
stop-000007                the processes of this generation are to save and stop, because a node can be taken in
end-000007.json            the run has ended after this generation: exit code and reason

The agent that joined first leads: it writes the next generation. While agents disagree about who is alive, two may want to:
a generation is created with a hard link, which succeeds once. No clocks are compared: a node is alive while its counter
changes, as seen by the reader's own clock.
"""

import contextlib
import json
import os
import pathlib
import time
from dataclasses import asdict, dataclass, field

SIZE = 2048  # bytes of a node's file, whose text changes its length
WAITING, RUNNING, STOPPED, FAILED = "waiting", "running", "stopped", "failed"


@dataclass
class Node:
    """An agent's state.

    Attributes:
      name, host: of the node; the name is unique, and is not used again after a restart.
      joined: `time.time()` at its start; the order of the nodes.
      address: under which other hosts reach it.
      count: grows with each write.
      state: of its processes: waiting for a generation, running, stopped (ended as asked or killed), or failed.
      generation: the last one that it has started or was left out of.
      leaving: it will leave when its processes have saved.
      step: the highest step that its processes have reached, in this generation or before.
      training: they have reached a step of this generation, and so can save and stop.
      reason: why its processes have failed.
    """

    name: str
    host: str
    joined: float
    address: str
    count: int = 0
    state: str = WAITING
    generation: int = 0
    leaving: bool = False
    step: int = 0
    training: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Generation:
    """One start of the training processes.

    Attributes:
      number: from 1.
      members: names of the nodes, in the order of their processes' ranks.
      coordinator: HOST:PORT of process 0.
      arguments: of the training command, beyond the user's: the mesh's degrees.
      reached: the highest step that any generation before it has reached.
      failures: generations in a row that have failed without going beyond `reached`.
    """

    number: int
    members: list[str]
    coordinator: str
    arguments: list[str]
    reached: int = 0
    failures: int = 0


@dataclass
class _Seen:
    """When a node's counter last changed, by this process's clock; `alive` after the first change."""

    count: int
    when: float
    alive: bool = False
    node: Node | None = field(default=None)


class Rendezvous:
    """One agent's view of the directory."""

    def __init__(self, directory: pathlib.Path, own: Node, timeout: float):
        """Creates the directory and publishes `own`.

        Args:
          own: this agent's node; the caller changes it and calls `publish`.
          timeout: seconds after which a node whose counter does not change is dead.

        Raises:
          OSError: the directory cannot be written.
        """
        self.directory, self.own, self.timeout = directory, own, timeout
        self._nodes, self._seen = directory / "nodes", {}
        self._nodes.mkdir(parents=True, exist_ok=True)
        self._old_ends = {path.name for path in directory.glob("end-*.json")}  # of earlier runs in this directory
        self.first = self.newest_number()
        self.published = time.monotonic()
        self.publish()

    def publish(self) -> None:
        """Writes this agent's state; keeps it alive for the others."""
        self.own.count += 1
        _overwrite(self._nodes / f"{self.own.name}.json", asdict(self.own))
        self.published = time.monotonic()

    def leave(self) -> None:
        """Removes this agent's state."""
        (self._nodes / f"{self.own.name}.json").unlink(missing_ok=True)

    def observe(self) -> None:
        """Reads the states of all nodes."""
        now, present = time.monotonic(), set()
        for path in self._nodes.glob("*.json"):
            present.add(path.stem)
            data = _read(path)
            if data is None:
                continue
            node = Node(**data)
            seen = self._seen.setdefault(node.name, _Seen(node.count, now))
            if node.count != seen.count:
                seen.count, seen.when, seen.alive = node.count, now, True
            seen.node = node
        self._seen = {name: seen for name, seen in self._seen.items() if name in present}

    def alive(self, within: float | None = None) -> list[Node]:
        """The live nodes in the order in which they joined, this one included.

        Args:
          within: seconds within which their counters have changed; None: the timeout.
        """
        limit = time.monotonic() - (self.timeout if within is None else within)
        others = [seen.node for seen in self._seen.values() if seen.alive and seen.when >= limit and seen.node]
        nodes = [node for node in others if node.name != self.own.name] + [self.own]
        return sorted(nodes, key=lambda node: (node.joined, node.name))

    def newest_number(self) -> int:
        """The number of the newest generation; 0: there is none."""
        return max((int(path.stem[11:]) for path in self.directory.glob("generation-*.json")), default=0)

    def generation(self, number: int) -> Generation | None:
        """A generation; None if it cannot be read (yet)."""
        data = _read(self.directory / f"generation-{number:06d}.json")
        return Generation(**data) if data else None

    def propose(self, generation: Generation) -> bool:
        """Creates a generation; returns False if another agent has created one of this number."""
        return _create(self.directory / f"generation-{generation.number:06d}.json", asdict(generation), self.own.name)

    def request_stop(self, number: int) -> None:
        """Asks the members of a generation to save and stop."""
        (self.directory / f"stop-{number:06d}").touch()

    def stop_requested(self, number: int) -> bool:
        """Whether the members of a generation are to save and stop."""
        return (self.directory / f"stop-{number:06d}").exists()

    def end(self, number: int, code: int, reason: str) -> None:
        """Ends the run for all agents; the first call decides."""
        _create(self.directory / f"end-{number:06d}.json", {"code": code, "reason": reason}, self.own.name)

    def ended(self) -> tuple[int, str] | None:
        """Exit code and reason, if the run has ended since this agent joined."""
        for path in sorted(self.directory.glob("end-*.json")):
            if path.name not in self._old_ends and (data := _read(path)):
                return data["code"], data["reason"]
        return None


def _overwrite(path: pathlib.Path, data: dict) -> None:
    """Writes a file in place: that needs no space on a full disk. A reader that sees half of it reads it again."""
    text = json.dumps(data).ljust(SIZE).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    finally:
        os.close(descriptor)


def _create(path: pathlib.Path, data: dict, name: str) -> bool:
    """Creates a complete file; returns False if it exists."""
    temporary = path.with_name(f".{path.name}.{name}")
    temporary.write_text(json.dumps(data))
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read(path: pathlib.Path) -> dict | None:
    with contextlib.suppress(OSError, ValueError):
        data = json.loads(path.read_text())
        return data if isinstance(data, dict) else None
    return None
