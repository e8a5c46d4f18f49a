"""Starting a run of several processes: each finds its place among them by options or by the launcher's environment.

`start` calls `jax.distributed.initialize` with what SLURM, MPI, Kubernetes or the options say; `watchdog.py` ends the job
when a process dies or hangs.
"""

import functools
import os
import re
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megajax.config import ConfigError, LaunchConfig
from megajax.runtime.compat import (
    COORDINATION_SERVICE,
    call_after_compilation,
    coordination_service,
    initialize_distributed,
)
from megajax.runtime.coordinator import ServiceProcess
from megajax.runtime.gpu_environment import visible_gpus
from megajax.runtime.heartbeat import VARIABLE
from megajax.runtime.joining import PortInUse, Refused, join

EXIT_PEER = 3  # exit code of a process that cannot continue without another: a new start may succeed
COMPILED = "megajax/compiled/"
COMPILE_TIMEOUT = 7 * 24 * 3600  # seconds; a process that dies or hangs is the watchdog's business


class StartError(Exception):
    """The processes of a run did not connect to one another. It may succeed if it is tried again."""


@dataclass(frozen=True)
class Place:
    """This process's rank and how it reaches the others; None: jax's cluster detection finds it, or it is unknown."""

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    local_devices: list[int] | None = None  # indices of this host's GPUs
    method: str = "deactivate"  # jax's cluster_detection_method, which finds the fields that are None


class _Environment:
    """A launcher's variables, read as numbers."""

    def __init__(self, variables: Mapping[str, str]):
        self.variables = variables

    def __contains__(self, name: str) -> bool:
        return name in self.variables

    def number(self, *names: str) -> int | None:
        """The first of the variables that is set to a whole number."""
        found = (self.variables.get(name, "") for name in names)
        return next((int(text) for text in found if text.isdecimal()), None)

    def several(self, name: str) -> bool:
        """Whether the variable is a number above 1."""
        return (self.number(name) or 1) > 1


def find_place(launch: LaunchConfig, environment: Mapping[str, str]) -> Place | None:
    """The process's place by options or environment; None for a run of one process.

    Options take precedence over JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and those over the
    launcher's variables.

    Raises:
      ConfigError: the variables of the launcher that was named are missing, or contradict one another.
    """
    variables = _Environment(environment)
    kind = _detect_launcher(launch, variables) if launch.launcher == "auto" else launch.launcher
    if kind == "single":
        return None
    given = Place(
        launch.coordinator or environment.get("JAX_COORDINATOR_ADDRESS"),
        _first(launch.processes, variables.number("JAX_NUM_PROCESSES")),
        _first(launch.process_id, variables.number("JAX_PROCESS_ID")),
    )
    return {"slurm": _slurm, "mpi": _mpi, "kubernetes": _kubernetes, "flags": _flags}[kind](given, variables)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _detect_launcher(launch: LaunchConfig, variables: _Environment) -> str:
    by_variables = "JAX_COORDINATOR_ADDRESS" in variables and "JAX_PROCESS_ID" in variables
    if launch.coordinator or launch.processes or by_variables:
        return "flags" if "JOB_COMPLETION_INDEX" not in variables else "kubernetes"
    if "SLURM_PROCID" in variables and "SLURM_STEP_NODELIST" in variables and variables.several("SLURM_NTASKS"):
        return "slurm"
    if variables.several("OMPI_COMM_WORLD_SIZE") or variables.several("PMI_SIZE"):
        return "mpi"
    if "JOB_COMPLETION_INDEX" in variables and variables.several("JAX_NUM_PROCESSES"):
        return "kubernetes"
    return "single"


def _slurm(given: Place, variables: _Environment) -> Place:
    tasks = re.match(r"\d+", variables.variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    place = Place(
        given.coordinator,
        _first(given.processes, variables.number("SLURM_NTASKS")),
        _first(given.process_id, variables.number("SLURM_PROCID")),
        _local_devices(variables, variables.number("SLURM_LOCALID"), int(tasks[0]) if tasks else None),
        "slurm",
    )
    needs = "SLURM_NTASKS and SLURM_PROCID: start with srun"
    return _checked(place, "slurm", needs, finds_coordinator="SLURM_STEP_NODELIST" in variables)


def _mpi(given: Place, variables: _Environment) -> Place:
    local_rank = variables.number("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    detects = "OMPI_MCA_orte_hnp_uri" in variables  # older versions of Open MPI publish mpirun's address
    place = Place(
        given.coordinator,
        _first(given.processes, variables.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")),
        _first(given.process_id, variables.number("OMPI_COMM_WORLD_RANK", "PMI_RANK")),
        _local_devices(variables, local_rank, variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")),
        "ompi" if detects else "deactivate",
    )
    needs = "OMPI_COMM_WORLD_SIZE or PMI_SIZE: start with mpirun, and pass --coordinator"
    return _checked(place, "mpi", needs, finds_coordinator=detects)


def _kubernetes(given: Place, variables: _Environment) -> Place:
    process_id = _first(given.process_id, variables.number("JOB_COMPLETION_INDEX"))
    needs = "JOB_COMPLETION_INDEX, JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS: see scripts/kubernetes.yaml"
    return _checked(Place(given.coordinator, given.processes, process_id), "kubernetes", needs)


def _flags(given: Place, variables: _Environment) -> Place:
    return _checked(given, "flags", "--coordinator, --processes and --process-id")


def _checked(place: Place, kind: str, needs: str, finds_coordinator: bool = False) -> Place:
    if place.processes is None or place.process_id is None or not (place.coordinator or finds_coordinator):
        raise ConfigError(f"launcher = {kind} needs {needs}; for one process pass --launcher single.")
    if not 0 <= place.process_id < place.processes:
        raise ConfigError(f"process {place.process_id} of {place.processes}: processes count from 0; check {needs}.")
    return place


def _local_devices(variables: _Environment, local_rank: int | None, tasks_here: int | None) -> list[int] | None:
    """This process's visible GPUs: all if it is the only process on its host, otherwise the one of its rank."""
    count = len(visible_gpus(variables.variables))
    if count == 0 or local_rank is None:
        return [0] if local_rank is not None else None  # no GPU: jax must not choose a device by rank
    return list(range(count)) if tasks_here == 1 or count == 1 else [local_rank]


def is_first(launch: LaunchConfig) -> bool:
    """Whether this process is process 0, or the only one, as far as that is known before it has joined the others.

    Raises:
      ConfigError: see `find_place`.
    """
    place = find_place(launch, os.environ)
    return place is None or place.process_id == 0


def start(launch: LaunchConfig, run: str | None = None, identity: Mapping[str, str] | None = None) -> int:
    """Connects to the other processes, if there are any; returns their number. Call it before jax starts its devices.

    Ends the process with exit code 3 if the others have not connected within `start_timeout` seconds.

    Args:
      launch: how the processes find each other.
      run: the run directory; None: there is none.
      identity: what must be the same in all processes, by its name for the message.

    Raises:
      ConfigError: the launcher's variables or the options are wrong, another run uses the port, or a process of this run
        was started twice or with other options.
      StartError: the service cannot be started or reached.
    """
    place = find_place(launch, os.environ)
    if place is None:
        return 1
    # It outlives process 0 until the other processes have found out that process 0 is dead.
    start_service = functools.partial(
        ServiceProcess, *COORDINATION_SERVICE, launch.peer_timeout + 30, identity or {}, run
    )
    joined = coordination_service()

    def find_service(address: str, process: int) -> str:
        if process == 0:
            return f"{address.rpartition(':')[0]}:{joined.service.port}"
        found, connection = join(address, process, identity or {}, run)
        connection.detach()  # it stays open until this process ends
        return found

    timer = threading.Timer(launch.start_timeout, _exit_for_timeout, (place, launch.start_timeout))
    timer.daemon = True
    timer.start()
    try:
        initialize_distributed(
            start_service,
            find_service,
            place.coordinator,
            place.processes,
            place.process_id,
            place.local_devices,
            cluster_detection_method=place.method,
            coordinator_bind_address=bind_address(place.coordinator) if place.process_id == 0 else None,
            # `timer` and the watchdog must act first: jax aborts the process without naming the one at fault.
            initialization_timeout=int(2 * launch.start_timeout + 60),
            heartbeat_timeout_seconds=int(2 * launch.peer_timeout + 60),
            shutdown_timeout_seconds=int(launch.peer_timeout) + 1,
        )
    except PortInUse as error:
        # The launcher chooses another port for its next start.
        raise (StartError if VARIABLE in os.environ else ConfigError)(str(error)) from error
    except Refused as error:
        raise ConfigError(str(error)) from error
    except (RuntimeError, ValueError) as error:
        problem = ConfigError if isinstance(error, ValueError) else StartError
        raise problem(_not_connected(place, " ".join(str(error).split())[:200])) from error
    finally:
        timer.cancel()
    if joined.num_processes > 1:
        call_after_compilation(CompilationBarrier(joined.client))
    return joined.num_processes


class CompilationBarrier:
    """Lets the processes of a program execute it for the first time together, however long each has compiled it.

    A program's first execution connects its devices' processes, with deadlines: gloo waits 30 s for the others. One
    process may find a program in the compilation cache that another compiles for an hour.
    """

    def __init__(self, client):
        """`client` is that of jax's coordination service."""
        self._client, self._programs = client, Counter()

    def __call__(self, program: str, processes: Sequence[int]) -> None:
        """Waits until all `processes` have compiled `program`. They compile their common programs in the same order."""
        key = "-".join(map(str, processes))
        self._programs[key] += 1
        name = f"{COMPILED}{key}/{self._programs[key]}/{program}"
        self._client.wait_at_barrier(name, 1000 * COMPILE_TIMEOUT, process_ids=list(processes))


def bind_address(coordinator: str | None) -> str | None:
    """The address on which process 0 listens: the coordinator's own; None: jax's default, all interfaces.

    None if the address is not one of this host's (behind a forwarded port), or if a host's name stands for loopback, as
    in the /etc/hosts of some distributions: other hosts resolve it to another address.
    """
    host, _, port = (coordinator or "").rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host or None, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return None
    family, *_, (address, *_) = found[0]
    is_loopback = address.startswith("127.") or address == "::1"
    if is_loopback and host not in (address, "localhost"):
        return None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return None
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _not_connected(place: Place, reason: str) -> str:
    return (
        f"process {place.process_id} of {place.processes} did not connect to the others at "
        f"{place.coordinator or 'the first host'}: {reason}. Check that process 0 runs there and that all others run, that "
        "the port is free and not blocked, and that no *_proxy variable is set."
    )


def _exit_for_timeout(place: Place, seconds: float) -> None:
    """Ends a process whose main thread waits inside jax."""
    reason = f"not all of them started within {seconds:g} s"
    print(f"error: {_not_connected(place, reason)}", file=sys.stderr, flush=True)
    os._exit(EXIT_PEER)
