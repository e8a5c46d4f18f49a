"""The options of `python -m megajax.generate`. No jax is imported here: the devices are chosen before it starts."""

import argparse
import dataclasses
from collections.abc import Sequence

from megajax.config import ConfigError, LaunchConfig, option
from megajax.config.options import Parser, add_options, option_names, read_words
from megajax.config.sample import SampleConfig
from megajax.interop.source_options import add_mesh_options, add_model_options, check_model_options
from megajax.schedules.arguments import number, whole
from megajax.schedules.paths import local_path

DESCRIPTION = """Continues prompts with a trained model, on any mesh.

python -m megajax.generate --run-dir runs/first --prompt "The " --prompt "A "
python -m megajax.generate --run-dir runs/first --prompts prompts.jsonl --out texts.jsonl --pipe 4 --tensor 2
python -m megajax.generate --init-from SmolLM2-135M --interactive --stop "." --temperature 0

A model that needs several hosts: the same command in every process, under srun or mpirun, or with
--coordinator HOST:PORT --processes N --process-id I. Process 0 reads the prompts and writes the texts.

Exit codes: 0; 2 wrong options, or prompts that the model cannot take; 3 another process ended the run; 130 Ctrl-C."""

MOST_TOGETHER = 64  # prompts, by default


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
      run_dir, init_from: a run's directory, or one of Hugging Face: exactly one of the two is given.
      prompts: texts, a path of JSON Lines, or "" for those that are typed: exactly one of the three is given.
      sampling: the number of new tokens, and how they are drawn.
      batch: most prompts that are continued together; None: all, up to 64.
      launch: the processes.
    """

    run_dir: str | None
    init_from: str | None
    step: int | None
    trust: bool
    prompt: tuple[str, ...]
    prompts: str | None
    interactive: bool
    out: str | None
    sampling: SampleConfig
    seed: int
    stop: tuple[str, ...]
    ignore_end: bool
    data: int
    pipe: int
    tensor: int
    devices: str | None
    precision: str | None
    batch: int | None
    prefill_chunk: int
    launch: LaunchConfig

    @property
    def of_all_processes(self) -> dict[str, str]:
        """Values that must be equal in all processes, by option. Paths may differ, and process 0 reads the prompts."""
        own = {"run_dir", "init_from", "prompt", "prompts", "out", "devices", "launch", "sampling"}
        fields = {name: value for name, value in vars(self).items() if name not in own} | vars(self.sampling)
        return {option(name): repr(value) for name, value in fields.items()}


def read_options(arguments: Sequence[str] | None) -> Options:
    """Reads a command line.

    Raises:
      ConfigError: an option does not exist or cannot be read, or options contradict each other.
    """
    given = read_words(_parser(), arguments)
    sources = [name for name in ("prompt", "prompts", "interactive") if given[name]]
    if len(sources) != 1:
        problem = f"--{sources[0]} and --{sources[1]} are both given" if sources else "there is nothing to continue"
        raise ConfigError(f"{problem}: pass one of --prompt TEXT, --prompts FILE.jsonl and --interactive.")
    check_model_options(given)
    if given["out"] and given["interactive"]:
        raise ConfigError("--interactive prints its texts: omit --out.")
    if "" in (given["stop"] or ()):
        raise ConfigError("--stop is an empty text, which every text has: pass another, or omit it.")
    drawn = {name: given.pop(name) for name in ("new_tokens", "temperature", "top_k", "top_p")}
    sampling = SampleConfig(**drawn)
    sampling.validate()
    for name in ("prompt", "stop"):
        given[name] = tuple(given[name] or ())
    launch = LaunchConfig(**{name: given.pop(name) for name in option_names(LaunchConfig) if name in given})
    launch.validate()
    return Options(sampling=sampling, launch=launch, **given)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megajax.generate",
        usage="%(prog)s (--run-dir RUN | --init-from DIR) (--prompt TEXT | --prompts FILE.jsonl | --interactive) [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser)
    text = parser.add_argument_group("the text")
    text.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; can be repeated")
    text.add_argument("--prompts", type=local_path, metavar="FILE", help='JSON Lines with {"prompt": TEXT, ...}')
    text.add_argument("--interactive", action="store_true", help="continue each line that is typed")
    text.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        help="write JSON Lines: each prompt's object with text, tokens and finish (default: print the texts)",
    )
    text.add_argument("--new-tokens", type=whole(), default=128, help="most tokens to generate (default: %(default)s)")
    fields = SampleConfig.__dataclass_fields__
    for name, reader in (("temperature", number(0)), ("top_k", whole()), ("top_p", number())):
        shown = fields[name].metadata["shown_default"] or fields[name].default
        text.add_argument(
            "--" + name.replace("_", "-"),
            type=reader,
            default=fields[name].default,
            help=f"{fields[name].metadata['help']} (default: {shown})",
        )
    text.add_argument(
        "--seed", type=whole(0), default=0, help="of the draws; a text depends on nothing else (default: 0)"
    )
    text.add_argument("--stop", action="append", metavar="TEXT", help="text that ends a text; can be repeated")
    text.add_argument("--ignore-end", action="store_true", help="do not stop at the end of a document")
    layout = parser.add_argument_group("layout")
    add_mesh_options(layout, "replicas, each with its own prompts")
    layout.add_argument(
        "--batch", type=whole(), help="most prompts that are continued together (default: all, up to 64)"
    )
    layout.add_argument(
        "--prefill-chunk",
        type=whole(),
        default=256,
        help="tokens of a prompt that are run at once (default: %(default)s)",
    )
    add_options(parser, LaunchConfig, "several processes")
    return parser
