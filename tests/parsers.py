"""The options of every command, read from the parsers that the command itself makes."""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import sys
from unittest import mock

from megajax.commands import BENCHMARKS, COMMANDS

TRAINING = "train"
ALL = {**COMMANDS, **{f"bench {name}": command for name, command in BENCHMARKS.items()}}
del ALL["bench"], ALL["own-model"]
SUBCOMMANDS = {"preprocess": [(), ("merge",), ("inspect",), ("verify",)]}


def main_of(name: str):
    """The function that runs a command."""
    module = ALL[name].module
    package = importlib.util.find_spec(module).submodule_search_locations
    return importlib.import_module(f"{module}.__main__" if package else module).main


@functools.cache
def options_of(name: str) -> frozenset[str]:
    """The long options of a command, without --help and without those that negate others."""
    found: set[str] = set()
    parse = argparse.ArgumentParser.parse_known_args

    def record(parser, args=None, namespace=None):
        for action in parser._actions:
            negated = isinstance(action, argparse.BooleanOptionalAction)  # --no-biases beside --biases
            found.update(word for word in action.option_strings if not (negated and word.startswith("--no-")))
        return parse(parser, args, namespace)

    for words in SUBCOMMANDS.get(name, [ALL[name].words]):
        for last in ("--help", "--no-such-option"):  # some print their help without a parser
            with (
                mock.patch.object(argparse.ArgumentParser, "parse_known_args", record),
                mock.patch.object(sys, "argv", [name, *words, last]),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
                contextlib.suppress(SystemExit),
            ):
                main_of(name)()
            if found:
                break
    return frozenset(word for word in found - {"--help"} if word.startswith("--"))
