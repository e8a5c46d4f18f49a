"""Matmuls of groups: Pallas's kernels in their interpreter and XLA's, against loops over the groups in numpy, in fp64.

And compiled for H100s, where no loop over groups is left.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu_day.kernels import grouped_in_numpy as in_numpy
from megajax.estimate import communication, hlo
from megajax.ops.grouped_matmul import INTERPRETED, XLA
from megajax.pipeline.program import StepProgram
from tests import gpu

# Tiles have at most 64 rows and columns of fp32, and contract 32 elements in a step; no size here is a multiple of them.
ROWS, INTO, OUT = 150, 40, 70
KERNELS = pytest.mark.parametrize("kernel", [INTERPRETED, XLA], ids=["pallas", "xla"])
SIZES = {
    "ends inside tiles": (10, 64, 65, 11),
    "some without rows": (0, 70, 0, 80),
    "all rows in one": (0, 0, 0, 150),
    "rows of no group": (0, 3, 64, 16),
    "no rows at all": (0, 0, 0, 0),
}


@partial(jax.jit, static_argnames="kernel")
def by_kernel(kernel, rows, kernels, slopes, sizes):
    return (
        kernel.product(rows, kernels, sizes),
        kernel.product(slopes, kernels, sizes, transposed=True),
        kernel.gradient(rows, slopes, sizes),
    )


def inputs(rows=ROWS, into=INTO, out=OUT, groups=4, dtype=np.float32):
    draw = np.random.default_rng(0)
    shapes = (rows, into), (groups, into, out), (rows, out)
    return [np.asarray(jnp.asarray(draw.normal(size=shape), dtype)) for shape in shapes]


def check(kernel, arrays, sizes, close=1e-5):
    got, want = by_kernel(kernel, *arrays, np.array(sizes, np.int32)), in_numpy(*arrays, sizes)
    for value, expected in zip(got, want, strict=True):
        assert value.shape == expected.shape
        np.testing.assert_allclose(np.float64(value), expected, rtol=close, atol=close * max(1, np.abs(expected).max()))
    assert got[2].dtype == jnp.float32


@KERNELS
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equal_to_numpy(kernel, sizes):
    check(kernel, inputs(), sizes)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 150), min_size=3, max_size=3).map(lambda cuts: np.diff([0, *sorted(cuts)]).tolist()))
def test_any_sizes(sizes):
    check(INTERPRETED, inputs(), (*sizes, 0)[:4])


@pytest.mark.slow
def test_sizes_that_are_multiples_of_the_tiles():
    check(INTERPRETED, inputs(128, 64, 128, 2), (64, 64))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_added_in_place(sizes):
    """To one of three sums; the others stay as they are, as do those of groups without rows."""
    rows, _, slopes = inputs()
    total = np.random.default_rng(1).normal(size=(3, 4, INTO, OUT)).astype(np.float32)
    got = jax.jit(INTERPRETED.add)(total, jnp.int32(1), rows, slopes, np.array(sizes, np.int32))
    gradient = INTERPRETED.gradient(rows, slopes, np.array(sizes, np.int32))
    np.testing.assert_allclose(got, np.stack([total[0], total[1] + gradient, total[2]]), rtol=1e-6, atol=1e-6)
    unchanged = [0, *[1] * (not any(sizes)), 2]
    np.testing.assert_array_equal(np.asarray(got)[unchanged], total[unchanged])


def test_written_into_a_stack():
    """Where the product is saved; the other parts stay."""
    rows, kernels, slopes = inputs()
    sizes = np.array((0, 3, 64, 16), np.int32)
    out, stack = np.ones((3, ROWS, OUT), np.float32), np.stack([0 * kernels, kernels])
    got = jax.jit(INTERPRETED.into)(out, jnp.int32(2), rows, stack, sizes, jnp.int32(1))
    np.testing.assert_array_equal(got[2], by_kernel(INTERPRETED, rows, kernels, slopes, sizes)[0])
    np.testing.assert_array_equal(got[:2], out[:2])


def test_bf16_sums_in_fp32():
    """Tiles are larger; results are rounded once, and the kernels' gradient not at all."""
    arrays, sizes = inputs(300, 80, 40, 2, jnp.bfloat16), (130, 160)
    check(INTERPRETED, arrays, sizes, close=8e-3)
    gradient = by_kernel(INTERPRETED, *arrays, np.array(sizes, np.int32))[2]
    np.testing.assert_allclose(gradient, in_numpy(*arrays, sizes)[2], rtol=1e-4, atol=1e-4)


def test_rows_that_overflow_stay_in_their_group():
    """A tile reads rows of the next group too, and zeros times infinity would be NaN."""
    rows, kernels, slopes = map(np.array, inputs())
    rows[70:], slopes[70:] = np.inf, np.nan
    got = by_kernel(INTERPRETED, rows, kernels, slopes, np.array((30, 40, 0, 0), np.int32))
    for value, expected in zip(got, in_numpy(rows[:70], kernels, slopes[:70], (30, 40, 0, 0)), strict=True):
        np.testing.assert_allclose(value[: len(expected)], expected, rtol=1e-5, atol=1e-4)
    assert not got[0][70:].any() and not got[1][70:].any()


SPARSE = dataclasses.replace(
    gpu.LARGE, norm="rmsnorm", activation="swiglu", biases=False, feedforward=1536, experts=8, experts_per_token=2
)
MICROBATCHES = 4
BLOCKS = MICROBATCHES * SPARSE.layers


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2, "tensor": 2, "expert": 2}], ids=str)
def test_compiled_for_h100s_the_flops_are_those_of_the_rows(layout):
    """Each product is a kernel: two in a forward, and two of each kind in a backward. No array has a row's every expert."""
    text, _ = gpu.compile_step(SPARSE, MICROBATCHES, attention="xla", **layout)
    module = hlo.read(text, hlo.loop_trip_counts(gpu.run_of(SPARSE, MICROBATCHES, attention="xla", **layout)))
    assert module.kernels["grouped_matmul_product"] == 4 * BLOCKS
    assert module.kernels["grouped_matmul_add"] == 2 * BLOCKS
    degree = layout.get("expert", 1)
    rows = 2 * SPARSE.sequence_length * degree  # the choices of a group's tokens that may be here: min(2, 8 / degree)
    matrices = 3 * SPARSE.hidden * SPARSE.feedforward // 2
    found = sum(one.flops for one in module.matmuls if one.grouped)
    assert found == 3 * BLOCKS * 2 * rows * matrices
    assert "ragged" not in text


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_expert_groups_send_what_the_formula_says():
    layout = {"data": 4, "expert": 2, "attention": "xla"}
    text, _ = gpu.compile_step(SPARSE, MICROBATCHES, **layout)
    run = gpu.run_of(SPARSE, MICROBATCHES, **layout)
    # With the run's counts, as a merged tick has a branch for each slot of its stash.
    found = hlo.read(text, hlo.loop_trip_counts(run)).collectives
    sent = hlo.most_sent(one for one in found if one.axes((2, 2, 1, 1)) == ("expert",))
    (line,) = (line for line in communication.expected(StepProgram.of(run)) if line.axis == "expert")
    assert sent == pytest.approx(line.bytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_memory_does_not_grow_with_microbatches():
    peaks = [gpu.compile_step(SPARSE, count, attention="xla", pipe=2, data=2, expert=2)[1] for count in (4, 16)]
    assert peaks[1] < 1.01 * peaks[0]
