"""Loss and gradients do not depend on mesh, schedule, chunks, microbatches or recompute.

The reference is the unpipelined model on one device in fp32, `mean_loss` through `jax.grad`.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from megajax.train import step as step_module
from tests import small


def slow(cases: list) -> list:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


# mesh (data, pipe, tensor), schedule, chunks, microbatches, sequence parallel, recompute
GRID = [((2, 2, 2), "interleaved_1f1b", 2, 4, True, "selective")]
GRID_LONG = [
    ((2, 2, 2), "1f1b", 1, 4, True, "full"),
    ((2, 2, 2), "zb_v", 2, 4, True, "selective"),
    ((1, 4, 1), "eager_1f1b", 1, 4, True, "none"),
    ((2, 4, 1), "gpipe", 1, 8, True, "selective"),
    ((2, 2, 2), "dualpipe_v", 2, 4, True, "none"),
    ((1, 1, 1), "1f1b", 1, 4, True, "none"),
    ((1, 4, 2), "interleaved_1f1b", 2, 8, False, "full"),
    ((1, 4, 2), "1f1b", 1, 2, True, "selective"),  # fewer microbatches than stages
    ((1, 8, 1), "1f1b", 1, 16, True, "selective"),  # one block a stage: it cannot be cut in halves
    ((2, 1, 4), "interleaved_1f1b", 1, 2, True, "selective"),
    ((1, 1, 4), "1f1b", 1, 2, True, "selective"),
    ((1, 4, 2), "zb_h1", 1, 8, True, "selective"),
    ((2, 2, 2), "zb_1p_interleaved", 2, 4, True, "full"),
    ((1, 4, 2), "auto", 2, 4, True, "full"),
]
BUBBLES = [*GRID, *GRID_LONG[:3]]
# Every mesh with every schedule, microbatch count and sequence parallelism; the recompute modes alternate.
LONG = [
    (mesh, schedule, chunks, microbatches, sequence_parallel, ("none", "selective", "full")[index % 3])
    for index, (mesh, (schedule, chunks), microbatches, sequence_parallel) in enumerate(
        itertools.product(
            [(2, 2, 2), (1, 4, 2), (2, 4, 1), (1, 2, 4), (4, 2, 1)],
            [("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved_1f1b", 1), ("interleaved_1f1b", 2)]
            + [("looped_bfs", 2), ("zb_h1", 1), ("zb_h2", 1), ("zb_1p_interleaved", 2), ("zb_v", 2), ("dualpipe_v", 2)],
            [4, 8],
            [True, False],
        )
    )
    if microbatches * mesh[0] <= small.BATCH
    and (sequence_parallel or mesh[2] > 1)
    and (schedule != "dualpipe_v" or microbatches >= 2 * mesh[1])
]


def training_of(mesh, schedule, chunks, microbatches, sequence_parallel, recompute, model=small.MODEL, **shared_out):
    run = small.make_run(
        mesh,
        schedule=schedule,
        chunks=chunks,
        microbatches=microbatches,
        model=model,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        **shared_out,
    )
    return small.training_of(run)


compiled_once = functools.cache(training_of)  # for cases of several tests


def check(*case, training=None, model=small.MODEL, **shared_out):
    training = training or training_of(*case, model=model, **shared_out)
    params = small.place(training, small.busy_params(model))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run))
    want_loss, want = small.expected(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*GRID, *GRID_LONG], ids=str)
def test_loss_and_gradients_equal_the_unpipelined_model(case):
    """The quick one is in test_program.py, which has the compiled step."""
    check(*case, training=compiled_once(*case) if case in BUBBLES else None)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=str)
def test_loss_and_gradients_equal_the_unpipelined_model_long(case):
    check(*case)


@pytest.mark.parametrize(
    "model", [pytest.param(small.LLAMA, id="llama", marks=pytest.mark.slow), pytest.param(small.BERT, id="bert")]
)
def test_evaluation_equals_the_unpipelined_model(model):
    """The forward alone, of families whose gradients the slow tests compare: compiled in a fifth of the time."""
    training = training_of(*GRID[0], model=model)
    got = training.evaluate(small.place(training, small.busy_params(model)), small.make_batch(training.run))
    np.testing.assert_allclose(got, small.expected_loss(model), rtol=1e-5)


SHARED_OUT = [  # options other than those of the default run
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {"zero": 1}),
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {"zero": 1, "recompute": "full", "recompute_blocks": 2}),
    ((2, 2, 2), "1f1b", 1, 4, {"zero": 3, "vocab_parallel": "tensor"}),
    ((1, 4, 2), "zb_v", 2, 4, {"vocab_parallel": "tensor"}),
    ((4, 2, 1), "zb_h1", 1, 4, {"zero": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED_OUT, ids=str)
def test_zero_and_vocabulary_sharding_change_no_loss_and_no_gradient(case):
    *sizes, options = case
    check(*sizes, True, **{"recompute": "selective"} | options)  # `options` is shared: it must not be changed


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 2), (4, 2, 1), (1, 4, 2), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("vocab_parallel", ["pipe", "tensor"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("eager_1f1b", 1), ("zb_v", 2), ("gpipe", 1)])
def test_zero_and_vocabulary_sharding_change_no_loss_and_no_gradient_long(mesh, zero, vocab_parallel, schedule, chunks):
    if mesh[1] == 1 and (vocab_parallel == "tensor" or chunks == 2):
        pytest.skip("one stage")
    options = {"zero": zero, "vocab_parallel": vocab_parallel}
    model = small.LLAMA if mesh[2] <= small.LLAMA.kv_heads else small.MODEL
    check(mesh, schedule, chunks, 4, True, ("none", "selective", "full")[zero % 3], model=model, **options)


IN_PLACE = [
    ((4, 1, 1), "interleaved_1f1b", 1, 4, {"recompute": "none", "zero": 1}),  # unrolled
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {"recompute": "selective", "zero": 1}),
    ((2, 2, 1), "interleaved_1f1b", 2, 8, {"recompute": "full", "recompute_blocks": 2}),
    ((2, 2, 2), "1f1b", 1, 4, {"recompute": "full", "zero": 3}),
    ((1, 2, 4), "gpipe", 1, 4, {"recompute": "none", "vocab_parallel": "tensor"}),
    ((1, 4, 2), "eager_1f1b", 1, 8, {"recompute": "none"}),
    ((2, 2, 2), "zb_v", 2, 4, {"recompute": "selective"}),
    ((2, 2, 2), "zb_h1", 1, 4, {"recompute": "full", "zero": 1}),
    ((2, 2, 2), "dualpipe_v", 2, 4, {"recompute": "none"}),
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {"recompute": "none", "zero": 3}),
    ((1, 2, 2), "eager_1f1b", 1, 8, {"recompute": "full", "vocab_parallel": "tensor"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", [small.MODEL, small.LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_weights_and_gradients_in_place(monkeypatch, case, model):
    """The program for GPUs with jax 0.12, here on CPU devices: with tensor parallelism, paired ticks are merged."""
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    if case[0][2] > model.key_value_heads:
        pytest.skip("fewer heads than tensor ranks")
    *sizes, options = case
    check(*sizes, True, model=model, **options)


@pytest.mark.slow
@pytest.mark.parametrize("model", [small.LLAMA, small.QWEN], ids=["llama", "qwen"])
def test_llama_options_equal_the_unpipelined_model(model):
    """RMS norm, SwiGLU, rotary positions, grouped queries and an untied head, through the pipeline.

    With qwen also a head size of its own, norms of queries and keys, biases on qkv only, and a sliding window.
    """
    check((2, 2, 2), "interleaved_1f1b", 2, 4, True, "selective", model=model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "zero"), [(((2, 2, 2), "zb_v", 2, 4, True, "none"), 1), (((2, 4, 1), "1f1b", 1, 4, True, "full"), 3)]
)
def test_the_options_of_later_families_equal_the_unpipelined_model(case, zero):
    check(*case, model=small.QWEN, zero=zero)


OVER_HEADS = dataclasses.replace(small.LLAMA, query_key_norm=True, query_key_norm_over="projection")
NORMS = [
    ((2, 2, 2), "zb_v", 2, 4, {"zero": 1}),
    ((1, 4, 2), "zb_h1", 1, 4, {"recompute": "full"}),
    ((1, 2, 2), "interleaved_1f1b", 2, 4, {"context": 2, "recompute": "none"}),
    ((2, 2, 2), "1f1b", 1, 4, {"zero": 3, "recompute": "none"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_a_norm_over_all_heads_equals_the_unpipelined_model(case):
    """Its mean is a sum over the tensor ranks, inside the branches of mixed ticks too."""
    *sizes, options = case
    check(*sizes, True, model=OVER_HEADS, **{"recompute": "selective"} | options)


# Of the sequence exchanged for heads, which every schedule runs.
EXCHANGED = [
    ((1, 2, 2), "zb_v", 2, 4, {"recompute": "none"}),
    ((1, 4, 1), "1f1b", 1, 4, {"zero": 3}),
    ((2, 2, 1), "dualpipe_v", 2, 4, {"recompute": "full", "zero": 1}),
    ((1, 2, 2), "interleaved_1f1b", 2, 4, {"vocab_parallel": "tensor"}),
    ((1, 4, 1), "zb_h1", 1, 4, {"recompute": "full", "recompute_blocks": 2}),
    ((2, 1, 2), "1f1b", 1, 2, {"zero": 3, "recompute": "none"}),
    ((1, 2, 1), "gpipe", 1, 4, {"context": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", [small.LLAMA, small.QWEN, small.BERT], ids=["llama", "qwen", "bert"])
@pytest.mark.parametrize("case", EXCHANGED, ids=str)
def test_a_sequence_exchanged_for_heads_equals_the_unpipelined_model(case, model):
    *sizes, options = case
    options = {"context": 2, "context_exchange": "all_to_all", "recompute": "selective"} | options
    check(*sizes, True, model=model, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", BUBBLES, ids=str)
def test_nan_in_bubbles_changes_no_loss_and_no_gradient(case):
    """With NaN in every bubble's input, the loss and all gradients are bitwise equal."""
    training = compiled_once(*case)
    params = small.place(training, small.busy_params(small.MODEL))
    batch = small.make_batch(training.run)
    clean = training.loss_and_gradients(params, batch)
    poisoned = training.loss_and_gradients(params, batch, poison_bubbles=True)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), clean, poisoned)


@functools.cache
def dropping():
    """A model with dropout; its loss and gradients unpipelined."""
    model = small.dataclasses.replace(small.MODEL, layers=4, dropout=0.3)
    return model, small.expected(model)


@pytest.mark.slow
def test_dropout_changes_the_loss():
    model, (loss, _) = dropping()
    assert abs(loss - small.expected(small.dataclasses.replace(model, dropout=0.0))[0]) > 1e-4


EXCHANGED = {"context": 2, "context_exchange": "all_to_all", "zero": 3}
DROPOUT = [
    ((1, 2, 2), "zb_v", 2, 4, {}),
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {}),
    ((1, 4, 1), "1f1b", 1, 8, {}),
    ((1, 2, 2), "interleaved_1f1b", 2, 4, {"context": 2}),
    ((1, 2, 1), "eager_1f1b", 1, 4, {"context": 4, "recompute": "full"}),
    ((1, 2, 2), "zb_v", 2, 4, EXCHANGED),
    ((2, 2, 1), "dualpipe_v", 2, 4, EXCHANGED | {"recompute": "none"}),
]


@pytest.mark.parametrize("case", [((1, 1, 2), "gpipe", 1, 2, {"context": 2}), *slow(DROPOUT)], ids=str)
def test_dropout_does_not_depend_on_the_mesh(case):
    """Masks depend on sample, layer and position: the pipelined, tensor-parallel model drops the same values."""
    mesh, schedule, chunks, microbatches, options = case
    model, (want_loss, want) = dropping()
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, microbatches=microbatches, model=model, **options)
    training = small.training_of(run)
    params = small.place(training, small.busy_params(model))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)


ONE_DEVICE = ((1, 1, 1), "1f1b", 1, 2)
CURVES = [
    ((1, 4, 2), "zb_v", 2, 4),
    ((1, 8, 1), "1f1b", 1, 16),
    ((2, 2, 2), "interleaved_1f1b", 2, 4),
    ((1, 4, 2), "interleaved_1f1b", 2, 8),
    ((4, 2, 1), "eager_1f1b", 1, 4),
    ((2, 1, 4), "gpipe", 1, 1),
    ((8, 1, 1), "1f1b", 1, 2),
]


@functools.cache
def curve(mesh, schedule, chunks, microbatches, frozen=False):
    """Losses of 20 steps from step 0, with a new batch each; frozen: with the initial weights on the same batches."""
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, microbatches=microbatches)
    training = small.training_of(run)
    state, losses = training.init_state(), []
    for step in range(run.train.steps):
        state = training.init_state() if frozen else state
        state, metrics = training.train_step(state, small.make_batch(run, step))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


@pytest.mark.slow
@pytest.mark.parametrize("case", CURVES, ids=str)
def test_the_loss_curve_is_the_same_on_every_mesh(case):
    want = curve(*ONE_DEVICE)
    moved = np.abs(want - curve(*ONE_DEVICE, frozen=True))[10:]
    assert moved.mean() > 10 * 1e-4 * want.mean()  # the weights' updates show, ten times above the tolerance
    np.testing.assert_allclose(curve(*case), want, rtol=1e-4)
