"""The one-pass backward of gated MLPs: its kernel, interpreted, against jax's gradients, and in steps of whole models."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.estimate import hlo
from megajax.estimate.gpus import find_gpu
from megajax.models import context
from megajax.ops import gated_down as module
from megajax.ops.gated_down import gated_down, gated_gradients
from megajax.ops.linear import identity
from megajax.ops.norm_kernel import norm_in_one_pass
from megajax.plan.compiler import compile_for
from megajax.train import step as step_module
from tests import gpu, small
from tests.gradients import both_ways
from tests.train.test_equivalence import check

GELU = partial(jax.nn.gelu, approximate=True)


def arrays(dtype=jnp.float32, width=70):
    draw = np.random.default_rng(0)
    shapes = (3, 2, 5, 2, width), (2, 5, width), (width, 6), (2, 5, 6)
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("activation", [jax.nn.silu, GELU], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_to_jaxs_gradients(activation, dtype):
    """Of one part of a stack, whose sizes are no multiples of the kernel's tiles; rounded once."""
    stack, slopes, _, _ = arrays(dtype)
    run = partial(gated_gradients, activation=activation, interpret=True)
    got = jax.jit(run)(stack, jnp.int32(1), slopes)
    (alone,) = run(stack, jnp.int32(1), slopes, with_activation=False)
    np.testing.assert_array_equal(alone, got[0])
    of = lambda up: activation(up[..., 0, :]) * up[..., 1, :]  # noqa: E731
    active, pull = jax.vjp(of, stack[1].astype(jnp.float32))
    for value, expected in zip(got, (*pull(slopes.astype(jnp.float32)), active), strict=True):
        assert value.dtype == dtype
        np.testing.assert_allclose(
            value, expected.astype(dtype), rtol=1e-5 if dtype == jnp.float32 else 8e-3, atol=1e-6
        )


@pytest.mark.parametrize("kept", [False, True])
def test_the_gradients_are_those_of_the_two_steps(monkeypatch, kept):
    stack, _, kernel, gradient = arrays()
    monkeypatch.setattr(module, "on_tensor_shards", lambda local, *specs: local)
    one_pass = lambda up, kernel: gated_down(up, kernel, jax.nn.silu, identity, True, kept)  # noqa: E731
    plain = lambda up, kernel: (jax.nn.silu(up[..., 0, :]) * up[..., 1, :]) @ kernel  # noqa: E731
    for got, want in zip(*(both_ways(of)(gradient, stack[0], kernel) for of in (one_pass, plain)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# mesh, schedule, chunks, microbatches, sequence parallel, recompute; parts of how many blocks the kernel finds in a stack
CASES = [
    (((2, 1, 2), "interleaved_1f1b", 1, 4, True, "selective"), 8),
    (((1, 4, 1), "1f1b", 1, 4, True, "selective"), None),
    (((1, 2, 1), "interleaved_1f1b", 2, 4, True, "full"), 1),
    (((1, 2, 2), "interleaved_1f1b", 2, 4, True, "selective"), 0),
    (((1, 4, 1), "zb_h1", 1, 4, True, "selective"), 0),
    (((1, 4, 1), "1f1b", 1, 4, True, "none"), 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "parts"), CASES, ids=str)
def test_the_step_is_that_of_the_unpipelined_model(case, parts, monkeypatch):
    """The program for GPUs with jax 0.12, the kernel interpreted."""
    found = set()

    def gradients(stack, *arguments, **settings):
        found.add(len(stack))
        return gated_gradients(stack, *arguments, **settings)

    monkeypatch.setattr(module, "gated_gradients", gradients)
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    monkeypatch.setattr(context, "generation", lambda device: 9)
    monkeypatch.setattr(context, "gated_down", partial(gated_down, interpret=True))
    monkeypatch.setattr(context, "norm_in_one_pass", lambda *arguments: norm_in_one_pass(*arguments, True))
    check(*case, model=small.LLAMA)
    assert max(found, default=0) == parts or (parts is None and max(found) > 1)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb", "b200"])
def test_compiles_for_three_generations(name):
    """The stash is read where it is: no copy of a gate and gated value."""
    model = gpu.LARGE.__class__(**vars(gpu.LARGE) | {"activation": "swiglu", "feedforward": 1536, "biases": False})
    run = gpu.run_of(model, 4, attention="xla", tensor=2)
    text = compile_for(run, find_gpu(name))["hlo"]
    assert hlo.read(text, hlo.loop_trip_counts(run)).kernels[module.NAME] == 4 * model.layers
