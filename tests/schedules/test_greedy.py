"""auto: never slower than the best registered schedule, never more in flight than allowed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.schedules.registry import find, make_schedule, names
from megajax.schedules.schedule import ScheduleError
from megajax.schedules.simulate import Costs, simulate_lockstep

times = st.sampled_from([0.5, 1.0, 1.5, 2.0])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 10), st.integers(1, 3), st.integers(1, 12), times, times, times,
    st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_never_slower_than_the_best_registered_one(stages, microbatches, chunks, room, forward, back, weight, latency):
    costs = Costs(forward, back + weight, back, weight, latency)
    live_chunks = chunks - 1 + room
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    best = simulate_lockstep(make_schedule("auto", **sizes, costs=costs, live_chunks=live_chunks), costs)
    assert max(best.peak_live) <= live_chunks
    for name in (name for name in names() if name != "auto" and find(name).drains):
        try:
            named = simulate_lockstep(make_schedule(name, **sizes), costs)
        except ScheduleError:
            continue
        assert best.makespan <= named.makespan + 1e-9 or max(named.peak_live) > live_chunks, name


def test_it_chooses_zero_bubble_at_equal_costs():
    schedule = make_schedule("auto", stages=8, microbatches=32, chunks=2)
    assert simulate_lockstep(schedule).makespan / 2 == pytest.approx(99.5)
    assert schedule.name.startswith("auto:zb_")


def test_it_makes_a_schedule_where_no_registered_one_fits():
    """Half of 1F1B's memory, less than any registered schedule needs."""
    schedule = make_schedule("auto", stages=8, microbatches=32, live_chunks=4)
    assert schedule.name == "auto:greedy"
    assert max(simulate_lockstep(schedule).peak_live) == 4


def test_slow_input_gradients_change_the_choice():
    """Full recompute runs the forward again before I. In lockstep, zb_h1's ranks then wait for the I of other ranks."""
    costs = Costs(1, 3, 2, 1)
    sizes = {"stages": 8, "microbatches": 32}
    best = simulate_lockstep(make_schedule("auto", **sizes, costs=costs), costs).makespan
    assert best < 0.8 * simulate_lockstep(make_schedule("zb_h1", **sizes), costs).makespan


def test_too_little_memory():
    with pytest.raises(ScheduleError, match="one activation of each of its 2 chunks"):
        make_schedule("auto", stages=2, microbatches=2, chunks=2, live_chunks=1)
