"""Values and command lines for the fuzz tests: legal, extreme, of the wrong type, empty, not ASCII, huge."""

import contextlib
import dataclasses
import io
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megajax.schedules.errors import UserError

DIGITS = "9" * 5000  # more than Python converts to an int
NUMBERS = ("0", "-1", "1", "2", "3", "4", "6", "8", "16", "2147483647", "2147483648", "4000000000", "9" * 30, DIGITS)
NUMBERS += (
    "1e5",
    "0.5",
    "1e-320",
    "1e300",
    "inf",
    "-inf",
    "nan",
    "1_0",
    "٣",
    "0x10",
    "1,2",
    "8,8,100",
    "1,1,9",
    "none",
)
# The last ones are a null character, a byte that is not UTF-8, and characters that terminals act on.
TEXTS = (
    "",
    " ",
    "a",
    "x" * 10_000,
    "é",
    "日本",
    "-",
    "--",
    "=",
    "{}",
    "%s",
    "%(prog)s",
    "a=b",
    "a\nb",
    "../..",
    ".",
    "/",
)
TEXTS += (
    "true",
    "None",
    "[]",
    "cpu",
    "cpu:2",
    "cpu:",
    "cpu:" + DIGITS,
    "gpt2",
    "a:1",
    "3:5",
    DIGITS + ":1",
    "data,pipe,tensor",
)
TEXTS += ("none.csv", ".csv", "x.json", "no.py", "a\0b", "\udcff", "\x1b[2J", "\u2028", "\u200d")
# By index: hypothesis prints its strategies, and these texts are long.
texts = st.sampled_from(range(len(NUMBERS + TEXTS))).map((NUMBERS + TEXTS).__getitem__) | st.text(max_size=8)
# Values of TOML and JSON: a schedule, metadata and a configuration are made of these.
scalars = (
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from([2**31, -(2**63), 10**400, 1e400, -1e400, 1e-320])
) | (st.floats(allow_nan=True) | texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


def fuzz(strategy):
    """Turns a function of an example into a test: 50 examples in the quick tests, 2,000 in the slow ones."""

    def make(check):
        @pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
        def test(count, tmp_path_factory):
            folder = tmp_path_factory.mktemp("fuzz")
            every = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

            @settings(max_examples=count, suppress_health_check=every, database=None)
            @given(strategy)
            def run(example):
                with contextlib.chdir(folder):
                    check(example)

            run()

        test.__doc__ = check.__doc__
        return test

    return make


def error_of(call, *arguments) -> str | None:
    """The message of the user's mistake that `call` raises, None if it succeeds; any other error fails the test."""
    try:
        call(*arguments)
    except UserError as error:
        message = str(error)
        assert message and message.isprintable() and len(message) < 2100
        return message
    return None


@dataclasses.dataclass
class Outcome:
    """What a command did: its exit code and its lines on stderr."""

    code: int
    errors: list[str]


def outcome_of(main, words, reported: bool = False) -> Outcome:
    """Runs a command's `main` on a command line, its output discarded. Only SystemExit may leave it.

    Args:
        main: returns the exit code.
        words: the command line.
        reported: stdout may explain exit code 2, too.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as stopped:
            code = stopped.code
    err.flush()
    errors = err.buffer.getvalue().decode().splitlines()
    if code == 2 and not (reported and not errors):
        assert len(errors) == 1 and errors[0].startswith("error: "), errors
    return Outcome(code, errors)


def command_lines(parser, more=None, most=6):
    """Lines of up to `most` options of an argparse parser, with values of all kinds.

    Args:
        parser: whose options are drawn; --help is not.
        more: strategies of further, legal values, by option.
    """
    more, options = more or {}, []
    for action in parser._actions:
        for flag in action.option_strings:
            if flag in ("-h", "--help") or not flag.startswith("--"):
                continue
            legal = st.sampled_from([str(choice) for choice in action.choices]) if action.choices else st.nothing()
            value = legal | more.get(flag, st.nothing()) | texts
            if action.nargs == 0:
                options.append(st.just([flag]) | value.map(lambda word, flag=flag: [f"{flag}={word}"]))
            else:
                options.append(value.map(lambda word, flag=flag: [flag, word]))
                options.append(value.map(lambda word, flag=flag: [f"{flag}={word}"]))
                options.append(st.lists(value, max_size=3).map(lambda words, flag=flag: [flag, *words]))
    options.append(texts.map(lambda word: [word]))
    return st.lists(st.one_of(options), max_size=most).map(lambda lists: [word for words in lists for word in words])


def remedies(message: str) -> list[list[str]]:
    """The options that an error message says to pass, each group of which is a remedy by itself."""
    tail = message.partition("ass ")[2]
    groups = []
    for group in re.split(r", or | or (?=--)|; |: ", tail):
        words = re.match(r"(?:--[a-z0-9-]+(?: [^\s-][^\s,]*)?(?: |,|$|\.$|\. ?))+", group)
        pairs = re.findall(r"(--[a-z0-9-]+)(?: ([^\s-][^\s,]*))?", words.group()) if words else []
        given = [word.rstrip(".").split("|")[0] for pair in pairs for word in pair if word]
        if given and not any(word.isupper() or word in ("with", "and") or word[:1].isupper() for word in given):
            groups.append(given)
    return groups


def rule_of(message: str) -> str:
    """A message without its numbers: the rule that was broken."""
    return re.sub(r"\d[\d.e+-]*", "N", message.partition(": pass ")[0])
