"""Experts' matmuls in 8 bits: products against numpy, gradients and losses of models, and compiled for H100s."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.estimate import hlo
from megajax.models import context
from megajax.ops.grouped_matmul import INTERPRETED, XLA
from megajax.train import step as step_module
from tests import dense_experts, gpu, small
from tests.ops.test_grouped_kernels import BLOCKS, MICROBATCHES, SPARSE
from tests.train import runs

KERNELS = pytest.mark.parametrize("kernel", [INTERPRETED, XLA], ids=["pallas", "xla"])
TILE = 128
# rows, elements contracted by the first product and by the second, rows of each group; no tile divides the first ones
SIZES = {
    "parts of tiles": (150, 40, 70, (10, 64, 65, 11)),
    "whole tiles": (256, 256, 384, (128, 128)),
    "several tiles and a part": (300, 200, 300, (0, 140, 100)),  # the last 60 rows are of no group
    "no rows": (20, 130, 40, (0, 0)),
}


def rounded(x, tile, module=np):
    """x with a power of two for each tile of its last two axes, with which the largest element is between 2^7 and 2^8."""
    parts = []
    for row in range(0, x.shape[-2], tile[0]):
        line = []
        for column in range(0, x.shape[-1], tile[1]):
            part = x[..., row : row + tile[0], column : column + tile[1]]
            largest = module.abs(part).max((-2, -1), keepdims=True)
            scale = module.exp2(module.floor(module.log2(module.where(largest > 0, largest, 1.0))) - 7)
            line.append((part / scale).astype(ml_dtypes.float8_e4m3fn).astype(x.dtype) * scale)
        parts.append(module.concatenate(line, -1))
    return module.concatenate(parts, -2)


def in_numpy(rows, kernels, sizes, transposed):
    """The product in fp64."""
    rows, kernels = rounded(np.float64(rows), (1, TILE)), rounded(np.float64(kernels), (TILE, TILE))
    kernels = kernels.swapaxes(1, 2) if transposed else kernels
    out, start = np.zeros((len(rows), kernels.shape[2])), 0
    for kernel, size in zip(kernels, sizes, strict=True):
        out[start : start + size] = rows[start : start + size] @ kernel
        start += size
    return out


def drawn(shape, dtype, seed):
    """Rows whose sizes differ by up to 2^40."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=shape) * np.exp2(draw.integers(-20, 21, (*shape[:-1], 1)))
    return np.asarray(jnp.asarray(x, dtype))


def assert_close(got, want, close=1e-5):
    """Within `close` of each number, and 1e-6 of the largest of its row."""
    largest = np.abs(want).max(1, keepdims=True)
    np.testing.assert_array_less(np.abs(np.float64(got) - want), close * np.abs(want) + 1e-6 * largest + 1e-30)


@KERNELS
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_are_those_of_rounded_operands(sizes, dtype, kernel):
    """Rounded once, to the operands' type, after sums in fp32."""
    count, into, out, groups = sizes
    rows, slopes = drawn((count, into), dtype, 0), drawn((count, out), dtype, 1)
    kernels = drawn((len(groups), into, out), dtype, 2)
    close = 2**-8 if dtype == jnp.bfloat16 else 1e-6
    for given, transposed in ((rows, False), (slopes, True)):
        product = jax.jit(partial(kernel.in_8_bits().product, transposed=transposed))
        got = product(given, kernels, np.array(groups, np.int32))
        want = in_numpy(given, kernels, groups, transposed)
        assert got.dtype == dtype and got.shape == want.shape
        assert_close(got, want, close)


def test_of_a_stack_and_into_one():
    """A part of a stack of kernels; and the result where it is saved, whose other parts stay."""
    rows, kernels = drawn((150, 200), np.float32, 0), drawn((2, 200, 130), np.float32, 1)
    sizes, stack, out = (
        np.array((100, 40), np.int32),
        np.stack([0 * kernels, kernels]),
        np.ones((3, 150, 130), np.float32),
    )
    of = INTERPRETED.in_8_bits()
    plain = jax.jit(of.product)(rows, kernels, sizes)
    for kernel in (INTERPRETED, XLA):
        got = jax.jit(kernel.in_8_bits().product)(rows, stack, sizes, place=jnp.int32(1))
        assert_close(got, np.float64(plain))
    got = jax.jit(of.into)(out, jnp.int32(2), rows, stack, sizes, jnp.int32(1))
    np.testing.assert_array_equal(got[2], plain)
    np.testing.assert_array_equal(got[:2], out[:2])


@KERNELS
def test_what_is_not_finite_stays_in_its_row_or_group(kernel):
    """On GPUs a conversion to E4M3 makes its largest number of what is too large, so that the scale must say it."""
    sizes, product = np.array((10, 20), np.int32), jax.jit(kernel.in_8_bits().product)
    for bad in (np.nan, np.inf, -np.inf):
        rows, kernels = np.ones((32, 130), np.float32), np.ones((2, 130, 150), np.float32)
        rows[3, 129], rows[31] = bad, bad  # the last one is of no group
        got = np.asarray(product(rows, kernels, sizes))
        assert not np.isfinite(got[3]).any() and (np.delete(got[:30], 3, 0) == 130).all() and not got[30:].any()
        kernels[1, 5, 7] = bad
        got = np.asarray(product(np.ones((32, 130), np.float32), kernels, sizes))
        assert not np.isfinite(got[10:30, 7]).any() and (got[10:30, TILE:] == 130).all()
        assert kernel is XLA or (got[:10] == 130).all()  # XLA multiplies each row with every kernel, some times 0


@jax.custom_vjp
def product_of(x, kernel):
    return rounded(x, (1, TILE), jnp) @ rounded(kernel, (TILE, TILE), jnp)


def backward(operands, gradient):
    """The gradient of x of rounded operands, that of the kernel not."""
    x, kernel = operands
    of_x = rounded(gradient, (1, TILE), jnp) @ rounded(kernel, (TILE, TILE), jnp).T
    return of_x, jnp.einsum("...i,...o->io", x, gradient)


product_of.defvjp(lambda x, kernel: (product_of(x, kernel), (x, kernel)), backward)


def mixture(config, weights, x, p):
    """What experts compute of x [b, s, h] with these weights [b, s, E], which are multiplied before the second product."""

    def expert(weight, up, down):
        both = product_of(x, up.reshape(len(up), -1)).reshape(*x.shape[:-1], 2, -1)
        gate, value = both[..., 0, :], both[..., 1, :]
        return product_of(gate * jax.nn.sigmoid(gate) * value * weight[..., None], down)

    return jax.vmap(expert)(weights.transpose(2, 0, 1), p["up"], p["down"]).sum(0)


LAYOUTS = [
    ((1, 1, 1), {}),
    ((1, 1, 2), {"recompute": "full"}),
    ((4, 1, 2), {"expert": 4, "expert_dispatch": "gather"}),
    ((1, 2, 1), {"schedule": "zb_v", "chunks": 2}),
    ((2, 2, 2), {"expert": 2, "expert_dispatch": "bucketed", "schedule": "zb_v", "chunks": 2, "zero": 3}),
    ((2, 2, 1), {"expert": 2, "schedule": "dualpipe_v", "chunks": 2, "recompute": "none"}),
    ((4, 2, 1), {"expert": 4, "expert_dispatch": "bucketed", "zero": 1}),
]


def assert_as_the_reference(monkeypatch, mesh, options):
    """Loss and gradients of every layout are the dense reference's, whose experts multiply rounded numbers.

    A value near the middle of two of the format's may be rounded either way, hence the tolerance.
    """
    model = dataclasses.replace(dense_experts.GROUPED, layers=4 if "chunks" in options else 2)
    params = dense_experts.params_of(model)
    unrounded = dense_experts.expected_of(model, params)
    monkeypatch.setattr(dense_experts, "mixture", mixture)
    want_loss, want = dense_experts.expected_of(model, params)
    run = small.make_run(
        mesh,
        microbatches=8 // mesh[0],
        model=model,
        train={"expert_matmul_dtype": "fp8"},
        **{"schedule": "1f1b", **options},
    )
    training = small.training_of(run)
    loss, gradients = training.loss_and_gradients(small.place(training, params), small.make_batch(run))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-3)
    with pytest.raises(AssertionError):
        small.assert_gradients_close(small.canonical(gradients, training), unrounded[1], rtol=1e-3)


@pytest.mark.parametrize(
    ("mesh", "options"), [LAYOUTS[-1], *(pytest.param(*one, marks=pytest.mark.slow) for one in LAYOUTS[:-1])], ids=str
)
def test_gradients_on_any_layout(monkeypatch, mesh, options):
    assert_as_the_reference(monkeypatch, mesh, options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_gradients_by_kernels_for_gpus(monkeypatch, mesh):
    """The program for GPUs with jax 0.12, its kernels interpreted: weights are read in a stack, results written to one."""
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    monkeypatch.setattr(context, "kernel_for", lambda device: INTERPRETED)
    assert_as_the_reference(monkeypatch, mesh, {"schedule": "1f1b"})


@pytest.mark.slow
@pytest.mark.parametrize("matmuls", [None, "fp8"])
def test_losses_fall_as_in_full_precision(matmuls):
    """Of 40 steps; also with the matmuls outside experts in 8 bits."""
    if matmuls:
        pytest.importorskip("qwix", reason="qwix is not installed: pip install -e '.[fp8]'")
    model = dataclasses.replace(dense_experts.UNEVEN, layers=4)
    parallel = {"expert": 2, "expert_dispatch": "bucketed", "schedule": "interleaved_1f1b", "chunks": 2}
    more = {"matmul_dtype": matmuls}
    runs.assert_losses_fall_alike("expert_matmul_dtype", "fp8", (2, 2, 2), more, model=model, **parallel)


def test_unsupported_combinations_are_refused():
    refused = {
        "matmul_dtype = fp8 is not of the matmuls of experts, .* has 4: pass --expert-matmul-dtype fp8": (
            dense_experts.PLAIN,
            {"matmul_dtype": "fp8"},
        ),
        "expert_matmul_dtype = fp8 is of matmuls of experts, .* has none: omit --expert-matmul-dtype": (
            small.MODEL,
            {"expert_matmul_dtype": "fp8"},
        ),
        "expert_matmul_dtype = fp8 does not work with precision = fp16, .* pass --precision bf16": (
            dense_experts.PLAIN,
            {"expert_matmul_dtype": "fp8", "precision": "fp16"},
        ),
        "expert_matmul_dtype = bf16 does not work with precision = fp32: omit --expert-matmul-dtype": (
            dense_experts.PLAIN,
            {"expert_matmul_dtype": "bf16"},
        ),
    }
    for text, (model, train) in refused.items():
        with pytest.raises(ConfigError, match=text):
            runs.make_run(model=model, train=train)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2, "tensor": 2, "expert": 2}], ids=str)
def test_compiled_for_h100s(layout):
    """Each product is of two quantized operands, and each weights' gradient of none; FLOPs are those of the rows."""
    how = {"expert_matmul_dtype": "fp8", "attention": "xla", **layout}
    text, _ = gpu.compile_step(SPARSE, MICROBATCHES, **how)
    module = hlo.read(text, hlo.loop_trip_counts(gpu.run_of(SPARSE, MICROBATCHES, **how)))
    assert module.kernels["grouped_matmul_product"] == 4 * BLOCKS
    assert module.kernels["quantize_rows"] == module.kernels["quantize_blocks"] == 4 * BLOCKS
    assert module.kernels["grouped_matmul_add"] == 2 * BLOCKS
    rows = 2 * SPARSE.sequence_length * layout.get("expert", 1)
    found = sum(one.flops for one in module.matmuls if one.grouped)
    assert found == 3 * BLOCKS * 2 * rows * 3 * SPARSE.hidden * SPARSE.feedforward // 2
