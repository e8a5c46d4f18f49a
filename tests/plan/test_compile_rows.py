"""`megajax plan --compile`: the planner's own rows, compiled and ranked by their programs; models by a name on the Hub."""

import json
import tomllib

import pytest

from megajax.estimate.program_account import StepAccount
from megajax.estimate.roofline import Account
from megajax.plan import compiled
from megajax.plan.__main__ import main
from megajax.plan.compiler import CompilerError, has_compiler

WORDS = "--model gpt2 --gpu h100-80gb --gpus 4 --global-batch-size 16 --schedule 1f1b --microbatch-size 2 --zero 0"
SMALL = f"{WORDS} --layers 2 --hidden 128 --heads 2 --vocabulary 512 --sequence-length 128 --attention xla --top 3"


def test_rows_are_ranked_by_their_compiled_programs(monkeypatch, tmp_path, capsys):
    """Accounts on record: the second row is faster than the first, the third does not fit; the second is written."""
    asked, peaks = [], [1e9, 1e9, 1e12]

    def compile_for(run, gpu, timeout):
        asked.append(run)
        return {"hlo": str(len(asked)), "memory": {"peak": peaks[len(asked) - 1]}}

    def account_of(run, gpu, hlo):
        account = Account()
        account.seconds["matmul"] = {"1": 3.0, "2": 2.0, "3": 1.0}[hlo]
        return StepAccount(account, 0.0)

    monkeypatch.setattr(compiled, "compile_for", compile_for)
    monkeypatch.setattr(compiled, "account_of", account_of)
    out = tmp_path / "plan.toml"
    assert main([*SMALL.split(), "--compile", "3", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("compiled ")) :]
    assert [line[:5] for line in table[1:4]] == ["row 2", "row 1", "row 3"] and "does not fit" in table[3]
    assert tomllib.loads(out.read_text())["parallel"].get("tensor", 1) == asked[1].parallel.tensor
    assert len({run.parallel for run in asked}) == 3


def test_a_row_that_the_compiler_refuses_is_named(monkeypatch, tmp_path, capsys):
    def refuse(run, gpu, timeout):
        raise CompilerError("the compiler aborted (signal 6)")

    monkeypatch.setattr(compiled, "compile_for", refuse)
    assert main([*SMALL.split(), "--compile", "1", "--out", str(tmp_path / "plan.toml")]) == 0
    assert "not compiled: the compiler aborted (signal 6)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.timeout(900)
@pytest.mark.skipif(not has_compiler(), reason="pip install megajax[dryrun]")
def test_the_planners_best_rows_compile(tmp_path, capsys):
    assert main([*SMALL.split(), "--compile", "2", "--json", "--out", str(tmp_path / "plan.toml")]) == 0
    rows = json.loads(capsys.readouterr().out)["layouts"]
    own = [row["compiled"] for row in rows if "compiled" in row]
    assert len(own) == 2 and all(one["fits"] and one["step_seconds"] > 0 for one in own)


def test_a_name_on_the_hub_is_planned_from_the_cache(monkeypatch, tmp_path, capsys):
    """Offline, from a cache as huggingface_hub keeps it: a reference, and a snapshot with the config.json."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    values = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    values |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5}
    values |= {"max_position_embeddings": 1024, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False}
    folder = tmp_path / "hub" / "models--somebody--small" / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values | {"architectures": ["LlamaForCausalLM"]}))
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("a" * 40)
    out = tmp_path / "plan.toml"
    words = "--model somebody/small --gpu h100-80gb --gpus 1 --global-batch-size 8 --recompute none"
    assert main([*words.split(), "--out", str(out)]) == 0
    assert "somebody/small" in out.read_text() and "0.0B parameters on 1" in capsys.readouterr().out
