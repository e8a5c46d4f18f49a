"""The processes of a run: launcher, coordinator and timeouts."""

from dataclasses import dataclass

from megajax.config.errors import ConfigError, option
from megajax.config.fields import check_fields, setting
from megajax.schedules.arguments import is_count

LONGEST = 10**8  # seconds: three years. Twice as many must be an int32 of jax's coordination service


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How the processes of a run find each other, and their timeouts."""

    launcher: str = setting(
        "auto",
        "what started the processes; auto reads the environment of SLURM, MPI and Kubernetes, then --coordinator",
        ("auto", "single", "slurm", "mpi", "kubernetes", "flags"),
    )
    coordinator: str | None = setting(None, "address of process 0, reachable from all", metavar="HOST:PORT")
    processes: int | None = setting(None, "number of processes")
    process_id: int | None = setting(None, "number of this process, from 0", low=0)
    start_timeout: float = setting(
        300.0, "seconds to wait for the other processes at the start", below=LONGEST, metavar="SECONDS"
    )
    peer_timeout: float = setting(
        300.0,
        "seconds without a heartbeat or a step of another process, or of the only one, that end the job",
        below=LONGEST,
        metavar="SECONDS",
    )

    def validate(self) -> None:
        """Checks the values by themselves; nothing is connected.

        Raises:
            ConfigError: for the first field that is illegal, alone or with the others.
        """
        check_fields(self)
        by_hand = ("coordinator", "processes", "process_id")
        given = [name for name in by_hand if getattr(self, name) is not None]
        if self.launcher in ("auto", "flags") and (given or self.launcher == "flags") and len(given) < 3:
            missing = ", ".join(option(name) for name in by_hand if name not in given)
            raise ConfigError(f"several processes started by hand need {missing} too: pass all three.")
        host, _, port = (self.coordinator or "node0:12355").rpartition(":")
        if not host or not is_count(port) or not 0 < int(port) < 65536:
            raise ConfigError(f"coordinator = {self.coordinator!r} is not HOST:PORT: pass --coordinator node0:12355.")
        if self.processes is not None and self.process_id is not None and self.process_id >= self.processes:
            raise ConfigError(
                f"process_id = {self.process_id} must be below processes = {self.processes}: they count from 0."
            )
