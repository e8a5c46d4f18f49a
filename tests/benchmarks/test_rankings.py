"""`python -m benchmarks.rankings`: its questions and rows, and what its table says of them."""

import dataclasses
import json

import pytest

from benchmarks import rankings
from benchmarks.rankings import HAND, QUESTIONS
from megajax.estimate.error_bars import COMPARISON

ROWS = rankings.read()


def test_twelve_questions_have_their_three_best_layouts_and_some_by_hand():
    """Or no row: such a question was not compiled yet, and the table says so."""
    assert len(QUESTIONS) == 12
    for name, rows in ROWS.items():
        assert [row["place"] for row in rows if row["place"] != HAND] in ([1, 2, 3], []), name
    assert sum(any(row["place"] == HAND for row in rows) for rows in ROWS.values()) >= 4


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_rows_are_of_the_questions_models_and_gpus(name):
    asked = rankings.question(name)
    for row in ROWS[name]:
        run = rankings.run_from_json(row["run"])
        assert (run.model, run.parallel.devices, row["gpu"]) == (asked.model, asked.gpus, asked.gpu.name)
        assert run.train == asked.base.train
    hand = [rankings.run_from_json(row["run"]) for row in ROWS[name] if row["place"] == HAND]
    assert hand == rankings.by_hand(name, asked)


def test_the_comparisons_bar_is_that_of_the_compiled_layouts():
    """Of the planner's layouts of these and the standing questions, predicted within a tenth of their question's fastest."""
    assert rankings.comparisons()[1] == pytest.approx(COMPARISON, abs=1e-3)


def test_times_and_memory_of_the_planners_layouts_are_those_predicted():
    """Contexts, ZeRO-3, A100s with 40 GB, L40S and RTX 4090s, 1 to 128 GPUs."""
    found = [rankings.Comparison(row) for rows in ROWS.values() for row in rows if row["place"] != HAND]
    errors = [abs(one.step[1] / one.step[0] - 1) for one in found]
    assert sum(errors) / len(errors) < 0.02 and max(errors) < 0.05
    assert max(abs(one.peak_error) for one in found) < 0.05


def faster(row, factor):
    return row | {"seconds": {kind: seconds / factor for kind, seconds in row["seconds"].items()}}


def test_an_order_that_does_not_hold_is_said(capsys):
    name = "dense-8b"
    first, second, *_ = ROWS[name]
    rankings.show({name: [first, faster(second, 2)]})
    out = capsys.readouterr().out
    assert "row 2 is 9" in out and f"faster than row 1; the bar is {COMPARISON:.1%}" in out
    assert out.endswith(
        "the order holds beyond the bar in 0 of 1 questions: not in dense-8b\n" + out.splitlines()[-1] + "\n"
    )


def test_a_better_layout_by_hand_is_said(capsys):
    name = "dense-8b"
    first = ROWS[name][0]
    rankings.show({name: [first, faster(first, 1.25) | {"place": HAND}]})
    out = capsys.readouterr().out
    assert "by hand: 25.0% faster than row 1" in out
    assert out.endswith("a layout by hand is more than 2% faster than row 1 in 1 of 1: dense-8b\n")


def test_a_layout_that_does_not_compile_is_said(capsys):
    first = ROWS["dense-8b"][0]
    rankings.show({"dense-8b": [first | {"failed": "the compiler aborted (signal 6)"}]})
    assert "not compiled: the compiler aborted (signal 6)" in capsys.readouterr().out


def test_only_what_is_not_on_file_is_compiled(monkeypatch, tmp_path):
    """The order is the planner's; what was compiled before an interruption, or by hand, is kept."""
    name, compiled = "dense-8b", []
    rows = ROWS[name]
    known = [rankings.run_from_json(row["run"]) for row in rows]
    new = dataclasses.replace(known[0], parallel=dataclasses.replace(known[0].parallel, microbatch_size=16))

    def measure(run, gpu, timeout):
        compiled.append(run)
        return {**rows[0], "run": dataclasses.asdict(run)}

    path = tmp_path / "rankings.json"
    path.write_text(rankings.RESULTS.read_text())
    monkeypatch.setattr(rankings, "RESULTS", path)
    monkeypatch.setattr(rankings, "best", lambda asked: [known[1], new, known[0]])
    monkeypatch.setattr(rankings, "measure", measure)
    assert rankings.main(["--question", name]) == 0
    found = [row for row in json.loads(path.read_text())["rows"] if row["name"] == name]
    assert compiled == [new]
    hand = [rankings.run_from_json(row["run"]) for row in rows if row["place"] == HAND]
    assert [rankings.run_from_json(row["run"]) for row in found] == [known[1], new, known[0], *hand]
    assert [row["place"] for row in found] == [1, 2, 3, *[HAND] * len(hand)]
    others = {other: some for other, some in rankings.read().items() if other != name}
    assert others == {other: some for other, some in ROWS.items() if other != name}


def test_a_question_without_rows_is_said(capsys):
    rankings.show({"experts": []})
    out = capsys.readouterr().out
    assert "--sequence-length 4096  not compiled yet\nthe order holds beyond the bar in 0 of 0 questions\n" in out


def test_an_unknown_question_is_refused(capsys):
    assert rankings.main(["--question", "70b"]) == 2
    assert "question = 70b is not known: pass one of dense-8b, dense-70b" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, rows in ROWS.items() if rows])
def test_the_planner_still_gives_these_answers(name):
    planned = [rankings.run_from_json(row["run"]) for row in ROWS[name] if row["place"] != HAND]
    assert planned == rankings.best(rankings.question(name))
