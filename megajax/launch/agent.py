"""An agent: supervises the training processes of its host, and agrees with the other hosts' agents when to start them.

    waiting --- a generation with this node in it ---> running
    running --- a process dies or hangs -------------> failed     (the others see it, kill theirs: stopped)
    running --- asked to save and stop --------------> stopped    (also by a signal to one of the processes)
    failed, stopped --- the next generation ---------> running, or waiting: a spare

The leader writes the next generation when no node runs, and asks a running generation to stop when another node makes a
larger run possible. Why not an existing launcher: torchrun's rendezvous is a store in a process of one of its nodes, and
is lost with it; it needs torch, and knows nothing of jax's coordinator, nor which meshes are legal.
"""

import contextlib
import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from megajax.launch.options import Options
from megajax.launch.rendezvous import FAILED, RUNNING, STOPPED, WAITING, Generation, Node, Rendezvous
from megajax.launch.workers import Workers, describe_code
from megajax.schedules.errors import counted
from megajax.train.log_file import LogFile

TICK = 0.2  # seconds between two looks at files and processes
BEAT = 0.5  # seconds between two writes of this node's state
FRESH = 3.0  # a node that has been silent for longer may be dead: the leader waits until that is clear
FINISH = 60.0  # seconds that processes have to end when the run has ended
SAVE = 600.0  # seconds that processes have to save and stop when they are asked to
USER_ERROR, GAVE_UP = 2, 3  # exit codes
ASK = signal.SIGUSR1  # asks the processes to save and stop
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # SLURM, a person, a closed terminal

Commands = Callable[[Generation, int], Mapping[int, tuple[Sequence[str], Mapping[str, str]]]]


class Agent:
    """The agent of one host."""

    def __init__(
        self,
        options: Options,
        directory: pathlib.Path,
        layouts: Mapping[int, list[str]],
        commands: Commands,
        resume: Callable[[], list[str]] = list,
    ):
        """Joins the run.

        Args:
          directory: shared by all hosts.
          layouts: the legal numbers of nodes, and the arguments of the training command for each.
          commands: (generation, first rank of this node) -> the commands of this node's processes, by rank.
          resume: further arguments of the training command: what the next generation resumes from.

        Raises:
          OSError: the directory cannot be written.
        """
        self.options, self.layouts, self.commands, self.resume = options, layouts, commands, resume
        host = socket.gethostname()
        name = f"{host}-{os.getpid()}-{random.SystemRandom().randrange(16**4):04x}"
        address = options.address or host_address(host)
        self.own = Node(name, host, time.time(), address)
        self.rendezvous = Rendezvous(directory, self.own, options.node_timeout)
        self._log = LogFile(directory / f"agent-{name}.log")
        self._scratch = tempfile.TemporaryDirectory(prefix="megajax-launch-")
        self.workers = Workers({}, pathlib.Path(self._scratch.name))
        self.generation: Generation | None = None
        self._signals, self._asked, self._last_line = 0, 0.0, ""
        self._candidates, self._changed = 0, time.monotonic()
        self._worked = time.monotonic()  # when the directory could last be read and written

    def run(self) -> int:
        """Supervises until the run ends or this node leaves; returns the exit code."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, self._receive)
        *fewer, most = map(str, sorted(self.layouts))
        sizes = f"{', '.join(fewer)} or {most} nodes" if fewer else counted(int(most), "node")
        self.log(f"node {self.own.name} joins; the run can use {sizes}")
        try:
            while True:
                try:
                    if (code := self._tick()) is not None:
                        return code
                    self._worked = time.monotonic()
                except OSError as error:  # a full disk, a file server that does not answer
                    self.log(f"warning: {error}")
                    if (code := self._give_up(error)) is not None:
                        return code
                time.sleep(TICK)
        finally:
            self.workers.kill()
            self._scratch.cleanup()
            with contextlib.suppress(OSError):
                self.rendezvous.leave()
            self._log.close()

    def log(self, text: str) -> None:
        """One line, on the console and in the agent's log; not twice in a row."""
        if text != self._last_line:
            self._last_line, line = text, f"{time.strftime('%H:%M:%S')} launch: {text}"
            with contextlib.suppress(OSError, ValueError):  # a terminal that has gone
                print(line, file=sys.stderr, flush=True)
            self._log.append(f"{line}\n".encode(errors="replace"))

    def _give_up(self, error: OSError) -> int | None:
        """While the directory cannot be used: the exit code if this agent can do nothing any more."""
        if self._signals and not self.workers.running:
            return GAVE_UP
        if self._signals > 1:
            return GAVE_UP
        if self.workers.running or time.monotonic() - self._worked < 60 * self.options.wait_minutes:
            return None
        self.log(f"gives up: the directory could not be used for {self.options.wait_minutes:g} minutes: {error}")
        return GAVE_UP

    def _receive(self, number, frame) -> None:
        self._signals += 1

    def _tick(self) -> int | None:
        """One look at everything; returns the exit code when the agent has finished."""
        self.workers.listen()
        if self.generation:
            self.rendezvous.keep(self.generation)
        self._publish()
        self.rendezvous.observe()
        if ended := self.rendezvous.ended():
            return self._finish(*ended)
        newest = self.rendezvous.newest_number()
        if newest > self.own.generation and not self.own.leaving:
            self._enter(newest)
        if self.own.state == RUNNING:
            self._check_workers()
        if self._signals and (code := self._leave()) is not None:
            return code
        if not self.own.leaving and not self.rendezvous.ended() and self._leader() == self.own.name:
            self._lead(newest)
        return None

    def _publish(self) -> None:
        self.own.step = max(self.own.step, self.workers.step)
        self.own.training = self.workers.training
        silent = time.monotonic() - self.rendezvous.published
        if silent > self.options.node_timeout and self.own.state == RUNNING:
            self._fail(f"the agent did not run for {silent:.0f} s, and the others have left this node out")
        if silent > BEAT:
            self.rendezvous.publish()

    def _set(self, state: str, reason: str = "") -> None:
        self.own.state, self.own.reason = state, reason
        self.rendezvous.publish()

    def _fail(self, reason: str) -> None:
        self.log(f"{reason}; the processes of this node are killed")
        self.workers.kill()
        self._set(FAILED, reason)

    def _enter(self, number: int) -> None:
        """Starts this node's processes of a new generation, if it has any."""
        generation = self.rendezvous.generation(number)
        if generation is None:
            return
        self.workers.kill()
        self.generation, self.own.generation, self._asked = generation, number, 0.0
        if self.own.name not in generation.members:
            self.log(f"generation {number} runs on {counted(len(generation.members), 'node')}; this one is a spare")
            self._set(WAITING)
            return
        rank = generation.members.index(self.own.name) * self.options.processes_per_node
        last = rank + self.options.processes_per_node - 1
        own = f"process {rank}" if last == rank else f"processes {rank} to {last}"
        self.log(f"generation {number}: starts {own} of {self._processes(generation)}")
        self.workers = Workers(self.commands(generation, rank), pathlib.Path(self._scratch.name))
        self._set(RUNNING)

    def _processes(self, generation: Generation) -> int:
        return len(generation.members) * self.options.processes_per_node

    def _check_workers(self) -> None:
        """While this node runs: has a process failed, here or elsewhere, or is it time to stop?"""
        generation, codes = self.generation, self.workers.codes()
        if self._asked:  # it may have stopped with the others, before the signal has reached it
            codes = {rank: 0 if code == -ASK else code for rank, code in codes.items()}
        wrong = [describe_code(rank, code, self.workers.step) for rank, code in codes.items() if code]
        if USER_ERROR in codes.values():
            self.rendezvous.end(generation.number, USER_ERROR, f"{wrong[0]}: a new start would end the same way")
            return
        wrong += self.workers.hung(self.options.hang_timeout)
        if self._asked and time.monotonic() - self._asked > SAVE:
            wrong.append(f"the processes have not saved and stopped within {SAVE:g} s")
        if wrong:
            self._fail(wrong[0])
            return
        alive = {node.name: node for node in self.rendezvous.alive()}
        lost = [name for name in generation.members if name not in alive]
        failed = [name for name, node in alive.items() if node.generation == generation.number and node.state == FAILED]
        if lost or failed:
            names = f"node {lost[0]} is gone" if lost else f"node {failed[0]} has failed"
            self.log(f"{names}; the processes of this node are killed")
            self.workers.kill()
            self._set(STOPPED)
        elif not self.workers.running:
            self._processes_ended(generation)
        elif not self._asked and self.workers.training and self.rendezvous.stop_requested(generation.number):
            self._asked = time.monotonic()
            self.workers.send(ASK)

    def _processes_ended(self, generation: Generation) -> None:
        """All processes of this node have ended with 0: at the end of the training, or because they were told to stop."""
        if self.workers.finished:
            self.rendezvous.end(generation.number, 0, "the training has ended")
        elif not self.rendezvous.stop_requested(generation.number):
            if not self.workers.step:
                self._fail("the processes have ended without a step")
                return
            self.log(
                f"the processes have stopped in step {self.workers.step}, and the training has not ended: it resumes"
            )
        self._set(STOPPED)

    def _leave(self) -> int | None:
        """After a signal to this agent: the processes save and stop, and this node leaves."""
        if not self.own.leaving:
            self.log("signal received: the processes save and stop, and this node leaves; a second signal kills them")
            self.own.leaving = True
            if self.own.state == RUNNING:
                self.rendezvous.request_stop(self.generation.number)
            self.rendezvous.publish()
        if self.own.state != RUNNING or self._signals > 1:
            self.log("leaves")
            return GAVE_UP if self.own.state == FAILED or self._signals > 1 else 0
        return None

    def _finish(self, code: int, reason: str) -> int:
        """The run has ended."""
        deadline = time.monotonic() + FINISH
        while code == 0 and self.workers.running and time.monotonic() < deadline:
            time.sleep(TICK)
        self.log(f"the run has ended with exit code {code}: {reason}")
        return code

    # The functions below run on the leader only.

    def _leader(self) -> str:
        return next(node.name for node in self.rendezvous.alive() if not node.leaving)

    def _lead(self, newest: int) -> None:
        """Writes the next generation if no node runs; asks the running one to stop if a larger one is possible."""
        alive = self.rendezvous.alive()
        candidates = [node for node in alive if not node.leaving]
        if len(candidates) != self._candidates:
            self._candidates, self._changed = len(candidates), time.monotonic()
        waited = time.monotonic() - self._changed
        count = max((count for count in self.layouts if count <= len(candidates)), default=0)
        current = self.rendezvous.generation(newest) if newest else None
        running = [node for node in alive if node.generation == newest and node.state == RUNNING]
        if running:
            lost_none = {node.name for node in running} == set(current.members)
            if lost_none and count > len(current.members) and waited > FRESH and all(n.training for n in running):
                if not self.rendezvous.stop_requested(newest):
                    self.log(f"{len(candidates)} nodes: generation {newest} saves and stops, to resume with {count}")
                    self.rendezvous.request_stop(newest)
            return
        entering = any(node.generation < newest for node in candidates)
        doubtful = len(self.rendezvous.alive(FRESH)) < len(alive)
        if entering or doubtful:
            return
        if count == 0:
            self._wait(len(candidates), waited, newest)
        elif newest > self.rendezvous.first or len(candidates) >= self.options.most or waited > self.options.join_wait:
            self._propose(current if newest > self.rendezvous.first else None, newest, candidates, count)

    def _wait(self, nodes: int, waited: float, newest: int) -> None:
        self.log(f"waits for nodes: there are {nodes}, and the run needs {min(self.layouts)}")
        if waited > 60 * self.options.wait_minutes:
            reason = f"fewer than {min(self.layouts)} nodes for {self.options.wait_minutes:g} minutes"
            self.rendezvous.end(newest, GAVE_UP, reason)

    def _propose(self, last: Generation | None, newest: int, candidates: list[Node], count: int) -> None:
        """Writes the next generation, or gives up after too many failures."""
        reached, failures = 0, 0
        if last:
            reached = max(last.reached, *(node.step for node in candidates))
            failures = 1 if reached > last.reached else last.failures + 1
            names = {node.name: node for node in candidates}
            lost = [f"node {name} is gone" for name in last.members if name not in names]
            failed = [f"node {node.name}: {node.reason}" for node in candidates if node.state == FAILED]
            if not failed and (not lost or self.rendezvous.stop_requested(newest)):
                failures = 0 if reached > last.reached else last.failures
            for reason in (*failed, *lost):
                self.log(reason)
            if failures > self.options.max_failures:
                reason = f"{failures} failures without a step beyond {reached}: {(failed + lost)[0]}"
                self.rendezvous.end(newest, GAVE_UP, reason)
                return
        members = [node.name for node in candidates[:count]]
        coordinator = f"{candidates[0].address}:{free_port()}"
        arguments = [*self.layouts[count], *self.resume()]
        number = self.rendezvous.next_number()
        generation = Generation(number, members, coordinator, arguments, reached, failures)
        if self.rendezvous.propose(generation):
            spares = len(candidates) - count
            note = f", {spares} spare" if spares else ""
            self.log(f"generation {number}: {counted(count, 'node')}{note}, {' '.join(generation.arguments)}")


def free_port() -> int:
    """A port of this host on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def host_address(name: str) -> str:
    """An address of this host that other hosts reach, where it can be found; else its name."""
    try:
        found = {address[4][0] for address in socket.getaddrinfo(name, None, socket.AF_INET)}
        if outside := sorted(address for address in found if not address.startswith("127.")):
            return outside[0]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the route
            return probe.getsockname()[0]
    except OSError:
        return name
