"""fp8 matmuls: rounding errors, convergence of training, and matmuls compiled for H100s."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ConfigError
from tests import gpu, small
from tests.gradients import both_ways
from tests.train import runs

fp8 = pytest.importorskip("megajax.ops.fp8", reason="qwix is not installed: pip install -e '.[fp8]'")

product = jax.jit(lambda x, kernel: fp8.tensordot(x, kernel, 1))
SHAPES = [((2, 16, 32), (32, 3, 8), 1), ((2, 16, 4, 8), (4, 8, 24), 2)]


def normal(seed: int, shape) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_errors_of_products_and_gradients_match_the_rounding_of_the_formats(shapes):
    """A number in E4M3 is off by up to 2^-4 of it, by 2^-4 / sqrt(12) / 0.72 = 2.5% (root mean square), E5M2 by twice that.

    (In units of the power of two below it a number is off by 2^-3 / sqrt(12); its mean size in them is 1 / 0.72.)
    The two operands' errors add up as squares, and those of a sum's terms as the terms do: 3.6%, 5.6% of a gradient.
    These draws are up to 8% below that, and E4M3 for gradients would be 36% below.
    """
    x, kernel, contracted = normal(0, shapes[0]), normal(1, shapes[1]), shapes[2]
    results = []
    for tensordot in (fp8.tensordot, jnp.tensordot):
        of = lambda x, kernel: tensordot(x, kernel, contracted)  # noqa: E731, B023
        slope = normal(2, jax.eval_shape(of, x, kernel).shape)
        results.append(both_ways(of)(slope, x, kernel))
    for got, want, off in zip(*results, [0.036, 0.056, 0.056], strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert np.linalg.norm(np.ravel(got - want)) / np.linalg.norm(np.ravel(want)) == pytest.approx(off, rel=0.1)


def test_numbers_of_the_format_are_multiplied_exactly():
    """Every row and column has 448, the largest number of E4M3, so that the scale is 1; small integers are exact."""
    random = np.random.default_rng(3)
    x, kernel = random.integers(-16, 17, (4, 6)), random.integers(-16, 17, (6, 5))
    x[:, 0] = 448
    kernel[3] = -448
    got = product(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    np.testing.assert_array_equal(got, x @ kernel)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_non_finite_values_stay_non_finite(bad):
    x = np.array(normal(0, (3, 8)))
    x[1, 2] = bad
    y = np.asarray(product(x, normal(1, (8, 4))))
    assert not np.isfinite(y[1]).any() and np.isfinite(y[::2]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "chunks"),
    [
        ((1, 2, 1), "1f1b", 1),
        ((2, 2, 2), "interleaved_1f1b", 2),
        ((1, 2, 2), "zb_v", 2),  # whose backward is cut in two
    ],
)
def test_losses_fall_as_in_full_precision(mesh, schedule, chunks):
    model = dataclasses.replace(small.MODEL, layers=4)
    runs.assert_losses_fall_alike("matmul_dtype", "fp8", mesh, schedule=schedule, chunks=chunks, model=model)


def test_unsupported_combinations_are_refused():
    with pytest.raises(ConfigError, match="precision = fp16.* pass --precision bf16"):
        runs.make_run(train={"matmul_dtype": "fp8", "precision": "fp16"})
    with pytest.raises(ConfigError, match="tensor_overlap = ring.* pass --tensor-overlap none"):
        runs.make_run(train={"matmul_dtype": "fp8"}, tensor_overlap="ring")


@pytest.mark.slow
@pytest.mark.compiler
def test_h100s_multiply_in_fp8():
    """Twelve matmuls per block: four in the forward pass, eight in the backward pass; in each loop that XLA makes of it."""
    text, _ = gpu.compile_step(gpu.LARGE, 4, "fp8", data=2, tensor=2, recompute="none", attention="xla")
    operands = collections.Counter()
    for computation in text.split("\n\n"):
        types = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", computation))
        operands.update((types[a], types[b]) for a, b in re.findall(r" dot\(%([\w.\-]+), %([\w.\-]+)\)", computation))
    fp8_operands = {pair: count for pair, count in operands.items() if all(name.startswith("f8") for name in pair)}
    kinds = ("f8e4m3fn", "f8e4m3fn"), ("f8e5m2", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2")
    count = fp8_operands[kinds[0]]
    assert count > 0 and count % 4 == 0
    assert fp8_operands == dict.fromkeys(kinds, count)
