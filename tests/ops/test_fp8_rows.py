"""Tokens in 8 bits: rounding, special values and bytes; results and gradients with experts; losses."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.ops.fp8_rows import bytes_of_element, in_8_bits, pack, unpack
from tests import dense_experts, small
from tests.train import runs

packed, back = jax.jit(pack), jax.jit(unpack, static_argnums=(1, 2))


def drawn(hidden, seed=0):
    """Rows whose sizes differ by up to 2^80; and in each every element's."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(7, hidden)) * np.exp2(draw.integers(-40, 41, (7, 1)) + draw.integers(-6, 1, (7, hidden)))
    return x.astype(ml_dtypes.bfloat16)


def expected(x, tile):
    """Each tile's elements, scaled so that the largest one is between 2^7 and 2^8, in ml_dtypes' E4M3."""
    tiles = x.astype(np.float64).reshape(len(x), -1, tile)
    scales = np.exp2(np.floor(np.log2(np.abs(tiles).max(-1, keepdims=True))) - 7)
    return ((tiles / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales).reshape(x.shape)


@pytest.mark.parametrize(("hidden", "tile"), [(384, 128), (48, 16), (96, 32), (7, 1)])
def test_elements_are_rounded_to_the_format(hidden, tile):
    """And are numbers of bf16, so that nothing is rounded twice."""
    x = drawn(hidden)
    sent = packed(x)
    assert sent.dtype == jnp.uint8 and sent.shape == (7, hidden + hidden // tile)
    assert bytes_of_element(hidden) == sent.shape[1] / hidden
    got = np.asarray(back(sent, hidden, jnp.bfloat16)).astype(np.float64)
    np.testing.assert_array_equal(got, expected(x, tile))
    np.testing.assert_array_equal(np.asarray(back(sent, hidden, jnp.float32)), got)


def test_zeros_and_what_is_not_finite():
    """Places that no token has are bytes of zeros."""
    assert not np.asarray(back(np.zeros((2, 129), np.uint8), 128, jnp.float32)).any()
    assert not np.asarray(in_8_bits(jnp.zeros((2, 128)))).any()
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((3, 256), np.float32)
        x[1, 200] = bad
        got = np.asarray(in_8_bits(x))
        assert np.isnan(got[1, 200]) and (np.delete(got, 1, 0) == 1).all() and (got[1, :128] == 1).all()


@pytest.mark.parametrize("size", [3e38, 1e-30, 448.0, 449.0, 255.9, 256.0])
def test_sizes_up_to_the_largest_of_fp32(size):
    got = np.asarray(in_8_bits(np.full((1, 128), size, np.float32)))
    np.testing.assert_allclose(got, size, rtol=2**-4)


def in_jax(x):
    """`expected`, of fp32."""
    tiles = x.reshape(*x.shape[:-1], -1, math.gcd(x.shape[-1], 128))
    scales = jnp.exp2(jnp.floor(jnp.log2(jnp.abs(tiles).max(-1, keepdims=True))) - 7)
    scales = jnp.where(jnp.isfinite(scales) & (scales > 0), scales, 1)
    return ((tiles / scales).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scales).reshape(x.shape)


@jax.custom_vjp
def tokens_rounded(x):
    return in_jax(x)


@jax.custom_vjp
def gradient_rounded(x):
    return x


tokens_rounded.defvjp(lambda x: (in_jax(x), None), lambda _, gradient: (gradient,))
gradient_rounded.defvjp(lambda x: (x, None), lambda _, gradient: (in_jax(gradient),))
LAYOUTS = [
    ((1, 1, 1), {}),
    ((4, 1, 2), {"expert": 4, "expert_dispatch": "gather"}),
    ((4, 1, 2), {"expert": 2, "expert_dispatch": "all_to_all", "recompute": "full"}),
    ((1, 2, 1), {"schedule": "zb_v", "chunks": 2}),
    ((2, 2, 2), {"expert": 2, "expert_dispatch": "bucketed", "schedule": "zb_v", "chunks": 2, "zero": 3}),
    ((2, 2, 1), {"expert": 2, "schedule": "dualpipe_v", "chunks": 2, "recompute": "none"}),
    ((4, 2, 1), {"expert": 4, "expert_dispatch": "bucketed", "zero": 1}),
]


@pytest.mark.parametrize(
    ("mesh", "options"), [LAYOUTS[-1], *(pytest.param(*one, marks=pytest.mark.slow) for one in LAYOUTS[:-1])], ids=str
)
def test_tokens_and_gradients_of_results_are_rounded_and_nothing_else(monkeypatch, mesh, options):
    """In the reference the tokens that experts, not the router, take, and the gradient of what these compute, on any layout.

    A value near the middle of two of the format's may be rounded either way, hence the tolerance. Without the rounding of
    gradients an expert's are 2.6% off (in the norm), without that of tokens 4%.
    """
    model = dataclasses.replace(dense_experts.GROUPED, layers=4 if "chunks" in options else 2)
    plain, params = dense_experts.mixture, dense_experts.params_of(model)
    through = lambda config, weights, x, p: gradient_rounded(plain(config, weights, tokens_rounded(x), p))  # noqa: E731
    monkeypatch.setattr(dense_experts, "mixture", through)
    want_loss, want = dense_experts.expected_of(model, params)
    train, microbatches = {"expert_dispatch_dtype": "fp8"}, 8 // mesh[0]
    options = {"schedule": "1f1b", **options}
    run = small.make_run(mesh, microbatches=microbatches, model=model, train=train, **options)
    training = small.training_of(run)
    loss, gradients = training.loss_and_gradients(small.place(training, params), small.make_batch(run))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_to_all", "bucketed"])
def test_losses_fall_as_in_full_precision(dispatch):
    model = dataclasses.replace(dense_experts.UNEVEN, layers=4)
    parallel = {"expert": 2, "expert_dispatch": dispatch, "schedule": "interleaved_1f1b", "chunks": 2}
    runs.assert_losses_fall_alike("expert_dispatch_dtype", "fp8", (2, 2, 2), model=model, **parallel)


def test_unsupported_combinations_are_refused():
    with pytest.raises(
        ConfigError, match="dtype = fp8 is of tokens that are sent to experts, and .* has none: omit --expert-d"
    ):
        runs.make_run(train={"expert_dispatch_dtype": "fp8"})
    with pytest.raises(
        ConfigError, match="expert_dispatch_dtype = bf16 .* precision = fp32: omit --expert-dispatch-dtype"
    ):
        runs.make_run(train={"expert_dispatch_dtype": "bf16"})
