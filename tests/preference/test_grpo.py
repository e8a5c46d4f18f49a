"""experiments.grpo: the objective against TRL's on given completions (golden values, make_golden.py), and whole runs."""

import json
import pathlib
import re

import numpy as np
import pytest

from experiments import grpo
from megajax.config import ConfigError
from megajax.data.reward_prompts import load_prompts
from megajax.data.tokenizers import load_tokenizer
from megajax.generate.rollouts import RewardTraining
from megajax.ops.preference import group_advantages
from megajax.train.sinks import read_steps
from tests.interop.hugging_face import golden

GOLDEN = json.loads((pathlib.Path(__file__).parent / "grpo.json").read_text())
SIZES, ROLLOUTS, POLICY = GOLDEN["sizes"], GOLDEN["rollouts"], GOLDEN["policy"]
ONE, MESH = "--devices cpu:1", "--devices cpu:4 --pipe 2 --tensor 2"
WORDS = (
    f"--learning-rate-decay constant --no-sequence-parallel --sequence-length {SIZES['sequence_length']} --log-every 1"
)
REWARDS = """
def even(prompts, completions, completion_ids, wanted, **columns):
    assert len(prompts) == len(completions) == len(wanted) and all(isinstance(text, str) for text in completions)
    return [sum(token % 2 == parity for token in ids) / len(ids) for ids, parity in zip(completion_ids, wanted)]

def short(completions, **columns):
    return [1.0]
"""


def train(folder: pathlib.Path, words: str) -> list[dict]:
    rows = [{"prompt": "w1 w2", "wanted": 0}, {"prompt": "w3", "wanted": 0}, {"prompt": "w4 w5 w6", "wanted": 0}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    files = ["--prompts", str(folder / "prompts.jsonl"), "--run-dir", str(folder / "run")]
    begin = ["--init-from", str(golden("llama")), "--reward", f"{folder / 'rewards.py'}:even", *files]
    assert grpo.main([*begin, *WORDS.split(), *words.split()]) == 0
    return read_steps(folder / "run" / "log.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_type, words",
    [
        ("dapo", ONE),
        pytest.param("grpo", ONE, marks=pytest.mark.slow),
        pytest.param(
            "dr_grpo", "--devices cpu:8 --data 2 --pipe 2 --tensor 2 --schedule zb_v --zero 1", marks=pytest.mark.slow
        ),
        pytest.param("dapo", f"{MESH} --microbatch-size 2", marks=pytest.mark.slow),
        pytest.param("grpo", f"{MESH} --vocab-parallel tensor", marks=pytest.mark.slow),
    ],
)
def test_steps_on_given_completions_are_those_of_trl(loss_type, words, tmp_path, monkeypatch):
    """Four steps on the same completions: ratios, clipping and the divergence from the reference count."""
    expected = GOLDEN["losses"][loss_type]
    ends = [ids[-1] == 0 for ids in ROLLOUTS["completions"]]
    drawn = [np.array(ids, np.int32) for ids in ROLLOUTS["completions"]]
    rollout = RewardTraining.rollout

    def given(training, params, numbers):
        for prompt, tokens in zip(training.data.prompts, ROLLOUTS["prompts"][:: SIZES["group"]], strict=False):
            object.__setattr__(prompt, "tokens", np.array(tokens, np.int32))
        training.data.order.row = lambda index: index  # of the first step
        return rollout(training, params, numbers)

    monkeypatch.setattr(RewardTraining, "rollout", given)
    monkeypatch.setattr(RewardTraining, "draw", lambda *arguments: (drawn, ends))
    monkeypatch.setattr(RewardTraining, "rewarded", lambda *arguments: np.array(ROLLOUTS["rewards"], np.float32))
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in POLICY.items())
    options += f" --num-generations {SIZES['group']} --max-completion-length {SIZES['new']} --steps 4"
    options += f" --global-batch-size 8 --learning-rate {SIZES['learning_rate']}"
    options += f" --loss-type {loss_type} --scale-rewards {expected['scale_rewards']}"
    options += " --no-use-bias-correction-kl" * (not expected["use_bias_correction_kl"])
    records = train(tmp_path, f"{words} {options}")
    for record, wanted in zip(records, expected["steps"], strict=True):
        found = [record[name] for name in wanted]
        np.testing.assert_allclose(found, list(wanted.values()), rtol=1e-5, atol=1e-5, err_msg=str(wanted))
    assert records[0]["reward"] == pytest.approx(np.mean(ROLLOUTS["rewards"]))


@pytest.mark.slow
def test_rewards_grow(tmp_path):
    """Rollouts by the decoder on the mesh of the training; the reward is the share of even tokens."""
    words = (
        f"{MESH} --num-generations 8 --max-completion-length 12 --global-batch-size 24 --steps 12 --microbatch-size 6"
    )
    records = train(tmp_path, f"{words} --learning-rate 1e-2 --save-every 6 --beta 0.001")
    reward = [record["reward"] for record in records]
    assert np.mean(reward[:2]) < 0.65 and np.mean(reward[-2:]) > np.mean(reward[:2]) + 0.2
    assert records[0]["completions/max_length"] <= 12 and records[0]["kl"] == pytest.approx(0, abs=1e-6)
    config = ["--config", str(tmp_path / "run" / "config.toml"), "--resume", "auto", "--steps", "13"]
    assert grpo.main(config) == 0  # with the options of the run, and the reference read again
    last = read_steps(tmp_path / "run" / "log.jsonl")[-1]
    assert last["step"] == 13 and last["reward"] > np.mean(reward[:2]) + 0.1 and last["kl"] > 0.1


@pytest.mark.slow
def test_adapters_are_trained_on_completions_of_their_model(tmp_path):
    words = f"{MESH} --num-generations 4 --max-completion-length 6 --global-batch-size 12 --steps 2 --microbatch-size 6"
    records = train(tmp_path, f"{words} --learning-rate 1e-2 --beta 0.01 --lora 4")
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6) and records[1]["kl"] > 1e-5


def test_advantages_are_those_of_groups():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 2.0, 2.0], np.float32)
    found = group_advantages(rewards, 3)
    deviation = np.std([1, 0, 0], ddof=1) + 1e-4
    np.testing.assert_allclose(found[:3], np.array([2, -1, -1]) / 3 / deviation, rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, 3, "none")[3:], [-2 / 3, 1 / 3, 1 / 3], rtol=1e-6)
    assert not group_advantages(np.ones(4, np.float32), 2).any()


def test_rows_of_prompts(tmp_path):
    (tmp_path / "template.jinja").write_text("{% for m in messages %}w0 {{ m.content }} {% endfor %}w2")
    path = tmp_path / "prompts.jsonl"
    tokenizer = load_tokenizer(str(golden("llama")))

    def load(*rows, longest=8):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts([str(path)], tokenizer, str(tmp_path / "template.jinja"), longest)

    chat = {"prompt": [{"role": "user", "content": "w5"}], "answer": 3}
    text, said = load({"prompt": "w1 w2"}, chat)
    assert text.tokens.tolist() == [3, 4] and said.tokens.tolist() == [2, 7, 4] and said.columns == {"answer": 3}
    for row, message in {
        (("question", "w1"),): "line 1 has no prompt",
        (("prompt", "w1 w1 w1 w1 w1 w1 w1 w1 w1"),): "the prompt has 9 tokens.*is 8: pass a larger --sequence-length",
        (("prompt", " "),): "the prompt is empty",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load(dict(row))
    with pytest.raises(ConfigError, match="has no prompts"):
        load()


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "there is nothing to train on: pass --prompts FILE and --reward"),
        ("--prompts {prompts} --reward even", "names no function: pass --reward MODULE:FUNCTION"),
        ("--prompts {prompts} --reward {rewards}:odd", "has no function odd"),
        ("--prompts {prompts} --reward no.module:odd", "no.module cannot be imported .ModuleNotFoundError"),
        ("{both} --num-generations 1", "nothing to compare"),
        ("{both} --num-generations 5", "parts a group of num_generations = 5 completions: pass --global-batch-size 60"),
        ("{both} --max-completion-length 64", "leaves no room for a prompt in sequence_length = 64"),
        ("{both} --devices cpu:2 --context 2 --max-completion-length 8", "not supported with context"),
        ("{both} --top-p 2", "top_p = 2.0 must be above 0 and at most 1"),
        ("{both} --generations 2", "there is no option --generations"),
    ],
)
def test_mistakes_are_one_line(words, message, tmp_path, capsys):
    rewards, prompts = tmp_path / "rewards.py", tmp_path / "prompts.jsonl"
    rewards.write_text(REWARDS)
    prompts.write_text('{"prompt": "w1", "wanted": 0}\n')
    both = f"--prompts {prompts} --reward {rewards}:even"
    given = words.format(prompts=prompts, rewards=rewards, both=both).split()
    assert grpo.main(["--init-from", str(golden("llama")), "--sequence-length", "64", *given]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.startswith("error: ") and error.count("\n") == 1


def test_a_reward_for_each_completion_is_required(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}\n')
    words = f"--prompts {tmp_path}/prompts.jsonl --reward {tmp_path}/rewards.py:short --max-completion-length 4"
    words += " --devices cpu:1 --global-batch-size 4 --num-generations 2 --sequence-length 16"
    assert grpo.main(["--init-from", str(golden("llama")), *words.split()]) == 2
    assert "rewards.py:short returned 1 values for 4 completions" in capsys.readouterr().err
