"""Numbers of layers that the stages do not divide: losses, gradients, updates and checkpoints are those of other layouts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint import layout, reader
from megajax.checkpoint.directory import choose
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.checkpoint.metadata import run_meta
from megajax.config import OutputConfig
from megajax.models.gpt import GPT
from megajax.models.interface import mean_loss
from megajax.runtime.mesh import make_mesh
from megajax.train import diagnose
from megajax.train import step as step_module
from megajax.train.step import make_training
from tests import gpu, small
from tests.train import runs


def of(layers: int, model=small.MODEL):
    return dataclasses.replace(model, layers=layers)


# layers, mesh (data, pipe, tensor), schedule, chunks, microbatches, options
CASES = [(5, (2, 2, 1), "interleaved_1f1b", 2, 4, {"zero": 1}), (7, (1, 2, 2), "zb_v", 2, 4, {"recompute": "full"})]
CASES_LONG = [
    (5, (2, 2, 2), "dualpipe_v", 2, 4, {"recompute": "none"}),
    (6, (1, 4, 2), "1f1b", 1, 4, {"vocab_parallel": "tensor"}),
    (7, (2, 4, 1), "eager_1f1b", 1, 8, {"zero": 3}),
    (5, (2, 2, 2), "1f1b", 1, 4, {"zero": 3, "recompute": "full"}),
    (7, (2, 2, 2), "zb_h1", 1, 4, {"zero": 1}),
    (5, (1, 2, 1), "looped_bfs", 2, 4, {}),
    (7, (1, 4, 2), "gpipe", 1, 4, {}),
    (5, (1, 4, 1), "zb_h2", 1, 8, {"recompute": "none"}),
    (6, (1, 2, 4), "zb_1p_interleaved", 2, 4, {"recompute": "selective"}),
    (7, (1, 2, 2), "auto", 2, 4, {}),
    (6, (1, 2, 2), "1f1b", 1, 4, {"recompute": "full", "recompute_blocks": 2}),  # groups of 2: 4 layers and 2
    (5, (1, 2, 1), "interleaved_1f1b", 1, 4, {"context": 2}),  # ranks run their blocks in bubbles
    (7, (1, 2, 2), "interleaved_1f1b", 2, 4, {"tensor_overlap": "ring"}),
    (5, (2, 2, 1), "1f1b", 1, 4, {"offload_activations": True}),
]
IN_PLACE = [
    (5, (2, 2, 2), "interleaved_1f1b", 2, 4, {"zero": 1}),  # merged ticks
    (6, (1, 4, 2), "eager_1f1b", 1, 8, {"recompute": "none"}),
    (5, (2, 2, 2), "1f1b", 1, 4, {"zero": 3}),
    (7, (1, 2, 2), "zb_v", 2, 4, {}),
    (7, (2, 2, 2), "dualpipe_v", 2, 4, {}),
    (6, (2, 2, 1), "interleaved_1f1b", 1, 8, {"recompute": "full", "recompute_blocks": 2}),
]


def training_of(case, model=None, **settings):
    layers, mesh, schedule, chunks, microbatches, options = case
    options = {"model": model or of(layers), "microbatches": microbatches} | options | settings
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, **options)
    training = small.training_of(run)
    assert training.where.idle > 0
    return training


@functools.cache
def compiled_once(number: int):
    return training_of(CASES[number])


def check(training):
    model = training.run.model
    params = small.place(training, small.busy_params(model))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run))
    want_loss, want = small.expected(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)
    for leaf in jax.tree.leaves(gradients["blocks"]):
        assert (empty_slots(training, leaf) == 0).all()


def empty_slots(training, leaf) -> np.ndarray:
    """The rows of empty slots of a leaf in pipeline layout."""
    numbers = np.asarray(step_layout(training))
    return np.asarray(leaf)[numbers == 0]


def step_layout(training):
    """[chunks, pipe, slots], 1 + the layer's number, 0 where there is none."""
    from megajax.pipeline.layout import to_pipeline_layout

    return to_pipeline_layout(1 + np.arange(training.run.model.layers), training.where)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_loss_and_gradients_equal_the_unpipelined_model(number):
    check(compiled_once(number))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES_LONG, ids=str)
def test_loss_and_gradients_equal_the_unpipelined_model_long(case):
    check(training_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES_LONG[:4], ids=str)
@pytest.mark.parametrize("model", [small.LLAMA, small.QWEN], ids=["llama", "qwen"])
def test_other_families_equal_the_unpipelined_model(case, model):
    if case[1][2] <= model.kv_heads:
        check(training_of(case, model=of(case[0], model)))


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_weights_and_gradients_in_place(monkeypatch, case):
    """The program for GPUs with jax 0.12: an empty slot's weight gradients are added, and cleared after the last tick."""
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    check(training_of(case))


@pytest.mark.slow
def test_dropout_masks_are_those_of_the_models_layers():
    model = of(5, dataclasses.replace(small.MODEL, dropout=0.3))
    check(training_of((5, (1, 2, 2), "zb_v", 2, 4, {}), model=model))


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), *range(1, len(CASES))])
def test_the_loss_without_dropout_is_that_of_the_unpipelined_model(number):
    training = compiled_once(number)
    model, batch = training.run.model, small.make_batch(training.run)
    got = training.evaluate(small.place(training, small.busy_params(model)), batch)
    np.testing.assert_allclose(got, small.expected_loss(model), rtol=1e-5)


@functools.cache
def curve(layers, mesh, schedule, chunks, options=(), **train):
    """Losses and gradient norms of 4 steps from step 0."""
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, model=of(layers), train=train, **dict(options))
    training = small.training_of(run)
    state, rows = training.init_state(), []
    for step in range(4):
        state, metrics = training.train_step(state, small.make_batch(run, step))
        rows.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    for tree in (state.params, *(getattr(state.optimizer_state[1], name) for name in ("mu", "nu"))):
        for leaf in jax.tree.leaves(tree["blocks"]):
            assert not empty_slots(training, leaf).any()  # weight decay, clipping and Adam leave them zero
    return np.array(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "chunks", "options"),
    [
        ((2, 2, 2), "interleaved_1f1b", 2, (("zero", 1),)),
        ((2, 2, 1), "zb_v", 2, (("zero", 3),)),
        ((1, 4, 2), "1f1b", 1, ()),
    ],
    ids=str,
)
def test_loss_curve_and_gradient_norms_equal_those_of_one_stage(mesh, schedule, chunks, options):
    """From the run's own initial weights: each parameter depends on the key, its name and its layer alone."""
    np.testing.assert_allclose(curve(7, mesh, schedule, chunks, options), curve(7, (1, 1, 1), "1f1b", 1), rtol=2e-5)


@pytest.mark.slow
def test_fp8_equals_one_stage():
    got, want = (
        curve(5, (1, pipe, 1), "1f1b", 1, (), matmul_dtype="fp8", precision="bf16") for pipe in (2, 1)
    )  # the scale of an empty slot's weights is zero
    np.testing.assert_allclose(got, want, rtol=1e-2)


class Dividing(GPT):
    """A GPT whose blocks divide zero by zero where a scale of their norm is zero, as in an empty slot."""

    def block(self, weights, x, microbatch, layer):
        scale = jnp.square(jax.tree.leaves(weights)[0].astype(jnp.float32)).sum()
        return (super().block(weights, x, microbatch, layer) * (scale / scale)).astype(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_nan_from_empty_slots_does_not_reach_the_update(monkeypatch, number, in_place):
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: in_place)
    run = compiled_once(number).run
    training = make_training(run, make_mesh(run.parallel), Dividing)
    params = small.place(training, small.busy_params(run.model))
    want_loss, want = small.expected(run.model)
    batch = small.make_batch(run)
    np.testing.assert_allclose(training.evaluate(params, batch), want_loss, rtol=1e-5)
    loss, gradients = training.loss_and_gradients(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)
    state = dataclasses.replace(training.init_state(), params=params)
    state, metrics = training.train_step(state, batch)
    assert int(metrics["skipped"]) == 0
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_a_layer_that_is_not_finite_is_named_by_its_number():
    training = compiled_once(0)
    params = small.place(training, small.busy_params(training.run.model))
    for layer in range(5):
        chunk, rank, slot = np.argwhere(np.asarray(step_layout(training)) == 1 + layer)[0]
        broken = jax.tree.map(lambda a: a.at[chunk, rank, slot].set(jnp.nan), params["blocks"])  # noqa: B023
        names = diagnose.not_finite(training, {**params, "blocks": broken})
        assert {name.split(",")[0] for name in names} == {f"layer {layer}"}


SAVED = (7, (1, 2, 2), "zb_v", 2, 4, {})
OTHERS = [
    (7, (2, 2, 2), "1f1b", 1, 4, {"zero": 1}),
    (7, (1, 4, 1), "gpipe", 1, 4, {}),
    (7, (1, 1, 2), "1f1b", 1, 4, {}),
    (7, (1, 7, 1), "1f1b", 1, 4, {"vocab_parallel": "tensor"}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, its run's programs, and the state, of one step on a mesh with uneven stages."""
    training = training_of(SAVED)
    state, _ = training.train_step(training.init_state(), small.make_batch(training.run))
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(directory, OutputConfig(), run_meta(training.run, runs.Letters()))
    checkpoints.save(training.state_layout, state, Progress(step=1, samples=16))
    assert "step 1: checkpoint saved" in checkpoints.close()[-1]
    return directory, training, state


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_a_checkpoint_resumes_on_other_meshes_and_back_with_equal_bits(saved, tmp_path, case):
    """From uneven stages to others, uneven and even; saved there, and restored on the first mesh."""
    directory, training, state = saved
    layers, mesh, schedule, chunks, microbatches, options = case
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, microbatches=microbatches, model=of(layers), **options)
    there = small.training_of(run)
    stored = run_meta(there.run, runs.Letters())
    moved, progress, _ = reader.load(choose(directory, "auto")[0], run, there.state_layout, stored["tokenizer"])
    assert progress.step == 1
    want = layout.to_canonical(state, training.where)
    assert want["params/blocks/attention/qkv/kernel"].shape[0] == 7  # no empty slot is stored
    got = layout.to_canonical(moved, there.where)
    assert got.keys() == want.keys()
    for name, array in got.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(want[name]), err_msg=name)
    checkpoints = Checkpoints(tmp_path, OutputConfig(), stored)
    checkpoints.save(there.state_layout, moved, Progress(step=2, samples=16))
    checkpoints.close()
    back, _, _ = reader.load(choose(tmp_path, "auto")[0], training.run, training.state_layout, stored["tokenizer"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), back, state)


@pytest.mark.slow
def test_the_initial_state_is_made_without_an_all_gather():
    """As a save and a restore: layers move from stage to stage by an all-to-all."""
    training = training_of(SAVED)
    with jax.set_mesh(training.mesh):
        text = training._init.lower().compile().as_text()
    assert " all-to-all(" in text and " all-gather(" not in text


def test_no_device_holds_more_than_its_shard_of_a_leaf():
    """In a save and a restore layers move from stage to stage by an all-to-all, and no all-gather."""
    training = training_of(SAVED)
    name = "params/blocks/feedforward/up/kernel"
    leaf, sharding = (layout.named(tree)[name] for tree in (training.state_shapes, training.state_sharding))
    between = layout.without_pipe(leaf.shape, sharding, training.where)
    canonical = layout.canonical_sharding(name, leaf.shape, sharding, training.where)
    shape = layout.canonical_shape(name, leaf.shape, training.where)
    stored = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=canonical)
    leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    save = layout._to_layers.lower(leaf, None, training.where, between, canonical).compile()
    restore = layout._to_pipeline.lower(stored, training.where, sharding).compile()
    shard = 4 * np.prod(sharding.shard_shape(leaf.shape))
    for program in (save, restore):
        assert " all-to-all(" in program.as_text() and " all-gather(" not in program.as_text()
        assert program.memory_analysis().temp_size_in_bytes <= 2.1 * shard


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved_1f1b", 2), ("zb_h1", 1)])
def test_compiled_for_h100s_nothing_more_is_copied(schedule, chunks):
    """Empty slots add selects to kernels that there are: no copy of the stash, the weights or the accumulators."""
    options = {"pipe": 2, "tensor": 2, "chunks": chunks, "schedule": schedule, "attention": "xla"}
    (even, most), (uneven, peak) = (
        gpu.compile_step(dataclasses.replace(gpu.LARGE, layers=layers), 4, **options) for layers in (8, 7)
    )
    for op in ("copy", "while", "conditional", "all-gather-start", "reduce-scatter-start"):
        assert uneven.count(f" {op}(") == even.count(f" {op}("), op
    assert peak <= 1.01 * most


def test_a_run_says_where_its_layers_are(capsys):
    from experiments import gpt3

    words = "--layers 7 --pipe 4 --tensor 1 --schedule 1f1b --dry-shapes"
    assert gpt3.main(words.split()) == 0
    assert (
        "7 layers on 4 stages: 3 of 2 layers, 1 of 1 (the last); 1 of 8 slots idle (12.5%)" in capsys.readouterr().out
    )


def test_the_reference_of_these_tests_has_all_layers():
    """The unpipelined loss depends on the last layer, which stands alone on its stage."""
    model = of(7)
    params, batch = small.busy_params(model), small.make_batch(small.make_run(microbatches=1, model=model))
    fewer = {**params, "blocks": jax.tree.map(lambda a: a[:6], params["blocks"])}
    build = small.build_model(model, recompute="none")
    loss = jax.jit(lambda params: mean_loss(build, params, batch))
    assert abs(loss(fewer) - small.expected_loss(model)) > 1e-3
