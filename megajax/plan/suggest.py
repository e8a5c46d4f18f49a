"""The smallest change to a run that makes it fit on its GPUs."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from megajax.config import RunConfig, option
from megajax.estimate.gpus import Gpu, with_attention
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.step_time import step_time
from megajax.pipeline.program import StepProgram
from megajax.plan.layouts import FIELDS, Fields, layouts, passes
from megajax.plan.search import usable_bytes
from megajax.schedules.registry import Slots, search_order
from megajax.schedules.schedule import ScheduleError

MESH = ("tensor", "context", "pipe")  # one choice; data follows from it
SPEED = ("tensor_overlap", "axis_order")  # which do not change what is held in memory, or not for less
TENSOR = (1, 2, 4, 8)  # degrees that fit a host
# Tables of schedules that a search may make, in forwards: some seconds. `auto` makes and simulates dozens for each.
MOST_FORWARDS, AUTO_TABLES = 100_000, 50


@dataclasses.dataclass(frozen=True)
class Change:
    """A run that fits.

    Attributes:
      options: the command line options that make the change.
      peak: bytes, by the memory model.
      cost: the change in the time of a step, in words.
    """

    run: RunConfig
    options: str
    peak: float
    cost: str


def smallest_change(run: RunConfig, gpu: Gpu, correction: float = 1.0, keep: Collection[str] = ()) -> Change | None:
    """The change of fewest options that fits, on the same number of GPUs if possible; of several the fastest.

    Any option of the layout, and any two, the mesh being one of them, are tried. Those that need another table of a
    schedule without closed forms come last, and few of them are tried.

    Args:
      run: a run that does not fit.
      gpu: its GPUs.
      correction: factor on the memory model's bytes, e.g. from a compilation of `run`.
      keep: fields of the layout that must not change.
    """
    made = {_table(run): 0}
    for growth in (1, 2, 4, 8, 16):
        changes = _changes(run, run.parallel.devices * growth, keep)
        allowed = sorted((fields for fields in changes if fields and not set(fields) & set(keep)), key=len)
        for _, equally_many in itertools.groupby(allowed, key=len):
            fits = _fitting(run, equally_many, made, gpu, usable_bytes(gpu) / correction)
            if fits:
                timed = [(step_time(changed, gpu).total, peak, fields, changed) for peak, fields, changed in fits]
                # Rounded: where a schedule hides a difference, sums in another order must not decide.
                time, peak, fields, changed = min(timed, key=lambda found: (float(f"{found[0]:.9g}"), found[1]))
                cost = f"{time / step_time(run, gpu).total - 1:+.0%} time a step"
                more = "" if growth == 1 else f" on {growth} times the GPUs"
                options = " ".join(_option(name, value) for name, value in fields.items())
                return Change(changed, options, correction * peak, cost + more)
    return None


def _changes(run: RunConfig, devices: int, keep: Collection[str]) -> Iterator[Fields]:
    """The fields that differ in the layouts of this many GPUs in which one or two options, or the mesh, were changed.

    An option whose value is not declared for the changed layout may follow, as the chunks of another schedule do; so may
    one of `keep`.
    """
    before = vars(run.parallel)
    limits = {"tensor": TENSOR, "schedule": search_order()}

    def same(name: str, declared: Sequence, layout: Fields) -> list:
        return [before[name]] if before[name] in declared else [*declared[:1], before[name]]

    def change(name: str, declared: Sequence, layout: Fields) -> list:
        others = [value for value in declared if value != before[name] and value in limits.get(name, declared)]
        return [before[name], *others] if name in MESH else others

    choices = [MESH, *((name,) for name in FIELDS if name not in (*MESH, "data", *SPEED))]
    follows = {MESH: ("data",)}
    choices = [names for names in choices if not {*names, *follows.get(names, ())} <= set(keep)]
    for some in itertools.chain.from_iterable(itertools.combinations(choices, count) for count in (1, 2)):
        if devices == run.parallel.devices or MESH in some:
            filters = {name: functools.partial(change if name in sum(some, ()) else same, name) for name in FIELDS}
            for layout in layouts(run, devices, filters | {"data": lambda declared, layout: declared}):
                yield {name: layout[name] for name in FIELDS if layout[name] != before[name]}


def _fitting(
    run: RunConfig, changes: Iterable[Fields], made: dict[tuple, int], gpu: Gpu, limit: float
) -> list[tuple[int, Fields, RunConfig]]:
    """The legal changes whose peak is at most `limit` bytes: peak, fields and changed run.

    Args:
      made: the tables that exist, with the forwards that were computed for them; those that are made are added.
    """
    candidates, fits = [], []
    for fields in changes:
        changed = run.with_layout(**fields)
        # Without the schedule's slots, which may need a table, most changes are ruled out.
        supported = functools.partial(with_attention, changed, gpu)
        legal = passes(changed.parallel.validate, changed.validate_together, supported)  # the rest is that of `run`
        if legal and sum(bytes_per_device(changed, slots=Slots(0, 0, 0)).values()) <= limit:
            candidates.append((_forwards(changed, made), fields, changed))
    for _, fields, changed in sorted(candidates, key=lambda candidate: candidate[0]):
        forwards = _forwards(changed, made)
        if forwards and (fits or sum(made.values()) + forwards > MOST_FORWARDS):
            break
        made.setdefault(_table(changed), forwards)
        try:
            peak = sum(bytes_per_device(changed).values())
        except ScheduleError:  # of a generator with rules of its own, or of a file's sizes
            continue
        if peak <= limit:
            fits.append((peak, fields, changed))
    return fits


def _forwards(run: RunConfig, made: dict[tuple, int]) -> int:
    """Forwards of the table that is needed for a run's slots or bubble; 0 for closed forms, or if the table exists."""
    spec, parallel = StepProgram.of(run).spec, run.parallel
    if (spec.slots and spec.bubble) or _table(run) in made:
        return 0
    return (AUTO_TABLES if "costs" in spec.options else 1) * parallel.pipe * parallel.chunks * run.microbatches


def _table(run: RunConfig) -> tuple:
    return run.parallel.schedule, *sorted(StepProgram.of(run).schedule_arguments.items())


def _option(name: str, value: Any) -> str:
    """A field and its value as an option of the command line."""
    if isinstance(value, bool):
        return option(name) if value else option(f"no_{name}")
    return f"{option(name)} {'none' if value is None else value}"
