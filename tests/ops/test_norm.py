"""Norms: values and gradients are those of the textbook's formula, differentiated by jax in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.norm import norm
from tests.gradients import both_ways

SHAPES = [(1, 1, 8), (2, 96, 16), (3, 7, 5), (4, 6, 2, 8)]  # rows that 64 divides, and not; heads


def textbook(x, scale, bias, centred):
    if centred:
        x = x - x.mean(-1, keepdims=True)
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    return y if bias is None else y + bias


def arguments(shape, with_bias):
    draw = np.random.default_rng(len(shape)).normal
    scale = draw(size=shape[-1])
    scale[0] = 0  # a gradient that divides by the scale would be NaN
    return draw(3, 2, shape), scale, draw(size=shape[-1]) if with_bias else None, draw(size=shape)


@pytest.mark.parametrize(
    "centred, with_bias", [(True, True), pytest.param(True, False, marks=pytest.mark.slow), (False, False)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, centred, with_bias):
    x, scale, bias, dy = arguments(shape, with_bias)
    with jax.enable_x64(True):
        expected = both_ways(lambda *given: textbook(*given, centred))(dy, *map(_as(np.float64), (x, scale, bias)))
    found = both_ways(lambda *given: norm(*given, centred, 1e-5))(*map(_as(np.float32), (dy, x, scale, bias)))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_16_bit_inputs_are_normed_in_fp32():
    x, scale, bias, dy = arguments((2, 96, 16), True)
    dy, *half = (jnp.asarray(a, jnp.bfloat16) for a in (dy, x, scale, bias))
    run = both_ways(lambda *given: norm(*given, True, 1e-5))
    found, exact = run(dy, *half), run(*(np.float32(a) for a in (dy, *half)))
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(one), other, rtol=2**-8, atol=1e-6)


def _as(dtype):
    return lambda a: None if a is None else a.astype(dtype)
