"""experiments.dpo against TRL: losses, gradient norms and metrics of each step, from golden values (make_golden.py)."""

import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

from experiments import dpo
from megajax.config import ConfigError
from megajax.config.cli import parse
from megajax.config.preference import PreferenceConfig
from megajax.data.preferences import PreferenceBatches, completion_row, load_preferences
from megajax.data.tokenizers import load_tokenizer
from megajax.train.sinks import read_steps
from tests.interop.hugging_face import golden

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = json.loads((pathlib.Path(__file__).parent / "dpo.json").read_text())
ONE, MESH = "--devices cpu:1", "--devices cpu:4 --pipe 2 --tensor 2"
WORDS = (
    f"--global-batch-size 16 --steps 5 --learning-rate {GOLDEN['settings']['learning_rate']} --beta "
    f"{GOLDEN['settings']['beta']} --sequence-length {GOLDEN['settings']['sequence_length']} "
    "--learning-rate-decay constant --no-sequence-parallel"
)


@pytest.fixture
def pairs(tmp_path):
    """The golden pairs as a file."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in GOLDEN["pairs"]))
    return path


def train(pairs: pathlib.Path, words: str) -> list[dict]:
    run = pairs.parent / "run"
    begin = ["--init-from", str(golden("llama")), "--pairs", str(pairs), "--run-dir", str(run)]
    assert dpo.main([*begin, *WORDS.split(), *words.split()]) == 0
    return read_steps(run / "log.jsonl")


def compare(records: list[dict], expected: list[dict], names: tuple[str, ...] = ()):
    assert len(records) == len(expected)
    for record, wanted in zip(records, expected, strict=True):
        found = {name: record[name] for name in wanted}
        np.testing.assert_allclose(
            list(found.values()), list(wanted.values()), rtol=1e-5, atol=1e-5, err_msg=str(found)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_type, words",
    [
        ("sigmoid", ONE),
        pytest.param("sigmoid", f"{MESH} --microbatch-size 4 --zero 0 --schedule 1f1b", marks=pytest.mark.slow),
        pytest.param(
            "ipo", "--devices cpu:8 --data 2 --pipe 2 --tensor 2 --schedule zb_v --zero 3", marks=pytest.mark.slow
        ),
        pytest.param("kto", f"{MESH} --microbatch-size 4", marks=pytest.mark.slow),
        pytest.param("kto", ONE, marks=pytest.mark.slow),
        pytest.param("ipo", ONE, marks=pytest.mark.slow),
        pytest.param("sigmoid", f"{MESH} --vocab-parallel tensor --chunks 2", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_trl(pairs, loss_type, words):
    records = train(pairs, f"{words} --loss-type {loss_type}")
    compare(records, GOLDEN["steps"][loss_type])
    assert records[1]["rewards/margins"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--lora 4 --lora-targets all-linear", "--freeze blocks/attention --ema-decay 0.9"])
def test_adapters_and_frozen_weights_are_trained_and_resumed(pairs, words, capsys):
    """The reference is the model without what is trained."""
    records = train(pairs, f"{MESH} --microbatch-size 4 --learning-rate 1e-2 --steps 2 --save-every 2 {words}")
    assert records[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and records[1]["rewards/margins"] > 0.01
    run = pairs.parent / "run"
    again = ["--config", str(run / "config.toml"), "--pairs", str(pairs), "--run-dir", str(run), "--resume", "auto"]
    assert dpo.main([*again, "--steps", "4", "--devices", "cpu:4"]) == 0
    assert "all others are frozen" in capsys.readouterr().out
    assert read_steps(run / "log.jsonl")[-1]["rewards/margins"] > records[1]["rewards/margins"]


@pytest.mark.slow
def test_a_run_resumes_with_its_reference_and_its_options(pairs, capsys):
    words = "--devices cpu:1 --steps 3 --save-every 3"
    compare(train(pairs, words), GOLDEN["steps"]["sigmoid"][:3])
    run = pairs.parent / "run"
    more = [
        "--config",
        str(run / "config.toml"),
        "--resume",
        "auto",
        "--steps",
        "5",
        "--devices",
        "cpu:2",
        "--pipe",
        "2",
    ]
    assert dpo.main(more) == 0
    compare(read_steps(run / "log.jsonl"), GOLDEN["steps"]["sigmoid"])
    reversed_pairs = pairs.with_name("reversed.jsonl")
    reversed_pairs.write_text("".join(reversed(pairs.read_text().splitlines(keepends=True))))
    assert dpo.main([*more, "--steps", "6", "--pairs", str(reversed_pairs)]) == 2
    assert "reference.npz is of other pairs" in capsys.readouterr().err
    (run / "reference.npz").unlink()
    assert dpo.main([*more, "--steps", "6"]) == 2
    assert "there is no" in capsys.readouterr().err


@pytest.mark.parametrize("name", GOLDEN["tokens"])
def test_tokens_are_those_of_trl(name, tmp_path):
    rows, expected = GOLDEN["tokens"][name]
    found, words = load(tmp_path, rows)
    assert [[one.prompt.tolist(), *(ids.tolist() for ids in one.completions)] for one in found] == expected
    assert words == f"{len(rows)} line{'s' * (len(rows) > 1)}, {len(rows)} pair{'s' * (len(rows) > 1)}"


def load(folder: pathlib.Path, rows: list, longest: int = 64):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(GOLDEN["template"])
    files = [str(folder / "rows.jsonl")]
    return load_preferences(files, load_tokenizer(str(golden("llama"))), str(folder / "template.jinja"), longest)


def test_long_pairs_are_cut_or_dropped_and_counted(tmp_path):
    rows = [
        {"prompt": "w1 w2 w3", "chosen": " w4 w5", "rejected": " w6"},
        {"prompt": "w1", "chosen": "w2", "rejected": "w3"},
    ]
    found, words = load(tmp_path, [rows[0], rows[1] | {"prompt": "w1 w2 w3 w4 w5 "}], longest=5)
    assert words == "2 lines, 1 pair, 1 cut, 1 dropped for the length of their prompts" and len(found) == 1
    row = completion_row(found[0].prompt, found[0].completions[0], 5)
    assert row["tokens"].tolist() == [3, 4, 5, 6, 7] and row["labels"].tolist() == [4, 5, 6, 7, 0]
    assert row["weights"].tolist() == [0, 0, 1, 1, 0]
    with pytest.raises(ConfigError, match="1 pair, all with prompts of 2 tokens or more"):
        load(tmp_path, rows[:1], longest=2)


def test_batches_have_pairs_and_mismatches(tmp_path):
    """Two samples of a pair follow one another; the mismatched completion is that of the pair before in the file."""
    found, _ = load(
        tmp_path, [{"prompt": f"w{n}", "chosen": f" w{10 + n}", "rejected": f" w{20 + n}"} for n in range(3)]
    )
    data = PreferenceBatches(found, (2, 2), 4, seed=1, with_mismatched=True)
    data.reference, data.mismatched = np.arange(6.0).reshape(3, 2), 10 + np.arange(6.0).reshape(3, 2)
    seen = []
    for first in (0, 4, 8):
        batch = data.batch(first)
        assert batch["tokens"].shape == (2, 2, 4) and batch["sample"].reshape(-1).tolist() == list(
            range(first, first + 4)
        )
        for of_pair in range(2):
            prompt = batch["tokens"][of_pair, 0, 0] - 2
            seen.append(int(prompt))
            assert batch["labels"][of_pair, :, 0].tolist() == [12 + prompt, 22 + prompt]
            assert batch["kl_labels"][of_pair, :, 0].tolist() == [12 + (prompt - 1) % 3, 22 + (prompt - 1) % 3]
            assert batch["reference"][of_pair].tolist() == [2 * prompt, 2 * prompt + 1]
            assert batch["kl_reference"][of_pair].tolist() == [10 + 2 * prompt, 11 + 2 * prompt]
    assert sorted(seen[:3]) == sorted(seen[3:]) == [0, 1, 2]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "w1", "chosen": "w2"}, "line 1 has no rejected: give prompt, chosen and rejected"),
        ({"prompt": "w1", "chosen": "w2", "rejected": ["w3"]}, "some of prompt, chosen and rejected are chats"),
        ({"prompt": "w1", "chosen": "w2", "rejected": ""}, "the rejected is empty"),
        ({"prompt": "", "chosen": "w2", "rejected": "w3"}, "the prompt is empty"),
        ({"chosen": [{"role": "user", "content": "w1"}], "rejected": [{"role": "user", "content": "w2"}]}, "assistant"),
    ],
)
def test_wrong_rows_are_one_line(row, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path, [row])
    assert "\n" not in str(error.value) and "rows.jsonl, line 1" in str(error.value)


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "there is nothing to train on: pass --pairs FILE"),
        ("--pairs a.jsonl --loss-type dpo", "loss_type = 'dpo' is not known"),
        ("--pairs a.jsonl --beta 0", "beta = 0.0 must be a number, above 0"),
        (
            "--pairs {pairs} --devices cpu:1 --microbatch-size 1",
            "microbatch_size = 1 parts a pair.*--microbatch-size 2",
        ),
        ("--pairs {pairs} --devices cpu:2 --context 2", "context ranks have parts of completions"),
        ("--pairs {pairs} --epoch 2", "there is no option --epoch"),
    ],
)
def test_mistakes_are_one_line(words, message, pairs, capsys):
    given = words.format(pairs=pairs).split()
    assert dpo.main(["--init-from", str(golden("llama")), "--sequence-length", "32", *given]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.startswith("error: ") and error.count("\n") == 1


def test_epochs_are_steps(pairs):
    request = parse(["--init-from", str(golden("llama")), "--global-batch-size", "4"], dpo.EXPERIMENT)
    assert dpo.steps_of(request, PreferenceConfig(pairs=(str(pairs),)), 3) == 12  # 8 pairs of 2 samples, three times


@pytest.mark.slow
def test_golden_values_are_those_of_the_library(tmp_path):
    """TRL in an environment of its own, whose Python MEGAJAX_TRL names."""
    python = os.environ.get("MEGAJAX_TRL")
    if not python:
        pytest.skip("set MEGAJAX_TRL to the Python of an environment with trl==1.16.0")
    subprocess.run([python, "-m", "tests.preference.make_golden", tmp_path], cwd=ROOT, check=True)
    found = json.loads((tmp_path / "dpo.json").read_text())
    assert found["tokens"] == GOLDEN["tokens"]
    for loss_type, steps in GOLDEN["steps"].items():
        compare(found["steps"][loss_type], steps)
    golden_policy = json.loads((pathlib.Path(__file__).parent / "grpo.json").read_text())
    policy = json.loads((tmp_path / "grpo.json").read_text())
    assert policy["rollouts"] == golden_policy["rollouts"]
    for loss_type, losses in golden_policy["losses"].items():
        compare(policy["losses"][loss_type]["steps"], losses["steps"])
