"""GELU and its gradient compared with numpy in fp64."""

import jax
import jax.numpy as jnp
import numpy as np

from megajax.ops import activation
from megajax.ops.activation import gelu


def test_gelu_and_its_gradient_equal_the_formula():
    x = np.linspace(-12, 12, 4001)
    scale = np.sqrt(2 / np.pi)
    z = scale * (x + 0.044715 * x**3)
    value = x * (1 + np.tanh(z)) / 2
    slope = (1 + np.tanh(z)) / 2 + x / np.cosh(z) ** 2 / 2 * scale * (1 + 3 * 0.044715 * x**2)
    found, vjp = jax.vjp(gelu, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(vjp(jnp.ones_like(found))[0], slope, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_finite_where_its_powers_are_large():
    x = jnp.asarray([-1e4, 1e4], jnp.float32)
    np.testing.assert_array_equal(jax.grad(lambda x: gelu(x).sum())(x), [0, 1])


def test_the_softmaxs_sum_in_one_pass_is_that_of_two():
    """Of ties, masked logits, and one that is far above the others."""
    x = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32) * 20
    x[1], x[2, 100:], x[3, 7] = 3.0, -1e9, 1e4
    largest, total = jax.jit(activation._at_once)(x)
    np.testing.assert_array_equal(largest, x.max(-1))
    np.testing.assert_allclose(total, np.exp(np.float64(x) - x.max(-1, keepdims=True)).sum(-1), rtol=1e-5)
