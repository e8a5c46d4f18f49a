"""GELU and its gradient compared with numpy in fp64."""

import jax
import jax.numpy as jnp
import numpy as np

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
