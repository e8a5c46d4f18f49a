"""The command line: the options of the comparison, the two layouts', and the training options that both share.

No jax is imported here: the devices are chosen before it starts.
"""

import argparse
import dataclasses
import importlib
import shlex
from collections.abc import Sequence
from typing import Any

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.config.cli import Experiment, Request, parse
from megajax.config.options import Parser, make_parser, read_words
from megajax.schedules.arguments import plain_text, split_command, whole
from megajax.schedules.paths import local_path

DESCRIPTION = """Compares the training steps of two layouts, or of two versions of megajax, tensor by tensor.

python -m megajax.verify --a "--data 8" --b "--pipe 2 --tensor 2 --schedule zb_v --chunks 2" -- --model tiny
python -m megajax.verify --a "--data 8" --b "--pipe 4 --zero 1" --resume runs/first -- --config runs/first/config.toml
python -m megajax.verify --a "--pipe 2" --deterministic
python -m megajax.verify --record a.npz --a "--data 8"             with one version of megajax, or on one machine
python -m megajax.verify --against a.npz --b "--data 8"            with another

Options after -- are those of the training (python -m experiments.gpt3 --help); the precision is fp32 by default.
Exit codes: 0 equal up to rounding, 1 different, 2 wrong options."""
USUAL_EXPERIMENT = "experiments.gpt3"


@dataclasses.dataclass(frozen=True)
class Layout:
    """One layout of the command line.

    Attributes:
      words: its options as they were given.
      request: the whole command line of its run; None for an experiment whose module has RUN and DATA.
      fixed: the run of such an experiment.
    """

    words: str
    request: Request | None
    fixed: RunConfig | None

    @property
    def devices_needed(self) -> int:
        """Devices of its mesh; 0: any number."""
        return self.fixed.parallel.devices if self.fixed else self.request.devices_needed or 0

    def run(self, device_count: int) -> RunConfig:
        """Its configuration, in fp32 if no precision was passed."""
        return self.fixed or self.request.run(self.devices_needed or device_count, "fp32")


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
      a, b: the layouts; None: that side is read from a file, or not needed.
      data: the batches of an experiment whose module has RUN and DATA; None: of the runs' options.
    """

    a: Layout | None
    b: Layout | None
    data: Any
    steps: int
    resume: str | None
    deterministic: bool
    record: str | None
    against: str | None
    json: bool

    @property
    def layouts(self) -> list[Layout]:
        """Those that are run."""
        return [layout for layout in (self.a, self.b) if layout]


def read(arguments: Sequence[str]) -> Options:
    """Reads a command line.

    Raises:
      ConfigError: an option does not exist or cannot be read, or options contradict each other.
    """
    own, shared = split_command(arguments)
    given = _parser().parse_args(own)
    _check(given)
    experiment = _experiment(given.experiment)
    words = {"a": given.a, "b": given.a if given.deterministic else given.b}
    needed = {"a": given.against is None, "b": given.record is None}
    layouts = {name: _layout(words[name] or "", shared, experiment) if needed[name] else None for name in ("a", "b")}
    data = None if isinstance(experiment, Experiment) else experiment.DATA
    others = {name: value for name, value in vars(given).items() if name not in (*layouts, "experiment")}
    return Options(**layouts, data=data, **others)


def _check(given: argparse.Namespace) -> None:
    """Raises ConfigError if the options contradict each other."""
    modes = [name for name in ("deterministic", "record", "against") if getattr(given, name)]
    if len(modes) > 1:
        raise ConfigError(f"--{modes[0]} and --{modes[1]} are two kinds of comparison: pass one of them.")
    takes = {"deterministic": "a", "record": "a", "against": "b"}.get("".join(modes), "ab")
    for name in "ab":
        if getattr(given, name) is None and name in takes:
            remedy = f'pass --{name} "--data 2 --pipe 2", or --{name} "" for the defaults'
            raise ConfigError(f"there is no layout {name}: {remedy}.")
        if getattr(given, name) is not None and name not in takes:
            raise ConfigError(f"--{modes[0]} takes one layout, --{takes}: omit --{name}.")


def _experiment(name: str) -> Any:
    """The module's EXPERIMENT, or the module itself if it has RUN and DATA."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--experiment {name} cannot be imported: {error}; pass --experiment experiments.gpt3."
        ) from error
    if hasattr(module, "EXPERIMENT"):
        return module.EXPERIMENT
    if hasattr(module, "RUN") and hasattr(module, "DATA"):
        return module
    raise ConfigError(f"--experiment {name} has neither EXPERIMENT nor RUN and DATA: see experiments/own_model.py.")


def _layout(words: str, shared: Sequence[str], experiment: Any) -> Layout:
    try:
        own = shlex.split(words)
    except ValueError as error:
        raise ConfigError(f"{words!r} cannot be split into words: {error}.") from error
    if isinstance(experiment, Experiment):
        return Layout(words, parse([*shared, *own], experiment), None)
    values = read_words(make_parser("", {}), [*shared, *own])
    run = experiment.RUN
    parts = {"parallel": ParallelConfig, "train": TrainConfig}
    changed = {
        part: {name: value for name, value in values.items() if name in kind.__dataclass_fields__}
        for part, kind in parts.items()
    }
    changed["train"].setdefault("precision", "fp32")
    return Layout(
        words,
        None,
        dataclasses.replace(
            run, **{part: dataclasses.replace(getattr(run, part), **fields) for part, fields in changed.items()}
        ),
    )


def check_pair(a: RunConfig, b: RunConfig) -> None:
    """Raises ConfigError if the runs differ in more than the layout."""
    for part in ("model", "train", "data"):
        one, other = (dataclasses.asdict(getattr(run, part)) for run in (a, b))
        for name in one:
            if one[name] != other.get(name):
                raise ConfigError(
                    f"{name} is {one[name]} in layout a and {other.get(name)} in b: pass options other than the layout's "
                    "once, after --."
                )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megajax.verify",
        usage="%(prog)s --a OPTIONS --b OPTIONS [options] [-- TRAINING OPTIONS]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.renamed = {"--from": "--resume"}
    add = parser.add_argument
    add("--a", metavar="OPTIONS", help="the layout to compare with, as one word: its options of the training")
    add("--b", metavar="OPTIONS", help="the layout under test")
    add("--steps", type=whole(), default=3, metavar="COUNT", help="steps to compare (default: 3)")
    add(
        "--resume",
        type=local_path,
        metavar="DIR",
        help="start both from this checkpoint or run directory (default: from fresh weights)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="run layout a twice, compiled twice, and require equal bits; sets the XLA flag for it on GPUs",
    )
    add("--record", type=local_path, metavar="FILE", help="run layout a only and write what would be compared")
    add("--against", type=local_path, metavar="FILE", help="compare layout b with such a file in place of layout a")
    add(
        "--experiment",
        type=plain_text,
        default=USUAL_EXPERIMENT,
        metavar="MODULE",
        help=f"with EXPERIMENT, or with RUN and DATA as experiments.own_model (default: {USUAL_EXPERIMENT})",
    )
    add("--json", action="store_true", help="print a JSON object")
    return parser
