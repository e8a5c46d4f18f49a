"""Norms: values and gradients are those of the textbook's formula, differentiated by jax in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.norm import norm

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


@pytest.mark.parametrize("centred, with_bias", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, centred, with_bias):
    x, scale, bias, dy = arguments(shape, with_bias)
    with jax.enable_x64(True):
        wanted, pull = jax.vjp(lambda *given: textbook(*given, centred), *map(_as(jnp.float64), (x, scale, bias)))
        expected = [wanted, *pull(jnp.asarray(dy))]
    y, pull = jax.vjp(lambda *given: norm(*given, centred, 1e-5), *map(_as(jnp.float32), (x, scale, bias)))
    for one, other in zip([y, *pull(jnp.float32(dy))], expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_16_bit_inputs_are_normed_in_fp32():
    x, scale, bias, dy = arguments((2, 96, 16), True)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, scale, bias)]
    y, pull = jax.vjp(lambda *given: norm(*given, True, 1e-5), *half)
    exact, exact_pull = jax.vjp(lambda *given: norm(*given, True, 1e-5), *(jnp.float32(a) for a in half))
    gradients, exact_gradients = (
        pull(jnp.asarray(dy, y.dtype)),
        exact_pull(jnp.asarray(dy, y.dtype).astype(jnp.float32)),
    )
    for one, other in zip([y, *gradients], [exact, *exact_gradients], strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(one), other, rtol=2**-8, atol=1e-6)


def _as(dtype):
    return lambda a: None if a is None else jnp.asarray(a, dtype)
