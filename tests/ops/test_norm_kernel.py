"""The one-pass backward of RMS norms: its kernel, interpreted, against jax's gradients, and in steps of whole models."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.estimate import hlo
from megajax.estimate.gpus import find_gpu
from megajax.models import context
from megajax.ops import norm_kernel as module
from megajax.ops.gated_down import gated_down
from megajax.ops.norm_kernel import NormGradients, norm_and_save, norm_gradients, norm_in_one_pass
from megajax.pipeline.jaxprs import fp32_gradients
from megajax.pipeline.norm_equations import with_merged_norms
from megajax.plan.compiler import compile_for
from megajax.runtime.compat import jaxpr_as_fun
from megajax.train import step as step_module
from tests import gpu, small
from tests.train.test_equivalence import check


def plain(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def arrays(dtype, width):
    draw = np.random.default_rng(0)
    shapes = (3, 2, 5, width), (width,), (2, 5, width), (2, 5, width)
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("dtype", "width"), [(jnp.float32, 70), (jnp.bfloat16, 64)])
def test_equal_to_jaxs_gradients(dtype, width, with_residual):
    """Of one part of a stack, whose rows are no power of 2; rounded once."""
    stack, scale, dy, residual = arrays(dtype, width)
    run = jax.jit(partial(norm_gradients, epsilon=1e-5, interpret=True))
    dx, parts, y = run(stack, jnp.int32(1), scale, dy, residual if with_residual else None)
    wide = [a.astype(jnp.float32) for a in (stack[1], scale, dy, residual)]
    expected, pull = jax.vjp(plain, *wide[:2])
    of_x, of_scale = pull(wide[2])
    of_x = of_x + wide[3] if with_residual else of_x
    close = partial(np.testing.assert_allclose, rtol=1e-5 if dtype == jnp.float32 else 8e-3, atol=1e-5)
    assert dx.dtype == y.dtype == dtype and parts.dtype == jnp.float32
    for value, want in zip((dx, y), (of_x, expected), strict=True):
        close(value, want.astype(dtype))
    np.testing.assert_allclose(parts.sum(0), of_scale, rtol=1e-5, atol=1e-5)


def test_terms_may_be_parts_of_other_stacks():
    """One of the place before, round the end; and one of the same place."""
    stack, scale, _, _ = arrays(jnp.float32, 6)
    run = jax.jit(partial(norm_and_save, before=(1, 0), epsilon=1e-5, interpret=True))
    whole, y = run(stack, jnp.int32(0), scale, 2 * stack, 3 * stack)
    x = 2 * stack[2] + 3 * stack[0]
    np.testing.assert_allclose(whole, stack.at[0].set(x), rtol=1e-6)
    np.testing.assert_allclose(y, plain(x, scale), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_a_forward_adds_saves_and_norms(dtype, terms):
    stack, scale, *given = arrays(dtype, 6)
    run = jax.jit(partial(norm_and_save, epsilon=1e-5, interpret=True))
    whole, y = run(stack, jnp.int32(1), scale, *given[:terms])
    x = sum(given[:terms])
    np.testing.assert_array_equal(whole, stack.at[1].set(x))
    np.testing.assert_allclose(y, plain(x, scale), rtol=1e-5 if dtype == jnp.float32 else 8e-3, atol=1e-5)


@pytest.mark.parametrize("saved", ["up", "nothing"])
def test_what_is_beside_a_norm_is_merged(saved, monkeypatch):
    """The residual's gradient is added in the kernel, and y computed there, unless the norm's own gradient depends on y."""
    merged = []

    def run(self, stack, place, scale, dy, residual=None):
        merged.append(residual is not None)
        dx, parts, y = norm_gradients(stack, place, scale, dy, residual, epsilon=1e-5, interpret=True)
        return dx, parts.sum(0), y

    monkeypatch.setattr(NormGradients, "__call__", run)
    stack, scale, dy, _ = arrays(jnp.float32, 8)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), jnp.float32)
    policy = jax.checkpoint_policies.save_only_these_names(saved)

    def block(norm, x, scale, weight):
        up = jax.ad_checkpoint.checkpoint_name(norm(x, scale) @ weight, "up")
        return x + jnp.tanh(up)

    def backward(norm, x, scale, weight, dy):
        run = jax.checkpoint(partial(block, norm), policy=policy, prevent_cse=False)
        *gradients, of_weight = jax.vjp(run, x, scale, weight)[1](dy)
        return (of_weight, gradients[1]), gradients[0]

    one_pass = lambda x, scale: norm_in_one_pass(x, scale, 1e-5, False)  # noqa: E731
    jaxpr = jax.make_jaxpr(
        lambda *given: fp32_gradients(partial(backward, one_pass), *given, rewrite=with_merged_norms)
    )(stack[0], scale, weight, dy)
    names = [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns]
    assert any(merged)
    assert names.count("rms_norm") == 1  # the forward's, or the backward's where its own gradient depends on it
    found = jaxpr_as_fun(jaxpr)(stack[0], scale, weight, dy)
    expected = jax.tree.leaves(backward(plain, stack[0], scale, weight, dy))
    for value, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)


# mesh, schedule, chunks, microbatches, sequence parallel, recompute; parts of how many blocks the kernel finds in a stack
# and norms that a forward's kernel saves
CASES = [
    (((2, 1, 2), "interleaved_1f1b", 1, 4, True, "selective"), 8, True),
    (((1, 4, 1), "1f1b", 1, 4, True, "selective"), None, True),
    (((1, 2, 1), "interleaved_1f1b", 2, 4, True, "full"), 0, False),
    (((1, 2, 2), "interleaved_1f1b", 2, 4, False, "selective"), None, False),
    (((1, 4, 1), "zb_h1", 1, 4, True, "selective"), 0, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "parts", "saves"), CASES, ids=str)
def test_the_step_is_that_of_the_unpipelined_model(case, parts, saves, monkeypatch):
    """The program for GPUs with jax 0.12, the kernels interpreted."""
    found, saving, carried = set(), [], set()

    def save(stack, place, scale, *terms, **settings):
        saving.append(len(terms))
        carried.update(settings["before"])
        return norm_and_save(stack, place, scale, *terms, **settings)

    monkeypatch.setattr(module, "norm_and_save", save)

    def gradients(stack, *arguments, **settings):
        found.add(len(stack))
        return norm_gradients(stack, *arguments, **settings)

    monkeypatch.setattr(module, "norm_gradients", gradients)
    interpreted(monkeypatch)
    check(*case, model=small.LLAMA)
    assert max(found, default=0) == parts or (parts is None and max(found) > 1)
    assert set(saving) == ({1, 2} if saves else set())
    assert carried - {None} == ({0, 1} if case[0][1] == 1 else set())  # residuals of merged ticks of one stage


def interpreted(monkeypatch):
    """The program for GPUs with jax 0.12, its kernels in Pallas's interpreter."""
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    monkeypatch.setattr(context, "generation", lambda device: 9)
    monkeypatch.setattr(context, "gated_down", partial(gated_down, interpret=True))
    monkeypatch.setattr(context, "norm_in_one_pass", lambda *arguments: norm_in_one_pass(*arguments, True))


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb", "b200", "l40s", "a10g"])
def test_compiles_for_all_generations(name):
    """Two norms of each block, in its backward's loop: merged with a forward, and alone. jax knows no L40S and no A10G."""
    changed = {"activation": "swiglu", "feedforward": 1536, "biases": False, "norm": "rmsnorm"}
    model = gpu.LARGE.__class__(**vars(gpu.LARGE) | changed)
    run = gpu.run_of(model, 4, attention="xla", tensor=2)
    text = compile_for(run, find_gpu(name))["hlo"]
    kernels = hlo.read(text, hlo.loop_trip_counts(run)).kernels
    assert kernels[module.NAME] == kernels[module.SAVING] == 2 * 4 * model.layers
