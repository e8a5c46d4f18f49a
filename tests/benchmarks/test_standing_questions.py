"""The planner's answers to the standing questions, compiled: the rows of `python -m benchmarks.compiled questions`."""

import dataclasses
import json
import math
import types

import pytest

from benchmarks import compiled as questions
from benchmarks.compiled import SETS
from megajax.config import ParallelConfig
from megajax.estimate.error_bars import COMPARISON, PAIRS, comparison_bar, pair_kinds

ROWS = [row for (kind, _), rows in questions.read().items() for row in rows if kind == "questions"]
WINNERS = {row["name"]: row for row in ROWS if row["place"] == 1}


def test_every_question_has_a_compiled_winner():
    assert list(WINNERS) == list(SETS["questions"])
    assert not any("failed" in row for row in WINNERS.values())


COMPARED = {
    name: [questions.Comparison(row) for row in ROWS if row["name"] == name and "failed" not in row] for name in WINNERS
}


@pytest.mark.parametrize("name", WINNERS)
def test_a_winner_fits(name):
    assert COMPARED[name][0].fits


def test_all_layouts_take_the_predicted_time_and_memory():
    """1 to 32 tensor ranks, A100s and H100s, 2,048 to 32,768 tokens."""
    compared = [questions.Comparison(row) for row in ROWS]
    errors = [abs(found.error) for found in compared]
    assert sum(errors) / len(errors) < 0.01 and max(errors) < 0.08
    assert all(abs(questions.Comparison(row).error) < 0.03 for row in WINNERS.values())
    assert max(abs(found.peak_error) for found in compared) < 0.03


def test_the_layouts_that_are_compared_are_those_near_the_fastest():
    found = [
        types.SimpleNamespace(step=(1.0, time), error=error) for time, error in ((11, 0.1), (10, 0.2), (11.1, 0.3))
    ]
    assert questions.errors_of_the_best(found) == [0.1, 0.2]


@pytest.mark.parametrize("name", WINNERS)
def test_no_other_layout_is_faster_by_more_than_comparisons_are_off_by(name):
    winner, *others = COMPARED[name]
    assert winner.step[0] < (1 + COMPARISON) * min(other.step[0] for other in others)


def test_a_comparison_is_off_by_the_difference_of_two_errors():
    """By hand: one pair of 2% and -1%, off by log(1.02 / 0.99); a question with one layout has no pair."""
    assert questions.comparison_error([[0.02, -0.01], [0.5]]) == pytest.approx(math.log(1.02 / 0.99))


def test_the_bar_of_a_comparison_is_that_of_what_differs():
    plain, sharded = ParallelConfig(data=8), ParallelConfig(data=8, zero=3)
    assert comparison_bar(plain, plain) == COMPARISON == comparison_bar(plain)
    assert comparison_bar(plain, sharded) == PAIRS["ZeRO"]
    split = ParallelConfig(data=4, pipe=2, schedule="zb_h1", zero=1)
    assert pair_kinds(plain, split) == ["ZeRO", "split backwards"]
    assert comparison_bar(plain, split) == max(PAIRS["ZeRO"], PAIRS["split backwards"])


def test_the_bars_of_kinds_are_those_of_all_pairs_of_compiled_programs():
    found = {kind: (count, error) for kind, count, error in questions.errors_of_pairs()}
    assert list(found) == list(PAIRS) and all(count >= 10 for count, _ in found.values())
    assert {kind: error for kind, (_, error) in found.items()} == pytest.approx(PAIRS, abs=1e-3)


def test_the_rows_are_of_the_questions_models_and_gpus():
    for row in ROWS:
        run, asked = questions.run_from_json(row["run"]), questions.question(row["name"])
        assert (run.model, run.parallel.devices, row["gpu"]) == (asked.model, asked.gpus, asked.gpu.name)
        assert run.train.global_batch_size == asked.global_batch


def test_a_layout_that_does_not_compile_is_said(capsys):
    row = WINNERS["6.7b"] | {"failed": "the compiler aborted (signal 6)"}
    questions.show("questions", [row])
    assert "not compiled: the compiler aborted (signal 6)" in capsys.readouterr().out


def test_another_layout_faster_than_the_winner_is_said(capsys):
    row = WINNERS["6.7b"]
    half = {kind: seconds / 2 for kind, seconds in row["seconds"].items()}
    questions.show("questions", [row, row | {"place": 2, "seconds": half}])
    assert "the fastest of the 1 others is faster than the winner by 100.0%" in capsys.readouterr().out


def test_missing_compiles_only_what_is_not_on_file(monkeypatch, tmp_path):
    """A new winner comes first, and the layout on file second; the rows of other questions stay as they are."""
    row, compiled = WINNERS["6.7b"], []
    known = questions.run_from_json(row["run"])
    new = dataclasses.replace(known, parallel=dataclasses.replace(known.parallel, microbatch_size=16))

    def measure(run, gpu, timeout):
        compiled.append(run)
        return {**row, "run": dataclasses.asdict(run)}

    asked = questions.question("6.7b")
    path = tmp_path / "rows.json"
    path.write_text(questions.RESULTS.read_text())
    before = json.loads(path.read_text())["rows"]
    monkeypatch.setattr(questions, "RESULTS", path)
    monkeypatch.setattr(
        questions, "best", lambda *_: [types.SimpleNamespace(run=run, question=asked) for run in (new, known)]
    )
    monkeypatch.setattr(questions, "measure", measure)
    assert questions.main(["questions", "--question", "6.7b", "--missing"]) == 0
    found = json.loads(path.read_text())["rows"]
    mine = [
        (one["place"], questions.run_from_json(one["run"]))
        for one in found
        if (one["set"], one["name"]) == ("questions", "6.7b")
    ]
    assert compiled == [new] and mine == [(1, new), (2, known)]
    others = lambda rows: [one for one in rows if (one["set"], one["name"]) != ("questions", "6.7b")]  # noqa: E731
    assert others(found) == others(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", WINNERS)
def test_the_planner_still_gives_these_answers(name):
    assert questions.run_from_json(WINNERS[name]["run"]) == questions.best(questions.question(name), 1)[0].run
