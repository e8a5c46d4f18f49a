"""Training on indexed datasets from the command line."""

import json
import re

import numpy as np
import pytest

from experiments import gpt3
from megajax.data.indexed import IndexedWriter

SMALL = "--devices cpu:1 --data 1 --pipe 1 --tensor 1 --layers 1 --hidden 16 --heads 2 --sequence-length 16".split()
SHORT = (
    "--steps 2 --global-batch-size 8 --microbatch-size 1 --validation-batches 1 --new-tokens 0 --log-every 1".split()
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    random = np.random.RandomState(0)
    for name in ("books", "web"):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for length in random.randint(5, 60, 100):
                writer.add_document([*random.randint(0, 256, length), 256])
    return folder


@pytest.mark.slow
def test_a_blend_with_separate_documents_trains(pairs, capfd):
    words = ["--data-path", "0.7", f"{pairs}/books", "0.3", f"{pairs}/web", "--split", "80,20"]
    apart = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
    assert gpt3.main([*SMALL, *SHORT, *words, *apart]) == 0
    out = capfd.readouterr().out.replace("\n", "")
    assert f"{pairs}/books: 70.6%" in out and "epochs of them" in out and "validation loss" in out
    assert "for data, the first batch included" in out


@pytest.mark.slow
def test_named_validation_sets_are_logged_one_by_one(pairs, capfd, tmp_path):
    """The set that is the training's data by itself has the same loss with and without a name."""
    words = [*SMALL, *SHORT, "--train-data-path", f"{pairs}/web", "--log-jsonl", str(tmp_path / "log.jsonl")]
    found = []
    for sets in ([f"{pairs}/books"], ["both=0.5", f"{pairs}/books", "0.5", f"{pairs}/web", f"books={pairs}/books"]):
        assert gpt3.main([*words, "--valid-data-path", *sets]) == 0
        found.append(json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1]))
    out = capfd.readouterr().out
    assert found[0]["validation/loss"] == found[1]["validation/books/loss"] != found[1]["validation/both/loss"]
    for name, loss in {"": found[0]["validation/loss"], " of both": found[1]["validation/both/loss"]}.items():
        assert f"step 2: validation loss{name} {loss:.4f} per token, perplexity " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data-path", "{0}/none"], "cannot read"),
        (["--data-path", "0", "{0}/web"], "weights must be above 0"),
        (["--data-path", "{0}/web", "--text", "a.txt"], "exclude one another"),
        (["--train-data-path", "{0}/web", "--valid-data-path", "{0}/web", "a={0}/web"], "web is in no set, and others"),
        (["--data-path", "{0}/web", "--split", "1"], "has no share for validation"),
        (["--data-path", "{0}/web", "{0}/books", "--split", "80,20", "--steps", "9999"], "needs sample 79,991 of"),
        (["--data-path", "{0}/web", "{0}/books", "--split", "98,2", "--steps", "1"], "validation has . samples"),
        (
            ["--data-path", "{0}/web", "{0}/books", "--sequence-length", "9999"],
            "a split has .* tokens, a sample needs 100",
        ),
    ],
)
def test_mistakes_are_one_line(pairs, capfd, words, message):
    assert gpt3.main([*SMALL, *SHORT, *(word.format(pairs) for word in words)]) == 2
    err = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(err) == 1
    assert re.search(message, err[0])
