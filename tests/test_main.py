"""`megajax COMMAND`: the table of commands is complete, each runs its module, and mistakes are one line."""

import ast
import configparser
import pathlib
import runpy
import sys

import pytest

from megajax import commands
from megajax.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]
ALL = commands.COMMANDS | {f"bench {name}": command for name, command in commands.BENCHMARKS.items()}
ALL.pop("bench")
# Scripts that make the package's own files, and processes that other commands start.
NO_COMMANDS = {
    "megajax",
    "megajax.runtime.coordinator",
    "megajax.runtime.gloo_output",
    "megajax.train.tracking.process",
    "megajax.data.text.make_corpus",
    "megajax.data.text.make_vocabulary",
    "benchmarks.data_peer",
    "experiments.diffusion_transformer",  # models to copy, as own-model is
    "experiments.encoder_decoder",
    "experiments.two_towers",
    "benchmarks.peers.torch_rates",
    "benchmarks.peers.torch_gpt",
    "benchmarks.peers.hugging_face",
}


def runs_by_itself(path):
    """Whether a file has `if __name__ == "__main__"`."""
    tests = [node.test for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    return any(ast.unparse(test) == "__name__ == '__main__'" for test in tests)


def test_every_module_that_runs_is_a_command():
    paths = [path for top in ("megajax", "experiments", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if runs_by_itself(path)]
    modules = {name.removesuffix(".__main__") for name in names}
    assert modules - NO_COMMANDS == {command.module for command in ALL.values()}


@pytest.fixture
def started(monkeypatch):
    """What would have been run: (module, words)."""
    found = []
    monkeypatch.setattr(runpy, "run_module", lambda module, **_: found.append((module, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["megajax"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return found


@pytest.mark.parametrize("name", ALL)
def test_a_command_runs_its_module_with_its_words(name, started):
    assert main([*name.split(), "--x", "1"]) == 0
    assert started == [(ALL[name].module, [*ALL[name].words, "--x", "1"])]


def test_the_exit_code_is_the_modules(monkeypatch):
    def run_module(module, **settings):
        sys.exit(7)

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["megajax"])
    with pytest.raises(SystemExit) as end:
        main(["plan"])
    assert end.value.code == 7


@pytest.mark.parametrize("name", ALL)
def test_ctrl_c_anywhere_in_a_command_is_one_line(name, monkeypatch, capsys):
    def run_module(module, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["megajax"])
    assert main(name.split()) == 130
    assert capsys.readouterr().err.strip() == "stopped"


@pytest.mark.parametrize("words", ["", "--help", "-h", "help"])
def test_the_list_has_every_command_in_a_line(words, capsys):
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    for name, command in commands.COMMANDS.items():
        assert [line for line in lines if line.split()[:1] == [name] and line.endswith(command.summary)]


def test_the_list_of_benchmarks(capsys):
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(commands.BENCHMARKS)


def test_help_of_one_command(started):
    assert main(["help", "plan"]) == 0
    assert started == [("megajax.plan", ["--help"])]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("traim", "did you mean train?"),
        ("pretrain_gpt", "did you mean train?"),
        ("Train", "did you mean train?"),
        ("dry-run", "did you mean dryrun?"),
        ("eval", "did you mean evaluate?"),
        ("sample", "did you mean generate?"),
        ("convert", "did you mean import?"),
        ("experiments.gpt3", "did you mean train?"),
        ("plan.failures", "did you mean failures?"),
        ("schedules.draw", "did you mean draw?"),
        ("megajax.plan.dryrun", "did you mean dryrun?"),
        ("roofline", "did you mean bench roofline?"),
        ("bench gpu_settings", "did you mean gpu-settings?"),
        ("bench nothing-like-it", "megajax bench --help lists all"),
        ("zzz", "megajax --help lists all"),
        ("--model tiny", "a command comes first, as in megajax train --model"),
    ],
)
def test_an_unknown_command_names_the_near_one(words, named, started, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not started


def test_synonyms_name_commands():
    assert set(commands.SYNONYMS.values()) <= set(commands.COMMANDS)
    assert not set(commands.SYNONYMS) & set(commands.COMMANDS)


def test_the_launcher_takes_a_commands_name(started):
    main("launch --nodes 2 -- train --run-dir launch".split())
    main("launch -- experiments.moe -- bert".split())
    assert [words for _, words in started] == [
        "--nodes 2 -- experiments.gpt3 --run-dir launch".split(),
        "-- experiments.moe -- bert".split(),
    ]


def test_the_console_script_is_this_function():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options.entry_points"]["console_scripts"].strip() == "megajax = megajax.__main__:main"
