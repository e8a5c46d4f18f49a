"""SQuAD's predictions from scores of tokens: by hand, and against a slow restatement of run_squad.py's rules."""

import json

import numpy as np
import pytest

from megajax.config import ConfigError, DataConfig
from megajax.data.squad import read_squad
from megajax.data.squad_windows import SpanSamples, Window, WindowSizes
from megajax.data.tokenizers import load_tokenizer
from megajax.evaluate import squad
from megajax.evaluate.spans import SpanScores, best_span, most_context
from tests.data.squad_files import question, write_squad

CONTEXT = "to be or not to be that is"
TOKENIZER = load_tokenizer("wordpiece")


def scores_of(paragraphs, tmp_path, task="squad", length=9, **options):
    path = write_squad(tmp_path / "dev.json", paragraphs, "2.0" if task == "squad2" else "1.1")
    rules = {"squad": "1.1", "squad2": "2.0"}[task]
    samples = SpanSamples(read_squad([path], rules), TOKENIZER, WindowSizes(length, 2, 64), None, path)
    return SpanScores(samples, DataConfig(task=task, task_data=("x",), **options))


def test_the_window_with_most_context():
    """Of four tokens from 0, 2 and 4: 2 has a token on both sides in the first window, 3 in the second, 5 in the third."""
    windows = [Window(0, first, 4, 3, 0, 0) for first in (0, 2, 4)]
    found = [owned.tolist() for owned in most_context(windows)]
    assert found == [[True, True, True, False], [False, True, True, False], [False, True, True, True]]


def test_the_best_span_by_hand():
    window = Window(0, 2, 4, 3, 0, 0)  # tokens 2 to 5 of the context are places 3 to 6 of the sample
    logits = np.zeros((1, 8, 2))
    logits[0, :, 0], logits[0, :, 1] = [9, 0, 0, 1, 2, 5, 0, 9], [9, 0, 9, 3, 7, 0, 3, 9]
    assert best_span([window], logits, 30) == (9.0, (3, 3))  # 2 + 7; [CLS], question and [SEP] do not count
    assert best_span([window._replace(count=0)], logits, 30) == (0.0, None)
    logits[0, 4, 1] = 0
    assert best_span([window], logits, 30) == (8.0, (4, 5))  # 5 + 3
    logits[0, 5, 0] = 0
    assert best_span([window], logits, 30) == (5.0, (3, 5)) and best_span([window], logits, 2) == (4.0, (2, 2))


def planted(scores, name, first, last, height):
    """Scores by which a question's answer is the tokens first to last of its context."""
    samples = scores.samples
    logits = np.zeros((samples.count + 3, samples.sizes.sequence, 2), np.float32)  # padding of the last batch
    for number, window in enumerate(samples.windows):
        if samples.found.questions[window.question].name == name and window.first <= first <= last < window.first + 4:
            logits[number, window.offset + first - window.first, 0] = height
            logits[number, window.offset + last - window.first, 1] = height
    return logits


def test_scores_and_files_of_predictions(tmp_path, capsys):
    """The files give the same scores with `python -m megajax.evaluate.squad`."""
    asked = [question("a", "or not", ("not to", 9)), question("b", "or not"), question("c", "or", ("that", 19))]
    scores = scores_of([(CONTEXT, asked)], tmp_path, "squad2")
    logits = planted(scores, "a", 3, 4, 5.0) + planted(scores, "c", 0, 1, 3.0)
    logits[:, 0] = 1.0  # of no answer: 2, more than the best of b
    losses = np.arange(len(logits), dtype=np.float32)
    found, files = scores.results(losses, logits)
    assert files["predictions.json"] == {"a": "not to", "b": "", "c": "to be"}
    assert files["null_odds.json"] == {"a": -8.0, "b": 2.0, "c": -4.0}
    assert found == {"exact_match": pytest.approx(200 / 3), "f1": pytest.approx(200 / 3), "loss": 4.0}  # windows 0 to 8
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    words = ["--task-data", str(tmp_path / "dev.json"), "--predictions", str(tmp_path / "predictions.json")]
    assert squad.main([*words, "--no-answer", str(tmp_path / "null_odds.json"), "--threshold", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["f1"] == pytest.approx(found["f1"])
    strict = scores_of([(CONTEXT, asked)], tmp_path, "squad2", null_threshold=-5.0)
    assert strict.predict(logits)[0] == {"a": "not to", "b": "", "c": ""}


def test_an_id_that_occurs_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the id 'a' occurs twice"):
        scores_of([(CONTEXT, [question("a", "or", ("to", 0))] * 2)], tmp_path)


@pytest.mark.parametrize("task", [pytest.param("squad", marks=pytest.mark.slow), "squad2"])
def test_predictions_are_those_of_the_rules(task, tmp_path):
    """Random scores of 30 questions with 1 to 20 windows, against `restated`."""
    draw, paragraphs = np.random.default_rng(0), []
    for number in range(30):
        context = " ".join(draw.choice(["to", "be", "Kings", "tomorrow!", "xylophonist's"], draw.integers(1, 40)))
        paragraphs.append((context, [question(str(number), "or not", (context[:2], 0))]))
    scores = scores_of(paragraphs, tmp_path, task, length=32, max_answer_length=3, null_threshold=1.5)
    logits = draw.normal(size=(scores.samples.count, 32, 2)).astype(np.float32)
    logits[:, 0] += 2
    predictions, null_odds = scores.predict(logits)
    for context, (asked,) in paragraphs:
        text, odds = restated(scores.samples, logits, context, asked["id"], task == "squad2")
        assert predictions[asked["id"]] == text
        assert null_odds[asked["id"]] == pytest.approx(odds, abs=1e-6)
    assert 3 < sum(text == "" for text in predictions.values()) < 27 or task == "squad"


def restated(samples, logits, context, name, with_null, most=20, longest=3, threshold=1.5):
    """`write_predictions` of run_squad.py for a question."""
    offsets = TOKENIZER.inner.encode(context, add_special_tokens=False).offsets
    asked = len(TOKENIZER.encode("or not"))
    room = 32 - asked - 3
    spans, start = [], 0
    while True:
        spans.append((start, min(room, len(offsets) - start)))
        if sum(spans[-1]) == len(offsets):
            break
        start += min(spans[-1][1], 2)
    numbers = [n for n, window in enumerate(samples.windows) if samples.found.questions[window.question].name == name]
    assert len(numbers) == len(spans)

    def has_most_context(window, token):
        best, best_window = None, None
        for index, (begin, length) in enumerate(spans):
            if begin <= token <= begin + length - 1:
                value = min(token - begin, begin + length - 1 - token) + 0.01 * length
                if best is None or value > best:
                    best, best_window = value, index
        return best_window == window

    candidates, null = [], 1000000
    for index, ((begin, length), number) in enumerate(zip(spans, numbers, strict=True)):
        starts, ends = (
            sorted(range(32), key=lambda place, side=side: logits[number, place, side], reverse=True)[:most]
            for side in (0, 1)
        )
        null = min(null, float(logits[number, 0, 0]) + float(logits[number, 0, 1]))
        for first in starts:
            for last in ends:
                tokens = [place - asked - 2 + begin for place in (first, last)]
                if not all(begin <= token < begin + length for token in tokens):
                    continue
                if not has_most_context(index, tokens[0]) or last < first or last - first + 1 > longest:
                    continue
                candidates.append((float(logits[number, first, 0]) + float(logits[number, last, 1]), tokens))
    if not candidates:
        return "", null
    candidates.sort(key=lambda one: one[0], reverse=True)
    best, (first, last) = candidates[0]
    text = context[offsets[first][0] : offsets[last][1]]
    return "" if with_null and null - best > threshold else text, null - best
