"""The fields of the configuration's dataclasses: help, legal values and metavar, as metadata, and their shared rules.

Every field is declared with `setting`. `check_fields` is the only code that reads the metadata's types, ranges and
choices; rules between two fields are in the `validate` method of the dataclass that owns them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from megajax.config.errors import ConfigError, near, option

NUMBERS = (int, float, int | None, float | None)
OPTIONAL = (int | None, float | None, str | None, tuple[str, ...] | None)


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
) -> Any:
    """Declares a dataclass field.

    Args:
        default: the field's default; `dataclasses.MISSING` if it has none.
        text: the field's comment, and its help on the command line.
        choices: the legal values; empty: any value of the type and range.
        low: smallest legal number, itself legal; None: whole numbers start at 1, others are above 0.
        below: numbers must be below this.
        metavar: the format of the value, as `--help` prints it; None: derived from the type.
        shown_default: the default as `--help` prints it, if None means a computed value.
        list_style: how a tuple is passed: "commas" (A,B,C), "words" (A B C) or "repeat" (the option once for each).
    """
    metadata = {
        "help": text,
        "choices": tuple(choices),
        "low": low,
        "below": below,
        "metavar": metavar,
        "shown_default": shown_default,
        "list_style": list_style,
    }
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(config: Any) -> None:
    """Checks the type and the range, or the listed choices, of each field of a dataclass.

    Raises:
        ConfigError: for the first field that is illegal. Fields that were not declared with `setting` are not checked.
    """
    for field in dataclasses.fields(config):
        check_field(field, getattr(config, field.name))


def check_field(field: dataclasses.Field, value: Any) -> None:
    """Checks a value for one field; see `check_fields`."""
    if field.metadata and not (value is None and field.type in OPTIONAL):
        if field.metadata["choices"]:
            _check_choice(field, value)
        elif field.type in NUMBERS:
            _check_number(field, value)
        elif field.type is bool and not isinstance(value, bool):
            name = option(field.name)
            raise ConfigError(f"{field.name} = {value!r} must be True or False: pass {name} or --no-{name[2:]}.")
        elif field.type in (str, str | None) and not isinstance(value, str):
            raise ConfigError(f"{field.name} = {value!r} must be a text: pass {option(field.name)} {metavar(field)}.")
        elif field.type in (tuple[str, ...], tuple[str, ...] | None):
            if not isinstance(value, tuple) or not all(isinstance(word, str) for word in value):
                raise ConfigError(
                    f"{field.name} = {value!r} must be a list of texts: pass {option(field.name)} {metavar(field)}."
                )
        elif field.type == tuple[int, ...] and not isinstance(value, tuple):
            raise ConfigError(
                f"{field.name} = {value!r} must be a list of whole numbers: pass {option(field.name)} {metavar(field)}."
            )


def metavar(field: dataclasses.Field) -> str:
    """The format of a field's value, as `--help` and errors print it."""
    if field.metadata["choices"]:
        return "|".join(map(str, field.metadata["choices"]))
    default = {int: "COUNT", int | None: "COUNT", float: "NUMBER", float | None: "NUMBER"}.get(field.type, "NAME")
    return field.metadata["metavar"] or default


def _check_choice(field: dataclasses.Field, value: Any) -> None:
    """Checks that the value is one of the listed ones and of their type (True is not 1)."""
    choices = field.metadata["choices"]
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return
    names = tuple(map(str, choices))
    hint = near(str(value), names)
    legal = "|".join(names) if hint.startswith("did") else "and one of them"
    raise ConfigError(f"{field.name} = {value!r} is not known: {hint} Pass {option(field.name)} {legal}.")


def _check_number(field: dataclasses.Field, value: Any) -> None:
    """A finite number of the field's kind, in its range."""
    whole = field.type in (int, int | None)
    low, below = field.metadata["low"], field.metadata["below"]
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    number = number and (isinstance(value, int) or math.isfinite(value))
    smallest = 1 if whole and low is None else low
    legal = "above 0" if smallest is None else f"{smallest} or more"
    legal += f" and below {below}" if below is not None else ""
    in_range = number and (value > 0 if smallest is None else value >= smallest) and (below is None or value < below)
    if not in_range:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(
            f"{field.name} = {value!r} must be {kind}, {legal}: pass {option(field.name)} with such a value."
        )
