"""A command that replaces a file says so; a plan of another text is kept beside it."""

import pathlib

import pytest

from megajax.interop.output_file import OutputFile
from megajax.plan.__main__ import _keep_older
from megajax.plan.__main__ import main as plan
from megajax.schedules.draw import main as draw
from megajax.schedules.pictures import picture

PLAN = (
    "--model gpt2 --gpus 2 --gpu a100-80gb --global-batch-size 4 --schedule 1f1b --microbatch-size 1 --recompute none"
)


def test_plan_keeps_an_edited_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan(PLAN.split()) == 0
    first = pathlib.Path("plan.toml").read_text()
    assert capsys.readouterr().err == ""
    assert plan([*PLAN.split(), "--html", "page.html"]) == 0  # the same plan: nothing to tell
    assert capsys.readouterr().err == ""
    pathlib.Path("plan.toml").write_text("mine")
    assert plan([*PLAN.split(), "--html", "page.html"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: page.html was there, and is replaced",
        "note: plan.toml was there with another text; that is now plan.toml.old",
    ]
    assert pathlib.Path("plan.toml").read_text() == first and pathlib.Path("plan.toml.old").read_text() == "mine"


def test_a_new_plan_needs_no_word(tmp_path, capsys):
    _keep_older(tmp_path / "plan.toml", "text")
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--json", "--save", "--trace", "--out"])
def test_draw_tells_of_each_file(option, tmp_path, capsys):
    path = tmp_path / {"--save": "s.csv", "--out": "s.svg"}.get(option, "s.json")
    words = ["--schedule", "1f1b", "--pipe", "2", "--microbatches", "2", option, str(path)]
    assert draw(words) == 0 and capsys.readouterr().err == ""
    assert draw(words) == 0
    assert capsys.readouterr().err == f"note: {path} was there, and is replaced\n"


@pytest.mark.parametrize("words", ["--save {}", "--schedule pipedream_2bw --save {}.csv"])
def test_a_file_that_is_not_written_is_not_told_of(words, tmp_path, capsys):
    path = tmp_path / "there"
    path.touch(), pathlib.Path(f"{path}.csv").touch()
    assert draw(["--pipe", "2", "--microbatches", "4", *words.format(path).split()]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_results_and_figures_are_told_of(tmp_path, capsys):
    def draw_nothing(path):
        with picture(path, 50, 50):
            pass

    for write in (lambda path: OutputFile(path).write("text"), draw_nothing):
        path = str(tmp_path / "new.svg")
        write(path)
        assert capsys.readouterr().err == ""
        write(path)
        assert capsys.readouterr().err == f"note: {path} was there, and is replaced\n"
        pathlib.Path(path).unlink()
