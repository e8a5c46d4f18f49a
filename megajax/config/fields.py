"""The fields of the configuration's dataclasses: help, legal values and metavar, as metadata, and their shared rules.

Every field is declared with `setting`. `field_problem` is the only code that reads the metadata's types, ranges and
choices; rules between two fields are in the `validate` method of the dataclass that owns them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from megajax.config.errors import ConfigError, near, option
from megajax.schedules.arguments import FLOAT32, INT32, range_problem, text_problem
from megajax.schedules.errors import shown
from megajax.schedules.paths import NAMED, path_problem, source_problem, store_problem, without_secrets

NUMBERS = (int, float, int | None, float | None)
PLAIN = (bool, int, float, str, type(None))  # True is not 1 as an argument of a typed cache, but it is in a tuple
OPTIONAL = (int | None, float | None, bool | None, str | None, tuple[str, ...] | None)


def setting(
    default: Any,
    text: str,
    choices: Sequence[Any] = (),
    *,
    low: float | None = None,
    below: float | None = None,
    metavar: str | None = None,
    shown_default: str | None = None,
    list_style: str = "commas",
    text_kind: str = "name",
) -> Any:
    """Declares a dataclass field.

    Args:
        default: the field's default; `dataclasses.MISSING` if it has none.
        text: the field's comment, and its help on the command line.
        choices: the legal values; empty: any value of the type and range.
        low: smallest legal number, itself legal; None: whole numbers start at 1, others are above 0.
        below: numbers must be below this; None: whole numbers must be int32, others finite in fp32.
        metavar: the format of the value, as `--help` prints it; None: derived from the type.
        shown_default: the default as `--help` prints it, if None means a computed value.
        list_style: how a tuple is passed: "commas" (A,B,C), "words" (A B C) or "repeat" (the option once for each).
        text_kind: of texts: "name"; "path" of this machine (or the name of something built in), which is no URL; "store", a
          path, or a folder in an object store, gs://... or s3://...; "source", a path, URL or hub:ORG/NAME; or "any", which
          may be empty.
    """
    metadata = {
        "help": text,
        "choices": tuple(choices),
        "low": low,
        "below": below,
        "metavar": metavar,
        "shown_default": shown_default,
        "list_style": list_style,
        "text_kind": text_kind,
    }
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(config: Any) -> None:
    """Checks the type and the range, or the listed choices, of each field of a dataclass.

    Raises:
        ConfigError: for the first field that is illegal. Fields that were not declared with `setting` are not checked.
    """
    for field in _declared(type(config)):
        value = getattr(config, field.name)
        problem = (_known_problem if type(value) in PLAIN else field_problem)(field, value)
        if problem:
            word = without_secrets(value) if isinstance(value, str) else shown(value)
            raise ConfigError(f"{field.name} = {word} {problem.rule}: pass {problem.remedy}.")


# The planner's search checks tens of thousands of layouts, with the same few values in each field.
@functools.lru_cache(maxsize=4096, typed=True)
def _known_problem(field: dataclasses.Field, value: Any) -> "Problem | None":
    return field_problem(field, value)


@functools.lru_cache
def _declared(kind: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a dataclass that have rules."""
    return tuple(field for field in dataclasses.fields(kind) if field.metadata)


class Problem(NamedTuple):
    """Why a value is illegal: the end of a sentence that starts with the value, and the option to pass."""

    rule: str
    remedy: str


def field_problem(field: dataclasses.Field, value: Any) -> Problem | None:
    """Why a field cannot have a value; None if it can. Fields that were not declared with `setting` take any."""
    if not field.metadata or (value is None and field.type in OPTIONAL):
        return None
    if field.metadata["choices"]:
        return _choice_problem(field, value)
    if field.type in NUMBERS:
        whole = field.type in (int, int | None)
        rule = _number_rule(value, whole, field.metadata["low"], field.metadata["below"])
        remedy = "with such a value"
    elif field.type in (bool, bool | None):
        rule, remedy = "" if isinstance(value, bool) else "must be True or False", f"or --no-{option(field.name)[2:]}"
    elif remote := _remote(value, field.metadata["text_kind"]):
        rule, remedy = remote
    elif field.type in (str, str | None):
        legal, may_be_empty = isinstance(value, str), field.metadata["text_kind"] == "any"
        rule, remedy = text_problem(value, may_be_empty) if legal else "must be a text", None
    else:
        rule, remedy = _tuple_rule(field, value), None
    return Problem(rule, f"{option(field.name)} {remedy or metavar(field)}") if rule else None


def metavar(field: dataclasses.Field) -> str:
    """The format of a field's value, as `--help` and errors print it."""
    if field.metadata["choices"]:
        return "|".join(map(str, field.metadata["choices"]))
    default = {int: "COUNT", int | None: "COUNT", float: "NUMBER", float | None: "NUMBER"}.get(field.type, "NAME")
    return field.metadata["metavar"] or default


def _remote(value: Any, kind: str) -> tuple[str, str] | None:
    """Why a text, or the first of several, is no path of this machine, or no source, and what to pass."""
    problem_of = {"path": path_problem, "store": store_problem, "source": source_problem}.get(kind)
    if problem_of is None:
        return None
    words = value if isinstance(value, tuple) else (value,)
    if kind == "store" and isinstance(value, tuple):
        words = tuple(NAMED.sub("", word, count=1) if isinstance(word, str) else word for word in words)
    return next((problem for word in words if isinstance(word, str) and (problem := problem_of(word))), None)


def _tuple_rule(field: dataclasses.Field, value: Any) -> str:
    if isinstance(value, list):  # of Python code: a list has no hash, which programs are looked up by
        return "must be a tuple, not a list"
    if field.type == tuple[int, ...]:
        legal = isinstance(value, tuple) and not any(_number_rule(one, whole=True) for one in value)
        return "" if legal else "must be a list of whole numbers above 0"
    if not isinstance(value, tuple) or not all(isinstance(word, str) for word in value):
        return "must be a list of texts"
    if not value and field.default != ():
        return "must not be empty"
    return next((rule for word in value if (rule := text_problem(word))), "")


def _choice_problem(field: dataclasses.Field, value: Any) -> Problem | None:
    """The value must be one of the listed ones and of their type (True is not 1)."""
    choices = field.metadata["choices"]
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return None
    names = tuple(map(str, choices))
    hint = near(value if isinstance(value, str) else shown(value), names).rstrip(".")
    legal = "|".join(names) if hint.startswith("did") else "and one of them"
    rule = f"is not known ({hint})" if hint.startswith("did") else f"is not known: {hint}"
    return Problem(rule, f"{option(field.name)} {legal}")


def _number_rule(value: Any, whole: bool, low: float | None = None, below: float | None = None) -> str:
    """The rule that the value breaks: a finite number of the field's kind, in its range; otherwise ""."""
    kind = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        value = float("nan")
    problem = range_problem(value, 1 if whole and low is None else low, below, INT32 if whole else FLOAT32)
    return problem and f"must be {kind}, {problem}"
