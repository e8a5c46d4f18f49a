"""ModernBERT of Hugging Face in and out, compared with transformers: its golden outputs (make_modernbert_golden.py), and
the library itself.

pip install "megajax[judges]" && pytest -m "slow or not slow" tests/interop/test_modernbert.py
"""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest

from megajax.checkpoint import layout as parameters
from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.interop.hugging_face.config import family_of_model, read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.interop.hugging_face.weights import Weights
from megajax.interop.safetensors import open_tensors
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests.interop.described import write_tokenizer
from tests.interop.hugging_face import change_config, copy_of, golden, round_trip, training_of
from tests.interop.make_modernbert_golden import LENGTH, VOCABULARY, inputs, logits_of, random_modernbert
from tests.interop.test_bert import outputs_of
from tests.interop.torch_adamw import adamw, take_step

STEPS, SAMPLES = 20, 8
LAYOUTS = {
    "pipe 4, uneven": dict(pipe=4),
    "tensor 2 x pipe 2, interleaved": dict(tensor=2, pipe=2, chunks=2, schedule="interleaved_1f1b"),
    "zb_v": dict(pipe=2, chunks=2, schedule="zb_v"),
    "dualpipe_v": dict(pipe=2, chunks=2, schedule="dualpipe_v"),
    "ZeRO-3": dict(data=2, pipe=2, zero=3),
    "tensor 4, full recompute": dict(tensor=4, recompute="full"),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def model_of(directory, length=LENGTH):
    return dataclasses.replace(read_config(directory)[1], sequence_length=length, dropout=0.0)


def assert_words(training, directory, wanted):
    """Logits of the tokens that are not padding."""
    got, real = outputs_of(training, initial_params(str(directory), training), inputs())["words"], inputs()["padding"]
    real = np.arange(LENGTH) < LENGTH - real[:, None]
    np.testing.assert_allclose(got[real], wanted[real], rtol=0, atol=1e-5)


def test_logits_are_those_of_transformers():
    """Windows of three tokens to either side in four of six layers, and padding."""
    model = model_of(golden("modernbert"))
    assert (model.layer_pattern, model.activation, model.token_types) == ("full,sliding*2", "geglu_exact", 0)
    assert model.attention_windows == (None, 4)
    assert_words(training_of(model), golden("modernbert"), np.load(golden("modernbert") / "outputs.npz")["logits"])


def test_a_config_returns():
    original = json.loads((golden("modernbert") / "config.json").read_text())
    family, keys = family_of_model(read_config(golden("modernbert"))[1])
    assert family.name == "modernbert"
    assert keys.pop("pad_token_id") is None  # transformers' own is not in a vocabulary of 64
    assert {name: original[name] for name in keys} == keys


@pytest.mark.parametrize("name", ["modernbert-base", "modernbert-large"])
def test_presets_have_a_place_in_a_config(name):
    assert family_of_model(preset(name))[0].name == "modernbert"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["ModernBertForSequenceClassification"]}, "architectures = .* is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu' is not supported"),
        ({"classifier_activation": "silu"}, "classifier_activation = 'silu' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
        ({"local_attention": -2}, "local_attention = -2 is not supported"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_the_block_does_not_have_is_refused(keys, message, tmp_path):
    directory = copy_of("modernbert", tmp_path)
    change_config(directory, **keys)
    with pytest.raises(ConfigError, match=message):
        read_config(directory)


def test_context_is_refused():
    run = RunConfig(model_of(golden("modernbert")), ParallelConfig(context=2), TrainConfig(global_batch_size=2))
    with pytest.raises(ConfigError, match="sliding_window = 4 is not computed by the kernels.*pass --context 1"):
        run.validate()


# transformers itself.


@functools.cache
def batch() -> dict[str, np.ndarray]:
    """Samples that end with padding, of whose other tokens a third has no weight; none is 0, the padding's, whose vector
    gets no gradient in torch. The padding is no longer than a window, beyond which torch's fp64 model has NaN.
    """
    random = np.random.default_rng(5)
    drawn = random.integers(1, VOCABULARY, (2, SAMPLES, LENGTH), dtype=np.int32)
    padding = random.integers(0, 4, SAMPLES, dtype=np.int32)
    weights = (random.random((SAMPLES, LENGTH)) > 0.3) & (np.arange(LENGTH) < LENGTH - padding[:, None])
    rows = {"tokens": drawn[0], "labels": drawn[1], "types": np.zeros_like(drawn[0]), "padding": padding}
    return rows | {"weights": weights.astype(np.float32), "swapped": np.zeros(SAMPLES, np.int32)}


def rows_of(run, step: int = 0) -> dict[str, np.ndarray]:
    """The batch of a step by microbatch: its tokens in other places."""
    rows = batch() | {name: np.roll(batch()[name], step, 0) for name in ("tokens", "labels")}
    rows["sample"] = (SAMPLES * step + np.arange(SAMPLES)).astype(np.uint32)
    return {name: array.reshape(run.microbatches, -1, *array.shape[1:]) for name, array in rows.items()}


def torch_loss(model, step: int = 0):
    """The mean over the batch's weights."""
    import torch

    rows = {name: torch.from_numpy(np.asarray(array, np.int64)) for name, array in batch().items()}
    mask = (torch.arange(LENGTH) < LENGTH - rows["padding"][:, None]).long()
    tokens, labels = (torch.roll(rows[name], step, 0) for name in ("tokens", "labels"))
    losses = torch.nn.functional.cross_entropy(
        model(tokens, attention_mask=mask).logits.transpose(1, 2), labels, reduction="none"
    )
    weights = torch.from_numpy(batch()["weights"]).double()
    return (losses * weights).sum() / weights.sum()


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """transformers' model, and its directory."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model, directory = random_modernbert(), tmp_path_factory.mktemp("modernbert")
    model.save_pretrained(directory)
    return model, directory


def in_fp64(judge):
    model = random_modernbert()
    model.load_state_dict(judge[0].state_dict())
    return model.double()


@pytest.mark.slow
@layouts
def test_logits_and_gradients_are_torchs(judge, layout, tmp_path):
    model = model_of(judge[1])
    assert model.parameters == sum(p.numel() for p in judge[0].parameters())
    parallel = ParallelConfig(microbatch_size=1, **LAYOUTS[layout])
    run = RunConfig(model, parallel, TrainConfig(global_batch_size=SAMPLES, steps=100, precision="fp32"))
    run.validate()
    training = make_training(run, make_mesh(parallel))
    assert_words(training, judge[1], logits_of(judge[0]))
    params = initial_params(str(judge[1]), training)
    with jax.set_mesh(training.mesh):
        loss, gradients, *_ = jax.jit(training.execute)(params, training.place(rows_of(run)), 1.0)
    of_torch = in_fp64(judge)
    wanted = torch_loss(of_torch)
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-6)
    of_torch.load_state_dict({name: p.grad for name, p in of_torch.named_parameters()}, strict=False)
    of_torch.float().save_pretrained(tmp_path)
    ours = parameters.to_canonical({"params": gradients}, training.where)
    names = {name.removeprefix("params/"): np.asarray(array) for name, array in ours.items()}
    weights = Weights(tmp_path, open_tensors(tmp_path), "modernbert", model, list(names))
    for name, array in names.items():
        region = weights.region(name, tuple(slice(0, size) for size in array.shape), array.shape)
        np.testing.assert_allclose(array, region, rtol=1e-4, atol=1e-4 * np.abs(region).max(), err_msg=name)


@functools.cache
def torch_losses(judge, train: TrainConfig) -> list[float]:
    """Of AdamW in fp64."""
    model, losses = in_fp64(judge), []
    optimizer = adamw(model, train)
    for step in range(STEPS):
        loss = torch_loss(model, step)
        take_step(optimizer, model, loss, train.learning_rate * min(1.0, (step + 1) / 5), train.clip_norm)
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@layouts
def test_losses_of_20_steps_are_torchs(judge, layout):
    settings = {"global_batch_size": SAMPLES, "steps": 1000, "learning_rate": 1e-3, "warmup_steps": 5}
    train = TrainConfig(**settings, precision="fp32", minimum_learning_rate=1e-3)
    run = RunConfig(model_of(judge[1]), ParallelConfig(microbatch_size=1, **LAYOUTS[layout]), train)
    run.validate()
    training = make_training(run, make_mesh(run.parallel))
    state = dataclasses.replace(training.init_state(), params=initial_params(str(judge[1]), training))
    losses = []
    for step in range(STEPS):
        state, metrics = training.train_step(state, rows_of(run, step))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, torch_losses(judge, train), rtol=1e-5)


@pytest.mark.slow
def test_a_round_trip_is_equal_bit_for_bit(judge, tmp_path):
    """In fp32, without the imported config.json, and in bf16; transformers computes the same from it."""
    import transformers

    source = tmp_path / "in"
    shutil.copytree(judge[1], source)
    write_tokenizer(source)
    was, now = round_trip(source, tmp_path)
    assert was == now
    load = transformers.ModernBertForMaskedLM.from_pretrained
    found = logits_of(load(tmp_path / "out", attn_implementation="eager").eval())
    np.testing.assert_allclose(found, logits_of(judge[0]), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
        {"decoder_bias": False},
        {"hidden_activation": "gelu_pytorch_tanh", "classifier_activation": "gelu_new"},
        {"layer_types": ["full_attention"] * 6},
        {"layer_types": ["sliding_attention"] * 6, "local_attention": 9},
        {"local_attention": 200},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_variants(settings, tmp_path):
    pytest.importorskip("transformers")
    judge = random_modernbert(**settings)
    judge.save_pretrained(tmp_path)
    assert family_of_model(read_config(tmp_path)[1])[0].name == "modernbert"
    assert_words(training_of(model_of(tmp_path), pipe=2), tmp_path, logits_of(judge))
