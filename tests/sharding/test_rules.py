"""The model under the axis rules: sharded values equal the unsharded ones, with Megatron's collectives."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError, ModelConfig
from megajax.ops.linear import plain_operations
from megajax.ops.vocabulary import VocabularySharding, lookup
from megajax.sharding.rules import default_rules
from tests import small

GPT = ModelConfig(layers=2, hidden=32, heads=4, vocabulary=251, sequence_length=16, dropout=0.1)
LLAMA = ModelConfig(
    layers=2,
    hidden=32,
    heads=8,
    kv_heads=4,
    feedforward=48,
    vocabulary=251,
    sequence_length=16,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    tied_embeddings=False,
    biases=False,
)
QWEN = dataclasses.replace(
    LLAMA, head_size=6, query_key_norm=True, qkv_biases=True, activation="geglu", rotary_fraction=0.67, sliding_window=5
)
OVER_HEADS = dataclasses.replace(QWEN, qkv_biases=False, query_key_norm_over="projection")
MANUAL = ("data", "pipe")
SAMPLES = 4


def make_mesh(data, pipe, tensor):
    shape = (data, pipe, tensor)
    devices = jax.devices()[: data * pipe * tensor]
    return jax.make_mesh(shape, ("data", "pipe", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=devices)


def sharded_functions(config, sequence_parallel, **options):
    rules = default_rules(sequence_parallel=sequence_parallel)
    vocabulary = VocabularySharding(lookup=partial(lookup, sequence_parallel=sequence_parallel))
    context = {"constrain": rules.constrain, "operations": plain_operations(rules.constrain), "vocabulary": vocabulary}
    return rules, small.build_model(config, **context, **options)


def lay(config, rules, mesh):
    """(weights of block 1, shared), sharded by the rules."""
    model = small.build_model(config, vocabulary=VocabularySharding(mesh.shape["tensor"]))
    params = small.busy_params(config, tensor=mesh.shape["tensor"])
    specs = jax.tree.map(rules.spec, model.logical_axes(), is_leaf=lambda node: isinstance(node, tuple))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
    weights = jax.tree.map(lambda a, spec: put(a[1], P(*spec[1:])), params["blocks"], specs["blocks"])
    return weights, jax.tree.map(put, params["shared"], specs["shared"])


def make_microbatch(config):
    draw, shape = np.random.default_rng(0), (SAMPLES, config.sequence_length)
    return {
        "tokens": draw.integers(0, config.vocabulary, shape, np.int32),
        "labels": draw.integers(0, config.vocabulary, shape, np.int32),
        "weights": draw.integers(0, 2, shape).astype(np.float32),
        "sample": np.arange(7, 7 + SAMPLES, dtype=np.uint32),
    }


def model_step(model, weights, shared, microbatch):
    """Loss, and gradients of the block's and the shared weights, of embed, one block and head_loss."""

    def loss(weights, shared):
        y = model.block(weights, model.embed(shared, microbatch), microbatch, 1)
        return model.head_loss(shared, y, microbatch)

    value, vjp = jax.vjp(loss, weights, shared)
    return value, vjp(jnp.ones_like(value))


def vary(tree):
    def one(x):
        return lax.pcast(x, tuple(set(MANUAL) - jax.typeof(x).mat.varying), to="varying")

    return jax.tree.map(one, tree)


def in_one_rank(model, *arguments):
    """`model_step` on the last pipeline rank only, summed over data: as an executor with a conditional calls it."""
    on = partial(model_step, model, *vary(arguments))

    def off():
        return vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(on)))

    return lax.psum(lax.cond(lax.axis_index("pipe") == 1, lambda: vary(on()), off), MANUAL)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4), (2, 2, 1)], ids=str)
@pytest.mark.parametrize(
    "config",
    [GPT, LLAMA, QWEN, OVER_HEADS],
    ids=["gpt", "llama", "qwen", "over heads"],
)
def test_values_and_gradients_inside_the_executors_shard_map(config, shape, sequence_parallel):
    """fp32, with dropout in the GPT: its masks must be the unsharded ones."""
    mesh = make_mesh(*shape)
    rules, model = sharded_functions(config, sequence_parallel)
    arguments = (*lay(config, rules, mesh), make_microbatch(config))
    whole = jax.tree.map(np.asarray, arguments)
    expected = jax.jit(partial(model_step, small.build_model(config)))(*whole)

    specs = dict(in_specs=(P(), P(), P("data")), out_specs=P())
    step = jax.shard_map(partial(in_one_rank, model), mesh=mesh, axis_names=set(MANUAL), check_vma=True, **specs)
    compiled = jax.jit(step).lower(*arguments).compile()
    assert "collective-permute" not in compiled.as_text()
    assert "all-to-all" not in compiled.as_text()

    def close(got, want):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())

    jax.tree.map(close, compiled(*arguments), expected)


@pytest.mark.slow
def test_values_and_gradients_in_a_plain_jit():
    mesh = make_mesh(2, 1, 4)
    rules, model = sharded_functions(GPT, True)
    with jax.set_mesh(mesh):
        weights, shared = lay(GPT, rules, mesh)
        microbatch = jax.device_put(make_microbatch(GPT), NamedSharding(mesh, P("data")))
        got = jax.jit(partial(model_step, model))(weights, shared, microbatch)
        logits = jax.jit(model.logits)(shared, jnp.ones((SAMPLES, 16, 32)))
    whole = jax.tree.map(np.asarray, (weights, shared, microbatch))
    expected = jax.jit(partial(model_step, small.build_model(GPT)))(*whole)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())  # noqa: E731
    jax.tree.map(close, got, expected)
    assert logits.sharding.spec == P("data", None, "tensor")


@pytest.mark.slow
def test_bf16_compiles_and_stays_close():
    """16-bit sums have aborted XLA's CPU compiler inside a shard_map; bf16 is the default precision."""
    mesh = make_mesh(2, 2, 2)
    rules, model = sharded_functions(GPT, True, dtype=jnp.bfloat16)
    arguments = (*lay(GPT, rules, mesh), make_microbatch(GPT))
    specs = dict(in_specs=(P(), P(), P("data")), out_specs=P())
    step = jax.shard_map(partial(in_one_rank, model), mesh=mesh, axis_names=set(MANUAL), check_vma=True, **specs)
    loss, _ = jax.jit(step)(*arguments)
    expected, _ = model_step(small.build_model(GPT), *jax.tree.map(np.asarray, arguments))
    np.testing.assert_allclose(loss, expected, rtol=1e-3)


@pytest.mark.parametrize(("sequence_parallel", "gathers"), [pytest.param(False, 0, marks=pytest.mark.slow), (True, 2)])
@pytest.mark.parametrize(
    "config",
    [pytest.param(GPT, marks=pytest.mark.slow), pytest.param(LLAMA, marks=pytest.mark.slow), QWEN],
    ids=["gpt", "llama", "qwen"],
)
def test_collectives_of_a_blocks_forward(config, sequence_parallel, gathers):
    """Two all-reduces per block (1909.08053); with sequence parallelism two gathers and two reduce-scatters (2205.05198).

    XLA's CPU compiler leaves a reduce-scatter as an all-reduce and a slice, so either counts as a sum.
    """
    mesh = make_mesh(1, 1, 2)
    rules, model = sharded_functions(config, sequence_parallel)
    with jax.set_mesh(mesh):
        weights, _ = lay(config, rules, mesh)
        x = jax.device_put(jnp.ones((2, 16, 32)), NamedSharding(mesh, rules.spec(("batch", "sequence", "hidden"))))
        sample = {"sample": np.arange(2, dtype=np.uint32)}
        text = jax.jit(lambda w, x: model.block(w, x, sample, 1)).lower(weights, x).compile().as_text()
    count = {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES}
    assert count["all-reduce"] + count["reduce-scatter"] == 2
    assert count["all-gather"] == gathers
    assert count["collective-permute"] == count["all-to-all"] == 0


COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all")


def test_a_block_keeps_its_residuals_sharding():
    mesh = make_mesh(2, 1, 2)
    rules, model = sharded_functions(LLAMA, True)
    with jax.set_mesh(mesh):
        weights, _ = lay(LLAMA, rules, mesh)
        y = jax.jit(lambda w, x: model.block(w, x, {}, 1))(weights, jnp.ones((2, 16, 32)))
    assert y.sharding.spec[:2] == ("data", "tensor")


def test_specs():
    rules, plain = default_rules(), default_rules(sequence_parallel=False)
    assert rules.spec(("layers", "hidden", "groups", None, None)) == P(None, None, "tensor", None, None)
    assert rules.spec(("batch", "sequence", "hidden")) == P("data", "tensor", None)
    assert plain.spec(("batch", "sequence", "hidden")) == P("data", None, None)
    with pytest.raises(ConfigError, match="'sequense' has no sharding rule: did you mean sequence"):
        rules.spec(("sequense",))


def test_init_on_a_mesh_gives_the_same_values():
    """Each device initializes its own shard, so a run's loss curve starts at the same point on any mesh."""
    mesh, rules = make_mesh(1, 2, 4), default_rules()
    model = small.build_model(dataclasses.replace(GPT, layers=1), vocabulary=VocabularySharding(4))
    specs = jax.tree.map(rules.spec, model.logical_axes(), is_leaf=lambda node: isinstance(node, tuple))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    draw = partial(model.init, jax.random.key(0))
    laid, whole = jax.jit(draw, out_shardings=shardings)(), jax.jit(draw)()
    jax.tree.map(np.testing.assert_array_equal, laid, whole)
