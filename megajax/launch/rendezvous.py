"""The agents of a run agree through files in a directory that all hosts share: there is no server whose loss ends the run.

nodes/NODE.json            an agent's state, rewritten about twice a second; only its agent writes it
generation-000007.json     one start of the training processes: the nodes in order of their ranks, the coordinator's address
stop-000007                the processes of this generation are to save and stop, because a node can be taken in
end-000007.json            the run has ended after this generation: exit code and reason

The agent that joined first leads: it writes the next generation. While agents disagree about who is alive, two may want to:
a generation is created with a hard link, which succeeds once. No clocks are compared: a node is alive while its counter
changes, as seen by the reader's own clock.

Other files in the directory, and what is not of these forms, are ignored; fields that a newer version has added are too.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import stat
import time
from dataclasses import asdict, dataclass, field
from typing import Any, get_origin, get_type_hints

SIZE = 2048  # bytes of a node's file, whose text changes its length
ABSENT = 3.0  # seconds in which a node without a file may write it again
LONGEST = 2**20  # bytes of any file
GENERATION = re.compile(r"generation-([0-9]{6,9})\.json")
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


@dataclass(frozen=True)
class End:
    """The end of a run: the exit code of all agents, and the reason."""

    code: int
    reason: str


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
        self._nodes, self._seen, self._valid = directory / "nodes", {}, {}
        self._nodes.mkdir(parents=True, exist_ok=True)
        self._old_ends = {path.name for path in directory.glob("end-*.json")}  # of earlier runs in this directory
        self.first = self.newest_number()
        self.published = time.monotonic()
        self.publish()

    def publish(self) -> None:
        """Writes this agent's state; keeps it alive for the others. A directory that has vanished is made again."""
        self.own.count += 1
        self._nodes.mkdir(parents=True, exist_ok=True)
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
            node = _read(path, Node)
            if node is None or node.name != path.stem:
                continue
            seen = self._seen.setdefault(node.name, _Seen(node.count, now))
            if node.count != seen.count:
                seen.count, seen.when, seen.alive = node.count, now, True
            seen.node = node
        # A node that is alive writes its file again if the directory has vanished.
        kept = {name for name, seen in self._seen.items() if not (seen.node and seen.node.leaving)}
        kept = {name for name in kept if now - self._seen[name].when < ABSENT}
        self._seen = {name: seen for name, seen in self._seen.items() if name in present | kept}

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
        """The number of the newest generation; 0: there is none. One that was read counts also if its file vanishes."""
        found = [GENERATION.fullmatch(path.name) for path in self.directory.glob("generation-*.json")]
        numbers = {int(match[1]) for match in found if match} | set(self._valid)
        return next((number for number in sorted(numbers, reverse=True) if self.generation(number)), 0)

    def next_number(self) -> int:
        """The number of a generation that can be created."""
        number = 1 + self.newest_number()
        while os.path.lexists(self._path(number)):  # another program's file
            number += 1
        return number

    def _path(self, number: int) -> pathlib.Path:
        return self.directory / f"generation-{number:06d}.json"

    def generation(self, number: int) -> Generation | None:
        """A generation; None if there is none, or if it cannot be read."""
        if number not in self._valid:
            found = _read(self._path(number), Generation)
            if found is None or found.number != number:
                return None
            self._valid[number] = found
        return self._valid[number]

    def keep(self, generation: Generation) -> None:
        """Creates the running generation again if its file has vanished, with the directory or alone."""
        if not self._path(generation.number).exists():
            self.propose(generation)

    def propose(self, generation: Generation) -> bool:
        """Creates a generation; returns False if another agent has created one of this number."""
        return _create(self._path(generation.number), asdict(generation), self.own.name)

    def request_stop(self, number: int) -> None:
        """Asks the members of a generation to save and stop."""
        self._nodes.mkdir(parents=True, exist_ok=True)
        (self.directory / f"stop-{number:06d}").touch()

    def stop_requested(self, number: int) -> bool:
        """Whether the members of a generation are to save and stop."""
        return (self.directory / f"stop-{number:06d}").exists()

    def end(self, number: int, code: int, reason: str) -> None:
        """Ends the run for all agents; the first call decides."""
        _create(self.directory / f"end-{number:06d}.json", asdict(End(code, reason)), self.own.name)

    def ended(self) -> tuple[int, str] | None:
        """Exit code and reason, if the run has ended since this agent joined."""
        for path in sorted(self.directory.glob("end-*.json")):
            if path.name not in self._old_ends and (found := _read(path, End)):
                return found.code, found.reason
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
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps(data))
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read(path: pathlib.Path, kind: type) -> Any:
    """The dataclass that a file holds; None if it holds none, or another program wrote it."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without waiting for a pipe's other end
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return _parse(json.loads(file.read(LONGEST)), kind)
    return None


def _parse(data: Any, kind: type) -> Any:
    """The dataclass of these fields, without those that it does not have; None if one is missing or of another type."""
    if not isinstance(data, dict):
        return None
    values, hints = {}, get_type_hints(kind)
    for one in dataclasses.fields(kind):
        if one.name not in data:
            if one.default is dataclasses.MISSING:
                return None
            continue
        value, hint = data[one.name], hints[one.name]
        if not _is(value, get_origin(hint) or hint):
            return None
        if get_origin(hint) is list and not all(_is(element, str) for element in value):
            return None
        values[one.name] = value
    return kind(**values)


def _is(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a type. A whole number is a float too; true is no number."""
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind
