"""`megajax COMMAND ...`, also as `python -m megajax COMMAND ...`: runs a command of `megajax.commands`, or lists them."""

import difflib
import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from megajax import __version__
from megajax.commands import BENCHMARKS, COMMANDS, GROUPS, SYNONYMS, Command
from megajax.schedules.errors import UserError, exit_code, shown

HELP = ("-h", "--help", "help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code, 2 for a command that does not exist."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    if words and words[0] == "help":  # of one command, `megajax help train`, or of all
        words = [*words[1:], "--help"]
    if not words or words[0] in HELP:
        print(list_of_commands())
        return 0
    if words[0] == "--version":
        print(f"megajax {__version__}")
        return 0
    if words[0] == "bench":
        if len(words) == 1 or words[1] in HELP:
            print(list_of_benchmarks())
            return 0
        command, rest = _find(words[1], BENCHMARKS, "megajax bench"), words[2:]
    else:
        command, rest = _find(words[0], COMMANDS, "megajax"), words[1:]
    if words[0] == "launch":
        rest = with_module(rest)
    return run_module(command, rest)


def _find(name: str, commands: Mapping[str, Command], program: str) -> Command:
    """The command of a name.

    Raises:
      UserError: there is none; the message names the near one.
    """
    if name in commands:
        return commands[name]
    if name.startswith("-"):
        raise UserError(
            f"a command comes first, as in {program} {next(iter(commands))} {name}; {program} --help lists all"
        )
    plain = name.lower().replace("_", "-")
    modules = {command.module: found for found, command in commands.items() if not command.words}
    near = modules.get(name) or modules.get(f"megajax.{name}") or (plain if plain in commands else None)
    if near is None and commands is COMMANDS:
        near = SYNONYMS.get(plain) or ("bench " + plain if plain in BENCHMARKS else None)
    names = {one.replace("-", ""): one for one in commands}
    matches = (
        [near]
        if near
        else [names[one] for one in difflib.get_close_matches(plain.replace("-", ""), names, n=3, cutoff=0.6)]
    )
    hint = f"did you mean {' or '.join(matches)}? " if matches else ""
    raise UserError(f"there is no command {shown(name)}: {hint}{program} --help lists all")


def with_module(words: Sequence[str]) -> list[str]:
    """The words of `launch`, after whose `--` a command's name may stand for the module of its experiment."""
    words = list(words)
    first = words.index("--") + 1 if "--" in words else len(words)
    if first < len(words) and words[first] in COMMANDS and COMMANDS[words[first]].module.startswith("experiments."):
        words[first] = COMMANDS[words[first]].module
    return words


def run_module(command: Command, words: Sequence[str]) -> int:
    """What `python -m MODULE WORDS` does, in this process."""
    # For --import and the launcher. After the installed packages, so that no folder here hides `experiments`.
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.append(os.getcwd())
    sys.argv[1:] = [*command.words, *words]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    return 0


def list_of_commands() -> str:
    """All commands, a line each."""
    width = max(map(len, COMMANDS))
    lines = ["usage: megajax COMMAND [options]", "", "megajax COMMAND --help describes a command and its options.", ""]
    for title, group in GROUPS.items():
        lines += [f"{title}:", *_rows(group, width), ""]
    return "\n".join(lines[:-1])


def list_of_benchmarks() -> str:
    """All benchmarks, a line each."""
    lines = ["usage: megajax bench NAME [options]", "", "megajax bench NAME --help describes a benchmark.", ""]
    return "\n".join([*lines, *_rows(BENCHMARKS, max(map(len, BENCHMARKS)))])


def _rows(commands: Mapping[str, Command], width: int) -> list[str]:
    return [f"  {name.ljust(width)}  {command.summary}" for name, command in commands.items()]


if __name__ == "__main__":
    sys.exit(main())
