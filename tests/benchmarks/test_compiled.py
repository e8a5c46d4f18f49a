"""`python -m benchmarks.compiled`: its cases, the form of its rows, and what it replaces in the file."""

import json

import pytest

from benchmarks import compiled
from benchmarks.compiled import SETS
from megajax.plan.compiler import CompilerError


@pytest.mark.parametrize("kind", ["time", "memory", "memory, held out"])
def test_every_case_has_the_row_of_its_run(kind):
    rows = compiled.read()
    for name, words in SETS[kind].items():
        assert [compiled.run_from_json(row["run"]) for row in rows[kind, name]] == [compiled.run_of(words)], name


def test_names_are_those_of_one_case():
    assert not SETS["memory"].keys() & SETS["memory, held out"].keys()
    for name in SETS["account"].keys() & SETS["time"].keys():
        assert SETS["account"][name] == SETS["time"][name]


def test_rows_have_one_form():
    always = {"set", "name", "place", "gpu", "versions", "memory", "compilation", "run"}
    for row in json.loads(compiled.RESULTS.read_text())["rows"]:
        assert always <= row.keys() <= always | {"seconds", "bubble", "collectives", "arguments", "rates", "operations"}
        assert ("seconds" in row) == ("bubble" in row) and "peak" in row["memory"]


def test_a_case_that_is_compiled_replaces_its_row_alone(monkeypatch, tmp_path, capsys):
    """One that the compiler refuses is printed, and the exit code is 1."""

    def refuses(*_, **options):
        raise CompilerError("the compiler aborted (signal 6)")

    before, path = compiled.read(), tmp_path / "rows.json"
    path.write_text(compiled.RESULTS.read_text())
    monkeypatch.setattr(compiled, "RESULTS", path)
    monkeypatch.setattr(compiled, "compile_for", refuses)
    assert compiled.main(["time", "--case", "1t", "--missing"]) == 0
    assert compiled.read() == before
    capsys.readouterr()
    assert compiled.main(["time", "--case", "1t"]) == 1
    assert capsys.readouterr().out == "1t         1.  not compiled: the compiler aborted (signal 6)\n"
    after = compiled.read()
    ((row,), (known,)) = after.pop(("time", "1t")), before.pop(("time", "1t"))
    assert after == before and compiled.run_from_json(row["run"]) == compiled.run_from_json(known["run"])


def test_a_name_of_another_set_is_refused(capsys):
    assert compiled.main(["memory", "--case", "175b-ring"]) == 2
    assert "case = 175b-ring is none of memory: pass one of 175b, 175b-data" in capsys.readouterr().err
