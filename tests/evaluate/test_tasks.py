"""The tasks on every layout against loops over one window and one passage at a time."""

import functools
import json
import math

import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig
from megajax.evaluate.scorer import Request, evaluation_run, make_scorer
from megajax.evaluate.tasks import Lambada, Perplexity, perplexity, windows
from megajax.runtime.mesh import make_mesh
from tests import small
from tests.evaluate import naive

WINDOW, STRIDES = 40, (1, 32, 40)
WORDS = 90
LAYOUTS = {
    "one device": {},
    "pipe 2 x tensor 2": dict(pipe=2, tensor=2),
    "data 2 x context 2, ZeRO-3": dict(data=2, context=2, zero=3),
    "data 2 x pipe 2, ZeRO-3": dict(data=2, pipe=2, zero=3),
    "context 2 x pipe 2 x tensor 2": dict(context=2, pipe=2, tensor=2),
    "pipe 4, data 2": dict(pipe=4, data=2),
}
QUICK = ("one device",)  # on two layouts: test_command.py


@functools.cache
def words() -> tuple[str, ...]:
    """Of one token, or of two: more tokens than words, and no multiple of any stride."""
    random = np.random.default_rng(3)
    return tuple(".".join(map(str, random.integers(0, 61, 1 + (place % 9 == 0)))) for place in range(WORDS))


@functools.cache
def passages() -> tuple[str, ...]:
    """Contexts of 1 to 60 tokens, the longest ones over the model's context; about half end as the model would."""
    random, found = np.random.default_rng(5), []
    for count in (1, 2, 7, 12, 20, 33, 46, 60):
        context = " ".join(map(str, random.integers(0, 61, count)))
        last = naive.greedy(context, 1 + count % 3) if count % 2 == 0 else "4.9"
        found.append(f"{context} {last}")
    return tuple(found)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict:
    """By name."""
    directory = tmp_path_factory.mktemp("data")
    text, lines = directory / "wiki.test.tokens", directory / "lambada.jsonl"
    text.write_text(" " + " ".join(words()) + " \n")
    lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in passages()))
    tokenizer = naive.NumberTokenizer()
    found = {stride: Perplexity("wikitext103", str(text), tokenizer, WINDOW, stride) for stride in STRIDES}
    return found | {strict: Lambada(str(lines), tokenizer, naive.CONTEXT, strict) for strict in ("word", "")}


@functools.cache
def wanted(name: object) -> tuple[float, float]:
    """Perplexity and adjusted perplexity, or perplexity and accuracy."""
    if name in STRIDES:
        tokens = naive.NumberTokenizer().encode(" ".join(words()))
        return naive.wikitext(tokens, WORDS, WINDOW, name)
    found = [naive.lambada(text, strict=bool(name)) for text in passages()]
    right, losses = zip(*found, strict=True)
    return math.exp(sum(losses) / len(losses)), sum(right) / len(right)


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_naive_loops_on_every_layout(layout, tasks):
    run = evaluation_run(small.make_run(model=naive.MODEL), ParallelConfig(**LAYOUTS[layout]))
    run.validate()
    scorer = make_scorer(run, make_mesh(run.parallel), samples=3)
    weights = scorer.weights(small.place(scorer.training, small.busy_params(naive.MODEL)))
    requests = [request for task in tasks.values() for request in task.requests]
    batches, scores = scorer.plan(requests), {}
    assert len({batch.shape for batch in batches}) == 1  # all are padded to the context of 48 tokens
    for batch, found in scorer.score(weights, requests, batches):
        scores |= dict(zip(batch.numbers, found, strict=True))
    assert sorted(scores) == list(range(len(requests)))
    first = 0
    for name, task in tasks.items():
        results = task.results([scores[number] for number in range(first, first + len(task.requests))])
        first += len(task.requests)
        second = "adjusted_perplexity" if name in STRIDES else "accuracy"
        np.testing.assert_allclose((results["perplexity"], results[second]), wanted(name), rtol=1e-6)


def test_the_passages_are_a_test(tasks):
    """Neither all right nor all wrong, targets of several tokens, and one that is longer than the context."""
    assert 0 < wanted("word")[1] < 1 and 0 < wanted("")[1] < 1
    assert tasks["word"].counts == {"passages": 8, "target_tokens": 16, "truncated": 1}
    assert tasks[""].counts["target_tokens"] == 8
    assert tasks[1].counts == {"words": 90, "tokens": 100, "windows": 60}
    assert [tasks[stride].counts["windows"] for stride in (32, 40)] == [3, 3]


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
@pytest.mark.parametrize("tokens", [2, 3, 8, 9, 10, 16, 17, 25, 40])
def test_windows_score_every_token_once(tokens, stride):
    stream, seen = np.arange(tokens, dtype=np.int32), []
    for request in windows(stream, 8, stride):
        assert 0 < request.scored < len(request.tokens) <= 9
        seen += list(request.tokens[-request.scored :])
    assert seen == list(range(1, tokens))


def test_few_lengths_and_the_longest_first():
    """A plan depends on the requests alone: a batch has the same samples in every run."""
    run = evaluation_run(
        small.make_run(model=small.dataclasses.replace(naive.MODEL, sequence_length=512)), ParallelConfig()
    )
    scorer = make_scorer(run, make_mesh(run.parallel), samples=4)
    lengths = [int(length) for length in np.random.default_rng(0).integers(2, 300, 90)]
    requests = [Request(np.zeros(length + 1, np.int32), 1) for length in lengths]
    batches = scorer.plan(requests)
    assert [batch.shape[2] for batch in batches] == sorted((batch.shape[2] for batch in batches), reverse=True)
    assert {batch.shape[2] for batch in batches} <= {64, 96, 128, 192, 256, 320}
    assert sorted(number for batch in batches for number in batch.numbers) == list(range(90))
    for batch in batches:
        assert max(lengths[number] for number in batch.numbers) <= batch.shape[2]
    with pytest.raises(ConfigError, match="the data has token 61, but the model has tokens 0 to 60"):
        scorer.plan([Request(np.array([1, 61], np.int32), 1)])


@pytest.mark.parametrize(("context", "split"), [(48, True), (50, False)])
def test_a_context_that_tensor_does_not_divide(context, split):
    model = small.dataclasses.replace(naive.MODEL, sequence_length=context)
    run = evaluation_run(small.make_run(model=model), ParallelConfig(tensor=2, context=2 if split else 1, pipe=2))
    assert evaluation_run(run, ParallelConfig(tensor=4)).parallel.sequence_parallel == split
    run.validate()


def test_lambada_reads_lines_of_text_and_refuses_bad_ones(tmp_path):
    def read(name: str, content: str, strict: bool = True) -> Lambada:
        (tmp_path / name).write_text(content)
        return Lambada(str(tmp_path / name), naive.NumberTokenizer(), 6, strict)

    plain = read("plain.txt", "1 2 3.4\n\n5 6\n")
    assert [list(request.tokens) for request in plain.requests] == [[1, 2, 3, 4], [5, 6]]
    assert [request.scored for request in plain.requests] == [2, 1]
    assert [request.scored for request in read("last.txt", "1 2 3.4\n", strict=False).requests] == [1]
    cases = {
        ("a.jsonl", '{"text": "1 2"}\n{"words": "3 4"}\n'): "a.jsonl, line 2: no 'text'",
        ("b.jsonl", '{"text": "1 2"}\n{"text": 5}\n'): "line 2: not an object with a string 'text'",
        ("c.jsonl", '{"text": "1 2"}\n{"text"'): "line 2: not JSON",
        ("d.jsonl", '{"text": "1 2"}\n{"text": "7"}\n'): "passage 2 has nothing before its last word",
        ("e.jsonl", '{"text": "1 2"}\n{"text": " "}\n'): "passage 2 has nothing before its last word",
        ("f.txt", "\n"): "f.txt has no text: give --task-data the task's file",
        ("g.txt", ""): "g.txt has no text",
        ("h.txt", "1 2.3.4.5.6.7.8"): "a target of 7 tokens, but the model's context is 6 tokens",
    }
    for (name, content), message in cases.items():
        with pytest.raises(ConfigError, match=message):
            read(name, content)


def test_a_perplexity_above_all_numbers_is_none():
    assert perplexity(1.0) == math.e and perplexity(5000.0) is None
