"""Models whose blocks pass on a dictionary of arrays: a diffusion transformer, an encoder-decoder and two towers.

On every schedule their losses and gradients are those of the unpipelined model, and the losses those of references that
are written here another way, in numpy and fp64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import diffusion_transformer, encoder_decoder, two_towers
from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.config.sample import SampleConfig
from megajax.estimate.flops import flops_per_step
from megajax.estimate.memory import bytes_per_device
from megajax.generate.decoder import Decoder, DecodeSizes
from megajax.models.interface import ModelContext, mean_loss, model_class
from megajax.runtime.mesh import make_mesh
from megajax.train.check import check
from megajax.train.step import make_training
from tests import small

MODELS = {
    "dit": (diffusion_transformer.DiTConfig(layers=4), diffusion_transformer.DATA),
    "encoder-decoder": (encoder_decoder.EncoderDecoderConfig(encoder=3, decoder=5), encoder_decoder.Reversed()),
    "two towers": (two_towers.TwoTowersConfig(), two_towers.Pairs()),
}
LAYOUTS = {  # mesh, chunks, options
    "1f1b": ((2, 2, 2), 1, {}),
    "eager_1f1b": ((2, 2, 2), 1, {}),
    "interleaved_1f1b": ((2, 2, 2), 2, {"zero": 1}),
    "zb_h1": ((1, 4, 2), 1, {}),
    "zb_v": ((2, 2, 2), 2, {"zero": 3}),
    "dualpipe_v": ((2, 2, 2), 2, {}),
}


@functools.cache
def params_of(name):
    model = model_class(MODELS[name][0])(MODELS[name][0], ModelContext(recompute="none"))
    fresh = jax.jit(model.init)(jax.random.key(3))
    random = np.random.default_rng(4)
    return jax.tree.map(lambda a: np.asarray(a) + random.normal(0, 0.02, a.shape).astype(np.float32), fresh)


def unpipelined_loss(name):
    config, _ = MODELS[name]
    return functools.partial(mean_loss, model_class(config)(config, ModelContext(recompute="none")))


@functools.cache
def expected(name):
    found = jax.jit(jax.value_and_grad(unpipelined_loss(name)))(params_of(name), MODELS[name][1].batch(0))
    return jax.tree.map(np.asarray, found)


def expected_loss(name):
    return jax.jit(unpipelined_loss(name))(params_of(name), MODELS[name][1].batch(0))


def run_of(name, schedule="1f1b", mesh=(2, 2, 2), chunks=1, **options):
    sizes = dict(zip(("data", "pipe", "tensor"), mesh, strict=True), microbatch_size=8 // mesh[0])
    parallel = ParallelConfig(schedule=schedule, chunks=chunks, **sizes, **options)
    run = RunConfig(
        MODELS[name][0], parallel, TrainConfig(global_batch_size=32, steps=2, warmup_steps=1, precision="fp32")
    )
    run.validate()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_the_unpipelined_models(name, schedule):
    mesh, chunks, options = LAYOUTS[schedule]
    run = run_of(name, schedule, mesh, chunks, **options)
    training = make_training(run, make_mesh(run.parallel))
    loss, gradients = training.loss_and_gradients(small.place(training, params_of(name)), MODELS[name][1].batch(0))
    np.testing.assert_allclose(loss, expected(name)[0], rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), expected(name)[1], rtol=1e-5)


@pytest.mark.slow
def test_pipedream_2bw_trains_it():
    run = run_of("dit", "pipedream_2bw")
    training = make_training(run, make_mesh(run.parallel))
    state, losses = training.init_state(), []
    for _ in range(8):
        state, metrics = training.train_step(state, MODELS["dit"][1].batch(0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]


def standardized(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def softmax(x):
    return np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.slow
def test_the_diffusion_transformers_loss_is_the_one_written_by_hand():
    weights, batch = jax.tree.map(np.float64, params_of("dit")), MODELS["dit"][1].batch(0)
    shared, total = weights["shared"], 0.0
    for noisy, noise, time, label in zip(*(batch[k].reshape(32, *batch[k].shape[2:]) for k in batch), strict=True):
        image = noisy @ shared["patch"] + shared["place"]
        angles = time * 2.0 ** (np.arange(16) - 8)
        vector = np.concatenate([np.sin(angles), np.cos(angles)]) + shared["label"][label]
        for layer in range(4):
            own = {name: leaf[layer] for name, leaf in weights["blocks"].items()}
            made = (vector / (1 + np.exp(-vector)) @ own["modulation"]).reshape(7, 32)
            y = standardized(image) * (1 + made[1]) + made[0]
            for head in range(4):
                q, k, v = (y @ own["qkv"][:, n, head] for n in range(3))
                image = image + made[2] * (softmax(q @ k.T / np.sqrt(8)) @ v @ own["out"][head])
            y = standardized(image) * (1 + made[4]) + made[3]
            image = image + made[5] * (gelu(y @ own["up"]) @ own["down"])
            vector = vector + made[6]
        total += np.square(standardized(image + vector) @ shared["patch"].T - noise).mean()
    np.testing.assert_allclose(expected("dit")[0], total / 32, rtol=1e-5)


def attended(weights, x, other, norm, causal=False):
    """Flax's MultiHeadAttention of norm(x) on `other`."""
    total = 0.0
    for head in range(4):
        q, k, v = (
            of @ weights[name]["kernel"][:, head] for name, of in (("query", norm(x)), ("key", other), ("value", other))
        )
        scores = q @ k.T / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(*scores.shape) > 0, scores, -np.inf) if causal else scores
        total = total + softmax(scores) @ v @ weights["out"]["kernel"][head]
    return total


def test_the_encoder_decoders_loss_is_the_one_written_by_hand():
    weights, batch = jax.tree.map(np.float64, params_of("encoder-decoder")), MODELS["encoder-decoder"][1].batch(0)
    shared, total = weights["shared"], 0.0
    for source, target, labels in zip(*(batch[k].reshape(32, 8) for k in ("source", "target", "labels")), strict=True):
        x = {"encoder": shared["table"][source] + shared["place"], "decoder": shared["table"][target] + shared["place"]}
        for kind, layers in (("encoder", 3), ("decoder", 5)):
            y = x[kind]
            for layer in range(layers):
                own = jax.tree.map(lambda leaf: leaf[layer], weights["blocks"][kind])  # noqa: B023

                def norm(y, own=own):
                    return standardized(y) * own["norm"]["scale"] + own["norm"]["bias"]

                y = y + attended(own["attend"], y, norm(y), norm, causal=kind == "decoder")
                if kind == "decoder":
                    y = y + attended(own["read"], y, x["encoder"], norm)
                y = y + gelu(norm(y) @ own["up"]) @ own["down"]
            x[kind] = y
        right = softmax(x["decoder"] @ shared["table"].T)[np.arange(8), labels]
        total -= np.log(right).mean()
    np.testing.assert_allclose(expected_loss("encoder-decoder"), total / 32, rtol=1e-5)


@pytest.mark.slow
def test_the_two_towers_loss_is_the_one_written_by_hand():
    weights, batch = jax.tree.map(np.float64, params_of("two towers")), MODELS["two towers"][1].batch(0)
    shared, total = weights["shared"], 0.0
    for query, documents in zip(batch["query"].reshape(32, 6), batch["document"].reshape(32, 4, 12), strict=True):
        means = {}
        for name, texts in (("query", [query]), ("document", documents)):
            for text in texts:
                x = shared[name][text]
                for layer in range(4):
                    own = jax.tree.map(lambda leaf: leaf[layer], weights["blocks"][name])  # noqa: B023

                    def norm(y, own=own):
                        return y / np.sqrt(np.square(y).mean(-1, keepdims=True) + 1e-6) * own["norm"]["scale"]

                    x = x + attended(own["attend"], x, norm(x), norm)
                    x = x + gelu(norm(x) @ own["up"]) @ own["down"]
                means.setdefault(name, []).append(x.mean(0))
        scores = np.array(means["document"]) @ (means["query"][0] @ shared["match"])
        total -= np.log(softmax(scores)[0])
    np.testing.assert_allclose(expected_loss("two towers"), total / 32, rtol=1e-5)


def test_sizes_of_all_arrays_are_counted():
    """What stages send each other is all of x: the model's width for the estimates is that of all its arrays."""
    config = two_towers.TwoTowersConfig()
    costs = two_towers.TwoTowers(config).costs()
    assert costs.sequence_length == 4 * 12
    assert costs.hidden == 32 + 6 * 16 // 48
    run = run_of("two towers")
    assert flops_per_step(run) > 0 and sum(bytes_per_device(run).values()) > 0


@pytest.mark.slow
def test_costs_of_an_encoder_and_a_decoder_are_those_of_their_layers():
    """Of each kind by hand, h = 32: four matmuls h x h of an attention, two of h x 4h, and a norm of two vectors."""
    config = MODELS["encoder-decoder"][0]
    costs = encoder_decoder.EncoderDecoder(config).costs()
    (decoders, decoder), (encoders, encoder) = costs.kinds
    assert (encoders, decoders) == (3, 5)
    assert encoder.block.total == 12 * 32 * 32 + 64 and decoder.block.total == 16 * 32 * 32 + 64
    assert (costs.hidden, costs.sequence_length) == (64, 8)  # source and target
    fresh = jax.eval_shape(encoder_decoder.EncoderDecoder(config).init, jax.random.key(0))
    assert costs.parameters == sum(leaf.size for leaf in jax.tree.leaves(fresh))
    run = run_of("encoder-decoder")
    assert flops_per_step(run) > 0 and sum(bytes_per_device(run).values()) > 0


class Changed(diffusion_transformer.Ends):
    def embed(self, microbatch):
        return super().embed(microbatch) | {"label": microbatch["class"]}


def without_gradient(ends, axes):
    return type("Wrong", (diffusion_transformer.DiT,), {"shared_module": ends, "activation_axes": axes})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            without_gradient(Changed, diffusion_transformer.DiT.activation_axes),
            "embed of Wrong returns a dictionary of 'conditioning', 'image', 'label' for the batch; expected a dictionary "
            "of 'image', 'conditioning', those of activation_axes",
        ),
        (
            without_gradient(Changed, {**diffusion_transformer.DiT.activation_axes, "label": ("batch",)}),
            "embed of Wrong returns int32 .8. as 'label' for the batch, and gradients pass through all that blocks pass on",
        ),
        (
            without_gradient(diffusion_transformer.Ends, {"image": ("batch",), "conditioning": ("batch", "hidden")}),
            "embed of Wrong returns float32 .8, 16, 32. as 'image' for the batch; expected one array of 1 axes",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(model, message):
    with pytest.raises(ConfigError, match=message):
        check(model(MODELS["dit"][0], ModelContext(dtype=jnp.float32)), MODELS["dit"][1].batch(0))


def test_texts_are_generated_of_models_that_pass_on_one_array():
    run = run_of("two towers", mesh=(1, 1, 1))
    with pytest.raises(
        ConfigError, match="TwoTowers passes several arrays from block to block .query, document.: texts"
    ):
        Decoder(run, make_mesh(run.parallel), DecodeSizes(1, 1, 2), SampleConfig())
