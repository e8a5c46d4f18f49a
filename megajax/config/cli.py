"""The command line of a training run: one option for every field of the run's dataclasses.

Precedence: the command line, the file of --config, the model's recipe or else the experiment's defaults, the dataclass.
A mistake is a ConfigError of one line. Nothing here imports jax: the device count must be known before jax starts.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.config import (
    BertConfig,
    ConfigError,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    option,
    preset,
)
from megajax.config.compare import changed_options
from megajax.config.evaluate import EvaluateConfig
from megajax.config.fields import check_fields, field_problem
from megajax.config.options import first_parser, make_parser, read_words
from megajax.config.parallel import MESH_AXES
from megajax.config.sample import SampleConfig
from megajax.config.schedule_rules import default_chunks
from megajax.config.sections import GROUPS, OTHERS, PLAIN, SAVED, option_names
from megajax.config.stored_paths import PATH_FIELDS, resolve_paths
from megajax.config.toml import load_config
from megajax.config.trust import require_trust
from megajax.schedules.errors import shown
from megajax.schedules.io import is_schedule_file, load
from megajax.schedules.registry import import_user_files

# Options that may differ between the processes of a run: paths (hosts may have copies of their own) and places.
OWN = {name for name in DataConfig.__dataclass_fields__ if name in PATH_FIELDS} | {"log_jsonl", "run_dir"}
OWN |= {*LaunchConfig.__dataclass_fields__, "devices"} - {"processes"}


@dataclasses.dataclass(frozen=True)
class Importer:
    """Reads models of another tool, for `--init-from DIR`. Rooms above this one provide it.

    Attributes:
      read: (DIR) -> the model, and other options' values by name that it implies, such as the tokenizer.
      params: (DIR, Training) -> the parameters on the run's devices.
    """

    read: Callable[[str], tuple[ModelConfig, Mapping[str, Any]]]
    params: Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A complete default configuration.

    Attributes:
      description: the first lines of `--help`.
      defaults: the experiment's values by field name; "model" is the preset's name. Other fields have the dataclasses'
        defaults.
      recipes: for each preset's name, the values that replace `defaults` for that model.
      program: the command as `--help` prints it, "python -m experiments.gpt3"; None: the file's name.
      importer: for `--init-from`; None: the experiment has no such option's models.
      defaults_for_imports: whether `defaults` are for models of `--init-from` too, and not for its own model only.
    """

    description: str
    defaults: Mapping[str, Any]
    recipes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    program: str | None = None
    importer: Importer | None = None
    defaults_for_imports: bool = False


@dataclasses.dataclass(frozen=True)
class Request:
    """A command line that has been read: the configuration's fields, and the options that are not part of it.

    Attributes:
      given: by field name, the values that do not depend on the devices: those passed, the experiment's or recipe's, and
        those that follow from them.
      passed: those on the command line and in the file of --config.
      defaults: what `given` is if nothing but --model is passed.
      output, launch, sampling, evaluation: complete configurations of their own.
      base: the model of --init-from; None: the preset.
    """

    given: Mapping[str, Any]
    passed: Mapping[str, Any]
    defaults: Mapping[str, Any]
    output: OutputConfig
    launch: LaunchConfig
    sampling: SampleConfig
    evaluation: EvaluateConfig
    base: ModelConfig | None
    model: str
    imports: tuple[str, ...]
    devices: str | None
    dry_shapes: bool

    def mesh(self, device_count: int) -> dict[str, int]:
        """Degrees data, pipe, tensor for a number of devices; those that were passed are kept.

        As with any of these, `pipe` and `tensor` are 1 if only `context` was passed.
        """
        context = max(1, self.given.get("context", 1))
        given = {axis: self.given[axis] for axis in MESH_AXES if axis in self.given}
        given |= {} if given or context == 1 else {"pipe": 1, "tensor": 1}
        return mesh_for(device_count // context, given, self.fewest_replicas)

    @property
    def fewest_replicas(self) -> int:
        """The number of which `data` must be a multiple, so that `expert` divides data * context."""
        context, expert, tensor = (max(1, self.given.get(name, 1)) for name in ("context", "expert", "tensor"))
        group = -(-expert // tensor) if self.given.get("expert_tensor") == 1 else expert
        return group // math.gcd(group, context)

    @property
    def devices_needed(self) -> int | None:
        """Devices that the passed mesh needs; None if no degree was passed, so that any number is legal."""
        degrees = [self.given[axis] for axis in (*MESH_AXES, "context") if axis in self.given]
        if not degrees:
            return None
        needed = 1 if "data" in self.given else self.fewest_replicas
        for degree in degrees:
            needed *= max(1, degree)
        return needed

    def run(self, device_count: int, precision: str) -> RunConfig:
        """The configuration, not yet validated.

        Args:
          device_count: devices that the degrees which were not passed divide.
          precision: used if none was passed.

        Raises:
          ConfigError: an option of BERT is passed for another model.
        """
        base = self.base or preset(self.model)
        for name in option_names(BertConfig):
            if name in self.given and name not in option_names(type(base)):
                raise ConfigError(
                    f"{name} = {shown(self.given[name])} is of BERT, which {base.name} is not: omit {option(name)}, or "
                    "pass --model bert-336m."
                )
        model = dataclasses.replace(base, **_fields(type(base), self.given))
        parallel = _fields(ParallelConfig, self.given) | self.mesh(device_count)
        schedule = parallel.get("schedule", ParallelConfig.schedule)
        parallel = {"chunks": default_chunks(schedule, parallel["pipe"], model.layers)} | parallel
        train = {"precision": precision} | _fields(TrainConfig, self.given)
        data = DataConfig(**_fields(DataConfig, self.given))
        return RunConfig(model, ParallelConfig(**parallel), TrainConfig(**train), data, imports=self.imports)

    def changed(self, run: RunConfig) -> str:
        """The passed options that differ from the experiment's defaults for this model: "--pipe 4 --steps 100".

        Args:
          run: as the method `run` returned it.
        """
        usual = dataclasses.replace(self, given=self.defaults).run(run.parallel.devices, run.train.precision)
        output = OutputConfig(**_fields(OutputConfig, self.defaults))
        return changed_options(run, self.output, usual, output, names=self.passed)

    @property
    def sample(self) -> SampleConfig | None:
        """The text to generate after the training, or None."""
        return self.sampling if self.sampling.new_tokens else None

    @property
    def evaluate(self) -> EvaluateConfig | None:
        """The task that is evaluated during the training, or None."""
        return self.evaluation if self.evaluation.evaluate_every is not None else None

    @property
    def identity(self) -> dict[str, str]:
        """What must be the same in all processes of a run, by the option's name. Data are compared by `train.same_run`."""
        values = {**self.given, **vars(self.output), **self.others}
        return {option(name): str(value) for name, value in values.items() if name not in OWN and value is not None}

    @property
    def others(self) -> dict[str, Any]:
        """The options that are no part of the run's configuration, as a saved one holds them."""
        return {name: getattr(self, name) for name in PLAIN} | vars(self.sampling) | vars(self.evaluation)


def mesh_for(device_count: int, given: Mapping[str, int], replicas: int = 1) -> dict[str, int]:
    """Degrees of parallelism for a number of devices: those given, and defaults for the others.

    If none is given, tensor and pipe are 2 where the count allows it and leaves data a multiple of `replicas`. If one is
    given, the others are 1. `data`, if it is not given, is the number of devices divided by the other degrees, as in
    Megatron-LM.
    """
    if given:
        mesh = {"data": 1, "pipe": 1, "tensor": 1} | dict(given)
    else:
        tensor = 2 if device_count % (2 * replicas) == 0 else 1
        mesh = {"data": 1, "pipe": 2 if device_count // tensor % (2 * replicas) == 0 else 1, "tensor": tensor}
    rest = mesh["pipe"] * mesh["tensor"]
    if "data" not in given and 0 < rest <= device_count and device_count % rest == 0:
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
      description: the experiment; or its description, with `defaults` and `recipes` as in `Experiment`.

    Raises:
      ConfigError: an option that does not exist, or a value that cannot be read.
      ScheduleError: a schedule's file or a file to import that cannot be read.
    """
    if not isinstance(description, Experiment):
        description = Experiment(description, defaults or {}, recipes or {})
    experiment, defaults = description, description.defaults
    first = first_parser().parse_known_args(arguments)[0]
    import_user_files(first.imports)  # before the options are checked: the files register schedules and models
    parser = make_parser(experiment.description, defaults, experiment.program)
    saved = load_config(first.config, SAVED) if first.config is not None else {}
    _check_saved(saved, first.config)
    if not first.trust:
        require_trust(first.config or "", saved.get("imports", ()), first.imports, os.environ)
    saved = resolve_paths(saved, pathlib.Path(first.config or "").absolute().parent)
    import_user_files(saved.get("imports", ()))
    parser.set_defaults(**{name: saved.pop(name) for name in OTHERS if name in saved})
    parser.set_defaults(imports=list(parser.get_default("imports")))  # --import appends to a list
    passed = read_words(parser, arguments)
    del passed["config"], passed["trust"]
    if {"warmup_steps", "warmup_samples"} <= passed.keys():
        raise ConfigError(
            "warmup_steps and warmup_samples both give the warm-up: omit --warmup-steps or --warmup-samples."
        )
    base, implied = _imported(passed.get("init_from"), experiment.importer)
    if any(axis in passed for axis in MESH_AXES):  # one degree on the command line replaces the file's whole mesh
        saved = {name: value for name, value in saved.items() if name not in MESH_AXES}
    if "warmup_steps" in passed:
        saved.pop("warmup_samples", None)
    passed = saved | passed
    if "warmup_steps" in passed:  # samples of the recipe would override them
        passed.setdefault("warmup_samples", None)
    other = {name: passed.pop(name) for name in OTHERS}
    recipe = experiment.recipes.get(other["model"])
    if base is not None and not experiment.defaults_for_imports:
        defaults = {}  # they are for the model that the experiment trains from random weights
    usual = {name: value for name, value in (recipe or defaults).items() if name not in OTHERS} | implied
    if other["new_tokens"] is None:
        other["new_tokens"] = (recipe or defaults).get("new_tokens", 0)
    other["imports"] = tuple(dict.fromkeys(other["imports"]))
    given = usual | passed
    output, launch = (config(**_fields(config, given)) for config in (OutputConfig, LaunchConfig))
    sample, evaluate = (config(**_fields(config, other)) for config in (SampleConfig, EvaluateConfig))
    for config in (output, launch, sample, evaluate):
        config.validate()
    given = _derive(given, passed, recipe)
    if is_schedule_file(given.get("schedule", "")):
        schedule = load(given["schedule"])
        given = {"pipe": schedule.stages, "chunks": schedule.chunks} | given
    plain = {name: other[name] for name in PLAIN}
    return Request(given, passed, _derive(usual, {}, recipe), output, launch, sample, evaluate, base, **plain)


def _imported(directory: str | None, importer: Importer | None) -> tuple[ModelConfig | None, Mapping[str, Any]]:
    """The model of --init-from and the options that it implies; a saved configuration has them already."""
    if directory is None:
        return None, {}
    if importer is None:
        raise ConfigError(f"init_from = {directory}, but this experiment cannot import a model: use experiments.gpt3.")
    return importer.read(directory)


def _derive(given: Mapping[str, Any], passed: Mapping[str, Any], recipe: Mapping[str, Any] | None) -> dict[str, Any]:
    """`given` with the lengths and learning rates that follow from the others, except those that are passed."""
    train = TrainConfig(**_fields(TrainConfig, given))
    check_fields(train)  # before computing with them: a saved configuration may hold any value
    given = dict(given) | (_scaled(recipe, train, passed) if recipe else {})
    if "warmup_steps" not in passed:
        given["warmup_steps"] = min(train.warmup_steps, train.steps // 10)
    given.setdefault("minimum_learning_rate", train.learning_rate / 10)
    return given


def _fields(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values in `given` for the fields of a dataclass."""
    return {name: given[name] for name in option_names(config) if name in given}


def _check_saved(saved: Mapping[str, Any], path: str) -> None:
    """Checks the values of a saved configuration by the rules of their fields."""
    configs = (RunConfig, *(group.config for group in GROUPS))
    fields = {name: field for config in configs for name, field in config.__dataclass_fields__.items()}
    others = {
        "dry_shapes": fields["biases"],
        "devices": fields["run_dir"],
        "model": fields["run_dir"],
    }  # of their types
    for name, value in saved.items():
        problem = field_problem((fields | others)[name], value)
        if problem:
            raise ConfigError(f"{name} = {shown(value)} in {path} {problem.rule}: change it in the file.")


def _scaled(recipe: Mapping[str, Any], train: TrainConfig, passed: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's lengths in samples, scaled to the length of the run."""
    share = train.steps * train.global_batch_size / (recipe["steps"] * recipe["global_batch_size"])
    names = [name for name in ("warmup_samples", "decay_samples") if name in recipe and name not in passed]
    scaled: dict[str, Any] = {name: round(share * recipe[name]) for name in names}
    if recipe.get("batch_ramp") and "batch_ramp" not in passed:
        start, increment, samples = recipe["batch_ramp"]
        fits = start < train.global_batch_size and (train.global_batch_size - start) % increment == 0
        scaled["batch_ramp"] = (start, increment, max(1, round(share * samples))) if fits else ()
    return scaled
