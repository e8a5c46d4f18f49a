"""What makes an OutputConfig or a LaunchConfig legal: how a run is started, and what it writes."""

from megajax.config import LaunchConfig, OutputConfig
from megajax.config.checks import check_values
from megajax.config.errors import ConfigError, option


def check_output(output: OutputConfig) -> None:
    """Raises ConfigError for the first value that an OutputConfig cannot have."""
    check_values(output)
    if output.profile is not None:
        start, _, stop = output.profile.partition(":")
        if not (start.isdecimal() and stop.isdecimal() and 0 < int(start) < int(stop)):
            raise ConfigError(f"profile = {output.profile!r} is not START:STOP, two steps: type --profile 10:13.")
    for name in ("profile", "exit_after_minutes", "keep_every"):
        if getattr(output, name) is not None and output.run_dir is None:
            raise ConfigError(f"{name} = {getattr(output, name)} has nowhere to write: type --run-dir DIR too.")
    if output.resume != "no" and output.run_dir is None:
        raise ConfigError(f"resume = {output.resume} needs a directory: type --run-dir DIR too.")


def check_launch(launch: LaunchConfig) -> None:
    """Raises ConfigError for the first value that a LaunchConfig cannot have."""
    check_values(launch)
    given = [name for name in ("coordinator", "processes", "process_id") if getattr(launch, name) is not None]
    if launch.launcher in ("auto", "flags") and (given or launch.launcher == "flags") and len(given) < 3:
        missing = ", ".join(option(name) for name in ("coordinator", "processes", "process_id") if name not in given)
        raise ConfigError(f"several processes started by hand need {missing} too: type all three.")
    if launch.coordinator is not None and not launch.coordinator.rpartition(":")[2].isdecimal():
        raise ConfigError(f"coordinator = {launch.coordinator!r} is not HOST:PORT: type --coordinator node0:12355.")
    if launch.processes is not None and launch.process_id is not None and launch.process_id >= launch.processes:
        raise ConfigError(
            f"process_id = {launch.process_id} must be below processes = {launch.processes}: they count from 0."
        )
