"""tokamax's kernels: its reference on CPU devices through megajax's calls, and programs compiled for three generations.

What is tested of the kernels themselves is that XLA compiles them: jax's interpreter of Mosaic does not run them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_day.kernels import attention_in_numpy, grouped_in_numpy
from megajax.estimate import hlo
from megajax.estimate.gpus import find_gpu
from megajax.estimate.hlo_parser import computations
from megajax.estimate.kernels import kernel_of
from megajax.ops import tokamax_kernels
from megajax.ops.flash_attention import HIDDEN_SCORE
from megajax.plan.compiler import compile_for
from megajax.runtime import compat_kernels
from tests import gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not compat_kernels.tokamax_installed(), reason="tokamax is not installed; it needs Python 3.12"),
]
LENGTH = 40
attention_forward = jax.jit(tokamax_kernels.attention_forward, static_argnums=(0, 4))
attention_backward = jax.jit(tokamax_kernels.attention_backward, static_argnums=(0, 7))
grouped_product = jax.jit(tokamax_kernels.grouped_product, static_argnums=(0, 4))


def inputs(keys=LENGTH, dtype=np.float32):
    draw = np.random.default_rng(0)
    query, gradient = (draw.normal(size=(2, LENGTH, 4, 16)) for _ in range(2))
    key, value = (draw.normal(size=(2, keys, 2, 16)) for _ in range(2))
    return [np.asarray(jnp.asarray(a, dtype)) for a in (query, key, value, gradient)]


PLACES = np.arange(LENGTH)
FIRST = {
    "all": None,
    "documents": np.stack([np.where(PLACES < 13, 0, 13), PLACES - PLACES % 7]).astype(np.int32),
    "window": np.tile(np.maximum(PLACES - 5, 0), (2, 1)).astype(np.int32),
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("causal", [True, False])
def test_a_forward_by_the_reference_equals_numpy(causal, first):
    query, key, value, gradient = inputs(LENGTH if causal else 60)
    got = attention_forward(jax.devices()[0], query, key, value, causal, first)
    want = attention_in_numpy(query, key, value, gradient, causal, first)
    for got_, want_ in zip(got, want, strict=False):
        np.testing.assert_allclose(got_, want_, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_a_backward_by_the_reference_equals_numpy(causal):
    query, key, value, gradient = inputs(LENGTH if causal else 60)
    output, statistics, *want = attention_in_numpy(query, key, value, gradient, causal, None)
    results = np.float32(output), np.float32(statistics), gradient
    got = attention_backward(jax.devices()[0], query, key, value, *results, causal)
    for got_, want_ in zip(got, want, strict=True):
        np.testing.assert_allclose(got_, want_, rtol=1e-5, atol=1e-5)


def test_queries_that_see_no_key_have_output_0():
    query, key, value, _ = inputs()
    first = np.tile(np.where(PLACES < 30, 10, LENGTH), (2, 1)).astype(np.int32)
    output, statistics = attention_forward(jax.devices()[0], query, key, value, False, first)
    assert not output[:, 30:].any() and (statistics[..., 30:] == HIDDEN_SCORE).all()
    assert np.isfinite(output).all() and (statistics[..., :30] > HIDDEN_SCORE).all()


@pytest.mark.parametrize("sizes", [(10, 0, 23), (3, 3, 3), (0, 0, 0)], ids=str)
def test_a_product_by_the_reference_equals_numpy(sizes):
    draw = np.random.default_rng(0)
    shapes = (33, 8), (3, 8, 12), (33, 12)
    rows, kernels, slopes = (np.float32(draw.normal(size=shape)) for shape in shapes)
    want = grouped_in_numpy(rows, kernels, slopes, sizes)
    counts, device = np.array(sizes, np.int32), jax.devices()[0]
    np.testing.assert_allclose(grouped_product(device, rows, kernels, counts), want[0], rtol=1e-5, atol=1e-5)
    got = grouped_product(device, slopes, kernels, counts, True)
    np.testing.assert_allclose(got, want[1], rtol=1e-5, atol=1e-5)


GPUS = ("a100-80gb", "h100-80gb", "b200")
# A length that no width of these models has: heads of 80 have 640 queries, keys and values.
SHAPE = dataclasses.replace(gpu.LARGE, hidden=512, heads=4, kv_heads=2, sequence_length=896)
MASKS = {
    "causal": (SHAPE, {}),
    "documents": (SHAPE, {"documents": True}),
    "documents and a window in a ring": (
        dataclasses.replace(SHAPE, sliding_window=300),
        {"documents": True, "context": 2, "tensor": 2},
    ),
    "a ring": (SHAPE, {"context": 2}),
    "sinks": (dataclasses.replace(SHAPE, attention_sinks=True), {}),
    "heads of 80": (dataclasses.replace(SHAPE, hidden=320), {}),
    "heads of 256": (dataclasses.replace(SHAPE, hidden=1024), {}),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(("model", "options"), MASKS.values(), ids=MASKS)
def test_attention_compiles_for_three_generations(name, model, options):
    """Every kernel of tokamax, or of megajax, and no array of s x s; FLOPs are two products forward and seven backward."""
    run = gpu.run_of(model, 2, attention="tokamax", pipe=2, **options)
    text = compile_for(run, find_gpu(name))["hlo"]
    large = name == "b200" and model.hidden // model.heads > 128
    own = name == "a100-80gb" or "documents" in options or large
    backward = ("flash_attention_backward_query", "flash_attention_backward_key_value")
    assert set(hlo.read(text).kernels) >= {
        "flash_attention_forward",
        *(backward if own else ["flash_attention_backward"]),
    }
    assert f"{model.sequence_length},{model.sequence_length}" not in text
    check_products(text, model, options)


def check_products(text, model, options):
    """Two products forward, three and four in the backward's kernels, of each piece of the keys: a ring has halves too."""
    modules, _ = computations(text)
    found = set()
    for lines in modules.values():
        types = {line.name: line.type for line in lines}
        kernels = [kernel_of(line, types, modules) for line in lines]
        found |= {(one.backward, one.keys, one.flops) for one in kernels if one and one.kind == "attention"}
    queries = model.sequence_length // options.get("context", 1)
    pieces = [queries // 2, queries] if "context" in options else [queries]
    heads, width = model.heads // options.get("tensor", 1), model.hidden // model.heads
    for backward, counts in ((False, [2]), (True, [3, 4])):
        every_keys = sorted({keys for is_backward, keys, _ in found if is_backward == backward})
        for piece, keys in zip(pieces, every_keys, strict=True):
            assert piece <= keys <= padded(piece)
            flops = sorted(
                flops for is_backward, its_keys, flops in found if (is_backward, its_keys) == (backward, keys)
            )
            product = flops[0] / counts[0]
            assert flops == pytest.approx([product * count for count in counts])
            assert 2 * heads * queries * keys * width <= product <= 2 * heads * padded(queries) * keys * padded(width)


def padded(length):
    """A kernel's tiles have up to 128 rows and columns."""
    return -(-length // 128) * 128


SPARSE = dataclasses.replace(
    SHAPE, norm="rmsnorm", activation="swiglu", biases=False, feedforward=768, experts=8, experts_per_token=2
)


@pytest.mark.compiler
@pytest.mark.parametrize("name", GPUS)
def test_grouped_matmuls_compile_for_three_generations(name):
    run = gpu.run_of(SPARSE, 2, attention="xla", tensor=2)
    text = compile_for(run, find_gpu(name))["hlo"]
    module, blocks = hlo.read(text, hlo.loop_trip_counts(run)), 2 * SPARSE.layers
    assert module.kernels["grouped_matmul_product"] == 4 * blocks
    assert module.kernels["grouped_matmul_add"] == 2 * blocks
    assert ("mosaic_gpu_v2" in text) == (name == "b200")
    matrices = 3 * SPARSE.hidden * SPARSE.feedforward // 2
    assert (
        sum(one.flops for one in module.matmuls if one.grouped)
        == 3 * blocks * 2 * 2 * SPARSE.sequence_length * matrices
    )


@pytest.mark.slow
@pytest.mark.compiler
def test_grouped_matmuls_of_fp32_compile_for_b200s():
    """tokamax's product refuses fp32."""
    run = gpu.run_of(dataclasses.replace(SPARSE, layers=1), 2, attention="xla")
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, precision="fp32"))
    text = compile_for(run, find_gpu("b200"))["hlo"]
    assert (
        hlo.read(text, hlo.loop_trip_counts(run)).kernels["grouped_matmul_product"] > 0 and "mosaic_gpu_v2" not in text
    )
