"""SQuAD's metrics: thirty cases worked by hand from the official scripts' rules, whole files, and wrong files."""

import json
import re

import pytest

from megajax.config import ConfigError
from megajax.evaluate.squad import Questions, exact_match, main, normalize, read_questions, score

# (answers, prediction, (exact match, F1) by the rules 1.1, the same by 2.0; None: refused by 1.1)
CASES = [
    (["Denver Broncos"], "Denver Broncos", (1, 1), (1, 1)),
    (["Denver Broncos"], "denver BRONCOS", (1, 1), (1, 1)),
    (["Denver Broncos"], "The Denver Broncos", (1, 1), (1, 1)),
    (["Denver Broncos"], "Denver Broncos.", (1, 1), (1, 1)),
    (["Denver Broncos"], "  Denver \n Broncos ", (1, 1), (1, 1)),
    (["Denver Broncos"], "Broncos", (0, 2 / 3), (0, 2 / 3)),  # precision 1, recall 1/2
    (["Denver Broncos"], "Carolina Panthers", (0, 0), (0, 0)),
    (["Denver Broncos"], "the Denver Broncos of Colorado", (0, 2 / 3), (0, 2 / 3)),  # 2 of 4 words, 2 of 2
    (["Denver Broncos"], "Broncos Denver", (0, 1), (0, 1)),  # F1 has no order
    (["Santa Clara, California"], "Santa Clara California", (1, 1), (1, 1)),
    (["Levi's Stadium"], "Levis Stadium", (1, 1), (1, 1)),  # punctuation is removed, not replaced by a space
    (["Levi\u2019s Stadium"], "Levi's Stadium", (0, 0.5), (0, 0.5)),  # only ASCII punctuation is
    (["24-10"], "2410", (1, 1), (1, 1)),
    (["24\u201310"], "2410", (0, 0), (0, 0)),  # an en dash
    (["10 a.m."], "10 am", (1, 1), (1, 1)),
    (["vitamin A"], "vitamin", (1, 1), (1, 1)),  # A is an article here too
    (["theatre"], "atre", (0, 0), (0, 0)),  # but not as part of a word
    (["an apple a day"], "apple day", (1, 1), (1, 1)),
    (["new new york"], "new york york", (0, 2 / 3), (0, 2 / 3)),  # new once, york once: 2 of 3 and of 3
    (["gold", "golden", "the gold medal"], "gold medal", (1, 1), (1, 1)),  # the best over the answers
    (["Bill Clinton", "President Clinton"], "President Bill Clinton", (0, 0.8), (0, 0.8)),  # 2 of 3, 2 of 2
    (["one two three four", "one five"], "one two", (0, 2 / 3), (0, 2 / 3)),  # 1 and 1/2; the other has 1/2
    (["\u00c9cole"], "\u00e9cole", (1, 1), (1, 1)),
    (["Ecole"], "\u00e9cole", (0, 0), (0, 0)),  # accents stay
    (["gold"], "", (0, 0), (0, 0)),
    ([], "", None, (1, 1)),
    ([], "gold", None, (0, 0)),
    ([], "the", None, (1, 1)),  # empty once normalized
    (["The"], "an", (1, 0), (1, 1)),  # both empty; by 2.0 the answer is ignored, so "" is the answer
    (["a", "gold"], "!", (1, 0), (0, 0)),  # by 2.0 only gold is an answer
]


def metrics(rules, answers, predicted):
    results = score(Questions(rules, {"q": answers}), {"q": predicted})
    return results["exact_match"], results["f1"]


def test_there_are_thirty():
    assert len(CASES) == 30


@pytest.mark.parametrize(("answers", "predicted", "first", "second"), CASES)
def test_a_question(answers, predicted, first, second):
    assert metrics("2.0", answers, predicted) == pytest.approx([100 * value for value in second])
    if first is not None:
        assert metrics("1.1", answers, predicted) == pytest.approx([100 * value for value in first])


def test_normalize():
    assert normalize("  The cat,  a-DOG & an  owl!") == "cat adog owl"
    assert exact_match("a.b", "ab") == 1


def squad_file(path, questions, version="v2.0"):
    """Writes a file of two paragraphs; `questions`: answers by id."""
    rows = [{"id": name, "question": "?", "answers": [{"text": t, "answer_start": 0} for t in texts]}
            for name, texts in questions.items()]  # fmt: skip
    paragraphs = [{"context": "c", "qas": rows[:2]}, {"context": "c", "qas": rows[2:]}]
    path.write_text(json.dumps({"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


def run(tmp_path, capsys, predictions, *words, **settings):
    """The command's exit code, printed JSON or None, and its errors."""
    data, predicted = tmp_path / "data.json", tmp_path / "predictions.json"
    squad_file(data, **settings)
    predicted.write_text(json.dumps(predictions))
    code = main(["--task-data", str(data), "--predictions", str(predicted), *words])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out.startswith("{") else None, printed.err


def test_a_file_of_1_1(tmp_path, capsys):
    questions = {"a": ["gold", "golden"], "b": ["Denver Broncos"], "c": ["1"], "d": ["2"]}
    predictions = {"a": "golden", "b": "Broncos", "c": "3", "other": "4"}
    code, results, errors = run(tmp_path, capsys, predictions, questions=questions, version="1.1")
    assert (code, errors) == (0, "")
    assert results.pop("f1") == pytest.approx(100 * (1 + 2 / 3) / 4)
    assert results == {"rules": "1.1", "exact_match": 25.0, "total": 4, "not_predicted": 1, "unknown": 1}


QUESTIONS = {"a": ["gold"], "b": ["Denver Broncos"], "c": [], "d": []}
PREDICTIONS = {"a": "gold", "b": "Broncos", "c": "x", "d": ""}


def test_a_file_of_2_0(tmp_path, capsys):
    code, results, _ = run(tmp_path, capsys, PREDICTIONS, questions=QUESTIONS)
    assert code == 0
    assert results == {
        **{
            "rules": "2.0",
            "exact_match": 50.0,
            "f1": pytest.approx(200 / 3),
            "total": 4,
            "not_predicted": 0,
            "unknown": 0,
        },
        **{"answerable_exact_match": 50.0, "answerable_f1": pytest.approx(250 / 3), "answerable_total": 2},
        **{"unanswerable_exact_match": 50.0, "unanswerable_f1": 50.0, "unanswerable_total": 2},
    }


def test_scores_of_no_answer(tmp_path, capsys):
    """By hand. Nothing predicted: 2 of 4 are right. Then by ascending score: b + 0 and + 2/3, c - 1, a + 1, d + 0."""
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({"a": 0.4, "b": 0.1, "c": 0.3, "d": 0.9}))
    words = ("--no-answer", str(scores), "--threshold", "0.3")
    _, results, _ = run(tmp_path, capsys, PREDICTIONS, *words, questions=QUESTIONS)
    # above 0.3 there is no answer: a becomes wrong, d stays right; c = 0.3 stays predicted, so wrong
    assert (results["exact_match"], results["f1"]) == (25.0, pytest.approx(100 * (2 / 3 + 1) / 4))
    assert (results["best_exact_match"], results["best_exact_match_threshold"]) == (50.0, 0.0)
    # F1 2 + 2/3 after b; 2 + 2/3 - 1 + 1 after a is no more, so the lowest threshold is reported
    assert (results["best_f1"], results["best_f1_threshold"]) == (pytest.approx(200 / 3), 0.1)


def test_out(tmp_path, capsys):
    out = tmp_path / "squad.json"
    assert run(tmp_path, capsys, PREDICTIONS, "--out", str(out), questions=QUESTIONS)[0] == 0
    assert json.loads(out.read_text())["exact_match"] == 50.0


def test_the_rules_of_a_file(tmp_path):
    path = squad_file(tmp_path / "data.json", {"a": ["1"]}, "1.0")
    assert read_questions(str(path)).rules == "1.1"
    assert read_questions(str(path), "2.0") == Questions("2.0", {"a": ["1"]})


WRONG_FILES = {
    "no 'data' that is a list": {"version": "1.1"},
    "has version None": {"data": []},
    "has no question": {"version": "1.1", "data": []},
    "data[0] has no 'paragraphs'": {"version": "1.1", "data": [{}]},
    "paragraphs[0], qas[0] has no 'id' that is a text": {
        "version": "1.1", "data": [{"paragraphs": [{"qas": [{"answers": []}]}]}]
    },
    "qas[0] has no 'answers' that is a list": {"version": "1.1", "data": [{"paragraphs": [{"qas": [{"id": "a"}]}]}]},
    "answers[0] has no 'text'": {"version": "1.1", "data": [{"paragraphs": [{"qas": [{"id": "a", "answers": [{}]}]}]}]},
    "question 'a' has no answer": {"version": "1.1", "data": [{"paragraphs": [{"qas": [{"id": "a", "answers": []}]}]}]},
    "the id 'a' occurs twice": {
        "version": "v2.0", "data": [{"paragraphs": [{"qas": [{"id": "a", "answers": []}] * 2}]}]
    },
    "not a JSON object": [],
}  # fmt: skip


@pytest.mark.parametrize("problem", WRONG_FILES)
def test_wrong_files(problem, tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(WRONG_FILES[problem]))
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_questions(str(path))


def test_unreadable_files(tmp_path):
    (tmp_path / "empty.json").write_text("")
    for name, problem in (("none.json", "No such file"), ("empty.json", "is empty")):
        with pytest.raises(ConfigError, match=problem):
            read_questions(str(tmp_path / name))


@pytest.mark.parametrize(
    ("predictions", "no_answer", "version", "problem"),
    [
        ({"a": "1"}, None, "v2.0", "--predictions lacks 3 of the 4 questions, the first 'b'"),
        (PREDICTIONS, {}, "v2.0", "--no-answer lacks 4 of the 4 questions, the first 'a'"),
        ({**PREDICTIONS, "b": 3}, None, "v2.0", "the answer to 'b' is 3, not a text"),
        (PREDICTIONS, dict.fromkeys("abcd", float("nan")), "v2.0", "the value of 'a' is nan, not a finite number"),
        (PREDICTIONS, dict.fromkeys("abcd", True), "v2.0", "the value of 'a' is True, not a finite number"),
        (PREDICTIONS, dict.fromkeys("abcd", 0), "1.1", "--no-answer is only legal by the rules 2.0"),
    ],
)
def test_mistakes_are_one_line(predictions, no_answer, version, problem, tmp_path, capsys):
    words = []
    if no_answer is not None:
        (tmp_path / "scores.json").write_text(json.dumps(no_answer))
        words = ["--no-answer", str(tmp_path / "scores.json")]
    questions = QUESTIONS if version == "v2.0" else {name: ["1"] for name in "abcd"}
    code, _, errors = run(tmp_path, capsys, predictions, *words, questions=questions, version=version)
    assert code == 2
    assert problem in errors
    assert errors.count("\n") == 1
