"""The block compared with a numpy reference, the values it stores per recompute mode, and its dropout."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ConfigError, ModelConfig
from megajax.models.rotary import attention_factor, frequencies, rotary_table, rotate
from megajax.models.transformer_costs import transformer_costs
from tests import small
from tests.models.configs import GPT, LLAMA, MODELS, QWEN


def changed(config: ModelConfig, **fields) -> ModelConfig:
    return ModelConfig(**{**vars(config), **fields})


def numpy_norm(x, weights, epsilon, kind):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weights["scale"] + weights.get("bias", 0)


def numpy_rotate(x, config):
    """[s, d], pair (i, i + n/2) of the first n elements rotated by position * frequency, as complex numbers."""
    half = config.rotated_dimension // 2
    turn = np.exp(1j * np.outer(np.arange(len(x)), frequencies(config, np))) * attention_factor(config)
    z = (x[:, :half] + 1j * x[:, half : 2 * half]) * turn
    return np.concatenate([z.real, z.imag, x[:, 2 * half :]], -1)


def numpy_block(config: ModelConfig, w, x):
    """One sample x [s, h] through one block, head by head and query by query, in float64."""
    w, x = jax.tree.map(np.float64, w), np.float64(x)
    bias = lambda weights: weights.get("bias", 0)  # noqa: E731
    y = numpy_norm(x, w["attention_norm"], config.norm_epsilon, config.norm)
    share, total = config.heads // config.key_value_heads, 0
    for head in range(config.heads):
        kernel = w["attention"]["qkv"]["kernel"][:, head // share]  # [h, heads of the group + 2, d]
        added = w["attention"]["qkv"].get("bias", np.zeros((config.key_value_heads, share + 2, config.head_dimension)))
        query, key, value = (y @ kernel[:, i] + added[head // share, i] for i in (head % share, share, share + 1))
        if config.query_key_norm and config.query_key_norm_over == "projection":
            of_queries, of_keys = (
                w["attention"]["qkv"]["kernel"][..., :-2, :],
                w["attention"]["qkv"]["kernel"][..., -2, :],
            )
            every = (np.tensordot(y, of_queries, 1), np.tensordot(y, of_keys, 1))  # of all heads
            root = [
                np.sqrt((each**2).reshape(len(x), -1).mean(-1, keepdims=True) + config.norm_epsilon) for each in every
            ]
            query = query / root[0] * w["attention"]["query_norm"]["scale"][head // share, head % share]
            key = key / root[1] * w["attention"]["key_norm"]["scale"][head // share]
        elif config.query_key_norm:
            query, key = (
                numpy_norm(x, w["attention"][name], config.norm_epsilon, "rmsnorm")
                for x, name in ((query, "query_norm"), (key, "key_norm"))
            )
        if config.positions == "rotary":
            query, key = numpy_rotate(query, config), numpy_rotate(key, config)
        context = np.zeros_like(value)
        for position in range(len(x)):
            seen = slice(max(0, position + 1 - (config.sliding_window or len(x))), position + 1)
            scores = np.exp(key[seen] @ query[position] / np.sqrt(config.head_dimension))
            context[position] = scores / scores.sum() @ value[seen]
        total = total + context @ w["attention"]["output"]["kernel"][head]
    x = x + total + bias(w["attention"]["output"])
    y = numpy_norm(x, w["feedforward_norm"], config.norm_epsilon, config.norm)
    up = np.tensordot(y, w["feedforward"]["up"]["kernel"], 1) + bias(w["feedforward"]["up"])
    gate = up[:, 0] if config.is_gated else up
    if config.activation == "swiglu":
        active = gate / (1 + np.exp(-gate))
    elif config.activation == "gelu_exact":
        active = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / np.sqrt(2)))
    else:
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    active = active * up[:, 1] if config.is_gated else active
    return x + active @ w["feedforward"]["down"]["kernel"] + bias(w["feedforward"]["down"])


@cache
def one_block(config: ModelConfig, samples=2):
    """(weights of block 1, x [samples, s, h])."""
    weights = jax.tree.map(lambda a: a[1], small.busy_params(config, deviation=0.1)["blocks"])
    x = np.random.default_rng(1).normal(size=(samples, config.sequence_length, config.hidden)).astype(np.float32)
    return weights, x


@MODELS
def test_forward_equals_a_numpy_reference(config):
    weights, x = one_block(config)
    y = jax.jit(small.build_model(config).block)(weights, x, {}, 1)
    expected = np.stack([numpy_block(config, weights, sample) for sample in x])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "change",
    [
        dict(norm="rmsnorm", positions="rotary", kv_heads=1),
        dict(head_size=5, biases=False, qkv_biases=True),
        dict(qkv_biases=False, activation="gelu_exact", sliding_window=1),
        dict(
            positions="rotary", rotary_scaling="yarn", rotary_factor=4.0, rotary_original_length=8, rotary_beta_fast=2.0
        ),
        dict(positions="rotary", rotary_scaling="linear", rotary_factor=2.0, query_key_norm=True),
        dict(qkv_biases=False, kv_heads=2, query_key_norm=True, query_key_norm_over="projection"),
    ],
)
def test_options_can_be_combined(change):
    config = changed(GPT, **change)
    weights, x = one_block(config, samples=1)
    y = jax.jit(small.build_model(config).block)(weights, x, {}, 1)
    np.testing.assert_allclose(y[0], numpy_block(config, weights, x[0]), rtol=1e-5, atol=2e-5)


def test_rotation_depends_on_distance_only():
    query, key = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    config = changed(LLAMA, sequence_length=12)
    rotated = [
        np.asarray(rotate(np.tile(vector, (1, 12, 1, 1)), rotary_table(config, np.arange(12)[None])))[0, :, 0]
        for vector in (query, key)
    ]
    products = rotated[0] @ rotated[1].T
    for distance in range(-11, 12):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)


def forward(config, mode, weights, x, microbatch):
    """(y, its VJP), as the executor makes them."""
    block = small.build_model(config, recompute=mode).block
    return jax.vjp(lambda w, x: block(w, x, microbatch, jnp.int32(1)), weights, x)


@pytest.mark.parametrize(
    "config",
    [*(pytest.param(config, marks=pytest.mark.slow) for config in (GPT, LLAMA)), QWEN],
    ids=["gpt", "llama", "qwen"],
)
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_recompute_changes_no_value_and_no_gradient(config, dropout):
    config = changed(config, dropout=dropout)
    weights, x = one_block(config)
    microbatch = {"sample": np.arange(2, dtype=np.uint32)}

    @jax.jit
    def all_modes(weights, x):
        pairs = [forward(config, mode, weights, x, microbatch) for mode in ("none", "selective", "full")]
        return [(y, vjp(jnp.cos(y))) for y, vjp in pairs]

    expected, *others = all_modes(weights, x)
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@MODELS
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_block_stashes_exactly_the_named_values(config, dropout, mode):
    config = changed(config, dropout=dropout)
    weights, x = one_block(config)
    sample = {"sample": np.arange(2, dtype=np.uint32)}
    _, vjp = jax.eval_shape(lambda w, x: forward(config, mode, w, x, sample), weights, jnp.bfloat16(x))
    stash = [a for a in jax.tree.leaves(vjp.opaque_residuals) if hasattr(a, "shape") and a.size > x.shape[0]]
    values = transformer_costs(config).kept_values(mode)[1:]  # the input is an argument, not a residual
    assert sorted(a.size for a in stash) == sorted(2 * value.elements(config.sequence_length) for value in values)
    kept = sum(a.size * a.dtype.itemsize for a in stash) + x.size * 2
    assert kept == transformer_costs(config).kept_bytes(mode, samples=2)
    if mode == "full":
        assert not stash


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "change",
    [
        dict(norm_placement="post", query_key_norm=True, query_key_norm_over="projection"),
        dict(norm_placement="both", norm_offset=True, attention_softcap=5.0, residual_multiplier=0.5),
        dict(norm_placement="parallel", rotary_pairs="neighbours", attention_scale=0.3),
        dict(
            rotated_norm=True,
            layer_pattern="a,b",
            kind_fields=("a.chunked_attention=4", "b.positions=none", "b.query_growth=0.5"),
        ),
        dict(mixer="none", activation="squared_relu"),
        dict(attention_sinks=True, output_biases=True, layer_pattern="a,b", kind_fields=("a.sliding_window=4",)),
    ],
)
def test_what_blocks_with_other_fields_stash(change, mode):
    test_a_block_stashes_exactly_the_named_values(changed(LLAMA, **change), 0.0, mode)


@pytest.mark.parametrize(("mode", "matmuls"), [("none", 12), ("selective", 13), ("full", 17)])
def test_matmuls_of_the_backward(mode, matmuls):
    weights, x = one_block(GPT)
    y, vjp = jax.eval_shape(lambda w, x: forward(GPT, mode, w, x, {}), weights, x)
    assert str(jax.make_jaxpr(lambda vjp, dy: vjp(dy))(vjp, y)).count("dot_general") == matmuls


def test_bytes_stay_within_the_papers_table():
    """2205.05198 table 2, per sbh, for its 175B model: h = 12288, a = 96, s = 2048, t = 8, dropout on."""
    config = ModelConfig(layers=96, hidden=12288, heads=96, vocabulary=51200, sequence_length=2048, dropout=0.1)
    sbh = 2048 * 12288

    def per_sbh(mode, **layout):
        return transformer_costs(config).kept_bytes(mode, samples=1, **layout) / sbh

    assert per_sbh("none") <= 34 + 5 * 96 * 2048 / 12288
    assert per_sbh("selective") == 20 <= 34
    assert per_sbh("full") == 2
    assert per_sbh("selective", tensor=8) == 20 / 8 <= 34 / 8
    assert per_sbh("selective", tensor=8, sequence_parallel=False) == 4 + 16 / 8 <= 10 + 24 / 8
    assert per_sbh("none", tensor=8) <= (34 + 5 * 96 * 2048 / 12288) / 8


def test_fused_attention_keeps_its_statistics_and_no_probabilities():
    """One fp32 number per query and head, in addition to the values of selective recompute; `none` stores less."""
    config = ModelConfig(layers=96, hidden=12288, heads=96, vocabulary=51200, sequence_length=2048)
    kept = {
        (mode, fused): transformer_costs(config).kept_bytes(mode, samples=1, tensor=8, fused_attention=fused)
        for mode in ("none", "selective", "full")
        for fused in (False, True)
    }
    statistics = 4 * 96 * 2048 // 8
    assert kept["selective", True] == kept["selective", False] + statistics
    assert kept["full", True] == kept["full", False]
    assert kept["none", True] == kept["none", False] + statistics - 2 * 96 * 2048**2 // 8


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="did you mean selective"):
        small.build_model(GPT, recompute="selectiv")


def test_a_bf16_block_stays_close_to_fp32():
    """The output is bf16 and close to the fp32 block's."""
    weights, x = one_block(GPT)
    y = jax.jit(small.build_model(GPT, dtype=jnp.bfloat16).block)(weights, jnp.bfloat16(x), {}, 1)
    assert y.dtype == jnp.bfloat16
    expected = jax.jit(small.build_model(GPT).block)(weights, x, {}, 1)
    assert np.abs(np.float32(y) - expected).max() < 0.05 * np.abs(expected).max()


class TestDropout:
    config = changed(GPT, dropout=0.2)

    def test_the_mask_depends_on_the_sample_and_the_layer_not_on_the_microbatch(self):
        weights, x = one_block(self.config, samples=4)
        block = jax.jit(small.build_model(self.config, dropout_seed=3).block)
        whole = block(weights, x, {"sample": np.arange(4, dtype=np.uint32)}, 1)
        parts = [block(weights, x[i : i + 2], {"sample": np.arange(i, i + 2, dtype=np.uint32)}, 1) for i in (0, 2)]
        np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-5, atol=1e-5)
        other = {
            "layer": block(weights, x, {"sample": np.arange(4, dtype=np.uint32)}, 2),
            "sample": block(weights, x, {"sample": np.arange(4, 8, dtype=np.uint32)}, 1),
            "seed": jax.jit(small.build_model(self.config, dropout_seed=4).block)(
                weights, x, {"sample": np.arange(4, dtype=np.uint32)}, 1
            ),
        }
        for y in other.values():
            assert np.abs(whole - y).max() > 0.1

    def test_dropout_keeps_the_expectation(self):
        shared = small.busy_params(self.config)["shared"]
        microbatch = {"tokens": np.zeros((200, 16), np.int32), "sample": np.arange(200, dtype=np.uint32)}
        dropped = np.asarray(jax.jit(small.build_model(self.config).embed)(shared, microbatch))
        plain = np.asarray(jax.jit(small.build_model(GPT).embed)(shared, microbatch))
        assert abs((dropped == 0).mean() - 0.2) < 0.01
        np.testing.assert_allclose(dropped[dropped != 0], plain[dropped != 0] / 0.8, rtol=1e-5)
