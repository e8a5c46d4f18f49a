"""Every placement puts every stage, and so every layer, on one rank, once; others are refused where they are made."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.pipeline.layout import from_pipeline_layout, to_pipeline_layout
from megajax.schedules import registry
from megajax.schedules.errors import UserError
from megajax.schedules.registry import make_schedule, register
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, Schedule, ScheduleError, pack
from megajax.schedules.stages import PLACEMENTS, StageLayers

TWO_CHUNKS = "is for two chunks on each rank, not "


@given(st.sampled_from([*PLACEMENTS, "V", "w", ""]), st.integers(1, 8), st.integers(1, 6))
def test_every_stage_is_on_one_rank_or_the_placement_is_refused(placement, ranks, chunks):
    legal = placement == "loop" or (placement == "v" and chunks == 2)
    try:
        schedule = Schedule("mine", ranks, 1, chunks, True, (), placement)
    except ScheduleError:
        assert not legal
        return
    assert legal
    places = [(chunk, rank) for chunk in range(chunks) for rank in range(ranks)]
    assert sorted(schedule.stage(*place) for place in places) == list(range(ranks * chunks))
    assert [schedule.home(schedule.stage(*place)) for place in places] == places


@settings(max_examples=20)  # each shape compiles
@given(st.data(), st.sampled_from(PLACEMENTS), st.integers(1, 5), st.integers(1, 5), st.integers(1, 2))
def test_every_layer_is_in_one_slot_of_its_stage_or_the_placement_is_refused(data, placement, ranks, chunks, group):
    layers = group * data.draw(st.integers(ranks * chunks, 3 * ranks * chunks))
    try:
        where = StageLayers(layers, ranks, chunks, placement, group)
    except UserError:
        assert placement == "v" and chunks != 2
        return
    numbers = np.arange(1, layers + 1)
    placed = np.array(to_pipeline_layout(numbers, where))
    assert placed.shape == (chunks, ranks, where.slots) and sorted(placed[placed > 0]) == numbers.tolist()
    np.testing.assert_array_equal(from_pipeline_layout(placed, where), numbers)
    schedule = Schedule("mine", ranks, 1, chunks, True, (), placement)
    for chunk in range(chunks):
        for rank in range(ranks):
            stage = schedule.stage(chunk, rank)
            own = numbers[where.firsts[stage] :][: where.counts[stage]]
            assert placed[chunk, rank][: len(own)].tolist() == own.tolist()


def test_a_v_of_four_chunks_is_refused_when_it_is_packed():
    orders = [[Operation(op, chunk, 0) for op in (FORWARD, BACKWARD) for chunk in range(4)] for _ in range(2)]
    with pytest.raises(ScheduleError, match=f'mine: placement "v" {TWO_CHUNKS}4'):
        pack("mine", orders, microbatches=1, chunks=4, paired=True, placement="v")


def test_a_v_of_four_chunks_is_refused_when_a_registered_schedule_is_made(monkeypatch):
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))
    v = make_schedule("zb_v", stages=2, microbatches=4, chunks=2)

    @register("long_v", chunks="any")
    def long_v(stages, microbatches, chunks):
        return Schedule("long_v", stages, microbatches, chunks, False, v.ticks, "v", split=True)

    with pytest.raises(ScheduleError, match=f'placement "v" {TWO_CHUNKS}4'):
        make_schedule("long_v", stages=2, microbatches=4, chunks=4)


@pytest.mark.parametrize(
    "fields", [{"placement": "v", "chunks": "any"}, {"placement": "v"}, {"placement": "V", "chunks": "two"}]
)
def test_a_placement_that_no_schedule_can_have_is_refused_when_it_is_registered(fields):
    with pytest.raises(ScheduleError, match="placement is 'loop', or 'v' with chunks='two'"):
        register("mine", **fields)


def test_every_registered_schedule_has_a_placement_for_its_chunks():
    for spec in registry.specs():
        assert spec.placement in (None, "loop") or spec.chunks == "two", spec.name
