"""The files that a run writes, and when it stops before its last step."""

from dataclasses import dataclass

from megajax.config.errors import ConfigError
from megajax.config.fields import check_fields, setting
from megajax.schedules.arguments import is_count
from megajax.schedules.errors import shown
from megajax.schedules.paths import is_store

# Names the directory in which the processes of a host keep their replicated state.
MEMORY_VARIABLE = "MEGAJAX_MEMORY_DIR"
TRACKERS = ("wandb", "mlflow", "trackio")
ARTIFACTS = ("none", "last", "all")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """The files that a run writes, and when it stops before its last step. No field changes a computed number."""

    run_dir: str | None = setting(
        None,
        "directory for checkpoints, logs and configuration; also gs://BUCKET/FOLDER or s3://BUCKET/FOLDER (extra stores)",
        metavar="DIR",
        text_kind="store",
        shown_default="nothing is kept",
    )
    resume: str = setting(
        "no",
        "auto: resume from run_dir's newest checkpoint, if there is one; STEP: from that step's; DIR: from another run's",
        metavar="no|auto|STEP|DIR",
        text_kind="store",
    )
    save_every: int = setting(1000, "steps between two checkpoints; there is always one at the end and at a stop")
    max_to_keep: int = setting(3, "newest checkpoints to keep")
    keep_every: int | None = setting(
        None, "also keep checkpoints whose step is a multiple of this", shown_default="none"
    )
    check_every: int | None = setting(
        None,
        "steps between two checks: copies of the state on different devices are compared bit by bit (silent data "
        "corruption), and slow processes are named; also before each save",
        shown_default="no checks",
    )
    replicate_state: int | None = setting(
        None,
        f"steps between two copies of the state in the memory of this host and the next one ({MEMORY_VARIABLE}, default "
        "/dev/shm), from which --resume auto resumes if they are newer than the checkpoints",
        shown_default="none",
    )
    exit_after_minutes: float | None = setting(
        None, "save and exit with code 0 after this long", shown_default="at the end"
    )
    log_jsonl: str | None = setting(
        None,
        "write one JSON object a step to FILE; a resumed run appends, and the FILE of an earlier run is renamed to FILE.1",
        metavar="FILE",
        text_kind="path",
        shown_default="log.jsonl in --run-dir",
    )
    tensorboard: bool = setting(True, "write run_dir/tensorboard")
    track: str | None = setting(
        None,
        "also log to this tracker of experiments, from process 0",
        choices=TRACKERS,
        shown_default="none",
    )
    track_project: str | None = setting(
        None, "the tracker's project; of mlflow the experiment", shown_default="the library's own variable, or megajax"
    )
    track_name: str | None = setting(
        None, "the run's name in the tracker", text_kind="any", shown_default="that of --run-dir, or the model's"
    )
    track_artifacts: str = setting(
        "none", "checkpoints that are logged as artifacts: the last one of each session, or all", choices=ARTIFACTS
    )
    track_wait: float = setting(60.0, "seconds that the end of a run waits for the tracker at most")
    profile: str | None = setting(
        None, "write a jax.profiler trace of these steps to run_dir/profile", metavar="START:STOP"
    )

    def validate(self) -> None:
        """Checks the values by themselves; no file is opened.

        Raises:
            ConfigError: for the first field that is illegal, alone or with the others.
        """
        check_fields(self)
        if self.profile is not None:
            start, _, stop = self.profile.partition(":")
            if not (is_count(start) and is_count(stop) and 0 < int(start) < int(stop)):
                raise ConfigError(
                    f"profile = {shown(self.profile)} is not START:STOP, two steps: pass --profile 10:13."
                )
        for name in ("profile", "exit_after_minutes", "keep_every", "replicate_state"):
            if getattr(self, name) is not None and self.run_dir is None:
                raise ConfigError(f"{name} = {getattr(self, name)} has nowhere to write: pass --run-dir DIR too.")
        for name in ("track_project", "track_name", "track_artifacts"):
            if self.track is None and getattr(self, name) not in (None, "none"):
                raise ConfigError(f"{name} = {shown(getattr(self, name))} has no tracker: pass --track wandb too.")
        if self.track_artifacts != "none" and self.run_dir is None:
            raise ConfigError(f"track_artifacts = {self.track_artifacts} has no checkpoints: pass --run-dir DIR too.")
        if self.resume != "no" and self.run_dir is None:
            raise ConfigError(f"resume = {self.resume} needs a directory: pass --run-dir DIR too.")
        if self.track_artifacts != "none" and is_store(self.run_dir):
            raise ConfigError(
                f"track_artifacts = {self.track_artifacts} logs checkpoints of a directory of this machine, and run_dir = "
                f"{self.run_dir} is in an object store: pass --track-artifacts none."
            )
        if self.resume.isdecimal() and not is_count(self.resume):
            raise ConfigError(f"resume = {shown(self.resume)} is not a step: pass --resume auto.")
