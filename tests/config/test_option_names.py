"""One spelling of each option in all commands; the older names are accepted with a line on stderr."""

import pathlib
import re

import pytest

from experiments.slow_links import _parser as sites_parser
from megajax.config.options import Parser
from megajax.evaluate.options import read_options as evaluate_options
from megajax.generate.options import read_options as generate_options
from megajax.plan.options import plan_parser
from megajax.schedules.arguments import CommandParser
from megajax.schedules.draw import _parser as draw_parser
from megajax.verify.options import _parser as verify_parser


def plan_options(words):
    return plan_parser(Parser(add_help=False), "").parse_args(words)


READERS = {
    "plan": plan_options,
    "sites": lambda words: sites_parser().parse_args(words),
    "draw": lambda words: draw_parser().parse_args(words),
    "verify": lambda words: verify_parser().parse_args(words),
    "generate": generate_options,
    "evaluate": evaluate_options,
}
TASK = "--run-dir r --task ptb"
RENAMED = [  # command, older names, their names now
    ("plan", "--global-batch 8", "--global-batch-size 8"),
    ("plan", "--global-batch-size 8 --schedules 1f1b zb_v", "--global-batch-size 8 --schedule 1f1b zb_v"),
    ("plan", "--global-batch-size 8 --microbatch-sizes 1 2", "--global-batch-size 8 --microbatch-size 1 2"),
    ("sites", "--schedules 1f1b", "--schedule 1f1b"),
    ("draw", "--stages 3", "--pipe 3"),
    ("verify", "--from runs/first", "--resume runs/first"),
    ("generate", "--hf d --prompt a", "--init-from d --prompt a"),
    ("evaluate", "--hf d --harness a", "--init-from d --harness a"),
    ("evaluate", f"{TASK} --data wiki.txt --data 4", f"{TASK} --task-data wiki.txt --data 4"),
    ("evaluate", f"{TASK} --data=4 --data=wiki.txt", f"{TASK} --data=4 --task-data=wiki.txt"),
]


@pytest.mark.parametrize(("command", "old", "new"), RENAMED)
def test_an_older_name_is_accepted_with_a_line(command, old, new, capsys):
    read = READERS[command]
    expected = read(new.split())
    assert capsys.readouterr().err == ""
    assert read(old.split()) == expected
    [line] = capsys.readouterr().err.splitlines()
    names = {word.partition("=")[0] for word in new.split()} - {word.partition("=")[0] for word in old.split()}
    assert line.startswith("note: --") and (not names or line.endswith(f"is now called {names.pop()}"))


def test_words_after_two_dashes_are_not_renamed(capsys):
    parser = CommandParser()
    parser.renamed = {"--old": "--new"}
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["--", "--old"]).rest == ["--old"]
    assert capsys.readouterr().err == ""


def test_options_are_not_abbreviated():
    parser = Parser()
    parser.add_argument("--microbatches")
    with pytest.raises(parser.mistake, match="--micro"):
        parser.parse_args(["--micro", "4"])


def test_messages_name_no_older_option():
    """Of those that no command has as its own: "pass --hf DIR" would be an advice to use an old name."""
    older = r"(pass|give|omit|use|or) --(hf|global-batch|microbatch-sizes|schedules|stages|from|iteration)\b(?!-)"
    root = pathlib.Path(__file__).parents[2]
    sources = [file for folder in ("megajax", "experiments") for file in (root / folder).rglob("*.py")]
    assert len(sources) > 200
    assert [file.name for file in sources if re.search(older, file.read_text())] == []
