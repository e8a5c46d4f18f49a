"""Counting in a compiled program's text, on a program small enough to count by hand."""

import pytest

from megajax.plan.hlo import Collective, Program

# Eight devices as data 2 x pipe 2 x tensor 2. A scan of ten ticks, in each a loop of four turns with a matmul of
# 2 * 8 * 16 * 32 = 8,192 FLOPs inside a fusion, an all-gather over tensor and a permute; then a sum over data.
TEXT = """HloModule jit_step, is_scheduled=true

%fused_computation (p0: bf16[8,16], p1: bf16[16,32]) -> bf16[8,32] {
  %p0 = bf16[8,16]{1,0} parameter(0)
  %p1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%blocks (carry: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %carry = (s32[], bf16[8,32]{1,0}) parameter(0)
  %fusion = bf16[8,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_computation
  %all-gather-start = (bf16[4,32]{1,0}, bf16[8,32]{1,0}) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={0}
  %all-gather-done = bf16[8,32]{1,0} all-gather-done(%all-gather-start)
  ROOT %tuple = (s32[], bf16[8,32]{1,0}) tuple(%i, %fusion)
}

%turns (carry: (s32[], bf16[8,32])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%head (carry: (s32[], f32[96,16])) -> (s32[], f32[96,16]) {
  %logits = bf16[8,96]{1,0} dot(%y, %table), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %y = bf16[8,16]{1,0} parameter(0)
  ROOT %tuple.2 = (s32[], f32[96,16]{1,0}) tuple(%i, %g)
}

%tick (carry: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %while.1 = (s32[], bf16[8,32]{1,0}) while(%carry), condition=%turns, body=%blocks, backend_config={TURNS}
  %permute-start = (bf16[4,32]{1,0}, bf16[4,32]{1,0}) collective-permute-start(%y), source_target_pairs={{0,2},{1,3},{4,6}}
  ROOT %tuple.3 = (s32[], bf16[8,32]{1,0}) tuple(%i, %y)
}

ENTRY %main (p: f32[64]) -> f32[64] {
  %while.2 = (s32[], bf16[8,32]) while(%start), condition=%turns, body=%tick, backend_config={"known_trip_count":{"n":"10"}}
  %all-reduce-start = f32[64]{0} all-reduce-start(%g), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  ROOT %all-reduce-done = f32[64]{0} all-reduce-done(%all-reduce-start)
}
"""
KNOWN = TEXT.replace("{TURNS}", '{"known_trip_count":{"n":"4"}}')


def program(text=KNOWN, blocks_run=40):
    return Program(text, (2, 2, 2), vocabulary_rows=96, blocks_run=blocks_run, microbatches=5)


def test_calls_bytes_and_flops_by_hand():
    totals = program().totals
    assert totals.flops == 10 * 4 * 2 * 8 * 16 * 32
    assert dict(totals.calls) == {
        Collective("all-gather", ("tensor",), 8 * 32 * 2 // 2): 40,  # half of the whole comes from the other
        Collective("collective-permute", ("pipe",), 4 * 32 * 2): 10,
        Collective("all-reduce", ("data",), 64 * 4): 1,  # round a ring of two: half, twice
    }


def test_loops_without_a_number_come_to_the_blocks_of_a_step():
    """25 blocks in ten ticks: two and a half turns a tick."""
    totals = program(TEXT.replace("{TURNS}", "{}"), blocks_run=25).totals
    assert totals.flops == pytest.approx(25 * 2 * 8 * 16 * 32)


def test_loops_over_the_vocabulary_turn_once_a_microbatch():
    text = TEXT.replace("body=%blocks", "body=%head").replace("{TURNS}", "{}")
    text = text.replace("  %y = bf16[8,16]{1,0} parameter(0)\n", "").replace(
        "  %logits", "  %y = bf16[8,16]{1,0} parameter(0)\n  %unused = f32[96,16]{1,0} parameter(1)\n  %logits"
    )
    assert program(text).totals.flops == pytest.approx(5 * 2 * 8 * 96 * 16)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("[4,2]<=[8]", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("pipe",)),
        ("[2,4]<=[8]", ("pipe", "tensor")),
        ("[1,8]<=[8]", ("data", "pipe", "tensor")),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ("pipe",)),
        ("mesh['a'=2,'b'=4] {'a'}", ("data",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",)),
    ],
)
def test_replica_groups_in_every_form(groups, axes):
    found = program(KNOWN.replace("[4,2]<=[8]", groups)).totals.calls
    assert axes in {collective.axes for collective in found if collective.kind == "all-gather"}
