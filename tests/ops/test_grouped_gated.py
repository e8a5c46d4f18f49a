"""The second matmul of gated experts with a backward in one pass: its kernel, interpreted, against jax's gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.gated_down import gated_gradients
from megajax.ops.grouped_gated import gated_row
from megajax.ops.grouped_matmul import INTERPRETED, XLA, GroupedMatmuls, route
from tests.gradients import both_ways

ROWS, WIDTH, STOP = 21, 70, 13  # neither a multiple of the kernel's tiles; rows 16 to 20 are in a tile without any row


def arrays(dtype=jnp.float32):
    draw = np.random.default_rng(0)
    shapes = (3, ROWS, 2, WIDTH), (ROWS, WIDTH), (ROWS,)
    up, slopes, shares = (draw.normal(size=shape) for shape in shapes)
    return jnp.asarray(up, dtype), jnp.asarray(slopes, dtype), jnp.asarray(shares, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_to_jaxs_gradients(dtype):
    """Of one part of a stack, of the rows before the end; rounded once."""
    stack, slopes, shares = arrays(dtype)
    run = partial(gated_gradients, activation=jax.nn.silu, interpret=True)
    of_up, active, sums = jax.jit(run)(stack, jnp.int32(1), slopes, shares, jnp.int32(STOP))
    of = lambda up, shares: jax.nn.silu(up[:, 0]) * up[:, 1] * shares[:, None]  # noqa: E731
    wanted, pull = jax.vjp(of, stack[1].astype(jnp.float32), shares)
    wanted_up, wanted_shares = pull(slopes.astype(jnp.float32))
    close = {"rtol": 1e-5 if dtype == jnp.float32 else 8e-3, "atol": 1e-6}
    for got, want in ((of_up, wanted_up), (active, wanted)):
        assert got.dtype == dtype
        np.testing.assert_allclose(got[:STOP], want.astype(dtype)[:STOP], **close)
    np.testing.assert_allclose(sums.sum(1)[:STOP], wanted_shares[:STOP], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [16, 24])
def test_the_gradients_are_those_of_the_two_steps(rows):
    """Of rows of three groups, of which the last is elsewhere; with 16 places some of its rows have none."""
    draw = np.random.default_rng(1)
    groups = jnp.asarray(draw.integers(0, 3, 24), jnp.int32)
    routing = route(groups, 2, rows)
    shapes = (rows, 2, 40), (rows,), (2, 40, 24), (12, 24)
    up, shares, kernels, gradient = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes)
    how = GroupedMatmuls(INTERPRETED)
    one_pass = lambda up, shares, kernels: gated_row(up, shares, kernels, routing, jax.nn.silu, how, 12)  # noqa: E731

    def plain(up, shares, kernels):
        active = jax.nn.silu(up[:, 0]) * up[:, 1] * shares[:, None]
        return GroupedMatmuls(XLA).row(active, kernels, routing, 12)

    here = np.arange(rows) < int(routing.sizes.sum())
    for got, want in zip(*(both_ways(of)(gradient, up, shares, kernels) for of in (one_pass, plain)), strict=True):
        some = here if got.shape[0] == rows else slice(None)
        np.testing.assert_allclose(got[some], want[some], rtol=1e-5, atol=1e-5)
    of_shares = both_ways(one_pass)(gradient, up, shares, kernels)[2]
    np.testing.assert_array_equal(of_shares[~here], 0)
