"""Layers of two kinds, dense and sparse, in one pipeline: loss, gradients and loads are the reference's on any layout."""

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
from megajax.estimate.hlo import merged_passes
from megajax.pipeline.layout import of_all_layers, to_pipeline_layout
from megajax.schedules.stages import StageLayers
from megajax.train import diagnose
from megajax.train import step as step_module
from megajax.train.expert_load import load_record
from tests import dense_experts, small
from tests.dense_experts import ALTERNATING, FIRST_DENSE
from tests.train import runs

# Every third layer is sparse, the last stage has another order of kinds than the first, and stages are uneven.
EVERY_THIRD = dataclasses.replace(FIRST_DENSE, dense_layers=0, moe_layer_freq="3", layers=7)
WITHOUT_PADDING = dataclasses.replace(ALTERNATING, moe_layer_freq="3", layers=7)  # in its batches

# mesh (data, pipe, tensor), schedule, chunks, microbatches; options of the layout
SMALLEST = dataclasses.replace(FIRST_DENSE, layers=3, dense_layers=1)
FIRST = (SMALLEST, ((2, 2, 1), "1f1b", 1, 4, {"expert": 2, "zero": 3}))
QUICK = (SMALLEST, ((2, 2, 1), "1f1b", 1, 4, {"expert": 2, "expert_dispatch": "all_to_all", "zero": 3}))
LONG = [
    (FIRST_DENSE, ((2, 2, 2), "zb_v", 2, 4, {"expert": 2, "zero": 3})),
    (FIRST_DENSE, ((1, 2, 2), "1f1b", 1, 4, {"recompute": "none"})),
    (ALTERNATING, ((2, 2, 2), "interleaved_1f1b", 2, 4, {"zero": 1})),
    (EVERY_THIRD, ((2, 2, 1), "1f1b", 1, 4, {"zero": 1, "expert": 2})),
    (EVERY_THIRD, ((1, 2, 2), "interleaved_1f1b", 2, 4, {"recompute": "full"})),
    (FIRST_DENSE, ((1, 1, 1), "1f1b", 1, 2, {})),
    (FIRST_DENSE, ((8, 1, 1), "1f1b", 1, 2, {"zero": 3, "expert": 2})),
    (ALTERNATING, ((1, 2, 1), "interleaved_1f1b", 2, 4, {"context": 2})),
    (ALTERNATING, ((1, 2, 2), "eager_1f1b", 1, 4, {"tensor_overlap": "ring"})),
    (FIRST_DENSE, ((1, 2, 2), "gpipe", 1, 4, {"offload_activations": True})),
    (dataclasses.replace(FIRST_DENSE, expert_capacity=0.75), ((2, 2, 2), "zb_h1", 1, 4, {"expert": 2})),
]
GRID = [
    (model, (mesh, schedule, chunks, max(4, 2 * mesh[1]), dict(how)))
    for model in (FIRST_DENSE, ALTERNATING)
    for mesh, options in [
        ((2, 2, 2), {"expert": 2, "expert_dispatch": "all_to_all"}),
        ((2, 4, 1), {"zero": 3}),
        ((1, 4, 2), {}),
    ]
    for schedule, chunks, recompute in [
        ("1f1b", 1, "none"),
        ("interleaved_1f1b", 2, "selective"),
        ("zb_h1", 1, "full"),
        ("zb_v", 2, "selective"),
        ("dualpipe_v", 2, "none"),
    ]
    for how in [{**options, "recompute": recompute}]
]


def cases(quick, long):
    return [pytest.param(*case, id=name(case)) for case in quick] + [
        pytest.param(*case, id=name(case), marks=pytest.mark.slow) for case in long
    ]


def name(case):
    return f"{case[0].moe_layer_freq}-{case[0].dense_layers}-{case[1]}"


def training_of(config, mesh, schedule, chunks, microbatches, options):
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, microbatches=microbatches, model=config, **options)
    return small.training_of(run)


def build(config, case):
    *sizes, options = case
    return training_of(config, *sizes, options)


def check(config, case, params=None, **bubbles):
    training = build(config, case)
    given = dense_experts.params_of(config) if params is None else params
    loss, gradients = training.loss_and_gradients(
        small.place(training, given), small.make_batch(training.run), **bubbles
    )
    want_loss, want = dense_experts.expected_of(config, params) if params else dense_experts.expected(config)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)
    again = layout.to_canonical({"params": gradients}, training.where)
    assert again["params/blocks/dense/feedforward/up/kernel"].shape[0] == config.layer_kinds.count("dense")
    return training


@pytest.mark.slow
@pytest.mark.parametrize(("config", "case"), cases([], [FIRST, *LONG]))
def test_loss_and_gradients(config, case):
    check(config, case)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "case"), cases([], GRID))
def test_loss_and_gradients_long(config, case):
    check(config, case)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "case"), cases([], LONG[:4]))
def test_bubbles_may_compute_nan(config, case):
    check(config, case, poison_bubbles=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "case"), cases([], [*LONG[:6], *(case for case in GRID[::4] if case[1][0] != (2, 4, 1))])
)
def test_weights_and_gradients_in_place(monkeypatch, config, case):
    """The program for GPUs with jax 0.12: a branch for each order of kinds."""
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    check(config, case)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [1, 3])
@pytest.mark.parametrize(
    "case",
    [
        ((2, 2, 1), "interleaved_1f1b", 2, 8, {"expert": 2, "expert_dispatch": "bucketed", "recompute": "full"}),
        ((2, 2, 2), "eager_1f1b", 1, 4, {"expert": 2, "expert_dispatch": "all_to_all", "zero": 1}),
        ((2, 2, 1), "dualpipe_v", 2, 4, {"expert": 2, "expert_dispatch": "bucketed"}),
    ],
    ids=str,
)
def test_ticks_that_merge_with_all_tokens_on_the_same_experts(monkeypatch, case, chosen):
    """All scores are equal, so all tokens choose the first experts: one replica has them all, the other has no row."""
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    config = dataclasses.replace(FIRST_DENSE, experts_per_token=chosen)
    params = jax.tree.map(np.array, dense_experts.params_of(config))
    router = params["blocks"]["sparse"]["feedforward"]["router"]
    router["kernel"][...], router["bias"][...] = 0, 0
    assert sum(merged_passes(check(config, case, params).program)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("config", "case"), cases([QUICK], [FIRST, LONG[0], LONG[2], LONG[4]]))
def test_the_loss_without_dropout_is_the_same(config, case):
    training = build(config, case)
    got = training.evaluate(small.place(training, dense_experts.params_of(config)), small.make_batch(training.run))
    np.testing.assert_allclose(got, dense_experts.expected_loss(config), rtol=1e-5)


def curve(config, case, steps=4):
    """Losses, and the loads of all layers, from the run's own initial weights."""
    training, rows = build(config, case), []
    state = training.init_state()
    for step in range(steps):
        state, metrics = training.train_step(state, small.make_batch(training.run, seed=step % 2))
        rows.append((float(metrics["loss"]), np.asarray(metrics["expert_load"])))
    return np.array([loss for loss, _ in rows]), np.stack([load for _, load in rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "case"),
    cases([], [LONG[0], *LONG[2:5], (WITHOUT_PADDING, ((1, 2, 1), "pipedream_2bw", 1, 4, {}))]),
)
def test_the_loss_curve_is_that_of_one_stage(config, case):
    """Initial values depend on the layer's number alone; the biases that balance follow the loads of each layer."""
    losses, loads = curve(config, case)
    if case[1] == "pipedream_2bw":
        assert np.isfinite(losses).all() and losses[-1] < losses[0]
        return
    want_losses, want_loads = curve(config, ((1, 1, 1), "1f1b", 1, 2, {}))
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
    sparse = [kind == "sparse" for kind in config.layer_kinds]
    assert (~np.isnan(loads).any((0, 2)) == sparse).all()
    assert np.nanmax(np.abs(loads - want_loads)) <= 2


@pytest.mark.slow
def test_a_pipeline_that_is_not_drained_uses_the_version_of_the_microbatch_in_place_too(monkeypatch):
    """In the program for GPUs with jax 0.12 a version of the weights is a branch, as a chunk is."""
    config = dataclasses.replace(ALTERNATING, layers=4, moe_layer_freq="2")
    case = ((1, 2, 1), "pipedream_2bw", 1, 4, {})
    want, _ = curve(config, case)
    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    np.testing.assert_allclose(curve(config, case)[0], want, rtol=1e-6)


def test_the_log_has_the_loads_of_each_layer_at_its_number():
    """Of layers 1 and 3 of four, on two stages."""
    where = StageLayers(4, 2, kinds=("dense", "sparse") * 2)
    loads, losses = np.float32([[2, 2, 2, 2], [4, 4, 0, 0]]), np.float32([[1, 3], [2, 5]])
    stacked = to_pipeline_layout({"expert_load": loads, "router_losses": losses}, where.of("sparse"))
    record = load_record(of_all_layers(stacked, where, "sparse"))
    assert record["layer_worst_expert_share"] == [None, 0.25, None, 0.5]
    assert record["layer_balance_loss"] == [None, 1, None, 2] and record["balance_loss"] == 1.5
    assert record["layer_expert_entropy"] == [None, pytest.approx(1), None, pytest.approx(0.5)]


@functools.cache
def saved():
    """The programs of a run, and a state whose arrays have no zeros but in empty slots."""
    training = build(*FIRST)
    state = training.init_state()
    params = small.place(training, dense_experts.params_of(FIRST[0]))
    first, adam, *others = state.optimizer_state
    moments = adam._replace(mu=params, nu=jax.tree.map(jnp.square, params))
    return training, dataclasses.replace(state, params=params, optimizer_state=(first, moments, *others))


RELOADED = [
    (SMALLEST, ((1, 1, 2), "1f1b", 1, 4, {})),
    (SMALLEST, ((1, 3, 1), "gpipe", 1, 4, {"vocab_parallel": "tensor"})),
    (SMALLEST, ((2, 1, 2), "interleaved_1f1b", 1, 4, {"zero": 1})),
    (SMALLEST, ((2, 2, 2), "zb_h1", 1, 4, {"zero": 3, "expert": 2})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "case"), cases([], RELOADED))
def test_a_checkpoint_resumes_on_other_layouts_with_equal_bits(tmp_path, config, case):
    training, state = saved()
    meta = run_meta(training.run, runs.Letters())
    checkpoints = Checkpoints(tmp_path / "here", OutputConfig(), meta)
    checkpoints.save(training.state_layout, state, Progress(step=1, samples=16))
    assert "step 1: checkpoint saved" in checkpoints.close()[-1]
    there = build(config, case)
    found = choose(tmp_path / "here", "auto")[0]
    moved, progress, _ = reader.load(found, there.run, there.state_layout, meta["tokenizer"])
    assert progress.step == 1
    want, got = layout.to_canonical(state, training.where), layout.to_canonical(moved, there.where)
    assert got.keys() == want.keys()
    dense = config.layer_kinds.count("dense")
    assert want["params/blocks/dense/attention/qkv/kernel"].shape[0] == dense  # no empty slot is stored
    assert want["optimizer_state/mu/blocks/sparse/feedforward/up"].shape[0] == config.layers - dense
    for leaf, array in got.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(want[leaf]), err_msg=leaf)
    checkpoints = Checkpoints(tmp_path / "there", OutputConfig(), meta)
    checkpoints.save(there.state_layout, moved, Progress(step=2, samples=16))
    checkpoints.close()
    back = reader.load(choose(tmp_path / "there", "auto")[0], training.run, training.state_layout, meta["tokenizer"])[0]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), back, state)


@pytest.mark.slow
def test_a_layer_that_is_not_finite_is_named_by_its_number():
    config, case = LONG[3]
    training = build(config, case)
    params = small.place(training, dense_experts.params_of(config))
    for number, kind in enumerate(config.layer_kinds):
        own = training.where.of(kind)
        numbers = np.asarray(to_pipeline_layout(1 + np.array(own.numbers), own))
        chunk, rank, slot = np.argwhere(numbers == 1 + number)[0]
        spoil = lambda a: a.at[chunk, rank, slot].set(jnp.nan)  # noqa: B023, E731
        broken = {**params["blocks"], kind: jax.tree.map(spoil, params["blocks"][kind])}
        names = diagnose.not_finite(training, {**params, "blocks": broken})
        assert {name.split(",")[0] for name in names} == {f"layer {number}"}
        assert f"layer {number}, attention/qkv/kernel" in names
