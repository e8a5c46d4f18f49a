"""Layers of several kinds by a pattern: which layer is of which kind, and the fields that a kind has of its own.

    layer_pattern = local*5,global            repeated over the layers; the last repetition may be cut off
    kind_fields = local.sliding_window=1024,global.rotary_base=1000000

A kind has the model's fields but for those. Fields that change no parameter may differ: all layers are then one stack of
parameters in one loop, and a block looks up by its number what is its own (`models/mixers/attention.py`). Apart, they would
need a branch of the program for each order of kinds that a stage has, and memory for the most layers of each kind. Layers
whose parameters differ are stacked apart: dense and sparse ones (`layer_kinds.py`), each of which may be of any kind here.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from megajax.config.errors import ConfigError, near
from megajax.config.fields import field_problem
from megajax.config.layer_kinds import MOST_LAYERS
from megajax.schedules.errors import shown

__all__ = [
    "NO_PATTERN",
    "VARYING",
    "check_layer_pattern",
    "layer_pattern_of",
    "KIND_FIELDS",
    "variant_numbers",
    "variants",
    "without_field",
    "words_of",
]

NO_PATTERN = "none"
# Fields that kinds may have of their own: they change no parameter.
VARYING = (
    *("sliding_window", "positions", "rotary_base", "rotary_scaling", "rotary_factor", "rotary_original_length"),
    *("rotary_low_frequency", "rotary_high_frequency", "rotary_beta_fast", "rotary_beta_slow", "rotary_truncate"),
    *("rotary_attention_factor", "chunked_attention", "query_growth"),
)
KIND_FIELDS = (*VARYING, "mixer")  # mixers have other parameters: layers of each are stacked apart
PART = re.compile(r"([A-Za-z_]\w*)(?:\*([1-9]\d{0,4}))?")
FIELD = re.compile(r"([A-Za-z_]\w*)\.(\w+)=(.*)")
READERS = {
    bool: {"True": True, "False": False}.__getitem__,
    int: int,
    int | None: int,
    float: float,
    float | None: float,
    str: str,
}


def variants(model: Any) -> tuple[Any, ...]:
    """The configurations of models all of whose layers are of one kind of the pattern, each once; without one the model.

    Raises:
        ConfigError: the pattern or the fields of a kind cannot be read.
    """
    return _variants(model)[0] if model.layer_pattern != NO_PATTERN else (model,)


def variant_numbers(model: Any) -> tuple[int, ...]:
    """The number in `variants` of each layer."""
    return _variants(model)[1]


@functools.lru_cache(maxsize=256)
def _variants(model: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    if model.layer_pattern == NO_PATTERN:
        return (model,), (0,) * model.layers
    names, own = _read_pattern(model.layer_pattern, model.layers), _read_fields(model)
    flat = dataclasses.replace(model, layer_pattern=NO_PATTERN, kind_fields=())
    found = {name: dataclasses.replace(flat, **own.get(name, {})) for name in dict.fromkeys(names)}
    each = tuple(dict.fromkeys(found.values()))
    return each, tuple(each.index(found[name]) for name in names)


def _read_pattern(text: str, layers: int) -> tuple[str, ...]:
    """The kind of each layer."""
    if layers > MOST_LAYERS:
        raise ConfigError(
            f"layers = {layers} is above {MOST_LAYERS}, the most with layer_pattern: pass fewer, or omit it."
        )
    parts = [PART.fullmatch(part.strip()) for part in text.split(",")]
    if not all(parts):
        wrong = next(part for part, found in zip(text.split(","), parts, strict=True) if not found)
        raise ConfigError(
            f"layer_pattern = {shown(text)} has {shown(wrong.strip())}, which is no kind: pass --layer-pattern with names "
            "and counts such as local*5,global."
        )
    one = itertools.chain(*([part[1]] * int(part[2] or 1) for part in parts))
    return tuple(itertools.islice(itertools.cycle(itertools.islice(one, layers)), layers))


def _read_fields(model: Any) -> dict[str, dict[str, Any]]:
    """The fields of each kind that has some of its own."""
    kinds = {found[1] for found in map(PART.fullmatch, map(str.strip, model.layer_pattern.split(","))) if found}
    fields, own = {field.name: field for field in dataclasses.fields(model)}, {}
    for text in model.kind_fields:
        found = FIELD.fullmatch(text)
        if not found or found[1] not in kinds:
            raise ConfigError(
                f"kind_fields = {shown(text)} must be KIND.FIELD=VALUE of a kind of layer_pattern = {model.layer_pattern}: "
                f"pass --kind-fields {min(kinds)}.sliding_window=1024."
            )
        kind, name, word = found.groups()
        if name not in KIND_FIELDS:
            raise ConfigError(
                f"kind_fields = {shown(text)}: {name} cannot differ between kinds ({near(name, KIND_FIELDS).rstrip('.')}): "
                f"pass --kind-fields with {', '.join(KIND_FIELDS)}."
            )
        own.setdefault(kind, {})[name] = _value(fields[name], word, text)
    return own


def _value(field: dataclasses.Field, word: str, text: str) -> Any:
    try:
        optional = field.type not in (int, float, str)
        value = None if optional and word == "none" else READERS[field.type](word)
    except (KeyError, ValueError):
        value = word
    if problem := field_problem(field, value):
        raise ConfigError(
            f"kind_fields = {shown(text)}: {field.name} {problem.rule}: pass --kind-fields with another value."
        )
    return value


def check_layer_pattern(model: Any) -> None:
    """Checks the pattern, and the model of each of its kinds.

    Raises:
        ConfigError: for the first rule that is broken.
    """
    if model.layer_pattern == NO_PATTERN:
        if model.kind_fields:
            raise ConfigError(
                f"kind_fields = {','.join(model.kind_fields)} is of kinds, and layer_pattern = none: pass --layer-pattern, "
                "or omit --kind-fields."
            )
        return
    each = variants(model)
    places = {one.positions for one in each} | {model.positions}
    if len(places) > 1 and "learned" in places:
        raise ConfigError("kinds with learned positions and others cannot be in one model: pass --positions rotary.")
    if model.positions == "none" and "rotary" in places:
        raise ConfigError("a kind has rotary positions, and the model none: pass --positions rotary.")
    if not model.kind_fields:
        kind = PART.match(model.layer_pattern.strip())[1]
        raise ConfigError(
            f"layer_pattern = {model.layer_pattern} has kinds that differ in nothing: pass --kind-fields "
            f"{kind}.sliding_window=1024 or others, or omit --layer-pattern."
        )
    for one in each:
        if one.positions != model.positions:  # none: the model's scaling and norm are of layers that rotate
            one = dataclasses.replace(one, rotary_scaling="none", rotary_factor=None, rotated_norm=False)
        one.validate()


def without_field(model: Any, name: str) -> dict[str, Any]:
    """The pattern and the fields of kinds of a model, without one field of all kinds."""
    kept = tuple(text for text in model.kind_fields if FIELD.fullmatch(text)[2] != name)
    return {"kind_fields": kept, "layer_pattern": model.layer_pattern if kept else NO_PATTERN}


def layer_pattern_of(kinds: Sequence[str]) -> str:
    """The shortest `layer_pattern` of layers of these kinds."""
    kinds = list(kinds)
    period = next(n for n in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False)))
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds[:period])]
    return ",".join(kind + (f"*{count}" if count > 1 else "") for kind, count in runs)


def words_of(fields: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """The `kind_fields` of these fields of each kind."""
    shown_value = lambda value: "none" if value is None else f"{value!r}" if isinstance(value, float) else str(value)  # noqa: E731
    return tuple(f"{kind}.{name}={shown_value(value)}" for kind, own in fields.items() for name, value in own.items())
