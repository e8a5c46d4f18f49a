"""What differs between the programs of two layouts or versions, from their descriptions: nothing is compiled.

`facts` is what a `StepProgram` and its collectives say, as values that JSON has: `--record` writes them, so that a file
stands for the program that wrote it.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megajax.estimate import model_costs
from megajax.estimate.communication import TICKS, collectives
from megajax.pipeline.program import StepProgram
from megajax.schedules.errors import counted

ORDER = "order of operations"
PLACED = {"v": ", as a v", "wave": ", as a wave", "own": ", in an order of their own"}
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class ProgramDifference(NamedTuple):
    """A part of the description that differs; the values are those of `facts`, None for one that a program has not."""

    name: str
    a: Any
    b: Any

    @property
    def cells(self) -> tuple[str, str, str]:
        """Name and values in words: of a schedule, of blocks and of slots only what differs."""
        a, b = self.a, self.b
        if self.name in ("schedule", "blocks", "slots") and isinstance(a, dict) and isinstance(b, dict):
            a, b = ({key: one[key] for key in one if a.get(key) != b.get(key)} for one in (a, b))
        return self.name, _words(self.name, a), _words(self.name, b)


def facts(program: StepProgram) -> dict[str, Any]:
    """The description by name, in the order in which differences are listed."""
    run, parallel, executed, layers = program.run, program.run.parallel, program.executed, program.layers
    places = zip(*layers.placement.stage_of, strict=True)
    found = {
        "schedule": {
            "name": executed.name,
            "stages": executed.stages,
            "chunks": executed.chunks,
            "microbatches": executed.microbatches,
            "microbatch size": parallel.microbatch_size,
            "ticks": len(executed.ticks),
        },
        ORDER: f"{zlib.crc32(repr(executed.ticks).encode()):08x}",
        "merged ticks": program.merged_ticks,
        "blocks": {
            "recompute": parallel.recompute,
            "in place": program.in_place,
            "unrolled": program.unrolls,
            "in bubbles": program.computes_bubbles,
        },
        "slots": program.slots._asdict(),
        "layers of a rank": {
            "counts": [sum(layers.counts[stage] for stage in of_rank) for of_rank in places],
            "placement": layers.placement.name,
        },
        "parameters": {
            **{axis: getattr(parallel, axis) for axis in ("pipe", "tensor", "expert")},
            **({"expert tensor": 1} if parallel.experts_over_tensor else {}),
            "zero": parallel.zero if parallel.replicas > 1 else 0,
            "replicas": parallel.replicas,
        },
        "attention": {"name": program.attention.name, "reason": program.attention.reason},
    }
    if model_costs(run.model).vocabulary_width:
        pipe = parallel.pipe if program.vocabulary_over_pipe else 1
        found["vocabulary"] = {"pipe": pipe, "tensor": parallel.tensor}
    return found | _communication(program)


def _communication(program: StepProgram) -> dict[str, Any]:
    """Sends between stages, and the other collectives of each axis: by kind, how many a step has and their bytes."""
    sent: dict[str, Any] = {}
    for one in collectives(program):
        name = "sends" if one.part == TICKS else f"over {one.axis}"
        kind = one.kind if one.part != TICKS else "with work" if one.in_papers else "without"
        total = sent.setdefault(name, {}).setdefault(kind, {"count": 0.0, "bytes": 0.0})
        total["count"] += one.times
        total["bytes"] += one.bytes
    return sent


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ProgramDifference]:
    """What differs between the `facts` of two programs, collectives last.

    The order of operations is left out where the schedules differ in more.
    """
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]
    names = [name for name in names if name != ORDER or "schedule" not in names]
    names.sort(key=lambda name: name.startswith("over "))
    return [ProgramDifference(name, a.get(name), b.get(name)) for name in names]


def _words(name: str, value: Any) -> str:
    """A value of `facts`, which another version of megajax may have written, in words."""
    if value is None:
        return "nothing"
    if name not in WORDS and not name.startswith("over "):
        return str(value)
    try:
        return WORDS.get(name, _sent)(value)
    except (KeyError, TypeError, ValueError, AttributeError):
        return str(value)


def _schedule(value: Mapping[str, Any]) -> str:
    named = {
        "stages": lambda number: counted(number, "stage"),
        "chunks": lambda number: f"{counted(number, 'chunk')} a rank",
        "microbatches": lambda number: counted(number, "microbatch", "microbatches"),
        "microbatch size": lambda number: f"microbatches of {number}",
        "ticks": lambda number: counted(number, "tick"),
    }
    return ", ".join(named.get(key, str)(one) for key, one in value.items())


def _options(value: Mapping[str, Any]) -> str:
    """What is set, or has another value than False."""
    shown = {name: one for name, one in value.items() if one is not False}
    return ", ".join(name if one is True else f"{name} {one}" for name, one in shown.items())


def _layers(value: Mapping[str, Any]) -> str:
    counts = value["counts"]
    equal = f"{counts[0]} on each of {len(counts)}" if len(counts) > 1 else str(counts[0])
    return (equal if len({*counts}) == 1 else ", ".join(map(str, counts))) + PLACED.get(value["placement"], "")


def _split(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {degree}" for axis, degree in value.items() if degree > 1) or "whole on each device"


def _parameters(value: Mapping[str, Any]) -> str:
    split = _split({axis: value[axis] for axis in ("pipe", "tensor", "expert")})
    split += ", of tensor ranks too" * ("expert tensor" in value)
    zero = f"ZeRO-{value['zero']} over " if value["zero"] else ""
    return f"{split}; {zero}{counted(value['replicas'], 'replica')}"


def _sent(value: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{one['count']:,.0f} {kind}" for kind, one in value.items() if one["count"])
    total = sum(one["bytes"] for one in value.values())
    unit, factor = next((pair for pair in UNITS if total >= pair[1]), ("B", 1))
    return f"{counts}: {total / factor:,.4g} {unit}"


WORDS: dict[str, Callable[[Any], str]] = {
    "schedule": _schedule,
    "blocks": _options,
    "slots": _options,
    "layers of a rank": _layers,
    "parameters": _parameters,
    "vocabulary": _split,
    "attention": lambda value: f"{value['name']}: {value['reason']}",
    "sends": _sent,
}
