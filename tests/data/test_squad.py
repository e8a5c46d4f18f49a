"""SQuAD's files and windows: by hand, against a slow restatement of run_squad.py's rules, and wrong files in one line."""

import json

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.data.loader import PADDING, RowLoader
from megajax.data.squad import read_squad
from megajax.data.squad_windows import SpanSamples, WindowSizes
from megajax.data.tokenizers import load_tokenizer
from tests.data.squad_files import question, write_squad

CONTEXT = "to be or not to be that is"
TOKENIZER = load_tokenizer("wordpiece")
BEGIN, END, EMPTY = (TOKENIZER.inner.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]"))


def samples_of(paragraphs, tmp_path, sizes=(9, 2, 64), rules="1.1", seed=None):
    path = write_squad(tmp_path / "squad.json", paragraphs)
    return SpanSamples(read_squad([path], rules), TOKENIZER, WindowSizes(*sizes), seed, "a file")


def ids(text):
    return TOKENIZER.encode(text).tolist()


def test_windows_by_hand(tmp_path):
    """Eight tokens, of which four fit beside a question of two: windows begin at 0, 2 and 4. "not to" is 3 and 4."""
    assert len(ids(CONTEXT)) == 8 and len(ids("or not")) == 2
    asked = [question("a", "or not", ("not to", 9)), question("b", "or", ("that", 19), ("is", 24))]
    samples = samples_of([(CONTEXT, asked)], tmp_path)
    rows = [samples.row(index) for index in range(3)]
    for row, first in zip(rows, (0, 2, 4), strict=True):
        tokens = [BEGIN, *ids("or not"), END, *ids(CONTEXT)[first : first + 4], END]
        assert row["tokens"].tolist() == tokens and row["types"].tolist() == [0] * 4 + [1] * 5
        assert row["padding"] == 0 and row["weights"] == 1
    assert [(row["start"], row["end"]) for row in rows] == [(0, 0), (5, 6), (0, 0)]
    # The other question has one token: five tokens of the context from 0, 2 and 4, of which the last has four.
    rows = [samples.row(index) for index in range(3, 6)]
    assert [(row["start"], row["end"]) for row in rows] == [(0, 0), (7, 7), (5, 5)]
    last = [BEGIN, *ids("or"), END, *ids("to be that is"), END, EMPTY]
    assert rows[2]["tokens"].tolist() == last and rows[2]["padding"] == 1 and rows[2]["types"][-1] == 0
    assert samples.count == 6 and samples.row(6)["weights"] == 0  # after the last one
    batch = RowLoader(samples, 2, 1).rows(np.array([1, PADDING]))
    assert batch["weights"].tolist() == [1, 0] and batch["start"].tolist() == [5, 0]


def test_a_long_question_is_cut_and_one_without_room_is_refused(tmp_path):
    asked = [question("a", "to be or not", ("be", 3))]
    samples = samples_of([(CONTEXT, asked)], tmp_path, sizes=(12, 128, 3))
    assert samples.row(0)["tokens"][:5].tolist() == [BEGIN, *ids("to be or"), END]
    assert "1 question cut to 3 tokens" in samples.describe(4)
    with pytest.raises(ConfigError, match="question 'a' has 3 tokens, and sequence_length = 6 leaves no room"):
        samples_of([(CONTEXT, asked)], tmp_path, sizes=(6, 128, 3))


def test_questions_without_an_answer_point_at_the_first_token(tmp_path):
    asked = [question("a", "or", is_impossible=True), question("b", "or"), question("c", "or", ("to", 0))]
    samples = samples_of([(CONTEXT, asked), ("", [question("d", "or")])], tmp_path, (16, 128, 64), "2.0")
    rows = [samples.row(index) for index in range(4)]
    assert [(row["start"], row["end"]) for row in rows] == [(0, 0), (0, 0), (3, 3), (0, 0)]
    assert all(row["weights"] == 1 for row in rows) and rows[3]["padding"] == 12


def test_answers_elsewhere_are_counted(tmp_path):
    """They are not trained on; of dev questions only the loss leaves them out."""
    asked = [question("a", "or", ("not", 8)), question("b", "or", ("be", 3))]
    training = samples_of([(CONTEXT, asked)], tmp_path, (16, 128, 64), seed=1)
    assert training.count == 1 and training.row(0)["start"] == 4
    assert "1 left out, whose answer is not in the context at answer_start" in training.describe(1)
    assert "qas[0], 'not'" in training.describe(1)
    dev = samples_of([(CONTEXT, asked)], tmp_path, (16, 128, 64))
    assert [dev.row(index)["weights"] for index in range(2)] == [0, 1] and "1 without a loss" in dev.describe(1)
    long = samples_of([(CONTEXT, [question("a", "or", (CONTEXT, 0))])], tmp_path)
    assert "1 whose answer is in no window" in long.describe(1)
    with pytest.raises(ConfigError, match="no answer is in its context at answer_start, the first one not at .*qas"):
        samples_of([(CONTEXT, asked[:1])], tmp_path)


def test_epochs_have_all_windows_in_their_own_order(tmp_path):
    asked = [question(str(number), "or", ("that", 19)) for number in range(9)]
    samples = samples_of([(CONTEXT, asked)], tmp_path, seed=1)
    epochs = [[samples.row(27 * epoch + index)["tokens"].tolist() for index in range(27)] for epoch in range(2)]
    assert samples.count == 27 and sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


WORDS = [
    "to",
    "be",
    "or",
    "Not",
    "kings",
    "\u00c9cole,",
    "tomorrow!",
    "\u4e2d\u6587",
    "--",
    "xylophonist's",
    "  ",
    "\n",
]


def test_windows_are_those_of_the_rules(tmp_path):
    """Random contexts and answers, also in the middle of words, against `restated`."""
    draw, paragraphs = np.random.default_rng(0), []
    for number in range(40):
        context = " ".join(draw.choice(WORDS, draw.integers(1, 40)))
        begin = int(draw.integers(0, len(context)))
        answer = context[begin : begin + int(draw.integers(1, 20))]
        if answer.strip():
            asked = " ".join(draw.choice(WORDS, draw.integers(1, 9)))
            paragraphs.append((context, [question(str(number), asked, (answer, begin))]))
    for sizes in ((24, 5, 6), (40, 128, 64), (16, 1, 3)):
        samples = samples_of(paragraphs, tmp_path, sizes)
        wanted = [row for context, (asked,) in paragraphs for row in restated(context, asked, *sizes)]
        assert samples.count == len(wanted) > 40
        for index, (tokens, start, end) in enumerate(wanted):
            row = samples.row(index)
            assert row["tokens"][: len(tokens)].tolist() == tokens and row["padding"] == sizes[0] - len(tokens)
            assert (row["start"], row["end"]) == (start, end), index


def restated(context, asked, length, stride, longest):
    """The windows of a question, [(tokens, start, end)]: `convert_examples_to_features` with characters for words."""
    encoded = TOKENIZER.inner.encode(context, add_special_tokens=False)
    document = list(zip(encoded.ids, encoded.offsets, strict=True))
    query = ids(asked["question"])[:longest]
    most = length - len(query) - 3
    answer = asked["answers"][0]
    wanted = set(range(answer["answer_start"], answer["answer_start"] + len(answer["text"])))
    has = [bool(wanted & set(range(*offsets))) for _, offsets in document]
    rows, start = [], 0
    while start < len(document) or not rows:
        part = document[start : start + most]
        tokens, marked = [BEGIN, *query, END], []
        for place, (token, _) in enumerate(part):
            if has[start + place]:
                marked.append(len(tokens))
            tokens.append(token)
        tokens.append(END)
        rows.append((tokens, marked[0], marked[-1]) if marked and len(marked) == sum(has) else (tokens, 0, 0))
        if start + len(part) == len(document):
            break
        start += min(len(part), stride)
    return rows


@pytest.mark.parametrize(
    ("content", "rules", "message"),
    [
        ("{", "1.1", "cannot read"),
        ("[]", "1.1", "not a JSON object: give a file in SQuAD's format"),
        ({"data": []}, "1.1", "has no question"),
        (
            {"data": [{"paragraphs": [{"qas": [question("a", "b", ("c", 0))]}]}]},
            "1.1",
            "paragraphs[0] has no 'context'",
        ),
        ({"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "a"}]}]}]}, "1.1", "qas[0] has no 'question'"),
        ([question("a", "b", ("c", None))], "1.1", "qas[0], answers[0] has no 'answer_start' that is a whole number"),
        ([question("a", "b", ("c", True))], "1.1", "has no 'answer_start'"),
        ([question("a", "b", (3, 0))], "1.1", "answers[0] has no 'text' that is a text"),
        ([question("a", "b")], "1.1", "question 'a' has no answer, which SQuAD 1.1 requires: pass --task squad2"),
        ([question("a", "b", ("c", 0), is_impossible=True)], "2.0", "is_impossible = true and 1 answers"),
        ([question("a", "b", is_impossible=False)], "2.0", "is_impossible = false and 0 answers"),
        ([question("a", "b", is_impossible="no")], "2.0", "'is_impossible' that is true or false"),
    ],
)
def test_a_mistake_names_its_place(content, rules, message, tmp_path):
    if isinstance(content, list):
        content = {"data": [{"paragraphs": [{"context": "c d", "qas": content}]}]}
    path = tmp_path / "squad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as error:
        read_squad([str(path)], rules)
    assert message in str(error.value) and "\n" not in str(error.value), error.value
