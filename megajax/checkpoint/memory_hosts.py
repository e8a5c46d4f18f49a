"""The hosts of a run that keep its replicated state in their memory: who they are, and which parts each of them has.

    MEGAJAX_MEMORY_DIR/RUN/own/      parts (parts.py) of this host's processes
                           copies/   parts of the next host's processes

Processes with the same host name and the same MEGAJAX_MEMORY_DIR are one host. The default directory is in /dev/shm. RUN is
a hash of the run's directory; parts also have the run's id, a file in that directory, so that the parts of a run whose
directory was deleted are not taken for those of a new run.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable

from megajax.checkpoint import checksums
from megajax.checkpoint.object_store import Path
from megajax.checkpoint.peer import FOLDERS, PartServer, PeerClient, own_address
from megajax.checkpoint.process_state import INDEX, TEMPORARY, Part, PartName, open_part, parse_part
from megajax.config import ConfigError
from megajax.config.output import MEMORY_VARIABLE
from megajax.runtime.compat import coordination_service
from megajax.runtime.exchange import exchange

RUN_ID = "run_id"  # the file in the run's directory
OWN, COPIES = FOLDERS


@dataclasses.dataclass(frozen=True)
class Holder:
    """Where a part can be read: in a folder of this host, or from the server of another."""

    folder: str
    address: str | None = None  # None: this host


class MemoryHosts:
    """This process's host and the others.

    Attributes:
      process, processes: this process, and their number.
      root: this host's directory.
      run, attempt: ids of the run, and of this start of its processes; later starts have higher ids.
      leads: whether this process copies and deletes for its host: it is the host's first.
      next: the processes of the next host; none if there is one host.
    """

    def __init__(self, run_directory: Path, files: pathlib.Path | None = None):
        """Makes the directories, verifies what is in them, and starts the server; waits for all processes to do so.

        Args:
          run_directory: of the run.
          files: where its files are on this machine; None: there.

        Raises:
          ConfigError: the directory in host memory cannot be written.
        """
        joined = coordination_service()
        self.process, self.processes = joined.process_id or 0, joined.num_processes or 1
        self.root = memory_directory(run_directory)
        group = f"{socket.gethostname()}:{os.path.realpath(self.root)}"
        shared = {"group": group}
        if self.process == 0:
            attempt = f"{time.time_ns() // 10**6:x}-{secrets.token_hex(3)}"
            shared |= {"run": _run_id(files or run_directory), "attempt": attempt, "token": secrets.token_hex(32)}
        found = {process: json.loads(text) for process, text in exchange("memory/hosts", json.dumps(shared)).items()}
        self.run, self.attempt, self._token = (found[0][name] for name in ("run", "attempt", "token"))
        groups: dict[str, list[int]] = {}
        for process in sorted(found):
            groups.setdefault(found[process]["group"], []).append(process)
        self._hosts, place = list(groups.values()), list(groups).index(group)  # in the order of their first processes
        self._leader = self._hosts[place][0]
        self.leads = self._leader == self.process
        self.next = self._hosts[(place + 1) % len(self._hosts)] if len(self._hosts) > 1 else []
        self._server = None
        if self.leads and self.next:
            self._server = PartServer(self.root, self._token, own_address(joined.coordinator_address))
        own = {"address": self._server.address if self._server else None, "parts": []}
        if self.leads:
            own["parts"] = [[folder, str(name)] for folder, name in self._sound_parts()]
        texts = exchange("memory/parts", json.dumps(own))
        self._published = {process: json.loads(text) for process, text in texts.items()}

    def __len__(self) -> int:
        """Hosts."""
        return len(self._hosts)

    def _sound_parts(self) -> list[tuple[str, PartName]]:
        """The parts of this run on this host whose checksums are right; deletes all others."""
        sound = []
        for folder in FOLDERS:
            for path in sorted((self.root / folder).iterdir()):
                name = PartName.parse(path.name)
                try:
                    good = name is not None and open_part(path).meta["run"] == self.run
                    good = good and not checksums.problems(path)
                except (OSError, ValueError, KeyError):
                    good = False
                if good:
                    sound.append((folder, name))
                else:
                    shutil.rmtree(path, ignore_errors=True)
        return sound

    def complete_states(self) -> dict[tuple[int, str], dict[PartName, Holder]]:
        """(step, attempt) of each state whose parts all were on some host at the start, and where: if possible here."""
        holders: dict[PartName, Holder] = {}
        for leader in sorted((host[0] for host in self._hosts), key=lambda leader: (leader != self._leader, leader)):
            address = None if leader == self._leader else self._published[leader]["address"]
            for folder, text in self._published[leader]["parts"]:
                holders.setdefault(PartName.parse(text), Holder(folder, address))
        states: dict[tuple[int, str], dict[PartName, Holder]] = {}
        for name, holder in holders.items():
            states.setdefault((name.step, name.attempt), {})[name] = holder
        return {
            key: parts
            for key, parts in states.items()
            if {name.process for name in parts} >= set(range(next(iter(parts)).processes))
        }

    def open(self, name: PartName, holder: Holder, clients: dict[str, PeerClient]) -> Part:
        """A part, here or on another host.

        Args:
          clients: connections by address; new ones are added.

        Raises:
          OSError, ValueError: it cannot be read.
        """
        if holder.address is None:
            return open_part(self.root / holder.folder / str(name))
        if holder.address not in clients:
            clients[holder.address] = PeerClient(holder.address, self._token)
        client, path = clients[holder.address], f"{holder.folder}/{name}"
        return parse_part(client.read(f"{path}/{INDEX}"), lambda start, stop: client.read(f"{path}/data", start, stop))

    def copy_next(self, name: PartName) -> None:
        """Copies the next host's parts of the same step and attempt as `name`, and verifies them.

        Raises:
          OSError: they cannot be read there or written here, or the copy is damaged.
        """
        client = PeerClient(self._published[self.next[0]]["address"], self._token)
        try:
            for process in self.next:
                other = dataclasses.replace(name, process=process)
                client.download_part(OWN, other, self.root / COPIES)
                if found := checksums.problems(self.root / COPIES / str(other)):
                    raise OSError(f"the copy of {other} is damaged: {found[0]}")
        finally:
            client.close()

    def delete(self, chosen: Callable[[PartName], bool]) -> None:
        """Deletes this host's parts for which `chosen` is true."""
        for folder in FOLDERS:
            for path in (self.root / folder).iterdir():
                if (name := PartName.parse(path.name)) and chosen(name):
                    shutil.rmtree(path, ignore_errors=True)

    def close(self, clear: bool) -> None:
        """Waits for all hosts, stops the server and, with `clear`, deletes this host's directory."""
        exchange("memory/closed", "")  # no other host reads any more
        if self._server:
            self._server.close()
        if self.leads and clear:
            shutil.rmtree(self.root, ignore_errors=True)


def memory_directory(run_directory: Path) -> pathlib.Path:
    """The directory in host memory for a run's parts, with its folders; made if it does not exist.

    Raises:
      ConfigError: it cannot be made, or belongs to another user.
    """
    base = pathlib.Path(os.environ.get(MEMORY_VARIABLE) or f"/dev/shm/megajax-{os.getuid()}")
    root = base / hashlib.sha256(str(run_directory).encode()).hexdigest()[:16]
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(base, base.stat(), others=(0,))
        root.mkdir(mode=0o700, exist_ok=True)
        _require_own(root, root.lstat())
        for folder in FOLDERS:
            (root / folder).mkdir(mode=0o700, exist_ok=True)
            _require_own(root / folder, (root / folder).lstat())
    except OSError as error:
        raise ConfigError(
            f"replicate_state cannot write to {base}: {error.strerror}; set {MEMORY_VARIABLE} to a directory in host "
            "memory, or omit --replicate-state."
        ) from error
    return root


def _require_own(path: pathlib.Path, status: os.stat_result, others: tuple[int, ...] = ()) -> None:
    """Raises ConfigError if another user can put files at a path: what is there is read as the state of a training.

    `others`: users that may own it too. Anybody may write into a directory that is sticky, as /dev/shm is: not into ours.
    """
    if status.st_uid not in (os.getuid(), *others) or not stat.S_ISDIR(status.st_mode):
        problem = "belongs to another user, or is no directory"
    elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        problem = "can be written by everybody"
    else:
        return
    raise ConfigError(f"{path} {problem}: set {MEMORY_VARIABLE} to a directory of your own.")


def _run_id(run_directory: pathlib.Path) -> str:
    """The id of the run in its directory; made at its first start."""
    path = run_directory / RUN_ID
    try:
        if path.exists() and (text := path.read_text().strip()):
            return text
        text = secrets.token_hex(16)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{RUN_ID}{TEMPORARY}")
        temporary.write_text(text)
        temporary.rename(path)
        return text
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give --run-dir a writable directory") from error
