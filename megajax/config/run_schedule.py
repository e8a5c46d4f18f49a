"""The schedule of a run: by name, from a file, or the best for what the run's operations cost."""

from typing import Any

from megajax.config import RunConfig
from megajax.config.parallel import SCHEDULE_FILES
from megajax.pipeline import pipedream_2bw
from megajax.schedules.io import load
from megajax.schedules.named import make_schedule
from megajax.schedules.schedule import Schedule, ScheduleError
from megajax.schedules.simulate import Costs


def run_schedule(run: RunConfig, microbatches: int | None = None) -> Schedule:
    """The schedule of the run's training step, of a full batch or of one with fewer microbatches.

    Raises:
      ScheduleError: the sizes do not suit it, or a file's are not the run's.
    """
    parallel, microbatches = run.parallel, microbatches or run.microbatches
    if parallel.schedule.endswith(SCHEDULE_FILES):
        schedule = load(parallel.schedule)
        _check_sizes(run, schedule, microbatches)
        return schedule
    if parallel.schedule == pipedream_2bw.NAME:
        return pipedream_2bw.steady_schedule(parallel.pipe, microbatches)
    return make_schedule(parallel.schedule, **arguments(run, microbatches))


def arguments(run: RunConfig, microbatches: int | None = None) -> dict[str, Any]:
    """What `make_schedule` takes beside the name of the run's schedule."""
    parallel = run.parallel
    sizes = {"stages": parallel.pipe, "microbatches": microbatches or run.microbatches, "chunks": parallel.chunks}
    if parallel.group_size is not None:
        sizes["group_size"] = parallel.group_size
    if parallel.schedule == "auto":
        sizes |= {"costs": operation_costs(run), "live_chunks": parallel.live_chunks}
    return sizes


def operation_costs(run: RunConfig) -> Costs:
    """What operations cost next to a forward: full recompute does the forward again before the input's gradient."""
    return Costs(1.0, 3.0, 2.0, 1.0) if run.parallel.recompute == "full" else Costs()


def _check_sizes(run: RunConfig, schedule: Schedule, microbatches: int) -> None:
    parallel, batch = run.parallel, run.parallel.microbatch_size * run.parallel.data
    if not schedule.has_backward:
        raise ScheduleError(f"{parallel.schedule} has no backwards: it trains nothing")
    for name, of_run, of_file, typed in (
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
            raise ScheduleError(f"{parallel.schedule} has {of_file} {name} and the run {of_run}: type {typed}")
