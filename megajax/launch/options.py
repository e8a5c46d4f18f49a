"""The launcher's own options, which precede `--`; after it, the module of an experiment and its command line."""

import argparse
import dataclasses
from collections.abc import Sequence

from megajax.config import ConfigError

DESCRIPTION = """Supervise a host's training processes. Start the same command on every host:

  python -m megajax.launch --nodes 2:4 -- experiments.gpt3 --run-dir /shared/run --pipe 2 --tensor 4 ...

When a process dies or hangs, or a host is lost, all processes stop, and the run resumes on the hosts that are left."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What the launcher does; see `parser` for the meanings."""

    least: int
    most: int
    processes_per_node: int
    node_timeout: float
    hang_timeout: float
    join_wait: float
    wait_minutes: float
    max_failures: int
    address: str | None
    module: str
    arguments: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message}; python -m megajax.launch --help lists the options")


def parser() -> argparse.ArgumentParser:
    """The parser of the options before `--`."""
    made = _Parser(
        prog="python -m megajax.launch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="python -m megajax.launch [options] -- MODULE [the experiment's options]",
    )
    add = made.add_argument
    add("--nodes", metavar="MIN:MAX", default="1", help="hosts of the run; below MIN it waits (default: 1)")
    add("--processes-per-node", type=int, default=1, metavar="COUNT", help="training processes of a host (default: 1)")
    add(
        "--node-timeout", type=float, default=10, metavar="SECONDS", help="a host is lost after this long (default: 10)"
    )
    add(
        "--hang-timeout",
        type=float,
        default=30,
        metavar="SECONDS",
        help="a process without a heartbeat for this long is killed (default: 30)",
    )
    add(
        "--join-wait",
        type=float,
        default=30,
        metavar="SECONDS",
        help="wait this long for more hosts, up to MAX, before the first start (default: 30)",
    )
    add(
        "--wait-minutes",
        type=float,
        default=60,
        metavar="MINUTES",
        help="give up when there have been fewer than MIN hosts for this long (default: 60)",
    )
    add(
        "--max-failures",
        type=int,
        default=5,
        metavar="COUNT",
        help="give up after this many failures without a further step (default: 5)",
    )
    add("--address", metavar="HOST", help="this host's address for the others (default: that of its first network)")
    return made


def read_options(words: Sequence[str]) -> Options:
    """Reads the launcher's command line.

    Raises:
      ConfigError: it is wrong.
    """
    words = list(words)
    own, _, command = (words, "", []) if "--" not in words else _split(words)
    values = vars(parser().parse_args(own))
    if not command:
        raise ConfigError("no training command: pass the module of an experiment after --, as in -- experiments.gpt3")
    least, _, most = values.pop("nodes").partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 0 < int(least) <= int(most or least)):
        raise ConfigError(f"nodes = {least}:{most} is not MIN:MAX, two numbers from 1: pass --nodes 2:4")
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 < value < 1e9:
            option = name.replace("_", "-")
            raise ConfigError(f"{name} = {value} must be above 0: pass --{option} with such a value")
    return Options(int(least), int(most or least), **values, module=command[0], arguments=tuple(command[1:]))


def _split(words: list[str]) -> tuple[list[str], str, list[str]]:
    index = words.index("--")
    return words[:index], "--", words[index + 1 :]
