"""Collective matmuls, context parallelism and fused attention change no loss and no gradient."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.models import context as model_context
from megajax.ops.attention import fused_attention
from megajax.ops.attention_kernels import XLA
from megajax.ops.linear import plain_operations
from tests import small


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def check(training, model):
    """Loss and gradients against the unpipelined model's."""
    params = small.place(training, small.busy_params(model))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run))
    want_loss, want = small.expected(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)
    return params


@pytest.fixture
def fused(monkeypatch):
    """Replaces cuDNN's kernel by XLA's behind the same interface."""
    monkeypatch.setattr(model_context, "CUDNN", XLA)
    monkeypatch.setattr(model_context, "choose_attention", lambda *_, **__: model_context.Choice("cudnn", "for a test"))


@pytest.mark.parametrize(
    ("mesh", "schedule", "chunks", "options", "model"),
    [
        slow((1, 2, 4), "interleaved_1f1b", 2, {"tensor_overlap": "ring"}, small.MODEL),
        slow((2, 1, 2), "gpipe", 1, {"context": 2, "tensor_overlap": "ring"}, small.LLAMA),
        slow((1, 2, 1), "interleaved_1f1b", 2, {"context": 4, "recompute": "none"}, small.MODEL),
        slow((2, 2, 2), "eager_1f1b", 1, {"tensor_overlap": "ring", "recompute": "full"}, small.LLAMA),
        slow((1, 2, 2), "interleaved_1f1b", 2, {"context": 2, "tensor_overlap": "ring"}, small.MODEL),
    ],
    ids=str,
)
def test_rings_change_no_loss_and_no_gradient(mesh, schedule, chunks, options, model):
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, model=model, **options)
    check(small.training_of(run), model)


@pytest.mark.parametrize(
    ("mesh", "schedule", "recompute"),
    [
        slow((1, 2, 2), "interleaved_1f1b", "selective"),
        slow((1, 2, 2), "1f1b", "full"),
        slow((1, 2, 2), "zb_h1", "none"),
    ],
)
def test_fused_attention_changes_no_loss_and_no_gradient(fused, mesh, schedule, recompute):
    """In every recompute mode, in mixed ticks, and with a split backward."""
    training = small.training_of(small.make_run(mesh, schedule=schedule, recompute=recompute, model=small.LLAMA))
    assert training.program.attention.name == "cudnn"
    check(training, small.LLAMA)


def test_evaluation_with_context_ranks_equals_one_device():
    losses, model = [], dataclasses.replace(small.MODEL, layers=2)
    for mesh, context in (((1, 1, 1), 1), ((1, 2, 1), 2)):
        training = small.training_of(small.make_run(mesh, context=context, microbatches=2, model=model))
        params = small.place(training, small.busy_params(model))
        losses.append(training.evaluate(params, small.make_batch(training.run)))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "1f1b", "context": 2}, "context = 2 sends round a ring .* which 1f1b does not run .* gpipe"),
        ({"schedule": "zb_h1", "tensor_overlap": "ring"}, "tensor_overlap = ring sends .* --schedule interleaved_1f1b"),
        ({"attention": "cudnn"}, "attention = cudnn, but cpu is not an NVIDIA GPU: pass --attention xla"),
    ],
)
def test_an_unsupported_configuration_is_one_clear_line(change, message):
    run = small.make_run((1, 2, 2), microbatches=4)
    run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **change))
    run.validate()
    with pytest.raises(ConfigError, match=message):
        small.training_of(run)


def test_rings_are_refused_where_xla_would_corrupt_their_data(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_pipelined_p2p=true")
    with pytest.raises(ConfigError, match="openxla/xla#45222"):
        small.training_of(small.make_run((1, 2, 2), tensor_overlap="ring"))


@pytest.mark.slow
def test_fused_attention_runs_again_only_under_full_recompute():
    """A differentiated block has one forward kernel, and two under full recompute."""
    model = dataclasses.replace(small.MODEL, layers=1)
    calls = []

    def forward(*arguments):
        calls.append("forward")
        return XLA.forward(*arguments)

    kernel = XLA._replace(forward=forward)
    assert fused_attention is model_context.fused_attention
    for mode, times in (("none", 0), ("selective", 0), ("full", 1)):
        run = small.make_run((1, 1, 2), model=model, recompute=mode)
        training = small.training_of(run)
        block = small.build_model(
            model,
            recompute=mode,
            operations=plain_operations()._replace(attend=lambda q, k, v, *_, sinks: fused_attention(q, k, v, kernel)),
        ).block
        weights = jax.tree.map(lambda a: a[0], small.busy_params(model)["blocks"])
        x = np.ones((2, 16, 32), np.float32)
        with jax.set_mesh(training.mesh):
            _, vjp = jax.vjp(lambda w, x: block(w, x, {}, 0), weights, x)  # noqa: B023
            text = str(jax.make_jaxpr(lambda vjp, dy: vjp(dy))(vjp, x))
        assert text.count("reduce_max") == times  # of the softmax's statistics
