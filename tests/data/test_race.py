"""RACE's folders and samples by hand, and wrong files in one line."""

import json

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.data.loader import RowLoader
from megajax.data.race import RaceSamples, read_race
from megajax.data.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("wordpiece")
BEGIN, END, EMPTY = (TOKENIZER.inner.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]"))
ARTICLE = {
    "article": "to be or not\nto be",
    "questions": ["not _ ?", "or ?"],
    "options": [["king", "queen", "day", "night"], ["to", "be", "or", "not"]],
    "answers": ["C", "A"],
    "id": "high1.txt",
}


def folder(tmp_path, *items):
    """RACE/dev with one file for each item, in high and middle."""
    for number, item in enumerate(items):
        path = tmp_path / "dev" / ("high", "middle")[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(item if isinstance(item, str) else json.dumps(item), encoding="utf-8")
    return str(tmp_path / "dev")


def ids(text):
    return TOKENIZER.encode(text).tolist()


def test_samples_by_hand(tmp_path):
    """The answer is in the place of "_", or after the question; the article loses its end."""
    other = ARTICLE | {"article": "day", "questions": ["be"], "options": [["a", "b", "c", "d"]], "answers": ["D"]}
    found = read_race([folder(tmp_path, ARTICLE, other)], 4)
    assert found.texts[0] == ["not king ?", "not queen ?", "not day ?", "not night ?"]
    assert found.texts[1] == ["or ? to", "or ? be", "or ? or", "or ? not"]
    assert found.texts[2] == ["be a", "be b", "be c", "be d"] and found.classes.tolist() == [2, 0, 3]
    samples = RaceSamples(found, TOKENIZER, 10, 128, None, "a folder")
    article = ids("to be or not to be")
    for index, choice in enumerate(found.texts[0]):
        row, room = samples.row(index), 7 - len(ids(choice))
        tokens = [BEGIN, *ids(choice), END, *article[:room], END]
        assert row["tokens"].tolist() == tokens and row["padding"] == 0
        assert row["types"].tolist() == [0] * (2 + len(ids(choice))) + [1] * (room + 1)
        assert (row["class"], row["weights"]) == (2, index == 0)
    last = samples.row(11)
    assert last["tokens"][:8].tolist() == [BEGIN, *ids("be d"), END, *ids("day"), END, EMPTY, EMPTY][:8]
    assert samples.count == 12 and samples.row(12)["weights"] == 0  # after the last one
    assert "3 questions with 4 answers each: 12 samples, 8 of them with an article cut" in samples.describe(12)
    short = RaceSamples(found, TOKENIZER, 10, 1, None, "a folder")
    assert short.row(4)["tokens"][:3].tolist() == [BEGIN, *ids("or"), END] and "12 with a question" in short.describe(1)
    with pytest.raises(ConfigError, match="sequence_length = 6 leaves no room for an article"):
        RaceSamples(found, TOKENIZER, 6, 128, None, "a folder")


def test_the_samples_of_a_question_stay_together(tmp_path):
    items = [ARTICLE | {"article": f"king {'day ' * number}"} for number in range(5)]
    samples = RaceSamples(read_race([folder(tmp_path, *items)], 4), TOKENIZER, 24, 128, 1, "a folder")
    orders = []
    for epoch in range(2):
        batches = [RowLoader(samples, 8, 1).batch(40 * epoch + 8 * number) for number in range(5)]
        rows = {name: np.concatenate([batch[name][0] for batch in batches]) for name in batches[0]}
        assert rows["weights"].tolist() == [1, 0, 0, 0] * 10
        groups = rows["class"].reshape(10, 4)
        assert (groups == groups[:, :1]).all() and sorted(groups[:, 0]) == [0] * 5 + [2] * 5
        seen = {tuple(row) for row in rows["tokens"].tolist()}
        assert len(seen) == 40  # each answer of each question once
        orders.append(rows["tokens"].tolist())
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("", "has no question: give RACE's folder of .txt files"),
        ("[]", "0.txt is one JSON array"),
        ("{", "line 1 is not a JSON object"),
        ({"questions": [], "options": [], "answers": [], "article": "x"}, "has no question"),
        ({name: ARTICLE[name] for name in ARTICLE if name != "article"}, "line 1 has no 'article' that is a text"),
        (ARTICLE | {"options": "x"}, "line 1 has no 'options' that is a list"),
        (ARTICLE | {"answers": ["A"]}, "line 1 has 2 questions, 2 options and 1 answers"),
        (ARTICLE | {"answers": ["A", "E"]}, "answers[1] = 'E' is not one of A, B, C, D"),
        (ARTICLE | {"answers": ["A", ""]}, "answers[1] = '' is not one of"),
        (ARTICLE | {"options": [["a", "b", "c", "d"], ["a", "b"]]}, "options[1] has 2 answers, and choices = 4"),
        (ARTICLE | {"questions": ["a", 3]}, "questions[1] or options[1] is no text"),
    ],
)
def test_a_mistake_names_its_place(item, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        read_race([folder(tmp_path, item)], 4)
    assert message in str(error.value) and "\n" not in str(error.value), error.value


def test_folders_without_files(tmp_path):
    with pytest.raises(ConfigError, match=r"has no \.txt file"):
        read_race([str(tmp_path)], 4)
    with pytest.raises(ConfigError, match="cannot read missing"):
        read_race(["missing"], 4)
