"""experiments.finetune from the command line, on the golden Llama: options, epochs, mistakes, whole runs."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from experiments import finetune
from megajax.config import ConfigError
from megajax.config.cli import parse
from megajax.train.sinks import read_steps
from tests.interop.hugging_face import golden

ROOT = pathlib.Path(__file__).parents[1]
TEMPLATE = (
    "{% for m in messages %}w0 {{ m.role[0] | replace('u', 'w1') | replace('a', 'w2') }} "
    "{{ m.content }} w3 {% endfor %}"
)


def chats(folder: pathlib.Path, count: int = 12, name: str = "chats") -> list[str]:
    """Options with chats of 12 words, so that a row of 24 tokens has two: each fills eleven places of it."""
    (folder / "template.jinja").write_text(TEMPLATE)
    lines = []
    for number in range(count):
        question, answer = f"w{number} w5 w6", f"w{number} w8 w9"
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": said}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))
    return ["--sft-data", str(folder / f"{name}.jsonl"), "--chat-template", str(folder / "template.jinja")]


SMALL = "--sequence-length 24 --global-batch-size 4 --learning-rate 1e-3 --log-every 1".split()


def test_epochs_are_steps(tmp_path):
    """12 chats are 6 rows: 3 epochs of them are 18 rows, five steps of four."""
    words = ["--init-from", str(golden("llama")), *SMALL, *chats(tmp_path)]
    completed = finetune.complete([*words, "--epochs", "3"])
    assert completed == [*words, "--validation-batches", "0", "--steps", "5"]
    run = parse(completed, finetune.EXPERIMENT).run(1, "fp32")
    run.validate()
    assert (run.train.steps, run.train.learning_rate_decay, run.train.warmup_steps) == (5, "cosine", 0)


def test_the_recipe_is_for_imported_models_too(tmp_path):
    words = ["--init-from", str(golden("llama")), "--sft-data", "a.jsonl", "--valid-sft-data", "b.jsonl"]
    assert finetune.complete(words) == words
    run = parse(words, finetune.EXPERIMENT).run(1, "fp32")
    train = run.train
    assert (train.learning_rate, train.minimum_learning_rate, train.global_batch_size) == (2e-5, 0, 64)
    assert run.model.name == "llama" and run.data.tokenizer == str(golden("llama"))
    assert finetune.complete(["--help"]) == ["--help"]
    (tmp_path / "config.toml").write_text("[train]\nvalidation_batches = 8\n")
    config = ["--config", str(tmp_path / "config.toml"), "--sft-data", "a.jsonl"]
    assert finetune.complete(config) == [*config, "--validation-batches", "0"]
    assert finetune.complete([*config, "--validation-batches=2"]) == [*config, "--validation-batches=2"]


def test_mistakes_are_one_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match="there is nothing to fine-tune on: pass --sft-data FILE"):
        finetune.complete(["--init-from", str(golden("llama"))])
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    start = ["--init-from", str(golden("llama")), "--sft-data", str(tmp_path / "bad.jsonl")]
    for words, message in {
        ("--epochs", "none"): "--epochs",
        ("--epochs", "2"): "bad.jsonl, line 1 has 'prompt': give messages, or a prompt and one of",
        ("--epoch", "2"): "there is no option --epoch",
        ("--text", "a"): "--text and --sft-data exclude one another",
    }.items():
        assert finetune.main([*start, *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error


def train(words, processes: int = 1) -> str:
    """The output of the first process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "experiments.finetune", *map(str, words)]
    several = f"--coordinator 127.0.0.1:{port} --processes {processes} --process-id".split()
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment |= {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    started = [
        subprocess.Popen(
            [*command, *([*several, str(number)] if processes > 1 else [])],
            cwd=ROOT,
            env=environment,
            stdout=-1,
            stderr=-1,
            text=True,
        )
        for number in range(processes)
    ]
    done = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * processes, done
    return done[0][0]


def losses(run_dir: pathlib.Path) -> list[float]:
    return [row["loss"] for row in read_steps(run_dir / "log.jsonl")]


@pytest.mark.slow
def test_whole_runs(tmp_path):
    """From a Hugging Face directory and from an import, in one process and in two: the same losses."""
    from tests.interop.hugging_face import convert

    data = [*chats(tmp_path), "--epochs", "20", "--learning-rate", "1e-2"]
    data[2:2] = ["--valid-sft-data", data[1], "--validation-batches", "1"]
    start = ["--init-from", golden("llama"), *SMALL]
    out = train([*start, *data, "--devices", "cpu:4", "--pipe", 2, "--data", 2, "--run-dir", tmp_path / "one"])
    assert "12 lines, 12 samples," in out and "packed into 6 rows of 24 tokens" in out and "20 epochs of them" in out
    assert "step 30: validation loss" in out and f"weights   from {golden('llama')}" in out
    found = losses(tmp_path / "one")
    assert len(found) == 30 and found[-1] < 1 < 4 < found[0]
    train([*start, *data, "--devices", "cpu:2", "--pipe", 2, "--data", 2, "--run-dir", tmp_path / "two"], processes=2)
    np.testing.assert_allclose(losses(tmp_path / "two"), found, rtol=1e-4)

    imported = tmp_path / "imported"
    assert convert("import", golden("llama"), "--run-dir", imported, "--sequence-length", 24) == 0
    resume = ["--config", imported / "config.toml", "--resume", imported, "--run-dir", tmp_path / "three", *SMALL]
    train([*resume, *data, "--devices", "cpu:2", "--context", 2, "--pipe", 1])
    np.testing.assert_allclose(losses(tmp_path / "three"), found, rtol=1e-4)
    assert convert("export", tmp_path / "three", "--out", tmp_path / "out") == 0
