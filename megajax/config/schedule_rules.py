"""Checks a run's layout and batch against the rules of its schedule, and raises ConfigErrors.

Arguments are a ParallelConfig or a RunConfig. They are not imported, since they import this file.
"""

from typing import Any

from megajax.config.errors import ConfigError, either, near, one_of, option
from megajax.schedules.io import is_schedule_file
from megajax.schedules.registry import SizeProblem, check_sizes, chunk_rule, drains, microbatch_rule, names, with_option

SCHEDULE_OPTIONS = ("group_size", "live_chunks")  # fields of ParallelConfig for the schedules that have such an option


def check_name(name: Any) -> None:
    """Checks `--schedule`.

    Raises:
        ConfigError: no schedule that trains has this name, and it is not the path of a schedule's file.
    """
    if not isinstance(name, str) or not (is_schedule_file(name) or name in names()):
        hint = near(str(name), names())
        choice = "|".join(names()) if hint.startswith("did") else "and one of them"
        raise ConfigError(f"schedule = {name!r} is not known: {hint} Pass --schedule {choice}.")


def default_chunks(schedule: str, stages: int, layers: int) -> int:
    """The chunks on each rank where none are given: two if it must be two, or can be and leaves no stage without a layer."""
    legal = chunk_rule(schedule) if schedule in names() and stages > 1 else "one"
    return 2 if legal in ("two", "even") or (legal == "any" and layers % (2 * stages) == 0) else 1


def check_schedule(parallel: Any) -> None:
    """Checks a ParallelConfig: the schedule's name, chunks and options, and the limits of a schedule without a drain.

    Raises:
        ConfigError: for the first rule broken.
    """
    schedule, stages = parallel.schedule, parallel.pipe
    check_name(schedule)
    for field in SCHEDULE_OPTIONS:
        value = getattr(parallel, field)
        if value is not None and schedule not in with_option(field):
            owners = " or ".join(with_option(field))
            raise ConfigError(
                f"{field} = {value} is for schedule {owners}, not {schedule}: "
                f"omit {option(field)}, or pass --schedule {owners}."
            )
    fewest = microbatch_rule(schedule, stages).fewest
    legal_microbatches = -(-fewest // stages) * stages
    problem = check_sizes(schedule, stages=stages, microbatches=legal_microbatches, chunks=parallel.chunks)
    if problem and problem.field == "stages":
        raise ConfigError(f"pipe = {stages}, but {problem.message}: pass --pipe 1.")
    if problem:
        other = ", or --schedule interleaved_1f1b" if parallel.chunks > 1 else ""
        raise ConfigError(
            f"chunks = {parallel.chunks}, but {problem.message}: pass --chunks {problem.legal[0]}{other}."
        )
    if parallel.zero == 3 and not drains(schedule):
        raise ConfigError(
            f"zero = 3 does not work with {schedule}, which holds two versions of its weights: pass --zero 1, or another "
            "--schedule."
        )


def check_microbatches(run: Any) -> None:
    """Checks a RunConfig: the microbatches of a full step and of a batch ramp, and the precision.

    Raises:
        ConfigError: for the first rule broken.
    """
    parallel, batch = run.parallel, run.train.global_batch_size
    schedule, at_once = parallel.schedule, parallel.microbatch_size * parallel.data
    check_name(schedule)
    if run.train.precision == "fp16" and not drains(schedule):
        raise ConfigError(
            f"precision = fp16 does not work with {schedule}, whose two batches in flight would have different loss "
            "scales: pass --precision bf16, or another --schedule."
        )
    rule, problem = microbatch_rule(schedule, parallel.pipe), _problem(parallel, run.microbatches)
    if problem:
        more = " or more" if run.microbatches < rule.fewest else ""
        batches = one_of("global_batch_size", [at_once * count for count in problem.legal], batch)
        other = "--schedule 1f1b" + (" --chunks 1" if parallel.chunks > 1 else "")
        other = "a larger --microbatch-size" if run.microbatches > rule.most else other
        raise ConfigError(
            f"microbatches = global_batch_size / (microbatch_size * data) = {batch} / {at_once} = {run.microbatches} "
            f"with pipe = {parallel.pipe}, but {problem.message}: pass {either(batches and batches + more, other)}."
        )
    if run.train.batch_ramp:
        _check_ramp(run, at_once)


def _check_ramp(run: Any, at_once: int) -> None:
    """Every batch of the ramp is a legal number of microbatches."""
    shown, schedule, pipe = ",".join(map(str, run.train.batch_ramp)), run.parallel.schedule, run.parallel.pipe
    rule = microbatch_rule(schedule, pipe)
    if not rule.varies:
        raise ConfigError(
            f"batch_ramp = {shown} does not work with {schedule}, which needs the same number of microbatches in "
            "every step: pass another --schedule, or omit --batch-ramp."
        )
    multiple = at_once * (pipe if rule.rounds else 1)
    for size in run.train.batch_sizes[:-1]:
        if size % multiple:
            raise ConfigError(
                f"batch_ramp = {shown} has a batch of {size}, which is not a multiple of {multiple} (microbatch_size * "
                f"data{' * pipe' if rule.rounds else ''}): pass {run.train.other_ramp(multiple, multiple)}, or a smaller "
                "--data."
            )
        problem = _problem(run.parallel, size // at_once)
        if problem:
            least = at_once * (problem.legal[0] if problem.legal else 1)
            raise ConfigError(
                f"batch_ramp = {shown} has a batch of {size}, or {size // at_once} microbatches, but {problem.message}"
                f": pass {run.train.other_ramp(least)}."
            )


def _problem(parallel: Any, microbatches: int) -> SizeProblem | None:
    sizes = {"stages": parallel.pipe, "microbatches": microbatches, "chunks": parallel.chunks}
    return check_sizes(parallel.schedule, **sizes, group_size=parallel.group_size)
