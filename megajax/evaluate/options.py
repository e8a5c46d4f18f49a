"""The options of `python -m megajax.evaluate`. No jax is imported here: the devices are chosen before it starts."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

from megajax.config import ConfigError, LaunchConfig, option
from megajax.config.evaluate import BATCH, STRIDE, TASKS
from megajax.config.options import Parser, add_options, option_names, read_words
from megajax.interop.source_options import add_mesh_options, add_model_options, check_model_options
from megajax.schedules.arguments import plain_text, renamed, whole
from megajax.schedules.paths import local_path

DESCRIPTION = """Scores a trained model on any layout: by the rules of the Megatron papers, or with lm-evaluation-harness.

python -m megajax.evaluate --task wikitext103 --task-data wiki.test.tokens --run-dir runs/first --out wikitext.json
python -m megajax.evaluate --task lambada --task-data lambada_test.jsonl --init-from SmolLM2-135M --pipe 2 --tensor 3
python -m megajax.evaluate --harness my_task,other --include-path tasks --init-from SmolLM2-135M

The same command resumes a --task that was killed, if it has --out. A model that needs several hosts: the same command in
every process, under srun or mpirun, or with --coordinator HOST:PORT --processes N --process-id I. All of them read the
data; process 0 writes the results.

Exit codes: 0; 2 wrong options, or data that the model cannot take; 3 another process ended the run; 130 Ctrl-C."""

CHAT = ("apply_chat_template", "fewshot_as_multiturn", "system_instruction")  # of `simple_evaluate`


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
      run_dir, init_from: a run's directory, or one of Hugging Face: exactly one of the two is given.
      task_data: the task's file.
      window, stride: tokens, of the perplexity tasks; None: not given.
      last_token: of LAMBADA: the target is the last token, not the last word.
      harness: tasks of lm-evaluation-harness: these, or `task` and `data`, are given.
      include_path: directory of more of them.
      limit: most documents of each.
      apply_chat_template: whether their documents are turns of a chat, or the name of its template; None: they are not.
      fewshot_as_multiturn: whether their examples are turns too; None: lm-eval's default.
      system_instruction: the first message of such chats, or the beginning of texts.
      generation_config: "none": of the model's generation settings the end tokens alone; None: not given.
      data: data-parallel replicas.
      launch: the processes.
    """

    run_dir: str | None
    init_from: str | None
    step: int | None
    trust: bool
    ema: bool
    precision: str | None
    task: str | None
    task_data: str | None
    window: int | None
    stride: int | None
    last_token: bool
    harness: tuple[str, ...]
    include_path: str | None
    num_fewshot: int | None
    limit: int | None
    apply_chat_template: bool | str | None
    fewshot_as_multiturn: bool | None
    system_instruction: str | None
    generation_config: str | None
    out: str | None
    batch: int
    data: int
    context: int
    pipe: int
    tensor: int
    zero: int
    devices: str | None
    launch: LaunchConfig

    @property
    def chat(self) -> dict[str, Any]:
        """What lm-eval is told about chats: what is given."""
        return {name: value for name in CHAT if (value := getattr(self, name)) is not None}

    @property
    def of_all_processes(self) -> dict[str, str]:
        """Values that must be equal in all processes, by option. Paths may differ."""
        own = {"run_dir", "init_from", "task_data", "include_path", "out", "devices", "launch"}
        return {option(name): repr(value) for name, value in vars(self).items() if name not in own}


def read_options(arguments: Sequence[str] | None) -> Options:
    """Reads a command line.

    Raises:
      ConfigError: an option does not exist or cannot be read, or options contradict each other.
    """
    given = read_words(_parser(), _with_task_data(sys.argv[1:] if arguments is None else arguments))
    given["harness"] = tuple(filter(None, (given["harness"] or "").split(",")))
    _check_task(given)
    check_model_options(given)
    launch = LaunchConfig(**{name: given.pop(name) for name in option_names(LaunchConfig) if name in given})
    launch.validate()
    return Options(launch=launch, **given)


def _with_task_data(words: Sequence[str]) -> list[str]:
    """The words with --task-data for its older name, --data FILE; --data COUNT is the number of replicas."""
    words = list(words)
    for place, (word, following) in enumerate(zip(words, [*words[1:], "0"], strict=True)):
        option, equals, value = word.partition("=")
        if option == "--data" and not re.fullmatch(r"[+-]?\d+", value if equals else following):
            words[place] = renamed(word, "--task-data")
    return words


def _check_task(given: dict[str, Any]) -> None:
    if given["harness"]:
        for name in ("task", "task_data", "window", "stride", "last_token"):
            if given[name]:
                raise ConfigError(f"{option(name)} is of the papers' tasks, and --harness has its own: omit it.")
        if given["fewshot_as_multiturn"] is not None and given["apply_chat_template"] is None:
            raise ConfigError("--fewshot-as-multiturn is of chats: pass --apply-chat-template, or omit it.")
        return
    for name in ("include_path", "num_fewshot", "limit", "generation_config", *CHAT):
        if given[name] is not None:
            raise ConfigError(f"{option(name)} is of --harness: pass --harness TASKS, or omit it.")
    if given["task"] is None:
        tasks = f"{', '.join(TASKS[:-1])} or {TASKS[-1]}"
        raise ConfigError(f"there is nothing to evaluate: pass --task {tasks}, or --harness TASKS.")
    if given["task_data"] is None:
        raise ConfigError(f"--task {given['task']} needs its file: pass --task-data FILE.")
    if given["task"] == "lambada":
        for name in ("window", "stride"):
            if given[name] is not None:
                raise ConfigError(f"--{name} is of overlapping windows, which --task lambada has not: omit it.")
    elif given["last_token"]:
        raise ConfigError(f"--last-token is of --task lambada, not {given['task']}: omit it.")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megajax.evaluate",
        usage="%(prog)s (--run-dir RUN | --init-from DIR) (--task TASK --task-data FILE | --harness TASKS) [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser)
    task = parser.add_argument_group("the task")
    task.add_argument("--task", choices=TASKS, help="WikiText103 or Penn Treebank perplexity, or LAMBADA accuracy")
    task.add_argument(
        "--task-data",
        type=local_path,
        metavar="FILE",
        help='wiki.test.tokens, ptb.test.txt, or LAMBADA as JSON lines with a "text" or one passage a line; also .gz, .zst',
    )
    task.add_argument("--window", type=whole(), help="tokens of a window (default: the model's context)")
    task.add_argument(
        "--stride",
        type=whole(),
        help=f"tokens from a window to the next, --overlapping-eval of Megatron-LM (default: {STRIDE})",
    )
    task.add_argument("--last-token", action="store_true", help="LAMBADA's last token, instead of its last word")
    task.add_argument(
        "--harness", type=plain_text, metavar="TASKS", help="tasks of lm-evaluation-harness (extra: eval), TASK,TASK"
    )
    task.add_argument("--include-path", type=local_path, metavar="DIR", help="directory with YAML files of such tasks")
    task.add_argument(
        "--num-fewshot", type=whole(0), help="examples before each of its documents (default: the task's)"
    )
    task.add_argument("--limit", type=whole(), help="most documents of each of its tasks, for a trial (default: all)")
    task.add_argument(
        "--apply-chat-template",
        nargs="?",
        const=True,
        type=plain_text,
        metavar="NAME",
        help="its documents are turns of a chat; NAME: of one of the tokenizer's templates",
    )
    task.add_argument(
        "--fewshot-as-multiturn",
        action=argparse.BooleanOptionalAction,
        help="the examples are turns too, not one message (default: lm-eval's)",
    )
    task.add_argument("--system-instruction", metavar="TEXT", help="first message of these chats")
    task.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        help="none: of the model's generation_config.json use the end tokens alone (default: auto)",
    )
    task.add_argument("--out", type=local_path, metavar="FILE", help="write the results as JSON (default: print them)")
    layout = parser.add_argument_group("layout")
    add_mesh_options(layout, "data-parallel replicas, each with its own samples")
    layout.add_argument(
        "--context", type=whole(), default=1, help="devices that share a sample's sequence (default: %(default)s)"
    )
    layout.add_argument(
        "--zero", type=int, choices=(0, 3), default=0, help="3: split the weights over replicas too (default: 0)"
    )
    layout.add_argument(
        "--batch", type=whole(), default=BATCH, help="most samples that a replica runs at once (default: %(default)s)"
    )
    add_options(parser, LaunchConfig, "several processes")
    return parser
