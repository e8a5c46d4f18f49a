"""On CPU devices no collective runs beside a loop with collectives (`pipeline.loops.serializes`): read off the programs.

A CPU device would wait in both, each with one of the process's threads. If enough devices do, the one that they wait for
has no thread, and never runs.
"""

import dataclasses

import jax
import pytest

from tests import small
from tests.collective_order import beside_loops

EXPERTS = dataclasses.replace(
    small.MODEL, experts=4, experts_per_token=2, activation="swiglu", biases=False, norm="rmsnorm", positions="rotary"
)

FURTHER_TOKENS = dataclasses.replace(EXPERTS, mtp_num_layers=1, balance_loss=0.01, shared_feedforward=16)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "options"),
    [
        ((2, 2, 2), "1f1b", {}),
        ((2, 2, 2), "eager_1f1b", {}),
        ((2, 2, 1), "interleaved_1f1b", {"chunks": 4, "zero": 3}),
        ((2, 2, 2), "interleaved_1f1b", {"chunks": 2}),
        ((2, 2, 2), "gpipe", {}),
        ((2, 2, 2), "zb_v", {"chunks": 2}),
        ((2, 2, 2), "dualpipe_v", {"chunks": 2}),
        ((2, 2, 2), "1f1b", {"model": small.LLAMA}),
        ((2, 2, 2), "1f1b", {"zero": 1}),
        ((2, 2, 2), "1f1b", {"zero": 3}),
        ((2, 2, 2), "1f1b", {"model": small.BERT}),
        ((8, 1, 1), "1f1b", {"microbatches": 2, "zero": 3}),
        ((2, 2, 2), "gpipe", {"zero": 3}),
        ((2, 2, 2), "eager_1f1b", {"zero": 3, "model": small.LLAMA}),
        ((1, 4, 2), "interleaved_1f1b", {"chunks": 2}),
        ((2, 2, 2), "interleaved_1f1b", {"chunks": 4}),
        ((2, 2, 2), "interleaved_1f1b", {"tensor_overlap": "ring"}),
        ((2, 2, 1), "interleaved_1f1b", {"chunks": 2, "context": 2, "zero": 3}),
        ((1, 2, 2), "zb_v", {"chunks": 2, "context": 2, "context_exchange": "all_to_all"}),
        ((2, 2, 1), "1f1b", {"context": 2, "context_exchange": "all_to_all", "zero": 3}),
        ((2, 4, 1), "looped_bfs", {"chunks": 2, "zero": 3}),
        ((2, 2, 2), "zb_h1", {"zero": 3}),
        ((2, 2, 2), "zb_h2", {"recompute": "full"}),
        ((2, 4, 1), "zb_v", {"chunks": 2, "zero": 1}),
        ((2, 2, 2), "zb_1p_interleaved", {"chunks": 2}),
        ((2, 2, 2), "dualpipe_v", {"chunks": 2, "zero": 1}),
        ((2, 2, 2), "pipedream_2bw", {"zero": 1}),
        ((2, 1, 2), "1f1b", {"expert": 2, "expert_dispatch": "all_to_all", "model": EXPERTS}),
        ((2, 2, 2), "zb_h1", {"expert": 2, "expert_dispatch": "gather", "zero": 3, "model": EXPERTS}),
        ((2, 2, 2), "1f1b", {"expert": 2, "expert_dispatch": "bucketed", "model": EXPERTS}),
        ((2, 2, 2), "zb_h1", {"expert": 2, "expert_dispatch": "bucketed", "zero": 3, "model": EXPERTS}),
        ((2, 2, 2), "dualpipe_v", {"chunks": 2, "expert": 2, "expert_dispatch": "bucketed", "model": FURTHER_TOKENS}),
    ],
)
def test_of_a_step(mesh, schedule, options):
    run = small.make_run(mesh, schedule=schedule, **options)
    training = small.training_of(run)
    step = training.compile_train_step(*training.step_shapes())
    pairs, loops = beside_loops(step.as_text())
    assert loops and not pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"), [slow((2, 4, 1), {"chunks": 2}), ((2, 1, 1), {"context": 2}), slow((2, 2, 2), {})]
)
def test_of_an_evaluation(mesh, options):
    training = small.training_of(small.make_run(mesh, zero=3, **options))
    state, batch = training.step_shapes()
    with jax.set_mesh(training.mesh):
        program = training._evaluate.lower(state.params, batch).compile()
    pairs, loops = beside_loops(program.as_text())
    assert loops and not pairs


BESIDE = """
%body (state: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %state = (s32[], f32[8], f32[8]) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %changed = f32[8] get-tuple-element(%state), index=1
  %kept = f32[8] get-tuple-element(%state), index=2
  %sum = f32[8] all-reduce(%changed), to_apply=%add
  ROOT %next = (s32[], f32[8], f32[8]) tuple(%count, %sum, %kept)
}

ENTRY %main (start: s32[], x: f32[8], y: f32[8]) -> (f32[8], f32[8], f32[8]) {
  %start = s32[] parameter(0)
  %x = f32[8] parameter(1)
  %y = f32[8] parameter(2)
  %earlier = f32[8] all-reduce(%x), to_apply=%add, metadata={op_name="earlier"}
  %state.1 = (s32[], f32[8], f32[8]) tuple(%start, %x, %y)
  %loop = (s32[], f32[8], f32[8]) while(%state.1), condition=%more, body=%body, metadata={op_name="loop"}
  %changed.1 = f32[8] get-tuple-element(%loop), index=1
  %kept.1 = f32[8] get-tuple-element(%loop), index=2
  %after = f32[8] all-reduce(%changed.1), to_apply=%add, metadata={op_name="after"}
  %beside = f32[8] all-reduce(%kept.1), to_apply=%add, metadata={op_name="beside"}
  ROOT %results = (f32[8], f32[8], f32[8]) tuple(%earlier, %after, %beside)
}
"""


def test_what_may_run_beside_a_loop():
    """By hand: "after" needs what the loop computes; "beside" needs an array that the loop only passes on."""
    assert beside_loops(BESIDE) == ([("while loop", "all-reduce beside")], 1)
