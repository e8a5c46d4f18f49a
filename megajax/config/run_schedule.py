"""The schedule of a run: by name, or from a file."""

from typing import Any

from megajax.config import RunConfig
from megajax.config.schedule_rules import SCHEDULE_OPTIONS
from megajax.schedules.io import is_schedule_file, load
from megajax.schedules.registry import make_schedule, with_option
from megajax.schedules.schedule import Schedule, ScheduleError
from megajax.schedules.simulate import Costs


def run_schedule(run: RunConfig, microbatches: int | None = None) -> Schedule:
    """The schedule of the run's training step.

    Args:
      microbatches: number of microbatches of a smaller batch, as in a batch ramp; None: that of a full step.

    Raises:
      ScheduleError: the sizes are illegal for this schedule, or a file's are not the run's.
    """
    sizes = schedule_arguments(run, microbatches)
    if is_schedule_file(run.parallel.schedule):
        _check_sizes(run, load(run.parallel.schedule), sizes["microbatches"])
    return make_schedule(run.parallel.schedule, **sizes)


def schedule_arguments(run: RunConfig, microbatches: int | None = None) -> dict[str, Any]:
    """The arguments of `make_schedule` for a run: its sizes and the options of its schedule that are set."""
    parallel = run.parallel
    options = {name: getattr(parallel, name) for name in SCHEDULE_OPTIONS}
    given = {name: value for name, value in options.items() if value is not None}
    if parallel.schedule in with_option("costs"):
        given["costs"] = operation_costs(run)
    return {
        "stages": parallel.pipe,
        "microbatches": microbatches or run.microbatches,
        "chunks": parallel.chunks,
        **given,
    }


def operation_costs(run: RunConfig) -> Costs:
    """Times of operations relative to a forward. Full recompute runs the forward again before the input's gradient."""
    return Costs(1.0, 3.0, 2.0, 1.0) if run.parallel.recompute == "full" else Costs()


def _check_sizes(run: RunConfig, schedule: Schedule, microbatches: int) -> None:
    parallel, batch = run.parallel, run.parallel.microbatch_size * run.parallel.data
    if not schedule.has_backward:
        raise ScheduleError(f"{parallel.schedule} has no backwards, so it cannot train")
    for name, of_run, of_file, change in (
        ("stages", parallel.pipe, schedule.stages, f"--pipe {schedule.stages}"),
        ("chunks", parallel.chunks, schedule.chunks, f"--chunks {schedule.chunks}"),
        (
            "microbatches",
            microbatches,
            schedule.microbatches,
            f"--global-batch-size {schedule.microbatches * batch}",
        ),
    ):
        if of_run != of_file:
            raise ScheduleError(f"{parallel.schedule} has {of_file} {name} and the run {of_run}: pass {change}")
