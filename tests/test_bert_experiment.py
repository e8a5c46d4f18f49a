"""`python -m experiments.bert`: a short run, its checkpoint on another mesh, a replay, and options of BERT elsewhere."""

import math

import pytest

from experiments import bert, gpt3
from megajax.generate.__main__ import main as generate
from megajax.train.sinks import read_steps

SMALL = "--layers 2 --hidden 32 --sequence-length 32 --global-batch-size 8 --microbatch-size 2 --validation-batches 1"


def losses(path) -> list[float]:
    return [row["loss"] for row in read_steps(path) if "loss" in row]


@pytest.mark.slow
def test_a_short_run_goes_on_on_another_mesh(tmp_path, capsys):
    """On the bundled text: from ln(vocabulary) + ln 2, then resumed with another schedule, from its own config.toml."""
    log, run_dir = tmp_path / "log.jsonl", tmp_path / "run"
    words = [*SMALL.split(), "--devices", "cpu:8", "--run-dir", str(run_dir), "--log-jsonl", str(log), "--steps", "4"]
    assert bert.main([*words, "--pipe", "2", "--tensor", "2", "--data", "2", "--chunks", "1"]) == 0
    out = capsys.readouterr().out
    assert "bert-tiny: " in out and "data      the text: " in out and "step 4: validation loss" in out
    first = losses(log)
    assert first[0] == pytest.approx(math.log(2048) + math.log(2), rel=0.02) and len(first) == 4
    mesh = ["--data", "4", "--pipe", "2", "--schedule", "1f1b", "--zero", "1", "--microbatch-size", "1", "--steps", "6"]
    again = ["--config", str(run_dir / "config.toml"), "--resume", "auto", "--log-jsonl", str(tmp_path / "again.jsonl")]
    assert bert.main([*again, *mesh, "--devices", "cpu:8"]) == 0
    assert len(losses(tmp_path / "again.jsonl")) == 2
    assert generate(["--run-dir", str(run_dir), "--prompt", "To be", "--devices", "cpu:1"]) == 2
    error = capsys.readouterr().err
    assert "error: " in error and "cannot generate text" in error, error


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (gpt3.main, "--token-types 2", "token_types = 2 is of BERT, which tiny is not: omit --token-types"),
        (bert.main, "--tokenizer byte", "tokenizer byte has no [CLS]"),
        (bert.main, "--output-heads none", "output_heads = none has no loss"),
        (bert.main, "--chunked-attention 8", "chunked_attention = 8 is not BERT's"),
        (bert.main, "--sliding-window 8 --context 2", "sliding_window = 8 is not computed by the kernels"),
        (bert.main, "--sliding-window 8 --attention tokamax", "no sliding_window in both directions"),
        (bert.main, "--attention cudnn --text {text}", "attention = cudnn"),
    ],
)
def test_a_mistake_is_one_line(main, words, message, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("A good day. A bad night.\n\n" * 200)
    assert main([*words.format(text=text).split(), "--devices", "cpu:8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
