"""Replicated state: the training state in the host memory of the machines that train, so that a lost one costs few steps.

Every N steps each process writes its part of the state (parts.py) below a directory in host memory, which outlives the
process, and one process of each host copies the parts of the next host (memory_hosts.py). So the state survives the loss of
all processes, and of one host, or of several that are not neighbours.

Training waits for the copy from the devices only. A thread does the rest: files, checksums, and the copy over the network
(peer.py). It waits for all processes before it copies, and again before it deletes the parts of an earlier step: at any
moment the parts of one step are complete on all hosts.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from megajax.checkpoint import layout, metadata
from megajax.checkpoint.layout import StateLayout
from megajax.checkpoint.manager import format_size
from megajax.checkpoint.memory_hosts import OWN, Holder, MemoryHosts
from megajax.checkpoint.metadata import FORMAT, Progress
from megajax.checkpoint.object_store import Path
from megajax.checkpoint.peer import PeerClient
from megajax.checkpoint.process_state import Part, PartName, assemble, write_part
from megajax.checkpoint.shapes import shape_problem
from megajax.checkpoint.writer import on_all_processes, reason_of
from megajax.config import ConfigError, RunConfig
from megajax.runtime.exchange import exchange
from megajax.schedules.stages import StageLayers

Tree = Any


class ReplicatedState:
    """The replicated state of one run: starts writing it, reports the results, and restores it.

    Attributes:
      every: steps from one replication to the next, for the caller.
      blocked: seconds for which the last `save` kept the training waiting.
      newest: step of the newest state that was restored or replicated; None: there is none.
      data_state: see `Checkpoints`.
      restored_data: the state of the data that was stored with the restored state; None: none was.
      messages: for the start of the log.
    """

    def __init__(self, run_directory: Path, every: int, meta: Mapping[str, Any], files: pathlib.Path | None = None):
        """Finds the hosts and what they have; all processes must call it.

        Args:
          run_directory: of the run.
          files: see `MemoryHosts`.
          meta: stored in each part: megajax's version, the configuration and the tokenizer.

        Raises:
          ConfigError: the directory in host memory cannot be written.
        """
        self.every, self.meta, self.blocked = every, dict(meta), 0.0
        self.hosts = MemoryHosts(run_directory, files)
        self._thread = ThreadPoolExecutor(1, "replicate")
        self._pending: tuple[int, Future] | None = None  # step and result of the one in progress
        self._arrays: dict[str, jax.Array] | None = None  # the last copies, where their memory is reused
        self.newest: int | None = None
        self.data_state: Callable[[int], str | None] = lambda samples: None
        self.restored_data: str | None = None
        self._saves, self._last_failure, self._told = 0, "", False
        copies = f"each of {len(self.hosts)} hosts also has a copy of the next one's"
        if not self.hosts.next:
            copies = "there is one host, so no other has a copy"
        self.messages = [f"replicate every {every} steps in {self.hosts.root}: {copies}"]

    def restore(
        self, run: RunConfig, target: StateLayout, at_least: int | None
    ) -> tuple[Tree, Progress, list[str]] | None:
        """The newest complete state, resharded for this run; all processes must call it.

        All other parts are deleted: the steps after the one resumed from will be taken again.

        Args:
          run: the configuration of the run that resumes.
          target: the layout of its state.
          at_least: an earlier step is not restored; None: nothing is.

        Returns:
          The state, its progress, and messages; None if there is none that is complete, or it cannot be read.

        Raises:
          ConfigError: the state is of another model or tokenizer.
        """
        found = kept = None
        states = self.hosts.complete_states() if at_least is not None else {}
        if states and max(states)[0] >= at_least:
            kept = max(states)
            found = self._load(run, target, states[kept])
            self.newest = kept[0] if found else None
        exchange("memory/restored", "")  # all hosts have read what is deleted now
        if self.hosts.leads:
            self.hosts.delete(lambda name: not found or (name.step, name.attempt) != kept)
        return found

    def _load(self, run: RunConfig, target: StateLayout, holders: Mapping[PartName, Holder]):
        """See `restore`. If one process cannot read a part, no process resumes from it."""
        copies: dict[str, jax.Array] = {}
        problem, meta, differing = "", {}, []
        # This host's parts first: with the same mesh and number of processes nothing else is read.
        parts = _LazyParts(self.hosts, dict(sorted(holders.items(), key=lambda item: (bool(item[1].address), item[0]))))
        try:
            first = next(iter(parts))
            meta = metadata.parse(first.meta)
            differing = self._compare(meta, run)
            shardings = layout.named(target.shardings)
            stored = {name: shape for name, (_, shape) in first.arrays.items()}
            for name, leaf in layout.named(target.shapes).items():
                shape = layout.canonical_shape(name, leaf.shape, target.where)
                if wrong := shape_problem(name, stored, shape, run):
                    raise ConfigError(f"the state replicated in {self.hosts.root}: {wrong}")
                copies[name] = _assemble_array(parts, name, leaf, shardings[name], target.where)
        except ConfigError:  # the same on all processes
            raise
        except (OSError, ValueError) as error:
            problem = reason_of(error)
        parts.close()
        texts = exchange("memory/loaded", json.dumps([parts.remote, problem]))
        loaded = {process: json.loads(text) for process, text in texts.items()}
        remote = sum(size for size, _ in loaded.values())
        if problems := {process: text for process, (_, text) in loaded.items() if text}:
            process = min(problems)
            self.messages.append(
                f"warning: the state replicated in host memory cannot be read: process {process}: {problems[process]}"
            )
            return None
        text = f"resume    from step {meta['progress'].step}, replicated in host memory"
        if remote:
            text += f" ({format_size(remote)} of it read from other hosts)"
        self.restored_data = meta.get("data")
        return layout.from_canonical(copies, target), meta["progress"], [text, *differing]

    def _compare(self, meta: Mapping[str, Any], run: RunConfig) -> list[str]:
        """`metadata.differences`, with the directory in its errors."""
        try:
            return metadata.differences(meta, run, self.meta["tokenizer"])
        except ConfigError as error:
            raise ConfigError(f"the state replicated in {self.hosts.root} {error}") from None

    def save(self, target: StateLayout, state: Tree, progress: Progress) -> list[str]:
        """Starts a replication; `state` may be donated as soon as this returns. All processes must call it.

        Blocks for the copy to host memory, and for a replication that is still in progress.

        Returns:
          Messages about the replication before this one.
        """
        start = time.perf_counter()
        messages = self.wait()
        leaves = layout.named(state, only=layout.named(target.shapes))
        self._arrays = layout.to_canonical(leaves, target.where, into=self._arrays)
        times = {"progress": dataclasses.asdict(progress), "time": time.time()}
        meta = self.meta | {"format": FORMAT, "run": self.hosts.run} | times
        if (data := self.data_state(progress.samples)) is not None:
            meta["data"] = data
        self._saves += 1
        name = PartName(progress.step, self.hosts.attempt, self.hosts.process, self.hosts.processes)
        self._pending = (progress.step, self._thread.submit(self._replicate, name, self._arrays, meta))
        self.blocked = time.perf_counter() - start
        return messages

    def _replicate(self, name: PartName, arrays: Mapping[str, jax.Array], meta: Mapping[str, Any]) -> tuple[int, float]:
        """In the thread: writes this process's part, copies the next host's, deletes older ones.

        Returns:
          Bytes of this process's part, and seconds.
        """
        written, hosts, start = [], self.hosts, time.perf_counter()
        prefix = f"replicate/{self._saves}"
        try:
            on_all_processes(f"{prefix}/own", lambda: written.append(write_part(hosts.root / OWN, name, arrays, meta)))
            if hosts.next:
                on_all_processes(f"{prefix}/copies", lambda: hosts.copy_next(name) if hosts.leads else None)
        except Exception:
            if hosts.leads:
                hosts.delete(lambda other: (other.step, other.attempt) == (name.step, name.attempt))
            raise
        if hosts.leads:
            hosts.delete(lambda other: (other.step, other.attempt) < (name.step, name.attempt))
        return written[0], time.perf_counter() - start

    def wait(self) -> list[str]:
        """Waits for the replication in progress; returns messages: about the first one, and about failures."""
        if self._pending is None:
            return []
        (step, written), self._pending = self._pending, None
        if error := written.exception():
            self._arrays, reason = None, reason_of(error)
            repeated, self._last_failure = reason == self._last_failure, reason
            newest = f"the newest is of step {self.newest}" if self.newest else "there is none yet"
            return [] if repeated else [f"warning: step {step}: state NOT replicated: {reason}; {newest}"]
        first, self.newest = not self._told or bool(self._last_failure), step
        self._told, self._last_failure = True, ""
        size, taken = written.result()
        waited = f"training waited {self.blocked:.2f} s"
        text = f"step {step}: state replicated, {format_size(size)} of this process in {taken:.1f} s ({waited})"
        return [text] if first else []

    def close(self, clear: bool) -> list[str]:
        """Waits for the replication in progress and ends the server; returns messages. All processes must call it.

        Args:
          clear: deletes all parts, because a checkpoint has the last state.
        """
        messages = self.wait()
        self._thread.shutdown()
        self.hosts.close(clear)
        return messages


class _LazyParts:
    """Parts that are opened when an iteration reaches them.

    Attributes:
      remote: bytes read from other hosts.
    """

    def __init__(self, hosts: MemoryHosts, holders: Mapping[PartName, Holder]):
        self._hosts, self._holders, self.remote = hosts, holders, 0
        self._open: dict[PartName, Part] = {}
        self._clients: dict[str, PeerClient] = {}

    def __iter__(self) -> Iterator[Part]:
        for name, holder in self._holders.items():
            if name not in self._open:
                part = self._hosts.open(name, holder, self._clients)
                self._open[name] = self._counted(part) if holder.address else part
            yield self._open[name]

    def _counted(self, part: Part) -> Part:
        def read(start: int, stop: int):
            self.remote += stop - start
            return part.read(start, stop)

        return dataclasses.replace(part, read=read)

    def close(self) -> None:
        """Ends the connections."""
        for client in self._clients.values():
            client.close()


def _assemble_array(
    parts: _LazyParts, name: str, leaf: jax.ShapeDtypeStruct, sharding, where: StageLayers
) -> jax.Array:
    """An array in canonical order, sharded as `layout.from_canonical` takes it; a block of several devices is read once."""
    shape, blocks = layout.canonical_shape(name, leaf.shape, where), {}

    def block(box) -> np.ndarray:
        key = tuple((index.start, index.stop) for index in box)
        if key not in blocks:
            blocks[key] = assemble(parts, name, box, shape, leaf.dtype)
        return blocks[key]

    return jax.make_array_from_callback(shape, layout.canonical_sharding(name, leaf.shape, sharding, where), block)
