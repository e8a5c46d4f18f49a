"""A model with experts on every layout: loss, gradients, expert loads and balance losses are the dense reference's."""

import dataclasses
import itertools

import numpy as np
import pytest

from megajax.models import context
from megajax.ops import grouped_gated
from megajax.ops.gated_down import gated_gradients
from megajax.ops.grouped_matmul import INTERPRETED
from megajax.pipeline.program import StepProgram
from megajax.train import step as step_module
from tests import dense_experts, small
from tests.dense_experts import DROPPING, PLAIN, UNEVEN
from tests.train.test_equivalence import slow

# mesh (data, pipe, tensor), schedule, chunks, microbatches; options of the layout
LONG = [
    ((2, 2, 2), "zb_v", 2, 4, {"zero": 3}),
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {"zero": 1}),
    ((1, 1, 1), "1f1b", 1, 2, {"recompute": "none"}),
    ((2, 2, 2), "1f1b", 1, 4, {"recompute": "full"}),
    ((2, 2, 2), "dualpipe_v", 2, 4, {"recompute": "none"}),
    ((1, 4, 2), "zb_h1", 1, 8, {}),
    ((4, 2, 1), "zb_h1", 1, 4, {"zero": 3, "recompute": "full"}),
    ((1, 2, 2), "interleaved_1f1b", 1, 4, {"context": 2}),
    ((2, 2, 1), "eager_1f1b", 1, 4, {"context": 2, "zero": 1, "recompute": "none"}),
    ((1, 4, 2), "interleaved_1f1b", 2, 8, {"sequence_parallel": False, "recompute": "full"}),
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {"recompute": "full", "recompute_blocks": 2}),
    ((1, 4, 2), "interleaved_1f1b", 1, 4, {"tensor_overlap": "ring"}),
    ((8, 1, 1), "1f1b", 1, 2, {"zero": 3}),
    ((1, 1, 4), "1f1b", 1, 2, {}),
    ((2, 4, 1), "gpipe", 1, 8, {"vocab_parallel": "tensor"}),
]
# Every mesh with every schedule; the ZeRO levels, recompute modes and models alternate.
GRID = [
    (
        (PLAIN, UNEVEN)[index % 2],
        (mesh, schedule, chunks, 8 // mesh[0], dict(zip(("zero", "recompute"), how, strict=True))),
    )
    for index, (mesh, (schedule, chunks), how) in enumerate(
        (mesh, schedule, [(0, "none"), (1, "selective"), (3, "full")][number % 3])
        for number, (mesh, schedule) in enumerate(
            itertools.product(
                [(1, 2, 2), (2, 2, 2), (2, 4, 1), (1, 4, 2), (1, 2, 4), (4, 2, 1), (2, 1, 4)],
                [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)],
            )
        )
    )
    if (schedule != "dualpipe_v" or 8 // mesh[0] >= 2 * mesh[1]) and (mesh[1] > 1 or chunks == 1)
]
# With the experts split over replicas (`--expert`).
EXPERT_FIRST = (UNEVEN, ((2, 1, 2), "1f1b", 1, 2, {"expert": 2, "expert_dispatch": "all_to_all"}))
EXPERT_LONG = [
    (UNEVEN, ((2, 2, 2), "zb_v", 2, 4, {"expert": 2, "zero": 3})),
    (UNEVEN, ((2, 2, 2), "1f1b", 1, 4, {"expert": 2, "zero": 1})),
    (UNEVEN, ((4, 1, 2), "1f1b", 1, 4, {"expert": 2, "zero": 3})),
    (UNEVEN, ((4, 2, 1), "zb_v", 2, 4, {"expert": 2, "recompute": "full", "recompute_blocks": 2})),
    (PLAIN, ((8, 1, 1), "1f1b", 1, 2, {"expert": 4, "zero": 3})),
    (PLAIN, ((4, 2, 1), "gpipe", 1, 4, {"expert": 4, "vocab_parallel": "tensor"})),
    (PLAIN, ((2, 1, 2), "interleaved_1f1b", 1, 2, {"expert": 4, "context": 2, "zero": 1})),
    (PLAIN, ((1, 2, 1), "eager_1f1b", 1, 4, {"expert": 2, "context": 4})),
    (PLAIN, ((1, 2, 2), "zb_v", 2, 4, {"expert": 2, "context": 2, "context_exchange": "all_to_all"})),
    (PLAIN, ((2, 2, 1), "1f1b", 1, 4, {"expert": 4, "context": 2, "context_exchange": "all_to_all", "zero": 3})),
    (PLAIN, ((2, 1, 4), "interleaved_1f1b", 1, 4, {"expert": 2, "tensor_overlap": "ring"})),
    (PLAIN, ((2, 2, 2), "interleaved_1f1b", 2, 4, {"expert": 2, "sequence_parallel": False})),
]
# With whole experts of tensor ranks (`--expert-tensor 1`).
OVER_TENSOR = [
    (PLAIN, ((1, 1, 4), "1f1b", 1, 4, {"expert": 4, "recompute": "full"})),
    (UNEVEN, ((4, 1, 2), "zb_h1", 1, 4, {"expert": 2, "zero": 3})),
    (UNEVEN, ((2, 2, 2), "interleaved_1f1b", 2, 4, {"expert": 2, "recompute": "none"})),
    (PLAIN, ((2, 1, 2), "1f1b", 1, 2, {"expert": 4, "context": 2, "context_exchange": "all_to_all"})),
    (PLAIN, ((2, 2, 2), "zb_v", 2, 4, {"expert": 4, "zero": 1})),
    (PLAIN, ((2, 2, 2), "dualpipe_v", 2, 4, {"expert": 4})),
]
DROPPING_LONG = [
    ((2, 2, 2), "zb_v", 2, 4, {"expert": 2, "zero": 1}),
    ((4, 2, 1), "1f1b", 1, 4, {"expert": 2, "recompute": "full"}),
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {}),
    ((2, 2, 2), "zb_v", 2, 4, {"expert": 2, "zero": 1, "expert_dispatch": "all_to_all"}),
    ((4, 2, 1), "1f1b", 1, 4, {"expert": 2, "recompute": "full", "expert_dispatch": "all_to_all"}),
    ((4, 1, 2), "1f1b", 1, 4, {"expert": 2, "sequence_parallel": False, "expert_dispatch": "all_to_all"}),
    ((4, 1, 2), "1f1b", 1, 4, {"expert": 2, "expert_tensor": 1, "expert_dispatch": "all_to_all"}),
    ((2, 2, 2), "zb_v", 2, 4, {"expert": 2, "zero": 1, "expert_dispatch": "bucketed"}),
]
EXPERT_GRID = [
    (
        UNEVEN if expert == 2 and number % 2 else PLAIN,
        (mesh, schedule, chunks, max(4, 2 * mesh[1]), {"expert": expert} | how),
    )
    for mesh, expert in [((2, 2, 2), 2), ((4, 2, 1), 4), ((4, 2, 1), 2), ((4, 1, 2), 4), ((2, 4, 1), 2)]
    for number, (schedule, chunks, how) in enumerate(
        [
            ("1f1b", 1, {"recompute": "none"}),
            ("interleaved_1f1b", 2, {"zero": 1}),
            ("zb_h1", 1, {"zero": 3, "recompute": "full"}),
            ("zb_v", 2, {}),
            ("dualpipe_v", 2, {"zero": 1, "recompute": "none"}),
        ]
    )
    if mesh[1] > 1 or chunks == 1
]


def training_of(config, mesh, schedule, chunks, microbatches, options):
    """Not cached: a CPU program has about a thousand memory mappings, of which Linux allows a process 65,530."""
    options = {"recompute": "selective"} | options
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, microbatches=microbatches, model=config, **options)
    return small.training_of(run)


def check(config, case, **bubbles):
    *sizes, options = case
    training = training_of(config, *sizes, options)
    params = small.place(training, dense_experts.params_of(config))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run), **bubbles)
    want_loss, want = dense_experts.expected(config)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)


@pytest.mark.parametrize("case", slow(LONG), ids=str)
def test_loss_gradients_and_measurements(case):
    check(UNEVEN, case)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "case"), GRID, ids=[str(case) for _, case in GRID])
def test_loss_gradients_and_measurements_long(config, case):
    check(config, case)


@pytest.mark.slow
def test_evaluation_on_replicas_that_split_the_experts():
    """The forward alone; the quick tests have it with layers of two kinds, in test_layer_kinds.py."""
    config, (*sizes, options) = EXPERT_FIRST
    config = dataclasses.replace(config, layers=2)  # the reference has no loop over layers
    training = training_of(config, *sizes, options)
    params = small.place(training, dense_experts.params_of(config))
    got = training.evaluate(params, small.make_batch(training.run))
    np.testing.assert_allclose(got, dense_experts.expected_loss(config), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "case"),
    [pytest.param(*case, id=str(case[1])) for case in [EXPERT_FIRST, *EXPERT_LONG, *EXPERT_GRID]],
)
def test_replicas_that_split_the_experts(config, case):
    check(config, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "case"),
    EXPERT_LONG + EXPERT_GRID,
    ids=lambda one: "" if hasattr(one, "layers") else str(one),
)
@pytest.mark.parametrize("dispatch", ["all_to_all", "bucketed"])
def test_dispatch_by_all_to_all(config, case, dispatch):
    """Each case of `test_replicas_that_split_the_experts`; UNEVEN has an expert without tokens and equal scores.

    And one for all tokens, so that its replica has more than the first exchange of "bucketed" holds.
    """
    *sizes, options = case
    check(config, (*sizes, options | {"expert_dispatch": dispatch}))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "all_to_all", "bucketed"])
@pytest.mark.parametrize(("config", "case"), [pytest.param(*case, id=str(case[1])) for case in OVER_TENSOR])
def test_tensor_ranks_that_split_the_experts(config, case, dispatch):
    """Attention is split over tensor; each of its ranks has whole experts, alone or with those of other replicas."""
    *sizes, options = case
    check(config, (*sizes, options | {"expert_tensor": 1, "expert_dispatch": dispatch}))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "all_to_all", "bucketed"])
@pytest.mark.parametrize("case", [((4, 2, 1), "zb_v", 2, 4), ((4, 1, 2), "1f1b", 1, 4)], ids=str)
def test_routing_limited_to_groups_of_experts(case, dispatch):
    """A token is sent to two of four replicas at most, though it has three experts."""
    check(dense_experts.GROUPED, (*case, {"expert": 4, "expert_dispatch": dispatch}))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"expert": 2, "expert_dispatch": "all_to_all"}], ids=str)
def test_inputs_of_experts_are_weighted(how):
    """As Llama 4's are."""
    check(dense_experts.INPUTS, ((2, 2, 1), "zb_h1", 1, 4, {"recompute": "none"} | how))


@pytest.mark.slow
def test_inputs_of_tensor_ranks_experts_are_weighted():
    check(dense_experts.INPUTS, ((1, 1, 2), "1f1b", 1, 4, {"expert": 2, "expert_tensor": 1}))


@pytest.mark.parametrize("case", slow(DROPPING_LONG), ids=str)
def test_dropped_choices(case):
    """Which ones depends on the sample alone; the rows that no expert takes are not computed."""
    check(DROPPING, case)


@pytest.mark.parametrize("case", slow([LONG[0], *LONG[2:6], EXPERT_LONG[0][1], DROPPING_LONG[3]]), ids=str)
def test_bubbles_may_compute_nan(case):
    check(UNEVEN, case, poison_bubbles=True)


# Whether weight gradients are added where they are: not those that ZeRO-3 scatters first.
IN_PLACE = [
    (((2, 1, 2), "interleaved_1f1b", 1, 4, {"expert": 2, "zero": 1}), True),
    (((1, 2, 2), "zb_h1", 1, 4, {"recompute": "full"}), True),
    (((2, 2, 1), "1f1b", 1, 4, {"expert": 2}), True),
    (((2, 2, 1), "1f1b", 1, 4, {"expert": 2, "expert_dispatch": "bucketed"}), True),
    (((2, 2, 1), "interleaved_1f1b", 2, 4, {"expert": 2, "expert_dispatch": "bucketed", "recompute": "full"}), True),
    (((2, 1, 2), "1f1b", 1, 4, {"zero": 3}), False),
    (((2, 1, 2), "interleaved_1f1b", 1, 4, {"expert": 2, "expert_tensor": 1, "zero": 1}), True),
    (((1, 2, 2), "1f1b", 1, 4, {"expert": 2, "expert_tensor": 1, "expert_dispatch": "bucketed"}), True),
    (((1, 1, 1), "interleaved_1f1b", 1, 2, {"recompute": "none"}), True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "added"), IN_PLACE, ids=str)
def test_gradients_are_added_in_place_by_their_kernel(case, added, monkeypatch):
    """The program for GPUs with jax 0.12, its kernels interpreted."""
    calls = []

    def add(*arguments):
        calls.append(arguments)
        return INTERPRETED.add(*arguments)

    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    monkeypatch.setattr(context, "kernel_for", lambda device: INTERPRETED._replace(add=add))
    check(UNEVEN, case)
    assert bool(calls) == added


# mesh, schedule, chunks, microbatches, options; whether kernels write gate and value to the stash and read them there
ONE_PASS = [
    (((2, 2, 1), "interleaved_1f1b", 2, 4, {"expert": 2, "expert_dispatch": "bucketed"}), True),
    (((1, 4, 1), "interleaved_1f1b", 1, 4, {"zero": 1}), True),
    (((2, 2, 1), "1f1b", 1, 4, {"expert": 2, "recompute": "full"}), False),
    (((2, 1, 2), "interleaved_1f1b", 1, 4, {"expert": 2, "expert_tensor": 1, "expert_dispatch": "bucketed"}), True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "in_stack"), ONE_PASS, ids=str)
def test_the_backward_of_gated_experts_in_one_pass(case, in_stack, monkeypatch):
    """The program for GPUs with jax 0.12, its kernels interpreted."""
    read, written = set(), set()

    def gradients(stack, *arguments, **settings):
        read.add(len(stack))
        return gated_gradients(stack, *arguments, **settings)

    def into(out, *arguments):
        written.add(len(out))
        return INTERPRETED.into(out, *arguments)

    monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    monkeypatch.setattr(context, "kernel_for", lambda device: INTERPRETED._replace(into=into))
    monkeypatch.setattr(grouped_gated, "gated_gradients", gradients)
    check(UNEVEN, case)
    assert read and ((max(read) > 1) == bool(written) == in_stack)


CURVES = [
    ((2, 2, 2), "zb_v", 2, 4, {"zero": 3}),
    ((1, 4, 2), "1f1b", 1, 4, {"recompute": "full"}),
    ((4, 2, 1), "zb_v", 2, 4, {"expert": 2, "zero": 1}),
    ((2, 2, 2), "1f1b", 1, 4, {"expert": 2, "zero": 3}),
    ((2, 2, 2), "interleaved_1f1b", 2, 4, {"expert": 2}),
    ((2, 2, 2), "zb_h1", 1, 4, {"expert": 2, "expert_dispatch": "all_to_all"}),
    ((2, 2, 2), "dualpipe_v", 2, 4, {"expert": 2, "expert_dispatch": "bucketed"}),
    ((2, 2, 2), "1f1b", 1, 4, {"expert": 2, "expert_tensor": 1, "expert_dispatch": "all_to_all"}),
]


@pytest.mark.slow
def test_twenty_steps_have_the_same_losses_and_loads():
    """Biases that balance included: they follow the loads of every step."""

    def curve(case):
        *sizes, options = case
        training = training_of(UNEVEN, *sizes, options)
        state, rows = training.init_state(), []
        for step in range(20):
            state, metrics = training.train_step(state, small.make_batch(training.run, seed=step % 2))
            rows.append((float(metrics["loss"]), np.asarray(metrics["expert_load"])))
        return [loss for loss, _ in rows], np.stack([load for _, load in rows])

    losses, loads = curve(((1, 1, 1), "1f1b", 1, 2, {}))
    assert losses[-1] < losses[0]
    for case in CURVES:
        got_losses, got_loads = curve(case)
        np.testing.assert_allclose(got_losses, losses, rtol=2e-5)
        assert np.abs(got_loads - loads).max() <= 2  # a choice between two nearly equal scores


@pytest.mark.parametrize(
    ("activation", "one_pass"), [("swiglu", True), ("geglu", True), ("geglu_exact", False), ("clamped_swiglu", False)]
)
def test_which_gates_have_a_backward_in_one_pass(activation, one_pass):
    """Its kernel multiplies by the gate's function alone: it clamps nothing."""
    run = small.make_run((2, 2, 1), model=dataclasses.replace(UNEVEN, activation=activation))
    program = StepProgram.of(run)
    assert program.gates_in_one_pass == program.expert_gates_in_one_pass == one_pass


@pytest.mark.parametrize(
    ("fields", "one_pass"),
    [({}, True), ({"expert_biases": True}, False), ({"expert_weighted": "input"}, False), ({"biases": True}, True)],
)
def test_which_gated_experts_have_a_backward_in_one_pass(fields, one_pass):
    """Its kernel does not know a weight before the activation; what biases are added to is fp32, not the stash's type."""
    run = small.make_run((2, 2, 1), model=dataclasses.replace(UNEVEN, **fields))
    assert StepProgram.of(run).expert_gates_in_one_pass == one_pass
