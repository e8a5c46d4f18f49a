"""peft itself as judge; `pip install "megajax[judges]"`, and `pytest -m slow`. The quick tests have its golden gradients."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax import OutputConfig, Trainer
from megajax.checkpoint.layout import to_canonical
from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.interop.hugging_face.read_model import initial_params
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests.interop.hugging_face import convert, golden, logits_of, model_of
from tests.interop.make_golden import tokens
from tests.interop.test_adapters import LAYOUTS, Batches, by_tensor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.slow
# The targets of PEFT and the run's; a GPT-2's with only one of the two modules that end with c_proj.
CASES = {
    "llama": ("llama", ["q_proj", "down_proj"], ("q_proj", "linear_fc2")),
    "qwen3": ("qwen3", ["k_proj", "v_proj", "o_proj", "gate_proj"], ("key", "value", "linear_proj", "gate_proj")),
    "gpt2": ("gpt2", ["c_attn", "mlp.c_proj"], ("c_attn", "down_proj")),
    "sparse": ("mixtral", ["q_proj", "k_proj", "v_proj", "o_proj"], ("all-linear",)),
    "mixed": ("qwen3_moe_mixed", ["q_proj", "o_proj"], ("q_proj", "o_proj")),
}


def base_of(family):
    return transformers.AutoModelForCausalLM.from_pretrained(
        golden(family), dtype=torch.float32, attn_implementation="eager"
    )


def run_of(case, steps=1, **fields):
    family, _, targets = CASES[case]
    layout = {name: fields.pop(name) for name in list(fields) if name in ("data", "pipe", "tensor", "zero", "schedule")}
    model = dataclasses.replace(model_of(family), lora=2, lora_alpha=8.0, lora_targets=targets)
    train = {"precision": "fp32", "global_batch_size": 2, "steps": steps, "warmup_steps": 0} | fields
    return RunConfig(
        model,
        ParallelConfig(**{"schedule": "1f1b"} | layout),
        TrainConfig(**train, init_from=str(golden(family))),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_gradients(case, layout, tmp_path):
    """Of adapters that PEFT has written, on every layout."""
    family, targets, _ = CASES[case]
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base_of(family), config).eval()
    own = {name: one for name, one in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for one in own.values():
            one.copy_(0.3 * torch.randn_like(one))
    ids = torch.tensor(tokens())
    logits = model(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    model.save_pretrained(tmp_path)
    run = run_of(case, init_adapters=str(tmp_path), **LAYOUTS[layout])
    run.validate()
    training = make_training(run, make_mesh(run.parallel))
    params = initial_params(str(golden(family)), training)
    _, gradients = training.loss_and_gradients(params, Batches(run).batch(0))
    adapters = {name: leaf for name, leaf in to_canonical(gradients, training.where).items() if "/lora/" in name}
    found = by_tensor(family.removesuffix("_mixed"), run.model, adapters)
    assert found.keys() == {name.replace(".default", "") for name in own}
    for name, one in own.items():
        wanted, got = one.grad.numpy(), found[name.replace(".default", "")]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_an_export_loads_in_peft(case, tmp_path):
    """After three steps on pipe 2: logits of PEFT with the adapters, and of transformers with the merged weights."""
    family = CASES[case][0]
    run = run_of(case, steps=3, learning_rate=1e-2, pipe=2)
    output = OutputConfig(run_dir=str(tmp_path / "run"), save_every=3)
    trainer = Trainer(run, output=output, data=Batches(run), devices=jax.devices()[:2])
    state = trainer.fit(initial_params=initial_params).state
    ours = logits_of(trainer.training, state.params)
    assert convert("export", tmp_path / "run", "--out", tmp_path / "peft", "--peft") == 0
    model = peft.PeftModel.from_pretrained(base_of(family), tmp_path / "peft").eval()
    assert not model.peft_config["default"].use_dora
    with torch.no_grad():
        theirs = model(torch.tensor(tokens())).logits.numpy()
        plain = base_of(family).eval()(torch.tensor(tokens())).logits.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    assert np.abs(theirs - plain).max() > 1e-2
    assert convert("export", tmp_path / "run", "--out", tmp_path / "merged") == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_allclose(merged(torch.tensor(tokens())).logits.numpy(), theirs, rtol=0, atol=2e-5)
