"""One `ScheduleSpec` for each schedule: its generator, its legal sizes, and its costs.

All properties of a named schedule are in its spec. The configuration asks for its rules (`check_sizes`, `chunk_rule`,
`microbatch_rule`, `with_option`, `drains`) and `StepProgram` for the spec itself. The executor runs the schedule
of `make_schedule`, the estimates use the closed forms `slots` and `bubble` of a spec or else build and simulate the table,
and the search tries `search_order()`. One decorated function is therefore enough to add a schedule:

    @register("one_at_a_time")
    def one_at_a_time(stages, microbatches, chunks):
        ...

`import_user_files` imports such functions from a user's own files.
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megajax.schedules.io import is_schedule_file, load
from megajax.schedules.schedule import MOST_FORWARDS, Schedule, ScheduleError
from megajax.schedules.stages import Placement

Generator = Callable[..., Schedule]
SPECS: dict[str, "ScheduleSpec"] = {}
CHUNKS = ("one", "two", "even", "any")


class Slots(NamedTuple):
    """Buffers that a schedule needs on the rank that needs most, as `megajax.pipeline.slots` allocates them."""

    stash: int  # chunks whose residuals are held between forward and backward
    kept: int  # chunks whose output gradients are held between I and W
    inbox: int  # received activations and gradients together, the two spare slots included


class SizeProblem(NamedTuple):
    """Why a schedule cannot have a size."""

    field: str  # "chunks", "microbatches", or "stages" if no number of microbatches is legal
    message: str  # the rule and the value given, as one sentence without a full stop
    legal: tuple[int, ...]  # the nearest legal values of the field, ascending


class MicrobatchRule(NamedTuple):
    """Which numbers of microbatches a schedule takes on a number of stages."""

    fewest: int
    most: int  # with one chunk on each rank
    rounds: bool  # multiples of the stages only
    varies: bool  # the number may differ between steps, as a batch ramp needs


@dataclasses.dataclass(frozen=True)
class ScheduleSpec:
    """All that is known of a schedule by its name.

    Attributes:
      name: the value of `--schedule`.
      generate: `f(stages, microbatches, chunks, **options) -> Schedule`.
      chunks: model chunks on each rank: "one", "two", an "even" number, or "any" number.
      rounds: the microbatches must be a multiple of the stages.
      fewest_microbatches: `f(stages)`, the smallest legal number of microbatches.
      any_microbatches: the number of microbatches may differ between steps, as a batch ramp needs.
      trains: it has backwards, so that `--schedule` accepts it.
      drains: each step ends with an empty pipeline. False for PipeDream-2BW, whose table is one step in steady state.
      split: backwards are split into I and W. None: read from the table.
      paired: a tick is a forward and a backward on every rank. None: read from the table.
      placement: `f(stages, chunks) -> Placement`, such as `stages.loop` and `stages.wave`. None: read from the table, whose
        placement then has no layers of its own.
      slots: `f(stages, microbatches, chunks, **options) -> Slots | None`, the closed form of the counts of
        `megajax.pipeline.slots`, None for sizes that it does not cover. Without one the slots are counted in the table.
      bubble: `f(stages, microbatches, chunks, costs, lockstep, **options)`, the closed form of a rank's idle time in a
        step, in the units of `costs`; `lockstep` as in `simulate_lockstep`. Without one the table is simulated.
      most_forwards: the largest legal stages * chunks * microbatches.
      one_chunk: the schedule that this one equals with one chunk; a search tries that one instead.
      simplicity: position in the search, which prefers the first of equally fast schedules. None: searched only by name.
      notes: one sentence that helps to choose a schedule, shown by `draw --help`.
    """

    name: str
    generate: Generator
    chunks: str = "one"
    rounds: bool = False
    fewest_microbatches: Callable[[int], int] = lambda stages: 1
    any_microbatches: bool = True
    trains: bool = True
    drains: bool = True
    split: bool | None = None
    paired: bool | None = None
    placement: Callable[[int, int], Placement] | None = None
    slots: Callable[..., Slots | None] | None = None
    bubble: Callable[..., float] | None = None
    most_forwards: int = MOST_FORWARDS
    one_chunk: str | None = None
    simplicity: int | None = 100
    notes: str = ""

    @functools.cached_property  # a search reads it thousands of times
    def options(self) -> tuple[str, ...]:
        """Names of the generator's own options."""
        return tuple(inspect.signature(self.generate).parameters)[3:]


def register(name: str, **fields: Any) -> Callable[[Generator], Generator]:
    """Registers the decorated generator `f(stages, microbatches, chunks, **options) -> Schedule` under `name`.

    Args:
      name: the value of `--schedule`.
      **fields: fields of `ScheduleSpec` that differ from its defaults. `notes` defaults to the docstring's first paragraph.

    Raises:
      ScheduleError: another function is registered under the name, or the name or a field is illegal.
    """
    known = [field.name for field in dataclasses.fields(ScheduleSpec)][2:]
    for field in fields:
        require(field in known, f"register({name!r}) has no field {field!r}: choose from {', '.join(known)}")
    require(
        fields.get("chunks", "one") in CHUNKS,
        f"register({name!r}) has chunks={fields.get('chunks')!r}: choose from {', '.join(map(repr, CHUNKS))}",
    )
    require(
        fields.get("placement") is None or callable(fields["placement"]),
        f"register({name!r}) has placement={fields.get('placement')!r}: it is a function of stages and chunks, such as "
        "stages.loop or stages.wave",
    )
    require(not is_schedule_file(name), f"schedule {name!r} has the name of a file: choose a name without an ending")

    def add(generator: Generator) -> Generator:
        if name in SPECS:
            before, now = (inspect.unwrap(f).__code__ for f in (SPECS[name].generate, generator))
            same = (before.co_filename, before.co_name) == (now.co_filename, now.co_name)  # a file imported twice
            require(same, f"schedule {name!r} is registered already, in {before.co_filename}: choose another name")
        notes = " ".join((inspect.getdoc(generator) or "").partition("\n\n")[0].split())
        SPECS[name] = ScheduleSpec(**{"name": name, "generate": generator, "notes": notes} | fields)
        return generator

    return add


def specs() -> tuple[ScheduleSpec, ...]:
    """All specs, in the order in which they were registered."""
    return tuple(SPECS.values())


def names() -> tuple[str, ...]:
    """The names of the schedules that train, in the order in which they were registered."""
    return tuple(name for name, spec in SPECS.items() if spec.trains)


def search_order() -> tuple[str, ...]:
    """The schedules that a search tries if none are named, the simplest first."""
    searched = [spec for spec in SPECS.values() if spec.trains and spec.simplicity is not None]
    return tuple(spec.name for spec in sorted(searched, key=lambda spec: spec.simplicity))


def with_option(option: str) -> tuple[str, ...]:
    """The schedules whose generator has an option, such as "group_size"."""
    return tuple(name for name in names() if option in SPECS[name].options)


def drains(name: str) -> bool:
    """Whether each step of a schedule ends with an empty pipeline."""
    return find(name).drains


def chunk_rule(name: str) -> str:
    """How many model chunks a schedule has on each rank: "one", "two", an "even" number, or "any" number."""
    return find(name).chunks


def microbatch_rule(name: str, stages: int) -> MicrobatchRule:
    """Which numbers of microbatches a schedule takes on so many stages; `check_sizes` checks one of them."""
    spec = find(name)
    most = spec.most_forwards // stages
    return MicrobatchRule(spec.fewest_microbatches(stages), most, spec.rounds, spec.any_microbatches)


def find(name: str) -> ScheduleSpec:
    """The spec of a registered schedule, or of the schedule in a .csv or .json file (which is not read yet).

    Raises:
      ScheduleError: the name is unknown; the message gives the nearest one.
    """
    if name in SPECS:
        return SPECS[name]
    if is_schedule_file(name):
        make = lambda stages, microbatches, chunks: load(name)  # noqa: E731
        placed = lambda stages, chunks: load(name).placement  # noqa: E731
        return ScheduleSpec(name, make, chunks="any", any_microbatches=False, placement=placed)
    near = difflib.get_close_matches(name, SPECS, 1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ScheduleError(f"schedule {name!r} is unknown{hint} Known: {', '.join(sorted(SPECS))}")


def placement_of(name: str, stages: int, chunks: int) -> Placement | None:
    """The placement of a schedule's stages. None: only its table has it, or it is a file for other sizes."""
    placed = find(name).placement
    placement = placed and placed(stages, chunks)
    return placement if placement and (placement.ranks, placement.chunks) == (stages, chunks) else None


def check_sizes(
    name: str, *, stages: int, microbatches: int, chunks: int, group_size: int | None = None
) -> SizeProblem | None:
    """The first rule of a schedule that these sizes break, None if they are legal.

    Args:
      group_size: the generator's option of that name. If given, the generator checks the groups by its own rule.
    """
    spec = find(name)
    if spec.chunks == "one" and chunks != 1:
        several = f"; {', '.join(name for name in names() if SPECS[name].chunks == 'any')} take several"
        return SizeProblem("chunks", f"{spec.name} has one chunk on each rank, not {chunks}{several}", (1,))
    if spec.chunks == "two" and chunks != 2:
        return SizeProblem("chunks", f"{spec.name} has two chunks on each rank, not {chunks}", (2,))
    if spec.chunks == "even" and chunks % 2:
        near = tuple(count for count in (chunks - 1, chunks + 1) if count)
        return SizeProblem("chunks", f"{spec.name} has an even number of chunks on each rank, not {chunks}", near)
    if spec.rounds and group_size is None and microbatches % stages:
        below = microbatches // stages * stages
        return SizeProblem(
            "microbatches",
            f"{spec.name} takes a multiple of the {stages} stages as microbatches, not {microbatches}",
            tuple(n for n in (below, below + stages) if n),
        )
    fewest = spec.fewest_microbatches(stages)
    if microbatches < fewest:
        return SizeProblem(
            "microbatches",
            f"{spec.name} takes at least {fewest} microbatches on {stages} stages, not {microbatches}",
            (fewest,),
        )
    forwards, each = stages * chunks * microbatches, stages * chunks * (stages if spec.rounds else 1)
    if forwards > spec.most_forwards:
        most = spec.most_forwards // each * (stages if spec.rounds else 1)
        possible = most >= max(1, fewest)
        return SizeProblem(
            "microbatches" if possible else "stages",
            f"a table of {spec.name} has at most {spec.most_forwards} forwards, not stages * chunks * microbatches = "
            f"{stages} * {chunks} * {microbatches}",
            (most,) if possible else (),
        )
    return None


def make_schedule(name: str, *, stages: int, microbatches: int, chunks: int = 1, **options) -> Schedule:
    """The named schedule as a validated table of the given sizes.

    Args:
      stages: ranks of the pipeline.
      microbatches: per step and data-parallel replica.
      chunks: model chunks on each rank.
      **options: options of the schedule's generator.

    Raises:
      ScheduleError: the name or an option is unknown, the sizes are illegal for this schedule, or its generator
        returned an invalid table or one that contradicts its spec.
    """
    spec = find(name)
    for label, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        require(value >= 1, f"{label} is {value}; it must be 1 or more")
    for option in options:
        legal = f"has {', '.join(spec.options)}" if spec.options else "has no options"
        require(option in spec.options, f"{name} has no option {option!r}: it {legal}")
    groups = {"group_size": options["group_size"]} if "group_size" in options else {}
    problem = check_sizes(name, stages=stages, microbatches=microbatches, chunks=chunks, **groups)
    if problem:
        legal = f"; {problem.field} can be {' or '.join(map(str, problem.legal))}" if problem.legal else ""
        raise ScheduleError(problem.message + legal)
    schedule = spec.generate(stages, microbatches, chunks, **options)
    require(
        isinstance(schedule, Schedule), f"{name} made a {type(schedule).__name__}, not a Schedule; return pack(...)"
    )
    if spec.drains:
        schedule.validate()
    for label, requested in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        made = getattr(schedule, label)
        require(made == requested, f"{name} made a schedule with {label}={made}, but {label}={requested} was requested")
    placed = spec.placement and spec.placement(stages, chunks)
    require(
        placed is not None or schedule.placement.layers is None,
        f"{name} made a schedule whose placement has layers: give register the function that makes it",
    )
    for label, declared in (("split", spec.split), ("paired", spec.paired), ("placement", placed)):
        made = getattr(schedule, label)
        require(
            declared in (None, made),
            f"{name} made a schedule with {label}={made}, but is registered with {label}={declared}",
        )
    require(
        schedule.has_backward == spec.trains, f"{name} made a schedule that is registered with trains={spec.trains}"
    )
    return schedule


def require(rule: bool, message: str) -> None:
    """Raises ScheduleError(message) unless the rule holds."""
    if not rule:
        raise ScheduleError(message)


def import_user_files(paths: Iterable[str], option: str = "--import") -> None:
    """Imports Python files (paths that end in .py) or modules (dotted names), which register schedules or models.

    A file that was imported before is not imported again.

    Raises:
      ScheduleError: a file or module does not exist, or fails; one line with the error and where it was raised.
    """
    for path in paths:
        remedy = f"pass {option} FILE.py, or the dotted name of a module"
        is_file = path.endswith(".py")
        require(not is_file or os.path.isfile(path), f"cannot import {path}: there is no such file; {remedy}")
        require(is_file or not os.path.exists(path), f"cannot import {path}: its name does not end in .py; {remedy}")
        try:
            _import_file(path) if is_file else importlib.import_module(path)
        except Exception as error:  # anything that a user's file may raise
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent and not is_file and f"{path}.".startswith(f"{absent}."):
                raise ScheduleError(f"cannot import {path}: there is no module {absent}; {remedy}") from error
            frame = traceback.extract_tb(error.__traceback__)[-1]
            message = (str(error).splitlines() or [""])[0]
            where = f" (raised in {frame.filename}, line {frame.lineno})"
            raise ScheduleError(f"cannot import {path}: {type(error).__name__}: {message}{where}") from error


def _import_file(path: str) -> None:
    file = pathlib.Path(path).resolve()
    module_name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
