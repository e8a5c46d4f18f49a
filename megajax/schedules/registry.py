"""The schedules there are, by name; `make_schedule` in schedules.py is the way in."""

import difflib
from collections.abc import Callable

from megajax.schedules.schedule import Schedule, ScheduleError

Generator = Callable[..., Schedule]
SCHEDULES: dict[str, Generator] = {}


def register(name: str) -> Callable[[Generator], Generator]:
    """Makes a generator `f(stages, microbatches, chunks, **options) -> Schedule` known to `make_schedule` by `name`."""

    def add(generator: Generator) -> Generator:
        SCHEDULES[name] = generator
        return generator

    return add


def find(name: str) -> Generator:
    """The generator called `name`.

    Raises:
      ScheduleError: there is none; the message names the near match.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ScheduleError(f"schedule {name!r} is unknown{hint} Known: {', '.join(sorted(SCHEDULES))}")
    return SCHEDULES[name]


def make(name: str, stages: int, microbatches: int, chunks: int, **options) -> Schedule:
    """What the named generator makes, proven, and of the sizes that were asked for.

    Raises:
      ScheduleError: the generator refuses the sizes, or its table is broken, or of other sizes.
    """
    schedule = find(name)(stages, microbatches, chunks, **options).validate()
    for label, asked in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        made = getattr(schedule, label)
        require(made == asked, f"{name} made a schedule of {label} {made} where {asked} was asked for")
    return schedule


def require(rule: bool, message: str) -> None:
    """Raises ScheduleError(message) where a generator's rule for its sizes is broken."""
    if not rule:
        raise ScheduleError(message)


def depth_first(group: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in Megatron-LM's order: groups of microbatches, each through all chunks in turn."""
    return [
        (chunk, microbatch)
        for low in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(low, min(low + group, microbatches))
    ]
