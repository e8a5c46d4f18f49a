"""What the commands that read and write other programs' weights share: options, processes, and what an import prints."""

import argparse
import pathlib
from collections.abc import Callable, Sequence

from megajax.config import BertConfig, LaunchConfig, RunConfig
from megajax.config.options import add_options, option_names
from megajax.schedules.arguments import plain_text, whole
from megajax.schedules.errors import exit_code
from megajax.schedules.paths import local_path

__all__ = ["add_import_options", "imported", "run_command"]


def run_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, perform: Callable[[argparse.Namespace], str]
) -> int:
    """Connects the processes that the options of `LaunchConfig` name, on CPUs, and performs a command.

    Args:
      parser: of the options.
      arguments: to parse; None: the process's.
      perform: the command; it returns what process 0 prints.

    Returns:
      The process's exit code, 2 for a user's mistake.
    """
    return exit_code(lambda: _run(parser.parse_args(arguments), perform))


def _run(options: argparse.Namespace, perform: Callable[[argparse.Namespace], str]) -> int:
    from megajax.runtime.processes import run_together

    given = {name: value for name, value in vars(options).items() if name in option_names(LaunchConfig)}
    launch = LaunchConfig(**given)
    launch.validate()
    return run_together(launch, lambda count, watchdog: _convert(options, perform))


def _convert(options: argparse.Namespace, perform: Callable[[argparse.Namespace], str]) -> None:
    from megajax.checkpoint.libraries import prepare_process
    from megajax.runtime.mesh import start_devices
    from megajax.runtime.processes import is_first_process

    prepare_process()
    start_devices("cpu")
    text = perform(options)
    if is_first_process():
        print(text)


def add_import_options(parser: argparse.ArgumentParser, usual_length: str) -> None:
    """The options of an import; `usual_length`: the default of --sequence-length, for the help."""
    add = parser.add_argument
    add("--run-dir", metavar="RUN", type=local_path, required=True, help="the run directory to write")
    length = f"tokens in a sample (default: {usual_length})"
    add("--sequence-length", metavar="COUNT", type=whole(), help=length)
    add("--tokenizer", metavar="NAME|FILE", type=local_path, help="instead of the directory's")
    add("--end-of-document", metavar="TOKEN", type=plain_text, help="token that ends documents")
    add_options(parser, LaunchConfig, "several processes")


def imported(run: RunConfig, run_dir: pathlib.Path) -> str:
    """What a command prints after an import."""
    active = f" ({run.model.active_parameters:,} for a token)" if run.model.experts else ""
    experiment = "bert" if isinstance(run.model, BertConfig) else "gpt3"
    return (
        f"{run_dir}: {run.model.name}, {run.model.parameters:,} parameters{active}, {run.model.sequence_length} tokens a "
        "sample\n"
        f"train it with: python -m experiments.{experiment} --config {run_dir / 'config.toml'} --resume auto"
    )
