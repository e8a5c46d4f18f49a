"""The backward in two, on our own blocks: what it computes, what it costs, what it keeps. Read off compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.pipeline.stage import Stack
from tests.small import LLAMA, MODEL, build_model

SAMPLES = 2


def programs(model, recompute):
    """(whole, I, W, arguments): a block's backward as one function and as two, from the same stash."""
    functions = build_model(model, recompute=recompute)
    params = jax.jit(functions.init)(jax.random.key(0))
    stack = Stack(functions.block, jax.tree.map(lambda a: a[:1], params["blocks"]), 1)
    microbatch = {"sample": jnp.arange(SAMPLES, dtype=jnp.uint32)}
    x = jax.random.normal(jax.random.key(1), (SAMPLES, model.sequence_length, model.hidden))
    stash = stack.forward_stashing(x, microbatch, 0, 0, stack.empty_stash(1, x, microbatch), 0)[1]
    kept = stack.empty_kept(1, x, microbatch)
    zeros = jax.tree.map(jnp.zeros_like, stack.weights)
    place = (microbatch, 0, stash, 0)
    whole = lambda dy: stack.backward(dy, *place, zeros)[:2]  # noqa: E731
    of_input = lambda dy: stack.backward_input(dy, *place, zeros, kept, 0, 1, 0)[:3]  # noqa: E731
    weights = lambda gradients, kept: stack.backward_weight(x, *place, gradients, kept, 0, 1, 0)[0]  # noqa: E731
    return whole, of_input, weights, jnp.cos(x)


def flops(function, *arguments) -> float:
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["gpt", "llama"])
def test_the_two_parts_are_the_whole(model, recompute):
    # Wide enough for matmuls to dominate, as in any model that is worth training.
    model = dataclasses.replace(model, hidden=128, heads=4, sequence_length=64)
    whole, of_input, weights, dy = programs(model, recompute)
    want_dx, want = jax.jit(whole)(dy)
    dx, early, kept = jax.jit(of_input)(dy)
    got = jax.jit(weights)(early, kept)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    split = flops(of_input, dy) + flops(weights, early, kept)
    assert split == pytest.approx(flops(whole, dy), rel=0.02)
    # I and W take about as long, which is what lockstep wants; with full recompute I does the forward too.
    share = flops(of_input, dy) / split
    assert 0.6 < share < 0.85 if recompute == "full" else 0.45 < share < 0.65
