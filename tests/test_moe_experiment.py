"""`python -m experiments.moe`: a short run whose log shows the balance of the experts."""

import pytest

from experiments import moe
from megajax.train.sinks import read_steps


@pytest.mark.slow
def test_a_short_run_logs_the_balance(tmp_path, capsys):
    """And resumes on another mesh and schedule from its checkpoint."""
    run_dir, log = tmp_path / "run", tmp_path / "log.jsonl"
    words = "--layers 4 --hidden 32 --sequence-length 32 --new-tokens 0 --validation-batches 1 --devices cpu:8".split()
    first = [*words, "--run-dir", str(run_dir), "--log-jsonl", str(log), "--steps", "3"]
    assert moe.main([*first, "--balance-bias-rate", "0.01"]) == 0
    assert "balance loss" in capsys.readouterr().out
    rows = read_steps(log)
    assert len(rows) == 3 and len(rows[0]["layer_expert_entropy"]) == 4
    assert all(0 < row["expert_entropy"] <= 1 and 1 / 8 <= row["worst_expert_share"] <= 1 / 2 for row in rows)
    again = ["--config", str(run_dir / "config.toml"), "--resume", "auto", "--steps", "5", "--devices", "cpu:8"]
    mesh = "--data 1 --pipe 2 --tensor 4 --schedule zb_v --chunks 2".split()
    assert moe.main([*again, *mesh, "--log-jsonl", str(tmp_path / "again.jsonl")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--experts-per-token 9", "experts_per_token = 9 is above experts = 8"),
        ("--experts 0", "balance_loss = 0.01 does nothing without experts: pass --balance-loss 0"),
        ("--matmul-dtype fp8", "matmul_dtype = fp8 is not of the matmuls of experts"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys):
    assert moe.main([*words.split(), "--devices", "cpu:8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
