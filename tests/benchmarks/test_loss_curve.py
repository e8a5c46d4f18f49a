"""benchmarks/loss_curve.py: the averages by hand, the picture, wrong files."""

import json

import numpy as np
import pytest

from benchmarks import loss_curve


def log_of(tmp_path, losses, name="run.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)))
    return path


def test_averages_by_hand():
    """Averages are over at most the last quarter of the steps, and over finite losses only."""
    losses = np.array([8.0, 7, 6, 5, 4, 3, np.nan, 1, 2])
    np.testing.assert_array_equal(loss_curve.smooth(losses, 2), [8, 7, 6, 5, 4, 3, np.nan, 1, 1.5])
    assert loss_curve.smooth(np.arange(100.0), 20)[-1] == np.arange(80, 100).mean()


def test_a_log_is_drawn_with_the_loss_of_a_guess(tmp_path, capsys):
    log = log_of(tmp_path, [5.5, "nan", 3.25])
    steps, losses = loss_curve.read_losses(log)
    np.testing.assert_array_equal(steps, [1, 2, 3])
    np.testing.assert_array_equal(losses, [5.5, np.nan, 3.25])
    out = tmp_path / "picture.svg"
    assert loss_curve.main([str(log), "--out", str(out), "--vocabulary", "257"]) == 0
    assert "</svg>" in out.read_text() and capsys.readouterr().out == f"wrote {out}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("# text", "not a log of --log-jsonl"), ('{"a": 1}', "not a log of --log-jsonl: 'step'")],
)
def test_a_wrong_file_is_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_text(content)
    assert loss_curve.main([str(path), "--out", str(tmp_path / "picture.svg")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
