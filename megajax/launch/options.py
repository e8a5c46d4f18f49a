"""The launcher's own options, which precede `--`; after it, the module of an experiment and its command line."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from megajax.config import ConfigError
from megajax.config.launch import LONGEST
from megajax.config.options import Parser
from megajax.schedules.arguments import is_count, number, plain_text, split_command, whole
from megajax.schedules.errors import shown
from megajax.schedules.paths import local_path

DESCRIPTION = """Supervise a host's training processes. Start the same command on every host:

  python -m megajax.launch --nodes 2:4 -- experiments.gpt3 --run-dir /shared/run --pipe 2 --tensor 4 ...

When a process dies or hangs, or a host is lost, all processes stop, and the run resumes on the hosts that are left."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What the launcher does; see `parser` for the meanings."""

    least: int
    most: int
    processes_per_node: int | None  # None: one for each GPU
    node_timeout: float
    hang_timeout: float
    join_wait: float
    wait_minutes: float
    max_failures: int
    address: str | None
    rendezvous: str | None
    module: str
    arguments: tuple[str, ...]


def parser() -> Parser:
    """The parser of the options before `--`."""
    made = Parser(
        prog="python -m megajax.launch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="python -m megajax.launch [options] -- MODULE [the experiment's options]",
    )

    def add(flag: str, read: Callable, default, metavar: str, text: str) -> None:
        usual = "that of its first network" if default is None else default
        made.add_argument(flag, type=read, default=default, metavar=metavar, help=f"{text} (default: {usual})")

    seconds = number(below=LONGEST)
    add("--nodes", _nodes, "1", "MIN:MAX", "hosts of the run; below MIN it waits")
    add("--processes-per-node", _processes, "auto", "COUNT", "processes of a host; auto: one for each GPU, on CPUs one")
    add("--node-timeout", seconds, 10, "SECONDS", "a host is lost when nothing has been heard of it for this long")
    add("--hang-timeout", seconds, 30, "SECONDS", "a process without a heartbeat for this long is killed")
    wait = "wait this long for more hosts, up to MAX, before the first start"
    add("--join-wait", number(0, LONGEST), 30, "SECONDS", wait)
    add("--wait-minutes", seconds, 60, "MINUTES", "give up when there have been fewer than MIN hosts for this long")
    add("--max-failures", whole(0), 5, "COUNT", "give up after more failures than this without a further step")
    add("--address", plain_text, None, "HOST", "this host's address for the others")
    made.add_argument(
        "--rendezvous",
        type=local_path,
        metavar="DIR",
        help="directory that all hosts share, for the agents' files; of a --run-dir in an object store it must be given "
        "(default: launch in --run-dir)",
    )
    return made


def _processes(text: str) -> int | None:
    """A reader of a number from 1; None for auto."""
    return None if text == "auto" else whole()(text)


def _nodes(text: str) -> tuple[int, int]:
    """A reader of MIN:MAX, or of one number for both."""
    least, colon, most = text.partition(":")
    most = most if colon else least
    if not (is_count(least) and is_count(most) and 0 < int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not MIN:MAX, two numbers from 1: pass --nodes 2:4")
    return int(least), int(most)


def read_options(words: Sequence[str]) -> Options:
    """Reads the launcher's command line.

    Raises:
      ConfigError: it is wrong.
    """
    own, command = split_command(words)
    values = vars(parser().parse_args(own))
    if not command:
        raise ConfigError("no training command: pass the module of an experiment after --, as in -- experiments.gpt3")
    least, most = values.pop("nodes")
    return Options(least, most, **values, module=command[0], arguments=tuple(command[1:]))
