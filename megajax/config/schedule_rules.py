"""Checks a run's layout and batch against the `ScheduleSpec` of its schedule, and raises ConfigErrors.

Arguments are a ParallelConfig or a RunConfig. They are not imported, since they import this file.
"""

from typing import Any

from megajax.config.errors import ConfigError, either, near, one_of, option
from megajax.schedules.io import is_schedule_file
from megajax.schedules.registry import ScheduleSpec, SizeProblem, check_sizes, find, names, with_option


def schedule_spec(name: Any) -> ScheduleSpec:
    """The spec of `--schedule`.

    Raises:
        ConfigError: no schedule that trains has this name, and it is not the path of a schedule's file.
    """
    if not isinstance(name, str) or not (is_schedule_file(name) or name in names()):
        hint = near(str(name), names())
        choice = "|".join(names()) if hint.startswith("did") else "and one of them"
        raise ConfigError(f"schedule = {name!r} is not known: {hint} Pass --schedule {choice}.")
    return find(name)


def check_schedule(parallel: Any) -> None:
    """Checks a ParallelConfig: the schedule's name, chunks and options, and the limits of a schedule without a drain.

    Raises:
        ConfigError: for the first rule broken.
    """
    spec = schedule_spec(parallel.schedule)
    for field in ("group_size", "live_chunks"):
        value = getattr(parallel, field)
        if value is not None and field not in spec.options:
            owners = " or ".join(with_option(field))
            raise ConfigError(
                f"{field} = {value} is for schedule {owners}, not {spec.name}: "
                f"omit {option(field)}, or pass --schedule {owners}."
            )
    fewest = spec.fewest_microbatches(parallel.pipe)
    legal_microbatches = -(-fewest // parallel.pipe) * parallel.pipe
    problem = check_sizes(spec, stages=parallel.pipe, microbatches=legal_microbatches, chunks=parallel.chunks)
    if problem and problem.field == "stages":
        raise ConfigError(f"pipe = {parallel.pipe}, but {problem.message}: pass --pipe 1.")
    if problem:
        other = ", or --schedule interleaved_1f1b" if parallel.chunks > 1 else ""
        raise ConfigError(
            f"chunks = {parallel.chunks}, but {problem.message}: pass --chunks {problem.legal[0]}{other}."
        )
    if spec.drains:
        return
    versions = f"{spec.name}, which holds two versions of its weights"
    if parallel.zero == 3:
        raise ConfigError(f"zero = 3 does not work with {versions}: pass --zero 1, or another --schedule.")


def check_microbatches(run: Any) -> None:
    """Checks a RunConfig: the microbatches of a full step and of a batch ramp, and the precision.

    Raises:
        ConfigError: for the first rule broken.
    """
    parallel, batch = run.parallel, run.train.global_batch_size
    spec, at_once = schedule_spec(parallel.schedule), parallel.microbatch_size * parallel.data
    if not spec.drains and run.train.precision == "fp16":
        raise ConfigError(
            f"precision = fp16 does not work with {spec.name}, whose two batches in flight would have different loss "
            "scales: pass --precision bf16, or another --schedule."
        )
    problem = _problem(spec, parallel, run.microbatches)
    if problem:
        more = " or more" if run.microbatches < spec.fewest_microbatches(parallel.pipe) else ""
        batches = one_of("global_batch_size", [at_once * count for count in problem.legal], batch)
        other = "--schedule 1f1b" + (" --chunks 1" if parallel.chunks > 1 else "")
        other = "a larger --microbatch-size" if run.microbatches > spec.most_forwards // parallel.pipe else other
        raise ConfigError(
            f"microbatches = global_batch_size / (microbatch_size * data) = {batch} / {at_once} = {run.microbatches} "
            f"with pipe = {parallel.pipe}, but {problem.message}: pass {either(batches and batches + more, other)}."
        )
    if run.train.batch_ramp:
        _check_ramp(run, spec, at_once)


def _check_ramp(run: Any, spec: ScheduleSpec, at_once: int) -> None:
    """Every batch of the ramp is a legal number of microbatches."""
    shown, pipe = ",".join(map(str, run.train.batch_ramp)), run.parallel.pipe
    if not spec.any_microbatches:
        raise ConfigError(
            f"batch_ramp = {shown} does not work with {spec.name}, which needs the same number of microbatches in "
            "every step: pass another --schedule, or omit --batch-ramp."
        )
    multiple = at_once * (pipe if spec.rounds else 1)
    for size in run.train.batch_sizes[:-1]:
        if size % multiple:
            raise ConfigError(
                f"batch_ramp = {shown} has a batch of {size}, which is not a multiple of {multiple} (microbatch_size * "
                f"data{' * pipe' if spec.rounds else ''}): pass {run.train.other_ramp(multiple, multiple)}, or a smaller "
                "--data."
            )
        problem = _problem(spec, run.parallel, size // at_once)
        if problem:
            least = at_once * (problem.legal[0] if problem.legal else 1)
            raise ConfigError(
                f"batch_ramp = {shown} has a batch of {size}, or {size // at_once} microbatches, but {problem.message}"
                f": pass {run.train.other_ramp(least)}."
            )


def _problem(spec: ScheduleSpec, parallel: Any, microbatches: int) -> SizeProblem | None:
    sizes = {"stages": parallel.pipe, "microbatches": microbatches, "chunks": parallel.chunks}
    return check_sizes(spec, **sizes, group_size=parallel.group_size)
