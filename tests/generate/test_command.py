"""The command: texts from a checkpoint, files of prompts, typed lines, and one line for each mistake."""

import io
import json
import pathlib
import re
import shutil

import pytest

from megajax.checkpoint.metadata import Progress
from megajax.config import DataConfig, ModelConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.generate.__main__ import main
from megajax.train.trainer import Trainer
from tests import small

MODEL = ModelConfig(name="tiny", layers=4, hidden=32, heads=4, kv_heads=2, vocabulary=257, sequence_length=48)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> pathlib.Path:
    """The directory of a run with interleaved chunks, ZeRO and a context group, with a checkpoint of random weights."""
    path = tmp_path_factory.mktemp("run")
    parallel = ParallelConfig(data=1, context=2, pipe=2, tensor=2, chunks=2, zero=1)
    train = TrainConfig(steps=2, global_batch_size=8, warmup_steps=1, precision="fp32")
    run = RunConfig(MODEL, parallel, train, DataConfig(tokenizer="byte"))
    trainer = Trainer(run, output=OutputConfig(run_dir=str(path), save_every=2, tensorboard=False))
    state = small.busy_state(trainer.training)
    trainer.directory.checkpoints.save(trainer.training.state_layout, state, Progress(step=2, samples=16))
    assert "step 2: checkpoint saved" in trainer.directory.close()[-1]
    return path


def texts(capsys, *words) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def written(common, capsys, tmp_path, pipe: int = 2, tensor: int = 2) -> list[dict]:
    """The texts of --prompts with --out on a mesh, whose rows keep their other fields."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('{"prompt": "The ", "id": 7}\n\n{"prompt": "Say that"}\n')
    capsys.readouterr()
    mesh = ("--devices", f"cpu:{pipe * tensor}", "--pipe", str(pipe), "--tensor", str(tensor))
    mesh += ("--batch", "1", "--prefill-chunk", "3")
    assert main([*map(str, common), *mesh, "--prompts", str(prompts), "--out", str(out)]) == 0
    done = capsys.readouterr()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["The ", "Say that"]
    assert rows[0]["id"] == 7 and [(row["tokens"], row["finish"]) for row in rows] == [(12, "length")] * 2
    assert done.out == "" and "decode 22 tokens in " in done.err and "prefill 12 tokens in " in done.err
    samples = {1: "1 sample", 2: "2 samples"}[pipe]
    assert f"data 1 x pipe {pipe} x tensor {tensor}, fp32; {samples} of 20 tokens together" in done.err
    assert "caches take" in done.err
    return rows


COMMON = ("--new-tokens", 12, "--seed", 3, "--ignore-end")


def test_texts_are_written_with_the_fields_of_their_prompts(run_dir, capsys, tmp_path):
    rows = written(("--run-dir", run_dir, *COMMON), capsys, tmp_path, pipe=1, tensor=1)
    assert all(row["text"] for row in rows)


@pytest.mark.slow
def test_the_same_text_on_every_mesh_printed_or_written(run_dir, capsys, tmp_path):
    """On one device, of --prompt, and on pipe 2 x tensor 2, of --prompts."""
    common = ("--run-dir", run_dir, *COMMON)
    printed = texts(capsys, *common, "--prompt", "The ", "--prompt", "Say that")
    assert printed.startswith("The ") and "\n\nSay that" in printed
    rows = written(common, capsys, tmp_path)
    assert "\n\n".join(row["prompt"] + row["text"] for row in rows) == printed.removesuffix("\n")


@pytest.mark.slow
def test_typed_lines(run_dir, capsys, monkeypatch):
    """Each line is continued by itself, to the context; a line that cannot be is one line of error."""
    monkeypatch.setattr("sys.stdin", io.StringIO("The king\n\n" + "a" * 60 + "\nThe king\n"))
    words = ("--run-dir", run_dir, "--interactive", "--temperature", 0, "--new-tokens", 100, "--ignore-end")
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    done = capsys.readouterr()
    first, second = [part for part in done.out.split("The king") if part]
    assert first == second and done.err.count("[context; prefill 8 tokens") == 2
    assert (
        "error: the line: the prompt is empty" in done.err and "error: the line: the prompt has 60 tokens" in done.err
    )


def test_wrong_input_is_one_line(run_dir, capsys, tmp_path):
    files = {"object": "[1]", "text": '{"prompt": 3}', "json": '{"prompt": "a"}\n{"prompt"', "empty": "\n"}
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}')
    (tmp_path / "long.jsonl").write_text('{"prompt": "a"}\n{"prompt": "' + "b" * 48 + '"}')
    (tmp_path / "bare").mkdir()
    shutil.copy(run_dir / "config.toml", tmp_path / "bare")
    good, prompt = ["--run-dir", str(run_dir)], ["--prompt", "a"]
    cases = {
        (*good,): "there is nothing to continue: pass one of --prompt TEXT, --prompts FILE.jsonl and --interactive",
        (*good, *prompt, "--interactive"): "--prompt and --interactive are both given: pass one of",
        (*good, "--interactive", "--out", "x"): "--interactive prints its texts: omit --out",
        (*prompt,): "there is no model: pass one of --run-dir RUN and --init-from DIR",
        (*good, "--init-from", "x", *prompt): "--run-dir and --init-from are both given",
        ("--init-from", "x", *prompt, "--step", "1"): "a directory of Hugging Face has one: omit --step",
        ("--init-from", str(tmp_path), *prompt): "config.json",
        (*good, *prompt, "--top-q", "1"): "there is no option --top-q: did you mean --top-",
        (*good, *prompt, "--top-p", "1.5"): "top_p = 1.5 must be above 0 and at most 1",
        (*good, *prompt, "--top-p", "0"): "--top-p: 0.0 must be a number, above 0",
        (*good, *prompt, "--top-k", "0"): "--top-k: 0 must be a whole number, 1 or more",
        (*good, *prompt, "--temperature", "-1"): "--temperature: -1.0 must be a number, 0 or more",
        (*good, *prompt, "--new-tokens", "0"): "--new-tokens: 0 must be a whole number, 1 or more",
        (*good, *prompt, "--seed", "x"): "--seed: 'x' is not a whole number",
        (*good, *prompt, "--stop", ""): "--stop is an empty text",
        (
            *good,
            *prompt,
            "--step",
            "7",
        ): "no checkpoint of step 7 in .*: there are those of steps 2; pass another --step",
        (*good, *prompt, "--precision", "fp8"): "invalid choice: 'fp8'",
        (
            *good,
            *prompt,
            "--devices",
            "cpu:1",
            "--pipe",
            "2",
        ): "needs data \\* pipe \\* tensor = 2 devices, but there are 1",
        (*good, *prompt, "--devices", "cpu:8", "--pipe", "8"): "layers = 4 cannot be cut into pipe",
        (*good, *prompt, "--devices", "cpu:8", "--tensor", "8"): "heads = 4 cannot be split over tensor = 8",
        (*good, "--prompt", ""): "--prompt 1: the prompt is empty",
        (*good, "--prompt", "a" * 48): "--prompt 1: the prompt has 48 tokens, but the model's context is 48",
        (*good, *prompt, "--out", str(tmp_path)): "cannot write .*: Is a directory; give --out the path of a file",
        (*good, *prompt, "--out", str(tmp_path / "no" / "x")): "cannot write .*: No such file or directory",
        (
            "--run-dir",
            str(tmp_path / "no"),
            *prompt,
        ): "no is not a directory: give --run-dir the directory of",
        ("--run-dir", str(tmp_path), *prompt): "has no config.toml: give --run-dir the directory of a training run",
        ("--run-dir", str(tmp_path / "bare"), *prompt): "no checkpoint in .*: there is none; train with --save-every",
        (*good, "--prompts", str(tmp_path / "none.jsonl")): "cannot read .*none.jsonl: No such file",
        (
            *good,
            "--prompts",
            str(tmp_path / "json.jsonl"),
        ): "json.jsonl line 2 is not JSON .*: write one JSON object a line",
        (*good, "--prompts", str(tmp_path / "object.jsonl")): "object.jsonl is one JSON array: make JSON lines of it",
        (*good, "--prompts", str(tmp_path / "text.jsonl")): 'text.jsonl line 1 has no text called "prompt"',
        (*good, "--prompts", str(tmp_path / "empty.jsonl")): "empty.jsonl has no prompts",
        (*good, "--prompts", str(tmp_path / "bytes.jsonl")): "bytes.jsonl line 2 is not UTF-8",
        (*good, "--prompts", str(tmp_path / "long.jsonl")): "long.jsonl line 2: the prompt has 48 tokens",
    }
    before = sorted(tmp_path.rglob("*"))
    for words, message in cases.items():
        capsys.readouterr()
        assert main(list(words)) == 2, words
        done = capsys.readouterr()
        assert done.err.count("\n") == 1 and done.out == "", (words, done.err)
        assert done.err.startswith("error: ") and re.search(message, done.err), (words, done.err)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is half-written
