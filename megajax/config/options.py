"""The options of the command line: one for every field of the configuration's dataclasses, read by argparse.

The help, legal values and format of an option are its field's metadata (`megajax.config.fields`).

argparse and not a library: tyro 1.0 prints a mistake as a box of several lines and exits, and cannot tell a bool that was
not passed from its default, which the precedence of recipes and --config needs; simple-parsing 0.1, draccus 0.11 and
jsonargparse 4.53 read neither `--no-x` nor `none` nor A,B,C as here. The commit that wrote this has the figures.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.config import PRESETS, ConfigError, ModelConfig, RunConfig, option
from megajax.config.fields import metavar as metavar_of
from megajax.config.sections import GROUPS, option_names
from megajax.config.unknown_options import describe_unknown
from megajax.schedules import arguments
from megajax.schedules.arguments import plain_text, real_number, whole_number
from megajax.schedules.paths import local_path, named_store_path, source_path, store_path

# The options that `--help` prints first, with --model.
MOST_USED = (
    *("data_path", "tokenizer", "global_batch_size", "steps", "learning_rate", "pipe", "tensor", "run_dir", "resume"),
)
# Defaults derived from other options, as `--help` prints them; `parse`, `Request.run` and `mesh_for` compute them.
DERIVED = {
    "data": "the devices left by --context, --pipe and --tensor",
    "pipe": "2 if the devices allow it and neither --data nor --tensor is given, else 1",
    "tensor": "2 if the devices allow it and neither --data nor --pipe is given, else 1",
    "chunks": "the file's; 2 where the schedule, --pipe and --layers allow it, else 1",
    "warmup_steps": "{default}, or a tenth of --steps if that is less",
    "minimum_learning_rate": "a tenth of --learning-rate",
    "precision": "bf16 on GPUs, fp32 on CPUs",
}


class Parser(arguments.Parser):
    """An argument parser whose errors are ConfigErrors."""

    mistake = ConfigError

    def describe_unknown(self, words: Sequence[str]) -> str:
        """Names the option that was meant, also that of another tool or of another command."""
        return describe_unknown(words, [flag for flag in self._option_string_actions if flag.startswith("--")])


def make_parser(description: str, defaults: Mapping[str, Any], program: str | None = None) -> Parser:
    """A parser with an option for every field; its errors are ConfigErrors.

    Args:
        description: the first lines of `--help`.
        defaults: the experiment's, by field name; the dataclasses' apply to the other fields.
        program: the command as `--help` prints it; None: the file's name.
    """
    parser = Parser(
        prog=program,
        usage="%(prog)s [options]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("most used")
    run.add_argument(
        "--model",
        default=defaults.get("model"),
        type=plain_text,
        metavar="NAME",
        help=f"preset to start from: {', '.join(PRESETS)} (default: {defaults.get('model')})",
    )
    more = parser.add_argument_group("the run")
    _add_config(more)
    more.add_argument(
        "--devices",
        default=None,
        type=plain_text,
        metavar="WHERE",
        help="gpu, cpu or cpu:COUNT (default: the GPUs, or cpu:8 if there are none)",
    )
    _add_imports(more)
    more.add_argument(
        "--dry-shapes",
        action="store_true",
        default=False,
        help="print every parameter's shape, dtype, sharding and bytes per device, and exit; needs none of the devices",
    )
    usual = {"prompt": "'The '", "new_tokens": f"{defaults.get('new_tokens', 0)}; 0 for models with a recipe"}
    for group in GROUPS:
        place = parser.add_argument_group(group.title)
        if group.saved == "options":
            _add_others(place, group.config, usual)
            continue
        for name in group.names:
            field = group.config.__dataclass_fields__[name]
            _add_field(run if name in MOST_USED else place, field, issubclass(group.config, ModelConfig), defaults)
    return parser


def _add_others(place, config: type, usual: Mapping[str, str]) -> None:
    """Adds an option for every field of a dataclass that is no part of a run's configuration; it has the field's default.

    `usual`: defaults as the help prints them, where they are not the field's. That of new_tokens is the recipe's.
    """
    for field in dataclasses.fields(config):
        place.add_argument(
            option(field.name),
            default=None if field.name == "new_tokens" else field.default,
            type=str if field.metadata["text_kind"] == "any" else _reader(field),
            metavar=metavar_of(field),
            help=f"{field.metadata['help']} (default: "
            f"{usual.get(field.name) or field.metadata['shown_default'] or field.default})",
        )


def add_options(parser: argparse.ArgumentParser, config: type, title: str) -> None:
    """Adds an option for every field of a dataclass; each is absent from the parsed values unless it is passed."""
    group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
    for name in option_names(config):
        _add_field(group, config.__dataclass_fields__[name], issubclass(config, ModelConfig), {})


def _add_config(group) -> None:
    group.add_argument(
        "--config",
        default=None,
        type=local_path,
        metavar="FILE",
        help="replay a run from its config.toml; other options take precedence over it (default: none)",
    )
    add_trust(group)


def add_trust(group) -> None:
    """Adds --trust: see `config/trust.py`."""
    group.add_argument(
        "--trust",
        action="store_true",
        default=False,
        help="import the Python files that a run directory names, though another account has written it (default: off)",
    )


def _add_imports(group) -> None:
    field = RunConfig.__dataclass_fields__["imports"]
    group.add_argument(
        "--import",
        dest="imports",
        action="append",
        type=local_path,
        default=[],
        metavar=field.metadata["metavar"],
        help=f"{field.metadata['help']} (default: none)",
    )


def first_parser() -> argparse.ArgumentParser:
    """A parser of --config and --import, which decide the legal values and the defaults of the other options."""
    parser = Parser(allow_abbrev=False, add_help=False)
    _add_config(parser)
    _add_imports(parser)
    return parser


def _add_field(group, field: dataclasses.Field, from_preset: bool, defaults: Mapping[str, Any]) -> None:
    """Adds the option of one dataclass field; it is absent from the parsed values unless it is passed."""
    name = field.name
    default = defaults.get(name, field.default)
    if name in DERIVED and (name not in defaults or "{default}" in DERIVED[name]):
        default = DERIVED[name].format(default=default)
    if default is None:
        default = field.metadata["shown_default"] or "none"
    elif isinstance(default, tuple):
        default = ",".join(map(str, default)) or "none"
    elif isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, float):
        default = f"{default:g}"
    shown = field.metadata["help"] if from_preset else f"{field.metadata['help']} (default: {default})"
    shown = shown.replace("%", "%%")
    flag = option(name)
    if field.type in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=shown)
        return
    if field.metadata["list_style"] == "words":
        group.add_argument(flag, nargs="+", type=_reader(field), action=_Words, metavar=metavar_of(field), help=shown)
        return
    action = _Repeated if field.metadata["list_style"] == "repeat" else "store"
    group.add_argument(flag, type=_reader(field), action=action, metavar=metavar_of(field), help=shown)


class _Words(argparse.Action):
    """Stores the words of an option as a tuple."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, tuple(values))


class _Repeated(argparse.Action):
    """Stores the words of an option that may be given several times as a tuple; none: an empty one."""

    def __call__(self, parser, namespace, values, option_string=None):
        words = getattr(namespace, self.dest, ())
        setattr(namespace, self.dest, () if values == "none" else (*words, values))


def _reader(field: dataclasses.Field) -> Callable[[str], Any]:
    """The parser of an option's text, or of each of its words, for a field."""
    if field.metadata["text_kind"] == "path":
        return local_path
    if field.metadata["text_kind"] == "store":
        return named_store_path if field.metadata["list_style"] == "words" else store_path
    if field.metadata["text_kind"] == "source":
        return source_path
    if field.metadata["list_style"] in ("words", "repeat"):
        return plain_text
    return _readers()[field.type]


def _readers() -> dict[Any, Callable[[str], Any]]:
    """The parser of an option's text for each type of a field."""
    return {
        int: whole_number,
        int | None: lambda word: None if word == "none" else whole_number(word),
        float: real_number,
        float | None: lambda word: None if word == "none" else real_number(word),
        str: plain_text,
        str | None: plain_text,
        tuple[int, ...]: lambda words: () if words == "none" else tuple(map(whole_number, words.split(","))),
        tuple[str, ...]: lambda words: tuple(map(plain_text, words.split(","))),
    }


def read_words(parser: Parser, words: Sequence[str] | None) -> dict[str, Any]:
    """The values that a parser reads from a command line; None: the process's own.

    Raises:
        ConfigError: an option does not exist or cannot be read.
    """
    values, unknown = parser.parse_known_args(words)
    if unknown:
        parser.refuse(unknown)
    return vars(values)
