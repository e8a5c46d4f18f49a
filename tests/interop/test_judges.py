"""transformers, torch and safetensors themselves as judges; `pip install "megajax[judges]"`, and `pytest -m slow`."""

import dataclasses

import numpy as np
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.interop.hugging_face.config import read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.interop.safetensors import open_tensors
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests.interop.hugging_face import FAMILIES, SPARSE, convert, golden, initial, model_of, training_of, wanted_logits
from tests.interop.hugging_face import logits_of as pipeline_logits
from tests.interop.make_golden import COMMON, LENGTH, VOCABULARY, random_model, tokens, write_tokenizer
from tests.interop.torch_adamw import adamw, take_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
families = pytest.mark.parametrize("family", FAMILIES)
STEPS = 40


def logits_of(directory) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens())).logits.float().numpy()


@families
def test_transformers_computes_the_same_logits_from_an_export(family, tmp_path):
    assert convert("import", golden(family), "--run-dir", tmp_path / "run") == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out", "--max-shard-size", "20KB") == 0
    np.testing.assert_array_equal(logits_of(tmp_path / "out"), logits_of(golden(family)))
    np.testing.assert_allclose(logits_of(golden(family)), wanted_logits(family), atol=1e-5)


@families
def test_transformers_reads_an_export_without_the_imported_files(family, tmp_path):
    """config.json is then written from the model alone, with the keys of transformers 4."""
    assert convert("import", golden(family), "--run-dir", tmp_path / "run") == 0
    for file in (tmp_path / "run" / "hugging_face").iterdir():
        file.unlink()
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    np.testing.assert_array_equal(logits_of(tmp_path / "out"), logits_of(golden(family)))


@families
def test_the_safetensors_library_reads_an_export(family, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    assert convert("import", golden(family), "--run-dir", tmp_path / "run") == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out", "--dtype", "bf16") == 0
    ours = open_tensors(tmp_path / "out")
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.bfloat16
        np.testing.assert_array_equal(ours[name].rows(0, tensor.shape[0]).astype(np.float32), tensor.float().numpy())


def batches():
    """int [STEPS, samples, LENGTH + 1]."""
    return np.random.default_rng(5).integers(0, VOCABULARY, (STEPS, 8, LENGTH + 1), dtype=np.int32)


def losses_of_torch(family: str, rates, train: TrainConfig) -> list[float]:
    """AdamW with our hyperparameters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(golden(family), attn_implementation="eager").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if family == "gpt2":
        for block in model.transformer.h:
            block.attn.attn_dropout.p = 0.0
    optimizer, losses = adamw(model, train), []
    for batch, rate in zip(batches(), rates, strict=True):
        batch = torch.from_numpy(batch).long()
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
        take_step(optimizer, model, loss, rate, train.clip_norm)
        losses.append(loss.item())
    return losses


@families
def test_training_from_imported_weights_is_torchs(family):
    """40 steps on data 2 x pipe 2: the loss of each equals torch's to 1e-5."""
    assert family.startswith(read_config(golden(family))[0].name)
    parallel = ParallelConfig(data=2, pipe=2, schedule="1f1b", microbatch_size=1)
    settings = {"global_batch_size": 8, "steps": STEPS, "learning_rate": 1e-3, "warmup_steps": 5, "precision": "fp32"}
    run = RunConfig(model_of(family), parallel, TrainConfig(**settings))
    run.validate()
    training = make_training(run, make_mesh(parallel))
    state = dataclasses.replace(training.init_state(), params=initial_params(str(golden(family)), training))
    losses, rates = [], []
    for number, drawn in enumerate(batches()):
        drawn = drawn.reshape(run.microbatches, 2, LENGTH + 1)
        sample = (8 * number + np.arange(8)).reshape(run.microbatches, 2).astype(np.uint32)
        batch = {"tokens": drawn[..., :-1], "labels": drawn[..., 1:], "sample": sample}
        batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
        state, metrics = training.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(losses, losses_of_torch(family, rates, run.train), rtol=1e-5)


@pytest.mark.parametrize("family", SPARSE)
def test_the_balance_loss_is_transformers_of_one_layer_and_sample(family):
    """Divided by k; transformers itself takes the tokens of all layers and samples together."""
    training, params = initial(family, pipe=2)
    drawn = batches()[0][: training.run.microbatches]
    batch = {"tokens": drawn[:, None, :-1], "labels": drawn[:, None, 1:], "weights": np.ones((len(drawn), 1, LENGTH))}
    batch |= {"weights": np.float32(batch["weights"]), "sample": np.arange(len(drawn), dtype=np.uint32)[:, None]}
    state = dataclasses.replace(training.init_state(), params=params)
    got = np.asarray(training.train_step(state, batch)[1]["router_losses"])[:, 0]
    model = transformers.AutoModelForCausalLM.from_pretrained(golden(family), attn_implementation="eager").eval()
    with torch.no_grad():
        layers = model(torch.from_numpy(drawn[:, :-1]).long(), output_router_logits=True).router_logits
    experts, chosen = training.run.model.experts, training.run.model.experts_per_token
    loss = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    samples = [layer.reshape(len(drawn), LENGTH, experts) for layer in layers]
    wanted = [[loss((sample,), experts, chosen).item() / chosen for sample in layer] for layer in samples]
    np.testing.assert_allclose(got, np.mean(wanted, axis=1), rtol=1e-5)


SMALL = {"max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = SMALL | {"intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 3}
VARIANTS = {
    "llama with biases": (
        "LlamaConfig",
        SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama with yarn": ("LlamaConfig", SMALL | {"rope_parameters": YARN}),
    "llama with yarn and its bounds": (
        "LlamaConfig",
        SMALL | {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3}},
    ),
    "llama with linear scaling": (
        "LlamaConfig",
        SMALL | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama with a tanh gate": ("LlamaConfig", SMALL | {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral with large heads and no window": ("MistralConfig", SMALL | {"head_dim": 12, "sliding_window": None}),
    "qwen2 with windows": (
        "Qwen2Config",
        SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "mixtral with a window and large heads": ("MixtralConfig", EXPERTS | {"head_dim": 12, "sliding_window": 5}),
    "mixtral with one expert for a token": ("MixtralConfig", EXPERTS | {"num_experts_per_tok": 1}),
    "mixtral tied": ("MixtralConfig", EXPERTS | {"tie_word_embeddings": True}),
    "qwen3_moe as by default": ("Qwen3MoeConfig", EXPERTS | {"moe_intermediate_size": 12}),
    "qwen3_moe with windows": (
        "Qwen3MoeConfig",
        EXPERTS | {"moe_intermediate_size": 12, "use_sliding_window": True, "sliding_window": 4, "head_dim": 8},
    ),
    "olmoe normalized and tied": ("OlmoeConfig", EXPERTS | {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "olmoe without grouped heads": ("OlmoeConfig", EXPERTS | {"num_key_value_heads": None}),
    "qwen3 tied": ("Qwen3Config", SMALL | {"head_dim": 8, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_families(variant, tmp_path):
    """Logits of the import, and the export without the imported config.json, are those of transformers."""
    name, settings = VARIANTS[variant]
    source = tmp_path / "source"
    random_model(getattr(transformers, name)(**COMMON | settings)).save_pretrained(source)
    write_tokenizer(source)
    wanted = logits_of(source)
    model = dataclasses.replace(read_config(source)[1], sequence_length=LENGTH)
    training = training_of(model, pipe=2)
    got = pipeline_logits(training, initial_params(str(source), training))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
    assert convert("import", source, "--run-dir", tmp_path / "run") == 0
    (tmp_path / "run" / "hugging_face" / "config.json").unlink()
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    np.testing.assert_array_equal(logits_of(tmp_path / "out"), wanted)
