"""Why a layout that the reader expected is not the fastest: `megajax plan --explain t8 p16 d8`."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from megajax.config import ConfigError, ParallelConfig, RunConfig
from megajax.plan.explain import PARTS, seconds, slower
from megajax.plan.layouts import layouts
from megajax.plan.report import value_text
from megajax.plan.search import Candidate, Question, bases, fastest_placement, filters, legal_run, order
from megajax.schedules.registry import names

__all__ = ["expected", "fields_of"]

LETTERS = {
    "t": "tensor",
    "p": "pipe",
    "d": "data",
    "c": "context",
    "v": "chunks",
    "b": "microbatch_size",
    "e": "expert",
}
LETTERS |= {"z": "zero", "zero": "zero"}
SHOWN = (
    *("tensor", "pipe", "data", "context", "expert", "expert_tensor", "axis_order"),
    *("chunks", "microbatch_size", "schedule", "recompute", "zero"),
)


def fields_of(words: Sequence[str]) -> dict[str, Any]:
    """The fields of a layout that words such as t8, 1f1b and full name; raises ConfigError for another word."""
    found: dict[str, Any] = {}
    for word in words:
        letter = re.fullmatch(r"([a-z]+)(\d+)", word)
        if word in names():
            found["schedule"] = word
        elif word in ParallelConfig.__dataclass_fields__["recompute"].metadata["choices"]:
            found["recompute"] = word
        elif letter and letter[1] in LETTERS:
            found[LETTERS[letter[1]]] = int(letter[2])
        else:
            raise ConfigError(
                f"explain = {word} is not a size, a schedule or a recompute mode: pass sizes such as t8 p16 d8 (letters: "
                f"{', '.join(f'{letter} {name}' for letter, name in LETTERS.items() if letter != name)})."
            )
    return found


def expected(question: Question, best: Candidate, words: Sequence[str]) -> str:
    """Lines that compare the fastest layout with these fields with the best of all; or say why there is none.

    Raises:
      ConfigError: a word names no field.
    """
    fields = fields_of(words)
    asked = filters(question) | {name: lambda declared, layout, value=value: [value] for name, value in fields.items()}
    # Of so many GPUs.
    asked["data"] = lambda declared, layout: [size for size in declared if size == fields.get("data", size)]
    found, problem = [], ""
    for base in bases(question):
        for layout in layouts(base, question.gpus, asked):
            run = legal_run(question, base, layout)
            if run is not None:
                found.append(fastest_placement(question, run))
            else:
                problem = problem or _problem(base, layout)
    name = " ".join(words)
    if not found:
        return f"{name}: no such layout is legal. {problem or _sizes(question, fields)}"
    one = min(found, key=order)
    head = f"{name}: the best of {len(found)} layouts is {_shown(one)}"
    if not one.fits:
        parts = sorted(one.memory.items(), key=lambda part: -part[1])[:3]
        largest = ", ".join(f"{part} {count / 1e9:.1f}" for part, count in parts)
        limit = question.memory_limit / 1e9
        return f"{head}; it does not fit: {one.peak / 1e9:.1f} GB of {limit:.1f}, most of it {largest}."
    if one.run == best.run:
        return f"{head}, the fastest of all."
    lines = [
        f"{head}: {slower(one, best)}; the fastest is {_shown(best)}.",
        f"  {'':<12}{name[:20]:>20}{'fastest':>12}",
    ]
    for part in PARTS:
        mine, theirs = getattr(one.time, part), getattr(best.time, part)
        if max(mine, theirs) > 1e-4 * best.time.total:
            lines.append(f"  {part:<12}{seconds(mine):>20}{seconds(theirs):>12}")
    return "\n".join(lines)


def _shown(one: Candidate) -> str:
    values = {name: getattr(one.run.parallel, name) for name in SHOWN}
    plain = dataclasses.asdict(ParallelConfig())
    texts = {name: value for name, value in values.items() if value != plain[name] or name in ("schedule", "recompute")}
    return ", ".join(
        value_text(value) if isinstance(value, str | tuple) else f"{name.replace('_', ' ')} {value}"
        for name, value in texts.items()
    )


def _problem(base: RunConfig, layout: dict[str, Any]) -> str:
    """Why a layout is not legal."""
    try:
        run = RunConfig(base.model, ParallelConfig(**layout), base.train)
        run.parallel.validate()
        run.validate_together()
    except ConfigError as error:
        return str(error)
    return ""


def _sizes(question: Question, fields: dict[str, Any]) -> str:
    """Why no mesh has these sizes."""
    sizes = {name: fields[name] for name in ("tensor", "pipe", "data", "context") if name in fields}
    product = " * ".join(map(str, sizes.values()))
    return f"The sizes of a mesh multiply to the {question.gpus} GPUs" + (
        f", of which {product} is no part." if sizes else "."
    )
