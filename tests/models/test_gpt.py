"""The whole model: initial values, axes, the loss compared with numpy, and independence of padding."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import padded_vocabulary
from megajax.models.interface import mean_loss
from megajax.ops.vocabulary import VocabularySharding, cross_entropy
from tests import small
from tests.models.configs import GPT, LLAMA, MODELS, QWEN

LARGER = dataclasses.replace(GPT, layers=5, vocabulary=500, sequence_length=64)


@cache
def make(config, tensor=1):
    return jax.jit(lambda: small.build_model(config, vocabulary=VocabularySharding(tensor)).init(jax.random.key(0)))()


@cache
def loss_at_the_start(config):
    return jax.jit(partial(mean_loss, small.build_model(config)))(make(config), make_batch(config))


def make_batch(config, microbatches=2, samples=3):
    draw, shape = np.random.default_rng(0), (microbatches, samples, config.sequence_length)
    return {
        "tokens": draw.integers(0, config.vocabulary, shape, np.int32),
        "labels": draw.integers(0, config.vocabulary, shape, np.int32),
        "weights": draw.integers(0, 2, shape).astype(np.float32),
        "sample": np.arange(microbatches * samples, dtype=np.uint32).reshape(microbatches, samples),
    }


@MODELS
def test_parameter_count_is_the_configs(config):
    params = jax.eval_shape(lambda: small.build_model(config).init(jax.random.key(0)))
    padding = (padded_vocabulary(61, 1) - 61) * config.hidden * (1 if config.tied_embeddings else 2)
    assert sum(a.size for a in jax.tree.leaves(params)) - padding == config.parameters


# A qwen's embedding and head are a llama's; its block is quick in test_transformer.py.
GPT_AND_LLAMA = pytest.mark.parametrize(
    "config", [GPT, LLAMA, pytest.param(QWEN, marks=pytest.mark.slow)], ids=["gpt", "llama", "qwen"]
)


@GPT_AND_LLAMA
def test_loss_at_the_start_is_that_of_a_uniform_guess(config):
    assert abs(float(loss_at_the_start(config)) - np.log(61)) < 0.05


@GPT_AND_LLAMA
def test_loss_equals_a_numpy_reference(config):
    """Embedding, final norm, logits and cross entropy in float64 numpy around the blocks (see test_transformer.py)."""
    params, batch, model = make(config), make_batch(config), small.build_model(config)
    block, shared = jax.jit(model.block), jax.tree.map(np.float64, params["shared"])
    x = shared["embedding"]["tokens"][batch["tokens"]] + shared["embedding"].get("positions", 0)
    total = 0
    for m in range(2):
        y = jnp.float32(x[m])
        for layer in range(config.layers):
            y = block(jax.tree.map(lambda a, i=layer: a[i], params["blocks"]), y, {}, layer)
        y = np.float64(y)
        if config.norm == "layernorm":
            y = y - y.mean(-1, keepdims=True)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + config.norm_epsilon)
        table = shared["embedding"]["tokens"] if config.tied_embeddings else shared["head"]["vocabulary"]
        probability = np.exp(y @ table[:61].T)
        probability /= probability.sum(-1, keepdims=True)
        picked = np.take_along_axis(probability, batch["labels"][m][..., None], -1)[..., 0]
        total -= (batch["weights"][m] * np.log(picked)).sum()
    np.testing.assert_allclose(loss_at_the_start(config), total / batch["weights"].sum(), rtol=1e-6)


def test_logits_mask_the_padding():
    params = make(GPT)
    logits = jax.jit(small.build_model(GPT, dtype=jnp.bfloat16).logits)(
        params["shared"], jnp.ones((1, 16, 32), jnp.bfloat16)
    )
    assert logits.shape == (1, 16, 128)
    assert logits.dtype == jnp.float32
    assert (logits[..., 61:] < -1e29).all()
    assert (jnp.abs(logits[..., :61]) < 100).all()


def test_cross_entropy_has_autodiffs_gradient():
    logits = np.random.default_rng(0).normal(size=(2, 5, 128)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 61, (2, 5))
    weights = np.random.default_rng(2).normal(size=(2, 5)).astype(np.float32)

    def plain(logits):
        log_softmax = jax.nn.log_softmax(logits[..., :61])
        return -(weights * jnp.take_along_axis(log_softmax, labels[..., None], -1)[..., 0]).sum()

    ours = jax.jit(jax.value_and_grad(lambda z: (weights * cross_entropy(z, labels, 61)).sum()))(logits)
    for a, b in zip(ours, jax.jit(jax.value_and_grad(plain))(logits), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert (ours[1][..., 61:] == 0).all()


@pytest.mark.parametrize(
    "config",
    [pytest.param(GPT, id="gpt", marks=pytest.mark.slow), pytest.param(LLAMA, id="llama", marks=pytest.mark.slow)],
)
def test_padded_rows_change_no_value_and_no_gradient(config):
    """For tensor = 3 the 61 rows are 384, for tensor = 1 128: same values, same loss, no gradient in the padding."""
    few, many, batch, model = make(config, 1), make(config, 3), make_batch(config), small.build_model(config)
    loss = jax.jit(jax.value_and_grad(lambda params: mean_loss(model, params, batch)))
    (loss_few, gradient_few), (loss_many, gradient_many) = loss(few), loss(many)
    np.testing.assert_allclose(loss_few, loss_many, rtol=1e-6)

    def same(a, b):
        cut = (slice(61),) if a.shape != b.shape else ()
        np.testing.assert_allclose(a[cut], b[cut], rtol=1e-5, atol=1e-7)

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:61], b[:61]), few["shared"], many["shared"])
    jax.tree.map(same, gradient_few, gradient_many)
    table = ("embedding", "tokens") if config.tied_embeddings else ("head", "vocabulary")
    assert (gradient_many["shared"][table[0]][table[1]][61:] == 0).all()


def test_initial_values_have_the_papers_scale():
    params = make(LARGER)
    blocks = params["blocks"]
    reduced = 0.02 / np.sqrt(2 * 5)
    expected = [
        (blocks["attention"]["qkv"]["kernel"], 0.02),
        (blocks["feedforward"]["up"]["kernel"], 0.02),
        (blocks["attention"]["output"]["kernel"], reduced),
        (blocks["feedforward"]["down"]["kernel"], reduced),
        (params["shared"]["embedding"]["tokens"][:500], 0.02),
        (params["shared"]["embedding"]["positions"], 0.02),
    ]
    for value, deviation in expected:
        assert abs(value.std() / deviation - 1) < 0.05
        assert abs(value.mean()) < 0.05 * deviation
    assert (blocks["attention_norm"]["scale"] == 1).all()
    assert (blocks["feedforward"]["down"]["bias"] == 0).all()


def test_initial_values_depend_on_name_and_layer_alone():
    params, deeper, wider = make(GPT), make(LARGER), make(LLAMA)
    kernel = params["blocks"]["attention"]["qkv"]["kernel"]
    np.testing.assert_array_equal(kernel, deeper["blocks"]["attention"]["qkv"]["kernel"][:3])
    assert len(np.unique(kernel)) > 0.99 * kernel.size  # no two layers share values
    np.testing.assert_array_equal(params["shared"]["embedding"]["tokens"], wider["shared"]["embedding"]["tokens"])
    assert np.abs(wider["shared"]["embedding"]["tokens"] - wider["shared"]["head"]["vocabulary"]).max() > 0.01


@MODELS
def test_axes_and_decay_fit_the_parameters(config):
    params = jax.eval_shape(lambda: small.build_model(config).init(jax.random.key(0)))
    axes, decay = small.build_model(config).logical_axes(), small.build_model(config).decay_mask()
    is_leaf = lambda node: isinstance(node, tuple)  # noqa: E731
    assert jax.tree.structure(axes, is_leaf=is_leaf) == jax.tree.structure(params) == jax.tree.structure(decay)
    jax.tree.map(lambda p, names: len(p.shape) == len(names) or pytest.fail(str(names)), params, axes)
    assert all(names[0] == "layers" for names in jax.tree.leaves(axes["blocks"], is_leaf=is_leaf))
    for path, decayed in jax.tree.leaves_with_path(decay):
        assert decayed == (path[-1].key in ("kernel", "tokens", "positions", "vocabulary")), path


def test_a_shorter_sequence_is_legal():
    """Generation feeds fewer tokens than the table has positions."""
    model, params = small.build_model(GPT), make(GPT)
    tokens = make_batch(GPT)["tokens"][0]
    x = model.embed(params["shared"], {"tokens": tokens})
    short = model.embed(params["shared"], {"tokens": tokens[:, :5]})
    np.testing.assert_array_equal(x[:, :5], short)
