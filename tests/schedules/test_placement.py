"""Every placement puts every stage, and so every layer, on one rank, once; others are refused where they are made."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.pipeline.layout import from_pipeline_layout, to_pipeline_layout
from megajax.schedules import registry
from megajax.schedules.errors import UserError
from megajax.schedules.registry import make_schedule, register
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, Schedule, ScheduleError, pack
from megajax.schedules.stages import Placement, StageLayers, loop, wave


@st.composite
def placements(draw):
    """Any placement: stages dealt to chunks of ranks, each rank's in the order of the model."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    if draw(st.booleans()):
        return draw(st.sampled_from([loop, wave]))(ranks, chunks)
    dealt = draw(st.permutations([rank for rank in range(ranks) for _ in range(chunks)]))
    held = [[stage for stage, owner in enumerate(dealt) if owner == rank] for rank in range(ranks)]
    return Placement(tuple(zip(*held, strict=True)))


@given(placements())
def test_every_stage_is_on_one_rank(placement):
    ranks, chunks = placement.ranks, placement.chunks
    schedule = Schedule("mine", ranks, 1, chunks, True, (), placement)
    places = [(chunk, rank) for chunk in range(chunks) for rank in range(ranks)]
    assert sorted(schedule.stage(*place) for place in places) == list(range(ranks * chunks))
    assert [schedule.home(schedule.stage(*place)) for place in places] == places
    # The forwards of any placement reach its end, in the order of `forward_only`.
    make_schedule("forward_only", stages=ranks, microbatches=3, chunks=chunks, placement=placement)


@settings(max_examples=20)  # each shape compiles
@given(st.data(), placements(), st.integers(1, 2))
def test_every_layer_is_in_one_slot_of_its_stage(data, placement, group):
    ranks, chunks = placement.ranks, placement.chunks
    layers = group * data.draw(st.integers(ranks * chunks, 3 * ranks * chunks))
    if data.draw(st.booleans()):
        cuts = data.draw(
            st.lists(st.integers(0, layers // group), min_size=ranks * chunks - 1, max_size=ranks * chunks - 1)
        )
        bounds = [0, *sorted(cuts), layers // group]
        own = tuple(group * (high - low) for low, high in itertools.pairwise(bounds))
        placement = dataclasses.replace(placement, layers=own)
    where = StageLayers(layers, ranks, chunks, placement, group)
    numbers = np.arange(1, layers + 1)
    placed = np.array(to_pipeline_layout(numbers, where))
    assert placed.shape == (chunks, ranks, where.slots) and sorted(placed[placed > 0]) == numbers.tolist()
    np.testing.assert_array_equal(from_pipeline_layout(placed, where), numbers)
    for stage, (chunk, rank) in enumerate(placement.homes):
        own = numbers[where.firsts[stage] :][: where.counts[stage]]
        assert placed[chunk, rank][: len(own)].tolist() == own.tolist()


def test_a_loop_a_v_and_waves():
    assert loop(2, 3).stage_of == ((0, 1), (2, 3), (4, 5))
    assert wave(2, 3).stage_of == ((0, 1), (3, 2), (4, 5))
    names = [placed.name for placed in (loop(4, 2), wave(4, 1), wave(4, 2), wave(4, 4), Placement(((0, 2), (1, 3))))]
    assert names == ["loop", "loop", "v", "wave", "own"]
    assert [placed.turns for placed in (loop(2, 2), wave(2, 2), Placement(((0, 2), (1, 3))))] == [False, True, True]


@pytest.mark.parametrize(
    ("stage_of", "layers", "message"),
    [
        (((0, 1), (1, 2)), None, "each of the stages 0, 1, ... once"),
        (((0, 1), (2,)), None, "a row for each chunk"),
        ((), None, "a row for each chunk"),
        (((2, 1), (0, 3)), None, r"has chunks .* on rank 0; a rank's stages must ascend"),
        (((0, 1),), (1, 2, 3), "a number for each of 2 stages"),
        (((0, 1),), (1, -1), "a number for each of 2 stages"),
    ],
)
def test_a_placement_that_is_none_is_refused(stage_of, layers, message):
    with pytest.raises(UserError, match=message):
        Placement(stage_of, layers)


def test_layers_that_are_not_the_models_are_refused():
    with pytest.raises(UserError, match="the stages have 0, 3 times 2 layers, but the model has 7"):
        StageLayers(7, 4, 1, dataclasses.replace(loop(4, 1), layers=(0, 2, 2, 2)))
    assert StageLayers(6, 4, 1, dataclasses.replace(loop(4, 1), layers=(0, 2, 2, 2))).skips_slots
    assert not StageLayers(7, 4).skips_slots


def test_a_placement_for_other_sizes_is_refused_when_a_schedule_is_packed_or_made(monkeypatch):
    orders = [[Operation(op, chunk, 0) for op in (FORWARD, BACKWARD) for chunk in range(4)] for _ in range(2)]
    message = "the placement is for 2 chunks on each of 2 ranks, not for 4 on each of 2"
    with pytest.raises(ScheduleError, match=f"mine: {message}"):
        pack("mine", orders, microbatches=1, chunks=4, paired=True, placement=wave(2, 2))
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))
    v = make_schedule("zb_v", stages=2, microbatches=4, chunks=2)

    @register("long_v", chunks="any")
    def long_v(stages, microbatches, chunks):
        return Schedule("long_v", stages, microbatches, chunks, False, v.ticks, v.placement, split=True)

    with pytest.raises(ScheduleError, match=message):
        make_schedule("long_v", stages=2, microbatches=4, chunks=4)

    @register("ends_alone")
    def ends_alone(stages, microbatches, chunks):
        made = make_schedule("1f1b", stages=stages, microbatches=microbatches)
        placed = dataclasses.replace(made.placement, layers=(0, 4, 4, 0))
        return dataclasses.replace(made, name="ends_alone", placement=placed)

    with pytest.raises(ScheduleError, match="has layers: give register the function that makes it"):
        make_schedule("ends_alone", stages=4, microbatches=4)


def test_a_placement_by_name_is_refused_when_it_is_registered():
    with pytest.raises(ScheduleError, match=r"placement='v': it is a function .* such as stages\.loop or stages\.wave"):
        register("mine", placement="v")
