"""The command line of a training run: one option for every field of the run's dataclasses, and nothing said twice.

The help of an option is its field's. What is not given comes from the experiment's defaults, then from the dataclass;
what is wrong is a ConfigError of one line. Nothing here imports jax: the device count must be known before jax starts.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.config import (
    PRESETS,
    ConfigError,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    near,
    preset,
)
from megajax.config.checks import SCHEDULE_FILES, SEVERAL_CHUNKS, check_values
from megajax.config.launch_checks import check_launch, check_output
from megajax.config.toml import load_config
from megajax.schedules.io import load

MESH_FIELDS = ("data", "pipe", "tensor")
# Defaults that follow from other options, as `--help` says them; `parse`, `Request.run` and `mesh_for` compute them.
DERIVED = {
    "data": "the devices left by --context, --pipe and --tensor",
    "pipe": "2 if the devices allow it and neither --data nor --tensor is given, else 1",
    "tensor": "2 if the devices allow it and neither --data nor --pipe is given, else 1",
    "chunks": "2 for schedules that may have it, on 2 or more stages if the layers can be cut so, else 1; a file's",
    "warmup_steps": "{default}, or a tenth of --steps if that is less",
    "minimum_learning_rate": "a tenth of --learning-rate",
    "precision": "bf16 on GPUs, fp32 on CPUs",
}
# Fields of a Request that are no options of their own.
COMPOUND = ("given", "output", "launch")
# Sections of a saved configuration; the options that are in none of the dataclasses are in "options".
SECTIONS = {"model": ModelConfig, "parallel": ParallelConfig, "train": TrainConfig, "output": OutputConfig}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A complete default configuration, with recipes by model."""

    description: str
    defaults: Mapping[str, Any]
    recipes: Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The text that is generated after the training."""

    prompt: str
    new_tokens: int
    temperature: float
    top_k: int | None


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be run: the configuration's fields that are known, and the options that are no part of it."""

    given: Mapping[str, Any]
    output: OutputConfig
    launch: LaunchConfig
    model: str
    devices: str | None
    text: str | None
    data_path: list[str] | None
    train_data_path: list[str] | None
    valid_data_path: list[str] | None
    split: str | None
    data_cache: str | None
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    tokenizer: str
    end_of_document: str | None
    dry_shapes: bool
    prompt: str
    new_tokens: int
    temperature: float
    top_k: int | None

    def mesh(self, device_count: int) -> dict[str, int]:
        """Degrees data, pipe, tensor for a number of devices; those typed are kept as they are."""
        context = max(1, self.given.get("context", 1))
        return mesh_for(device_count // context, {axis: self.given[axis] for axis in MESH_FIELDS if axis in self.given})

    @property
    def devices_needed(self) -> int | None:
        """How many devices the mesh typed needs; None if no degree was typed, so that any number will do."""
        degrees = [self.given[axis] for axis in MESH_FIELDS if axis in self.given]
        if not degrees:
            return None
        needed = max(1, self.given.get("context", 1))
        for degree in degrees:
            needed *= max(1, degree)
        return needed

    def run(self, device_count: int, precision: str) -> RunConfig:
        """The configuration, not yet validated.

        Args:
          device_count: devices to lay the run over where the degrees were not typed.
          precision: used if none was typed.
        """
        model = dataclasses.replace(preset(self.model), **self._given(ModelConfig))
        parallel = self._given(ParallelConfig) | self.mesh(device_count)
        several = parallel.get("schedule", "interleaved_1f1b") in SEVERAL_CHUNKS and parallel["pipe"] > 1
        parallel = {"chunks": 2 if several and model.layers % (2 * parallel["pipe"]) == 0 else 1} | parallel
        train = {"precision": precision} | self._given(TrainConfig)
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(DataConfig)}
        return RunConfig(model, ParallelConfig(**parallel), TrainConfig(**train), DataConfig(**data))

    @property
    def sample(self) -> SampleConfig | None:
        """The text to generate after the training; None: none."""
        if not self.new_tokens:
            return None
        return SampleConfig(self.prompt, self.new_tokens, self.temperature, self.top_k)

    @property
    def others(self) -> dict[str, Any]:
        """The options that are in none of the dataclasses, as a saved configuration holds them."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in COMPOUND]
        return {name: getattr(self, name) for name in names}

    def _given(self, config: type) -> dict[str, Any]:
        return {name: self.given[name] for name in _names(config) if name in self.given}


def mesh_for(device_count: int, given: Mapping[str, int]) -> dict[str, int]:
    """Degrees for a number of devices: those given, and for the rest what shows all three kinds of parallelism.

    With none given, tensor and pipe are 2 where the count allows it. As soon as one is given, the others are 1; data,
    if it is not given, takes the devices that are left, as it does in Megatron-LM.
    """
    if given:
        mesh = {"data": 1, "pipe": 1, "tensor": 1} | dict(given)
    else:
        tensor = 2 if device_count % 2 == 0 else 1
        mesh = {"data": 1, "pipe": 2 if device_count // tensor % 2 == 0 else 1, "tensor": tensor}
    rest = mesh["pipe"] * mesh["tensor"]
    if "data" not in given and rest > 0 and device_count % rest == 0:
        mesh["data"] = device_count // rest
    return mesh


def parse(
    arguments: Sequence[str] | None,
    description: str | Experiment,
    defaults: Mapping[str, Any] | None = None,
    recipes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Request:
    """Reads a command line.

    Args:
      arguments: the words after the program's name; None reads the process's own.
      description: what `--help` says first.
      defaults: by field name, what this experiment takes where the dataclasses' defaults do not suit it; "model" is the
        preset's name.
      recipes: by preset's name, what is taken in place of `defaults` for that model.

    Raises:
      ConfigError: an option that does not exist, or a value that cannot be read.
      ScheduleError: a schedule's file that cannot be read, or holds none.
    """
    if isinstance(description, Experiment):
        description, defaults, recipes = description.description, description.defaults, description.recipes
    parser = _parser(description, defaults)
    names = [field.name for field in dataclasses.fields(Request) if field.name not in COMPOUND]
    file = _file_parser().parse_known_args(arguments)[0].config
    saved = load_config(file, _known(names)) if file is not None else {}
    parser.set_defaults(**{name: saved.pop(name) for name in names if name in saved})
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown(unknown[0], parser))
    typed = vars(values)
    del typed["config"]
    if any(axis in typed for axis in MESH_FIELDS):  # a mesh that is typed is a whole one
        saved = {name: value for name, value in saved.items() if name not in MESH_FIELDS}
    typed = saved | typed
    other = {name: typed.pop(name) for name in names}
    output, launch = (
        config(**{name: typed.pop(name) for name in _names(config) if name in typed})
        for config in (OutputConfig, LaunchConfig)
    )
    check_output(output)
    check_launch(launch)
    chosen = (recipes or {}).get(other["model"], defaults)
    given = {name: value for name, value in chosen.items() if name != "model"} | typed
    plain = TrainConfig(**{name: given[name] for name in _names(TrainConfig) if name in given})
    check_values(plain)  # a saved configuration may hold anything
    if chosen is not defaults:
        given |= _scaled(chosen, plain, typed)
    if "warmup_steps" not in typed:
        given["warmup_steps"] = min(plain.warmup_steps, plain.steps // 10)
    given.setdefault("minimum_learning_rate", plain.learning_rate / 10)
    if given.get("schedule", "").endswith(SCHEDULE_FILES):
        schedule = load(given["schedule"])
        given = {"pipe": schedule.stages, "chunks": schedule.chunks} | given
    return Request(given=given, output=output, launch=launch, **other)


def _scaled(recipe: Mapping[str, Any], train: TrainConfig, typed: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's lengths in samples, for a run that is shorter or longer than the recipe's."""
    share = train.steps * train.global_batch_size / (recipe["steps"] * recipe["global_batch_size"])
    names = [name for name in ("warmup_samples", "decay_samples") if name in recipe and name not in typed]
    scaled: dict[str, Any] = {name: round(share * recipe[name]) for name in names}
    if "batch_ramp" in recipe and "batch_ramp" not in typed:
        start, increment, samples = recipe["batch_ramp"]
        fits = start < train.global_batch_size and (train.global_batch_size - start) % increment == 0
        scaled["batch_ramp"] = (start, increment, max(1, round(share * samples))) if fits else ()
    return scaled


def _known(others: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names that a saved configuration may have, by its sections."""
    known = {section: tuple(_names(config)) for section, config in SECTIONS.items()}
    return known | {"options": tuple(others)}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors."""

    def error(self, message: str):
        raise ConfigError(f"{message.removeprefix('argument ')}; --help lists every option with its values")


def _parser(description: str, defaults: Mapping[str, Any]) -> argparse.ArgumentParser:
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--model",
        default=defaults.get("model"),
        metavar="NAME",
        help=f"preset to start from: {', '.join(PRESETS)} (default: {defaults.get('model')})",
    )
    _add_config(run)
    run.add_argument(
        "--devices",
        default=None,
        metavar="WHERE",
        help="gpu, cpu or cpu:COUNT (default: GPUs if there are, else cpu:8)",
    )
    run.add_argument(
        "--dry-shapes",
        action="store_true",
        default=False,
        help="print every parameter's shape, type, sharding and bytes per device, and stop; needs none of the devices",
    )
    _add_data_options(parser.add_argument_group("data"))
    sample = parser.add_argument_group("the text generated at the end")
    sample.add_argument("--prompt", default="The ", metavar="TEXT", help="text to continue (default: 'The ')")
    sample.add_argument(
        "--new-tokens", default=200, type=_whole, metavar="COUNT", help="tokens to add; 0 for none (default: 200)"
    )
    sample.add_argument(
        "--temperature", default=0.8, type=_number, metavar="NUMBER", help="0 takes the likeliest (default: 0.8)"
    )
    sample.add_argument(
        "--top-k", default=None, type=_whole, metavar="COUNT", help="draw among the likeliest only (default: all)"
    )
    groups = {
        "layout": ParallelConfig,
        "training": TrainConfig,
        "model, in place of the preset's": ModelConfig,
        "what the run leaves behind, and when it stops": OutputConfig,
        "several processes": LaunchConfig,
    }
    for title, config in groups.items():
        group = parser.add_argument_group(title)
        for field in dataclasses.fields(config):
            if field.name in _names(config):
                _add_field(group, field, config is ModelConfig, defaults)
    return parser


def _add_config(group) -> None:
    group.add_argument(
        "--config",
        default=None,
        metavar="FILE",
        help="replay a run from its config.toml; what else is typed is taken in place of what it says (default: none)",
    )


def _file_parser() -> argparse.ArgumentParser:
    """Reads --config alone: what it says are the other options' defaults."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    _add_config(parser)
    return parser


def _add_data_options(group) -> None:
    """What is read, and how: the fields of megajax.data.source.DataSource, under Megatron-LM's names."""
    group.add_argument("--text", default=None, metavar="FILE", help="text to train on (default: the bundled corpus)")
    for name, use in (
        ("data-path", "datasets to train and validate on, as megajax.data.preprocess or Megatron-LM writes them"),
        ("train-data-path", "datasets to train on alone, in place of --data-path"),
        ("valid-data-path", "datasets to validate on alone"),
    ):
        help_text = f"{use}: PREFIX, or a blend: WEIGHT PREFIX WEIGHT PREFIX ... (no weights: by size)"
        group.add_argument(f"--{name}", default=None, nargs="+", metavar="PREFIX", help=help_text)
    group.add_argument(
        "--split", default=None, metavar="A,B,C", help="shares of training, validation, test (default: 969,30,1)"
    )
    group.add_argument(
        "--data-cache", default=None, metavar="DIR", help="where sample indices are kept (default: beside the dataset)"
    )
    group.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="how text becomes tokens: byte, gpt2, or a file tokenizer.json, .model, vocab.txt (default: byte)",
    )
    group.add_argument(
        "--end-of-document",
        default=None,
        metavar="TOKEN",
        help="what ends documents in a tokenizer's file, if not usual",
    )
    for name, use in (
        ("reset-position-ids", "positions begin at 0 in every document of a sample"),
        ("reset-attention-mask", "tokens attend to their own document only"),
        ("eod-mask-loss", "the token after an end of document is no label"),
    ):
        group.add_argument(f"--{name}", action="store_true", default=False, help=f"{use} (default: off)")


def _names(config: type) -> list[str]:
    """The fields of a dataclass that are options; a model's name is that of its preset."""
    return [field.name for field in dataclasses.fields(config) if (config, field.name) != (ModelConfig, "name")]


def _add_field(group, field: dataclasses.Field, from_preset: bool, defaults: Mapping[str, Any]) -> None:
    """Adds the option of one dataclass field; it is absent from the parsed values unless it is typed."""
    name = field.name
    default = "the preset's" if from_preset else defaults.get(name, field.default)
    if name in DERIVED and (name not in defaults or "{default}" in DERIVED[name]):
        default = DERIVED[name].format(default=default)
    if isinstance(default, tuple):
        default = ",".join(map(str, default)) or "none"
    elif isinstance(default, bool):
        default = "on" if default else "off"
    text = f"{field.metadata['help']} (default: {default})".replace("%", "%%")
    flag = "--" + name.replace("_", "-")
    if field.type is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    read, metavar = _readers()[field.type]
    metavar = "|".join(map(str, field.metadata["choices"])) or metavar
    group.add_argument(flag, type=read, metavar=metavar, help=text)


def _readers() -> dict[Any, tuple[Callable[[str], Any], str]]:
    """For each type a field may have: how its text is read, and what `--help` calls it."""
    return {
        int: (_whole, "COUNT"),
        int | None: (_whole, "COUNT"),
        float: (_number, "NUMBER"),
        float | None: (_number, "NUMBER"),
        str: (str, "NAME"),
        str | None: (str, "NAME"),
        tuple[int, ...]: (_wholes, "COUNT,COUNT,..."),
        tuple[str, ...]: (lambda text: tuple(text.split(",")), "NAME,NAME,..."),
    }


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _wholes(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(_whole(word) for word in text.split(","))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """What to say of a word that no option takes."""
    if not word.startswith("-"):
        return f"{word!r} is not an option: options start with --, as in --model NAME; --help lists them"
    flags = tuple(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))
    hint = near(word.split("=")[0], flags)
    hint = hint if hint.startswith("did you mean") else "--help lists every option"
    return f"there is no option {word.split('=')[0]}: {hint}"
