"""docs/planning.md quotes the output of its commands."""

import json
import pathlib

from benchmarks import memory_model, standing_questions
from megajax.estimate import validate
from megajax.plan import failures

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def shown(output: str) -> None:
    """Asserts that every line of the output is in the page, indented as a block."""
    missing = [line for line in output.splitlines() if f"    {line}".rstrip() not in PAGE.splitlines()]
    assert not missing


def test_the_throughputs_are_those_of_the_command():
    shown(validate.report([validate.check(row) for row in validate.ROWS]))


def test_the_memory_is_that_of_the_benchmark(capsys):
    memory_model.show(json.loads(memory_model.RESULTS.read_text()))
    shown(capsys.readouterr().out)


def test_the_standing_questions_are_those_of_the_benchmark(capsys):
    assert standing_questions.main(["--show"]) == 0
    shown(capsys.readouterr().out)


def test_the_goodput_is_that_of_the_command(capsys):
    failures.main([])
    shown("\n".join(capsys.readouterr().out.splitlines()[:-2]))
