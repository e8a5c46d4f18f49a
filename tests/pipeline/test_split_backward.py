"""The split backward of the transformer block: its gradients, and its FLOPs as counted in compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.pipeline.chunk_work import ChunkWork
from megajax.pipeline.stage import Stack
from megajax.pipeline.stash import StashRef
from tests.small import LLAMA, MODEL, QWEN, build_model, busy_params

SAMPLES = 2


def programs(model, recompute):
    """(whole backward, I, W, dy): a block's backward as one function and as two, from the same stash."""
    functions = build_model(model, recompute=recompute)
    stack = Stack(functions.block, jax.tree.map(lambda a: jnp.asarray(a[:1]), busy_params(model)["blocks"]), 1)
    microbatch = {"sample": jnp.arange(SAMPLES, dtype=jnp.uint32)}
    shape = (SAMPLES, model.sequence_length, model.hidden)
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    work = ChunkWork(microbatch, chunk=0, stash=StashRef(stack.empty_stash(1, x, microbatch), 0))
    work = dataclasses.replace(work, stash=StashRef(stack.forward_stashing(x, work)[1], 0))
    split = lambda kept: dataclasses.replace(work, kept=StashRef(kept, 0), blocks=(0, 1))  # noqa: E731
    empty = stack.empty_kept(1, x, microbatch)
    zeros = jax.tree.map(jnp.zeros_like, stack.weights)
    whole = lambda dy: stack.backward(dy, work, zeros)[:2]  # noqa: E731
    of_input = lambda dy: stack.backward_input(dy, split(empty), zeros)[:3]  # noqa: E731
    weights = lambda gradients, kept: stack.backward_weight(x, split(kept), gradients)[0]  # noqa: E731
    return whole, of_input, weights, jnp.cos(x)


@pytest.mark.slow  # quick: a block of one's own, in test_layer_argument.py
@pytest.mark.parametrize("recompute", ["selective", "none", "full"])
@pytest.mark.parametrize("model", [MODEL, LLAMA, QWEN], ids=["gpt", "llama", "qwen"])
def test_the_two_parts_equal_the_whole_backward(model, recompute):
    # Wide enough for matmuls to dominate, as in any model of practical size.
    model = dataclasses.replace(model, hidden=128, heads=4, sequence_length=64)
    whole, of_input, weights, dy = programs(model, recompute)
    compiled = lambda function, *arguments: jax.jit(function).lower(*arguments).compile()  # noqa: E731
    flops = lambda program: program.cost_analysis()["flops"]  # noqa: E731
    whole, of_input = compiled(whole, dy), compiled(of_input, dy)
    want_dx, want = whole(dy)
    dx, early, kept = of_input(dy)
    weights = compiled(weights, early, kept)
    got = weights(early, kept)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    split = flops(of_input) + flops(weights)
    assert split == pytest.approx(flops(whole), rel=0.02)
    # I and W cost about the same, so ticks are balanced; with full recompute I includes the forward.
    share = flops(of_input) / split
    assert 0.6 < share < 0.85 if recompute == "full" else 0.45 < share < 0.65
