"""Families with a description (`described_families.py`) against transformers: logits, gradients, training, texts, files.

pip install "megajax[judges]" && pytest -m slow tests/interop/test_described.py

The models have six layers, of several kinds where the family has them, and random weights.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from megajax.checkpoint import layout as parameters
from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.released_others import RELEASED_OTHERS
from megajax.config.sample import SampleConfig
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
from megajax.interop.hugging_face.config import REPLACED, family_of_model, read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.interop.hugging_face.weights import Weights
from megajax.interop.safetensors import open_tensors
from megajax.interop.weight_source import HuggingFaceSource
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests.generate.test_decoder import tokens_of
from tests.interop.described import FAMILIES, configs, random_model, write_tokenizer
from tests.interop.hugging_face import logits_of, round_trip, training_of
from tests.interop.make_golden import LENGTH, NEW, PROMPT, VOCABULARY, greedy, tokens
from tests.interop.torch_adamw import adamw, take_step

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
STEPS, SAMPLES = 20, 8
LAYOUTS = {
    "pipe 4, uneven": dict(pipe=4),
    "tensor 2 x pipe 2, interleaved": dict(tensor=2, pipe=2, chunks=2, schedule="interleaved_1f1b"),
    "zb_v": dict(pipe=2, chunks=2, schedule="zb_v"),
    "dualpipe_v": dict(pipe=2, chunks=2, schedule="dualpipe_v"),
    "ZeRO-3": dict(data=2, pipe=2, zero=3),
    "context 2": dict(context=2, pipe=2),
    "context 2, tensor 2": dict(context=2, tensor=2),
}
# Ring attention has no soft caps and states, and needs stages with one order of dense and sparse layers.
WITHOUT_CONTEXT = ("deepseek_v2", "deepseek_v3", "gemma2", "glm4_moe", "qwen2_moe", "mamba2", "qwen3_next")
WITHOUT_CONTEXT += ("granitemoehybrid", "nemotron_h", "dots1")
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in [*LAYOUTS][:6]
    if layout != "context 2" or family not in WITHOUT_CONTEXT
]
CASES += [(family, "context 2, tensor 2") for family in ("deepseek_v2", "deepseek_v3")]
families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def torch_model(family: str):
    """transformers' model."""
    return random_model(configs()[family])


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory):
    """The directory of a family's model, as transformers writes it."""

    @functools.cache
    def written(family: str):
        directory = tmp_path_factory.mktemp(family)
        torch_model(family).save_pretrained(directory)
        (directory / "generation_config.json").unlink(missing_ok=True)
        write_tokenizer(directory)
        return directory

    return written


@functools.cache
def batch() -> dict[str, np.ndarray]:
    """Samples [SAMPLES, LENGTH], a third of whose tokens have no weight."""
    random = np.random.default_rng(5)
    drawn = random.integers(1, VOCABULARY, (SAMPLES, LENGTH + 1), dtype=np.int32)
    weights = (random.random((SAMPLES, LENGTH)) > 0.3).astype(np.float32)
    sample = np.arange(SAMPLES, dtype=np.uint32)
    return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:], "weights": weights, "sample": sample}


def torch_loss(model, rows):
    """The mean over the batch's weights."""
    weights = torch.from_numpy(rows["weights"]).to(next(model.parameters()).dtype)
    logits = model(torch.from_numpy(rows["tokens"].astype(np.int64))).logits
    labels = torch.from_numpy(rows["labels"].astype(np.int64))
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses * weights).sum() / weights.sum()


def in_fp64(family: str):
    """A copy of the model in fp64."""
    source = torch_model(family)
    model = type(source)._from_config(source.config, attn_implementation="eager")
    model.load_state_dict(source.state_dict())
    if source.config.tie_word_embeddings:
        model.tie_weights()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # transformers' grouped matmul has no fp64
    return model.double().eval()


@functools.cache
def torch_gradients(family: str):
    """The loss, and the gradients by the names of the file."""
    model = in_fp64(family)
    loss = torch_loss(model, batch())
    loss.backward()
    model.load_state_dict({name: p.grad for name, p in model.named_parameters()}, strict=False)  # to be written
    return loss.item(), model


@dataclasses.dataclass
class Gradient:
    """A gradient as a tensor of a file."""

    array: np.ndarray

    @property
    def shape(self):
        return self.array.shape

    def rows(self, start, stop):
        return self.array[start:stop]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_and_gradients_are_torchs(family, layout, directory_of, tmp_path_factory):
    directory = directory_of(family)
    found, model = read_config(directory)
    assert model.parameters == sum(p.numel() for p in torch_model(family).parameters())
    model = dataclasses.replace(model, sequence_length=LENGTH, dropout=0.0)
    parallel = ParallelConfig(microbatch_size=1, **LAYOUTS[layout])
    run = RunConfig(model, parallel, TrainConfig(global_batch_size=SAMPLES, steps=100, precision="fp32"))
    run.validate()
    training = make_training(run, make_mesh(parallel))
    params = initial_params(str(directory), training)
    with torch.no_grad():
        wanted = torch_model(family)(torch.from_numpy(tokens())).logits.float().numpy()
    np.testing.assert_allclose(logits_of(training, params), wanted, rtol=0, atol=1e-4)

    rows = {name: array.reshape(run.microbatches, -1, *array.shape[1:]) for name, array in batch().items()}
    with jax.set_mesh(training.mesh):
        loss, gradients, *_ = jax.jit(training.execute)(params, training.place(rows), 1.0)
    loss_of_torch, of_torch = torch_gradients(family)
    np.testing.assert_allclose(loss, loss_of_torch, rtol=1e-6)
    ours = parameters.to_canonical({"params": gradients}, training.where)
    written = tmp_path_factory.mktemp("gradients")
    of_torch.save_pretrained(written)
    tensors = {name: Gradient(one.rows(0, one.shape[0])) for name, one in open_tensors(written).items()}
    names = {name.removeprefix("params/"): array for name, array in ours.items()}
    weights = Weights(directory, tensors, found.name, model, list(names))
    for name, array in names.items():
        if not weights.pieces[name] or name.endswith("/router/bias"):  # what routers report is no gradient
            continue
        array = np.asarray(array)
        box = tuple(slice(0, size) for size in array.shape)
        wanted = weights.region(name, (*box,), array.shape)
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max(), err_msg=name)


@functools.cache
def torch_steps(family: str, train: TrainConfig) -> list[float]:
    """Losses of AdamW in fp64."""
    model, losses = in_fp64(family), []
    optimizer = adamw(model, train)
    for step in range(STEPS):
        loss = torch_loss(
            model, {name: np.roll(array, step, 1) if array.ndim == 2 else array for name, array in batch().items()}
        )
        rate = train.learning_rate * min(1.0, (step + 1) / train.warmup_steps)
        take_step(optimizer, model, loss, rate, train.clip_norm)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("family", "layout"), [(one, [*LAYOUTS][n % 5]) for n, one in enumerate(FAMILIES)])
def test_losses_of_20_steps_are_torchs(family, layout, directory_of):
    directory = directory_of(family)
    model = dataclasses.replace(read_config(directory)[1], sequence_length=LENGTH, dropout=0.0)
    settings = {"global_batch_size": SAMPLES, "steps": 1000, "learning_rate": 1e-3, "warmup_steps": 5}
    train = TrainConfig(**settings, precision="fp32", minimum_learning_rate=1e-3)
    run = RunConfig(model, ParallelConfig(microbatch_size=1, **LAYOUTS[layout]), train)
    run.validate()
    training = make_training(run, make_mesh(run.parallel))
    state = dataclasses.replace(training.init_state(), params=initial_params(str(directory), training))
    losses = []
    for step in range(STEPS):
        rows = {name: np.roll(array, step, 1) if array.ndim == 2 else array for name, array in batch().items()}
        rows["sample"] = (SAMPLES * step + np.arange(SAMPLES)).astype(np.uint32)
        rows = {name: array.reshape(run.microbatches, -1, *array.shape[1:]) for name, array in rows.items()}
        state, metrics = training.train_step(state, rows)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, torch_steps(family, train), rtol=1e-5)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2), (1, 4, 1)])
@families
def test_greedy_texts_are_transformers(family, mesh, directory_of):
    """Longer than the window."""
    source = HuggingFaceSource(str(directory_of(family)))
    data, pipe, tensor = mesh
    run = decoding_run(source.run("fp32"), ParallelConfig(data=data, pipe=pipe, tensor=tensor))
    sizes = DecodeSizes(samples=2, prompt=PROMPT, new=NEW - 16, chunk=5)
    decoder = Decoder(run, make_mesh(run.parallel), sizes, SampleConfig(temperature=0))
    found = tokens_of(decoder, source.load(decoder), list(tokens()[:, :PROMPT].astype(np.int32)))
    np.testing.assert_array_equal(found, greedy_of_torch(family)[:, : NEW - 16])


@functools.cache
def greedy_of_torch(family: str) -> np.ndarray:
    return greedy(torch_model(family)).numpy()


@families
def test_a_round_trip_is_equal_bit_for_bit(family, directory_of, tmp_path):
    """In fp32, without the imported config.json, and in bf16."""
    source = directory_of(family)
    was, now = round_trip(source, tmp_path)
    kept = lambda keys: {name: value for name, value in keys.items() if name not in (*REPLACED, "dtype")}  # noqa: E731
    assert kept(was) == kept(now) and was.get("rope_parameters") == now.get("rope_parameters")
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = torch_model(family)(torch.from_numpy(tokens())).logits
        torch.testing.assert_close(judge(torch.from_numpy(tokens())).logits, wanted, rtol=0, atol=1e-6)


@families
def test_a_config_returns(family, directory_of):
    found, model = read_config(directory_of(family))
    assert family_of_model(model, family)[0].name == found.name == family


def test_experts_in_mxfp4_are_dequantised(tmp_path):
    """transformers' own code dequantises the blocks that this writes; the logits are those of its model of the result."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    config = configs()["gpt_oss"]
    config.hidden_size = config.intermediate_size = 32
    model, draw = random_model(config), np.random.default_rng(3)
    tensors = {name: p.detach() for name, p in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.from_numpy(draw.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8))
        scales = torch.from_numpy(draw.integers(122, 126, (experts, outputs, inputs // 32), np.uint8))
        model.get_parameter(name).data.copy_(_convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del tensors[name]
    keys = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    save_file(tensors, str(tmp_path / "model.safetensors"))
    found = dataclasses.replace(read_config(tmp_path)[1], sequence_length=LENGTH)
    training = training_of(found)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens())).logits.numpy()
    got = logits_of(training, initial_params(str(tmp_path), training))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


def test_blocks_in_fp8_are_dequantised(tmp_path):
    """As transformers' own code does it, with factors of blocks of 2 x 2, which divide all matrices."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    random_model(configs()["deepseek_v3"]).save_pretrained(tmp_path)
    tensors = {name: one.rows(0, one.shape[0]) for name, one in open_tensors(tmp_path).items()}
    tensors, draw = {name: torch.from_numpy(one.copy()) for name, one in tensors.items()}, np.random.default_rng(3)
    plain, op = dict(tensors), Fp8Dequantize(None)
    for name in [name for name in tensors if name.endswith("proj.weight") or "with_mqa" in name]:
        rows, columns = tensors[name].shape
        factors = torch.from_numpy(draw.uniform(0.1, 1, (rows // 2, columns // 2)).astype(np.float32))
        wide = factors.repeat_interleave(2, 0).repeat_interleave(2, 1)
        tensors[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = factors
        plain[name] = op._dequantize_one(tensors[name], factors)
    quantized, whole = tmp_path / "fp8", tmp_path / "fp32"
    keys = json.loads((tmp_path / "config.json").read_text())
    how = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}
    for directory, arrays, more in ((quantized, tensors, how), (whole, plain, {})):
        directory.mkdir()
        save_file(arrays, str(directory / "model.safetensors"))
        (directory / "config.json").write_text(json.dumps(keys | more))
    found = dataclasses.replace(read_config(quantized)[1], sequence_length=LENGTH)
    training = training_of(found)
    one, two = (initial_params(str(directory), training) for directory in (quantized, whole))
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
        ("granitemoehybrid", {"layer_types": ["full_attention"] * 6}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "mlp"]}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention"] * 2}),
        ("llama4_text", {"interleave_moe_layer_step": 1, "moe_layers": None, "use_qk_norm": False}),
        ("llama4_text", {"attention_chunk_size": None, "layer_types": None, "attn_temperature_tuning": False}),
        ("llama4_text", {"no_rope_layers": [1] * 6, "layer_types": None, "attention_bias": True}),
    ],
)
def test_variants_of_hybrids_and_llama4(family, changes, tmp_path):
    """Without experts, without Mamba-2, with one kind of layers: logits, and config.json there and back."""
    was = configs()[family].to_dict()
    model = random_model(type(configs()[family])(**was | changes))
    model.save_pretrained(tmp_path)
    found, config = read_config(tmp_path)
    assert family_of_model(config, family)[0].name == found.name == family
    training = training_of(dataclasses.replace(config, sequence_length=LENGTH))
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens())).logits.float().numpy()
    np.testing.assert_allclose(logits_of(training, initial_params(str(tmp_path), training)), wanted, rtol=0, atol=1e-4)


def test_kimi_is_deepseek_by_another_name(tmp_path):
    """config.json has a class of the model's own, which is not run."""
    random_model(configs()["deepseek_v3"]).save_pretrained(tmp_path)
    found = read_config(tmp_path)[1]
    keys = json.loads((tmp_path / "config.json").read_text())
    keys |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    family, model = read_config(tmp_path)
    assert family.name == "kimi_k2" and model == found
    training = training_of(dataclasses.replace(model, sequence_length=LENGTH))
    initial_params(str(tmp_path), training)
    family, written = family_of_model(model, "kimi_k2")
    assert family.name == written["model_type"] == "kimi_k2" and family_of_model(model)[0].name == "deepseek_v3"


@pytest.mark.parametrize("name", RELEASED_OTHERS)
def test_presets_have_the_parameters_of_transformers(name):
    """Of a model from the config.json that an export of the preset has, on the meta device."""
    family, keys = family_of_model(preset(name))
    kind = type(configs().get(family.name) or transformers.MistralConfig())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind(**keys))
    assert sum(p.numel() for p in model.parameters()) == preset(name).parameters
