"""The command: results on two layouts, resuming, and one line for each mistake."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from megajax.checkpoint.metadata import Progress
from megajax.config import DataConfig, ModelConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.evaluate import results
from megajax.evaluate.__main__ import main
from megajax.train.trainer import Trainer
from tests import small
from tests.interop.described import write_tokenizer
from tests.interop.hugging_face import copy_of, wanted_logits
from tests.interop.make_golden import tokens

MODEL = ModelConfig(name="tiny", layers=4, hidden=32, heads=4, kv_heads=2, vocabulary=257, sequence_length=64)
TEXT = (
    " = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . He had a guest @-@ \n"
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> pathlib.Path:
    """The directory of a run with interleaved chunks and ZeRO, with a checkpoint of random weights."""
    path = tmp_path_factory.mktemp("run")
    parallel = ParallelConfig(data=2, pipe=2, tensor=2, chunks=2, zero=1)
    train = TrainConfig(steps=2, global_batch_size=8, warmup_steps=1, precision="fp32")
    trainer = Trainer(
        RunConfig(MODEL, parallel, train, DataConfig(tokenizer="byte")),
        output=OutputConfig(run_dir=str(path), save_every=2, tensorboard=False),
    )
    state = small.busy_state(trainer.training)
    trainer.directory.checkpoints.save(trainer.training.state_layout, state, Progress(step=2, samples=16))
    assert "step 2: checkpoint saved" in trainer.directory.close()[-1]
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("data") / "wiki.test.tokens"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def words(run_dir, text) -> list[str]:
    """A command of ten windows, in batches of two."""
    sizes = ["--window", "48", "--stride", "8", "--batch", "2"]
    return ["--task", "wikitext103", "--task-data", str(text), "--run-dir", str(run_dir), *sizes]


@pytest.fixture(scope="module")
def expected(words, tmp_path_factory) -> dict:
    """Its results on one device."""
    out = tmp_path_factory.mktemp("expected") / "out.json"
    assert main([*words, "--devices", "cpu:1", "--out", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.mark.slow
def test_results_are_printed_or_written_with_all_settings(words, expected, text, run_dir, capsys, tmp_path):
    assert expected["counts"] == {"words": 23, "tokens": 102, "windows": 8}
    assert 200 < expected["perplexity"] < 320 and expected["adjusted_perplexity"] > 1e10
    settings = expected["settings"]
    assert settings["task"] == "wikitext103" and settings["data"] == str(text) and settings["stride"] == 8
    assert settings["layout"] == {"data": 1, "context": 1, "pipe": 1, "tensor": 1, "zero": 0}
    assert settings["precision"] == "fp32" and settings["model"]["layers"] == 4
    assert settings["weights"] == str(run_dir / "checkpoints" / "step_00000002")
    capsys.readouterr()
    mesh = ["--devices", "cpu:4", "--pipe", "2", "--data", "2", "--zero", "3"]
    assert main([*words, *mesh]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["settings"]["layout"] == {"data": 2, "context": 1, "pipe": 2, "tensor": 1, "zero": 3}
    for name in ("loss", "perplexity", "adjusted_perplexity", "token_accuracy"):
        assert printed[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_stopped_evaluation_resumes_to_the_same_bits(words, expected, tmp_path, capsys, monkeypatch):
    """Two batches of four are done, and the third line was being written."""
    out, add = tmp_path / "out.json", results.PartialScores.add
    words = [*words, "--devices", "cpu:1", "--out", str(out)]

    def stop(partial, batch, scores):
        if len(partial.done) == 4:
            raise KeyboardInterrupt
        add(partial, batch, scores)

    with monkeypatch.context() as patch:
        patch.setattr(results.PartialScores, "add", stop)
        assert main(words) == 130
    partial = tmp_path / "out.json.partial"
    assert len(partial.read_text().splitlines()) == 3 and not out.exists()
    with partial.open("a") as file:
        file.write('{"scores": [[3, 1.0')
    capsys.readouterr()
    assert main([*words, "--batch", "4"]) == 2
    assert "has the scores of an evaluation with batch = 2, and this one has 4: give --out" in capsys.readouterr().err
    assert main(words) == 0
    done = capsys.readouterr()
    assert "resumed: 4 of 8 samples were scored before" in done.err
    assert re.match(r"wikitext103: adjusted_perplexity .*, perplexity .*8 windows; ", done.out)
    found = json.loads(out.read_text())
    assert same(found, expected) and not partial.exists()


def same(found: dict, expected: dict) -> bool:
    """Whether two results are equal apart from their time."""
    return {**found, "seconds": 0} == {**expected, "seconds": 0}


@pytest.mark.slow
def test_a_killed_evaluation_resumes(run_dir, text, tmp_path):
    """kill -9 while batches are written, then the same command."""
    out = tmp_path / "out.json"
    long = tmp_path / "long.tokens"
    long.write_text(TEXT * 40)
    words = [
        "--task",
        "wikitext103",
        "--task-data",
        long,
        "--run-dir",
        run_dir,
        "--window",
        48,
        "--stride",
        1,
        "--batch",
        1,
    ]
    command = [sys.executable, "-m", "megajax.evaluate", *map(str, words), "--devices", "cpu:1", "--out", str(out)]
    partial = tmp_path / "out.json.partial"
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    while process.poll() is None and (not partial.exists() or partial.read_bytes().count(b"\n") < 5):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert partial.exists() and not out.exists()
    before = partial.read_bytes().count(b"\n")
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"resumed: {before - 1:,} of 3,993 samples" in again.stderr
    whole = subprocess.run([*command[:-1], str(tmp_path / "whole.json")], capture_output=True, check=True)
    assert whole.returncode == 0
    assert same(json.loads(out.read_text()), json.loads((tmp_path / "whole.json").read_text()))


def test_wrong_input_is_one_line(words, run_dir, text, capsys, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("word")
    (tmp_path / "bytes.txt").write_bytes(b"a b \xff c")
    (tmp_path / "column.jsonl").write_text('{"text": "a b"}\n{"words": "c d"}\n')
    (tmp_path / "out.json.partial").write_text("[3]\n")
    model, task = ["--run-dir", str(run_dir)], ["--task", "wikitext103", "--task-data", str(text)]
    lambada = ["--task", "lambada", "--task-data"]
    cases = {
        (*model,): "there is nothing to evaluate: pass --task wikitext103, ptb or lambada",
        (*model, "--task", "lambda"): "--task: invalid choice: 'lambda'",
        (*model, "--task", "ptb"): "--task ptb needs its file: pass --task-data FILE",
        (*task,): "there is no model: pass one of --run-dir RUN and --init-from DIR",
        (*model, *task, "--init-from", "x"): "--run-dir and --init-from are both given",
        (*model, *task, "--stirde", "3"): "there is no option --stirde: did you mean --stride",
        (*model, *task, "--last-token"): "--last-token is of --task lambada, not wikitext103: omit it",
        (
            *model,
            *lambada,
            str(text),
            "--stride",
            "3",
        ): "--stride is of overlapping windows, which --task lambada has not",
        (*model, *task, "--window", "65"): "--window 65 is longer than the model's context: pass at most --window 64",
        (
            *model,
            *task,
            "--window",
            "9",
            "--stride",
            "10",
        ): "--stride 10 skips tokens between windows of 9: pass at most",
        (*model, *task, "--stride", "0"): "--stride: 0 must be a whole number, 1 or more",
        (*model, *task, "--zero", "1"): "--zero: invalid choice: 1",
        (*model, *task, "--devices", "cpu:8", "--pipe", "8"): "layers = 4 cannot be cut into pipe",
        (*model, *task, "--devices", "cpu:8", "--tensor", "8"): "heads = 4 cannot be split over tensor = 8",
        (*model, *task, "--devices", "cpu:1", "--pipe", "2"): "needs .* = 2 devices, but there are 1",
        (*model, *task, "--out", str(tmp_path)): "cannot write .*: Is a directory; give --out the path of a file",
        (*model, *task, "--out", str(tmp_path / "no" / "x")): "cannot write .*: No such file or directory",
        (*model, *task, "--out", str(tmp_path / "out.json")): "out.json.partial is no file of partial scores",
        (
            *model,
            "--task",
            "ptb",
            "--task-data",
            str(tmp_path / "none"),
        ): "cannot read .*none: No such file .*; pass --task-data",
        (
            *model,
            "--task",
            "ptb",
            "--task-data",
            str(tmp_path / "empty.txt"),
        ): "empty.txt has no text: give --task-data the task's",
        (
            *model,
            "--task",
            "ptb",
            "--task-data",
            str(tmp_path / "one.txt"),
        ): "one.txt has 1 words and 4 tokens: give --task-data a",
        (*model, "--task", "ptb", "--task-data", str(tmp_path / "bytes.txt")): "bytes.txt, line 1: not UTF-8",
        (*model, *lambada, str(tmp_path / "column.jsonl")): "column.jsonl, line 2: no 'text'",
        (*model, *lambada, str(tmp_path / "one.txt")): "one.txt: passage 1 has nothing before its last word",
    }
    before = sorted(tmp_path.rglob("*"))
    for case, message in cases.items():
        capsys.readouterr()
        assert main(list(case)) == 2, case
        done = capsys.readouterr()
        assert done.err.count("\n") == 1 and done.out == "", (case, done.err)
        assert done.err.startswith("error: ") and re.search(message, done.err), (case, done.err)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is half-written
    assert not list(text.parent.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_the_perplexity_of_a_sparse_model_is_that_of_transformers_logits(family, tmp_path):
    """The golden tokens as words: 0 is the end of a document, 1 any unknown word, and 2 the word w0."""
    ids, logits = tokens()[0], wanted_logits(family)[0].astype(np.float64)
    source, text = copy_of(family, tmp_path), tmp_path / "text"
    write_tokenizer(source)  # that of olmoe, which transformers takes otherwise, has no such words
    text.write_text(" ".join(f"w{token - 2}" if token > 1 else "unknown" for token in ids))
    layout = ["--devices", "cpu:4", "--pipe", "2", "--tensor", "2"]
    out = tmp_path / "out.json"
    words = ["--init-from", str(source), "--task", "wikitext103", "--task-data", str(text), "--out", str(out)]
    assert main([*words, *layout]) == 0
    likelihoods = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.exp(-likelihoods[np.arange(15), ids[1:]].mean())
    assert json.loads(out.read_text())["perplexity"] == pytest.approx(wanted, rel=1e-5)
