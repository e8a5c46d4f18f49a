"""The options of `python -m megajax.generate`. No jax is imported here: the devices are chosen before it starts."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
# Fields of SampleConfig with an option, and what reads it.
DRAWS = {
    "new_tokens": whole(),
    "temperature": number(0),
    "top_k": whole(),
    "top_p": number(),
    "min_p": number(0),
    "repetition_penalty": number(),
    "no_repeat_ngram_size": whole(0),
    "min_new_tokens": whole(0),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
      run_dir, init_from: a run's directory, or one of Hugging Face: exactly one of the two is given.
      prompts: texts, a path of JSON Lines, or "" for those that are typed: exactly one of the three is given.
      apply_chat_template: whether prompts are turns of a chat.
      chat_template: a file; None: the model's.
      draws: fields of `SampleConfig` that are given; the others are the model's, or the defaults.
      generation_config: whether the model's own generation settings are used: "auto" or "none".
      batch: most prompts that are continued together; None: all, up to 64.
      launch: the processes.
    """

    run_dir: str | None
    init_from: str | None
    step: int | None
    trust: bool
    ema: bool
    prompt: tuple[str, ...]
    prompts: str | None
    interactive: bool
    out: str | None
    apply_chat_template: bool
    chat_template: str | None
    system_prompt: str | None
    draws: Mapping[str, Any]
    generation_config: str
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
        own = {"run_dir", "init_from", "prompt", "prompts", "out", "chat_template", "devices", "launch", "draws"}
        fields = {name: value for name, value in vars(self).items() if name not in own}
        fields |= {name: self.draws.get(name) for name in DRAWS}
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
    if not given["prompts"] and not given["apply_chat_template"]:
        for name in ("chat_template", "system_prompt"):
            if given[name] is not None:
                raise ConfigError(f"{option(name)} is of chats: pass --apply-chat-template, or omit it.")
    draws = {name: value for name in DRAWS if (value := given.pop(name)) is not None}
    SampleConfig(**draws).validate()
    for name in ("prompt", "stop"):
        given[name] = tuple(given[name] or ())
    launch = LaunchConfig(**{name: given.pop(name) for name in option_names(LaunchConfig) if name in given})
    launch.validate()
    return Options(draws=draws, launch=launch, **given)


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
    text.add_argument(
        "--prompts",
        type=local_path,
        metavar="FILE",
        help='JSON Lines with {"prompt": TEXT, ...}, or chats, {"messages": [...], "tools": [...], ...}',
    )
    text.add_argument("--interactive", action="store_true", help="continue each line that is typed")
    text.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="prompts are what the user of a chat says; with --interactive, lines are turns of one chat",
    )
    text.add_argument(
        "--chat-template", type=local_path, metavar="FILE", help="Jinja template of chats (default: the tokenizer's)"
    )
    text.add_argument("--system-prompt", metavar="TEXT", help="first message of chats that have no system message")
    text.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        help="write JSON Lines: each prompt's object with text, tokens and finish (default: print the texts)",
    )
    draws = parser.add_argument_group(
        "new tokens",
        "Their defaults are those of the model's generation_config.json, if it has one; see docs/generation.md.",
    )
    fields = SampleConfig.__dataclass_fields__
    for name, reader in DRAWS.items():
        field = fields[name]
        shown = 128 if name == "new_tokens" else field.metadata["shown_default"] or field.default
        meaning = "most tokens to generate" if name == "new_tokens" else field.metadata["help"]
        draws.add_argument(option(name), type=reader, help=f"{meaning} (default: the model's, or {shown})")
    draws.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="none: of the model's generation_config.json use the end tokens alone (default: auto)",
    )
    draws.add_argument(
        "--seed", type=whole(0), default=0, help="of the draws; a text depends on nothing else (default: 0)"
    )
    draws.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends a text; can be repeated (default: the model's)"
    )
    draws.add_argument("--ignore-end", action="store_true", help="do not stop at the tokens that end a text")
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
