"""Several processes as one run: how they find each other, and how a dead or hung one ends the job with its name.

`start` brings `jax.distributed` up from SLURM's, MPI's or Kubernetes' environment, or from options. `Watch` is two threads
a process. One tells process 0 every second or so that it lives, which step it is in, and whether it has failed; the
other ends the process when process 0 says so, or no longer answers. Process 0 finds who is missing or behind.
"""

import contextlib
import json
import os
import pathlib
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from megajax.config import ConfigError, LaunchConfig
from megajax.runtime.compat import coordination_service

EXIT_PEER = 3  # a process's exit code when another one ended the run
ALIVE, VERDICT, MET = "megajax/alive/", "megajax/verdict", "megajax/met/"


@dataclass(frozen=True)
class Place:
    """What is known of this process's place among the others; None: jax's detection finds it, or not at all."""

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    local_devices: list[int] | None = None  # indices of this host's GPUs
    method: str = "deactivate"  # jax's cluster_detection_method, where it has to find what is None


def find_place(launch: LaunchConfig, environment: Mapping[str, str]) -> Place | None:
    """The process's place by options or environment; None for a run of one process.

    Options go first, then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then what the launcher sets.

    Raises:
      ConfigError: the launcher that was named has left no mark, or not enough of them.
    """
    kind = launch.launcher
    if kind == "auto":
        kind = _recognise(launch, environment)
    if kind == "single":
        return None
    number = lambda name: int(environment[name]) if environment.get(name, "").isdecimal() else None  # noqa: E731
    first = lambda *values: next((value for value in values if value is not None), None)  # noqa: E731
    coordinator = first(launch.coordinator, environment.get("JAX_COORDINATOR_ADDRESS"))
    processes = first(launch.processes, number("JAX_NUM_PROCESSES"))
    process_id = first(launch.process_id, number("JAX_PROCESS_ID"))
    if kind == "slurm":
        tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        local = _local_devices(environment, number("SLURM_LOCALID"), int(tasks[0]) if tasks else None)
        place = Place(
            coordinator,
            first(processes, number("SLURM_NTASKS")),
            first(process_id, number("SLURM_PROCID")),
            local,
            "slurm",
        )
        _need(
            place,
            kind,
            "SLURM_NTASKS and SLURM_PROCID: start with srun",
            coordinator="SLURM_STEP_NODELIST" in environment,
        )
        return place
    if kind == "mpi":
        size = first(processes, number("OMPI_COMM_WORLD_SIZE"), number("PMI_SIZE"))
        rank = first(process_id, number("OMPI_COMM_WORLD_RANK"), number("PMI_RANK"))
        local_rank = first(number("OMPI_COMM_WORLD_LOCAL_RANK"), number("MPI_LOCALRANKID"))
        tasks = first(number("OMPI_COMM_WORLD_LOCAL_SIZE"), number("MPI_LOCALNRANKS"))
        detects = "OMPI_MCA_orte_hnp_uri" in environment  # older Open MPI says where mpirun runs
        place = Place(
            coordinator, size, rank, _local_devices(environment, local_rank, tasks), "ompi" if detects else "deactivate"
        )
        _need(
            place,
            kind,
            "OMPI_COMM_WORLD_SIZE or PMI_SIZE: start with mpirun, and give --coordinator",
            coordinator=detects,
        )
        return place
    if kind == "kubernetes":
        place = Place(coordinator, processes, first(process_id, number("JOB_COMPLETION_INDEX")))
        wanted = "JOB_COMPLETION_INDEX, JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS: see scripts/kubernetes.yaml"
        _need(place, kind, wanted)
        return place
    place = Place(coordinator, processes, process_id)
    _need(place, kind, "--coordinator, --processes and --process-id")
    return place


def _recognise(launch: LaunchConfig, environment: Mapping[str, str]) -> str:
    if launch.coordinator or launch.processes or {"JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"} <= environment.keys():
        return "flags" if "JOB_COMPLETION_INDEX" not in environment else "kubernetes"
    several = lambda name: int(environment.get(name) or 1) > 1  # noqa: E731
    if "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment and several("SLURM_NTASKS"):
        return "slurm"
    if several("OMPI_COMM_WORLD_SIZE") or several("PMI_SIZE"):
        return "mpi"
    if "JOB_COMPLETION_INDEX" in environment and several("JAX_NUM_PROCESSES"):
        return "kubernetes"
    return "single"


def _need(place: Place, kind: str, wanted: str, coordinator: bool = False) -> None:
    if place.processes is None or place.process_id is None or (place.coordinator is None and not coordinator):
        raise ConfigError(f"launcher = {kind} needs {wanted}; for one process type --launcher single.")
    if not 0 <= place.process_id < place.processes:
        raise ConfigError(f"process {place.process_id} of {place.processes}: they count from 0; look at {wanted}.")


def _local_devices(environment: Mapping[str, str], local_rank: int | None, tasks_here: int | None) -> list[int] | None:
    """This process's GPUs among those it sees: all of them if it is alone on its host, else the one of its rank."""
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown:
        count = len(shown.split(","))
    else:
        count = sum(path.name[6:].isdecimal() for path in pathlib.Path("/dev").glob("nvidia*"))
    if count == 0 or local_rank is None:
        return [0] if local_rank is not None else None  # no GPU: jax must not pick by rank
    return list(range(count)) if tasks_here == 1 or count == 1 else [local_rank]


def start(launch: LaunchConfig) -> int:
    """Joins the other processes, if there are any; returns how many there are. Call it before anything makes jax start.

    Raises:
      ConfigError: they cannot be found, or do not come within `start_timeout` seconds.
    """
    place = find_place(launch, os.environ)
    if place is None:
        return 1
    late = threading.Timer(launch.start_timeout, _give_up, (place, launch.start_timeout))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process_id,
            place.local_devices,
            cluster_detection_method=place.method,
            # `late` and `Watch` are to notice first: jax aborts the process without saying whose fault it was.
            initialization_timeout=int(2 * launch.start_timeout + 60),
            heartbeat_timeout_seconds=int(2 * launch.peer_timeout + 60),
            shutdown_timeout_seconds=int(launch.peer_timeout) + 1,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(_did_not_meet(place, " ".join(str(error).split())[:200])) from error
    finally:
        late.cancel()
    return coordination_service().num_processes


def _did_not_meet(place: Place, reason: str) -> str:
    return (
        f"process {place.process_id} of {place.processes} did not meet the others at "
        f"{place.coordinator or 'the first host'}: {reason}. See that process 0 runs there and all others run, that the "
        "port is free and not blocked, and that no *_proxy variable is set."
    )


def _give_up(place: Place, seconds: float) -> None:
    """Ends a process whose main thread waits inside jax."""
    print(f"error: {_did_not_meet(place, f'they did not come within {seconds:g} s')}", file=sys.stderr, flush=True)
    os._exit(2)


def meet(name: str, problem: str | None = None, timeout: float = 3600) -> dict[int, str]:
    """Waits until all processes have come to the place called `name`. Returns the problems they bring along, by process.

    Any thread may call it: no device takes part.

    Args:
      name: may be used once.
      timeout: seconds. Rather long: whether the others live is `Watch`'s to judge.

    Raises:
      RuntimeError: not all came in time.
    """
    joined = coordination_service()
    if joined.client is None:
        return {} if problem is None else {0: problem}
    if problem is not None:
        joined.client.key_value_set(f"{MET}{name}/{joined.process_id}", problem)
    joined.client.wait_at_barrier(f"{MET}{name}", int(1000 * timeout))
    found = joined.client.key_value_dir_get(f"{MET}{name}/")
    return {int(key.rsplit("/", 1)[1]): value for key, value in found}


@dataclass
class _Peer:
    """What process 0 knows of a process."""

    heard: float  # time.monotonic() when its sign of life last changed
    sign: dict


class Watch:
    """Ends the job, on every process, when one of them is dead, hung or has failed. Does nothing alone."""

    def __init__(self, timeout: float, say: Callable[[str], None]):
        """Starts watching.

        Args:
          timeout: seconds without a sign of life, or without a new step, that are too many. (A step that compiles may
            take longer: `enter` is told.)
          say: shows the one message there is.
        """
        self.timeout, self.say, self.interval = timeout, say, min(1.0, timeout / 10)
        joined = coordination_service()  # asking jax itself would start the devices
        self._client, self._id, self._count = joined.client, joined.process_id, joined.num_processes
        self._step, self._entered, self._patient, self._failure = 0, time.monotonic(), True, None
        self._beat, self._answered = 0, time.monotonic()
        unheard = {"step": 0, "failure": None}
        self._peers = {process: _Peer(time.monotonic(), unheard) for process in range(self._count)}
        self._closed = threading.Event()
        self._leaving = threading.Lock()
        if self._count > 1:
            self._publish()
            for target in (self._tell, self._judge):
                threading.Thread(target=target, daemon=True, name=f"watch {target.__name__}").start()

    def enter(self, step: int, patient: bool = False) -> None:
        """Says that the main thread begins a step; `patient` for one that may take as long as it likes."""
        self._step, self._entered, self._patient = step, time.monotonic(), patient

    def close(self) -> None:
        """Stops watching: the run has come to its end on this process."""
        self._closed.set()

    def fail(self, message: str, code: int) -> None:
        """Ends the job for an error of this process; does not return if there are others."""
        if self._count > 1:
            self._failure = message
            self._publish()
            if self._id == 0:
                self._pronounce(message, code)
            time.sleep(5 * self.interval)  # the verdict of process 0 comes first, if it can
            self._leave(message, code)

    def lost(self, error: Exception) -> None:
        """Ends the job after a collective has failed: another process is gone, and is named if it can be found."""
        if self._count == 1:
            return
        if self._id != 0:
            self._closed.wait(15 * self.interval)
            text = " ".join(str(error).split())[:200]
            self._leave(f"process {self._id} lost contact with the others in step {self._step}: {text}", EXIT_PEER)
        deadline = time.monotonic() + 8 * self.interval
        while time.monotonic() < deadline:
            if quiet := self._quiet(time.monotonic()):
                break
            time.sleep(self.interval / 2)
        names = self._names(quiet) if quiet else "another process"
        self._pronounce(f"{names} died in step {self._step}, and the others cannot go on without it", EXIT_PEER)

    def _name(self, process: int) -> str:
        host = self._peers[process].sign.get("host")
        return f"process {process}" + (f" on {host}" if host else "")

    def _names(self, processes: list[int]) -> str:
        return ", ".join(map(self._name, processes))

    def _quiet(self, now: float) -> list[int]:
        """Processes that have missed several signs of life."""
        return [process for process, peer in self._peers.items() if now - peer.heard > 4 * self.interval]

    def _publish(self) -> None:
        self._beat += 1
        sign = {"beat": self._beat, "step": self._step, "host": socket.gethostname(), "failure": self._failure}
        # What cannot be sent is not answered either, which is what `_judge` looks at.
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{ALIVE}{self._id}", json.dumps(sign), allow_overwrite=True)

    def _tell(self) -> None:
        """One thread: tells, and hears the verdict. It can hang in a call where process 0 hangs."""
        while not self._closed.wait(self.interval):
            self._publish()
            try:
                if self._id == 0:
                    self._hear(dict(self._client.key_value_dir_get(ALIVE)))
                else:
                    self._client.key_value_try_get(VERDICT)
                    self._leave(None, EXIT_PEER)  # process 0 has said it
            except Exception as error:
                if "NOT_FOUND" not in str(error):  # which is an answer: there is no verdict
                    continue
            self._answered = time.monotonic()

    def _hear(self, signs: dict[str, str]) -> None:
        now = time.monotonic()
        for key, value in signs.items():
            process, sign = int(key.rsplit("/", 1)[1]), json.loads(value)
            if self._peers[process].sign != sign:
                self._peers[process] = _Peer(now, sign)

    def _judge(self) -> None:
        """The other thread: looks at the clock."""
        while not self._closed.wait(self.interval):
            if self._id != 0:
                silent = time.monotonic() - self._answered
                if silent > self.timeout:
                    address = coordination_service().coordinator_address
                    self._leave(
                        f"process 0 ({address}) has not answered for {silent:.0f} s: dead, hung or cut off", EXIT_PEER
                    )
            elif verdict := self._verdict():
                self._pronounce(verdict, EXIT_PEER)

    def _verdict(self) -> str | None:
        """Process 0's judgement."""
        now, peers = time.monotonic(), dict(self._peers)
        for process, peer in peers.items():
            if peer.sign["failure"] and process != 0:
                return f"{self._name(process)} failed: {peer.sign['failure']}"
            if now - peer.heard > self.timeout:
                silent = f"{now - peer.heard:.0f} s (in step {peer.sign['step']})"
                return f"{self._name(process)} has given no sign of life for {silent}: dead or cut off"
        waiting = now - self._entered
        if self._patient or waiting <= self.timeout:
            return None
        if quiet := self._quiet(now):
            return f"{self._names(quiet)} has given no sign of life, and step {self._step} waits for it for {waiting:.0f} s"
        steps = {process: peer.sign["step"] for process, peer in peers.items()} | {0: self._step}
        behind = [process for process, step in steps.items() if step < max(steps.values())]
        if behind:
            names = ", ".join(self._name(process) for process in behind)
            return (
                f"{names} hangs before step {max(steps.values())}, in which the others have waited for {waiting:.0f} s"
            )
        return f"step {self._step} has not ended for {waiting:.0f} s, and all processes are in it: a network or device hangs"

    def _pronounce(self, verdict: str, code: int) -> None:
        """Tells the others why the job ends, gives them time to hear it, and leaves."""
        with contextlib.suppress(Exception):
            self._client.key_value_set(VERDICT, verdict, allow_overwrite=True)
        self.say(f"error: {verdict}")
        # The coordination service goes with this process: the others must have left by then.
        time.sleep(4 * self.interval)
        self._leave(None, code)

    def _leave(self, message: str | None, code: int) -> None:
        """Ends this process at once: its main thread may hang in a collective for ever."""
        with self._leaving:
            if message is not None:
                self.say(f"error: {message}")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
