"""Orders against Megatron-LM's, tables against closed forms, costs against the papers' formulas."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.pipeline.slots import slot_tables
from megajax.schedules.registry import find, make_schedule, specs
from megajax.schedules.schedule import ScheduleError, Work, show
from megajax.schedules.simulate import Costs, simulate_event, simulate_lockstep
from tests.schedules.cases import named_schedules


def text(order) -> str:
    """An order as megatron-core's tests and papers write it: F3.1 is the forward of microbatch 3, chunk 1."""
    return " ".join(f"{op}{microbatch}.{chunk}" for op, chunk, microbatch in order)


def orders(name, stages, microbatches, chunks=1):
    return make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks).orders()


# Megatron-LM's orders on these sizes, written out (megatron/core/pipeline_parallel/schedules.py, August 2026).
MEGATRON_2_2_4 = [
    "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
    "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0",
]
MEGATRON_4_2_8_FIRST = (
    "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0.0 F7.1 B1.0 "
    "B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0"
)
MEGATRON_4_2_8_LAST = (
    "F0.0 F1.0 F2.0 F3.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4.0 B0.0 F5.0 B1.0 F6.0 B2.0 F7.0 B3.0 "
    "F4.1 B4.1 F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 B4.0 B5.0 B6.0 B7.0"
)
MEGATRON_1F1B_4_8 = {
    0: "F0.0 F1.0 F2.0 F3.0 B0.0 F4.0 B1.0 F5.0 B2.0 F6.0 B3.0 F7.0 B4.0 B5.0 B6.0 B7.0",
    3: "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0 F4.0 B4.0 F5.0 B5.0 F6.0 B6.0 F7.0 B7.0",
}


def test_interleaved_order_is_megatrons():
    assert [text(order) for order in orders("interleaved_1f1b", 2, 4, 2)] == MEGATRON_2_2_4
    got = orders("interleaved_1f1b", 4, 8, 2)
    assert (text(got[0]), text(got[3])) == (MEGATRON_4_2_8_FIRST, MEGATRON_4_2_8_LAST)


def test_1f1b_order_is_megatrons():
    got = orders("1f1b", 4, 8)
    assert {rank: text(got[rank]) for rank in MEGATRON_1F1B_4_8} == MEGATRON_1F1B_4_8
    # Fewer microbatches than stages: the early ranks only fill and drain.
    assert [text(order) for order in orders("1f1b", 4, 2)] == [
        "F0.0 F1.0 B0.0 B1.0",
        "F0.0 F1.0 B0.0 B1.0",
        "F0.0 F1.0 B0.0 B1.0",
        "F0.0 B0.0 F1.0 B1.0",
    ]


@settings(max_examples=40)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 5))
def test_interleaved_counts_are_megatrons(stages, chunks, groups):
    """schedules.py: chunk(k) = (k mod pv) // p, mb(k) = (k // pv) p + k mod p, warm-up 2(p - r - 1) + (v - 1)p."""
    total = stages * groups * chunks
    for rank, order in enumerate(orders("interleaved_1f1b", stages, stages * groups, chunks)):
        forwards = [(chunk, microbatch) for op, chunk, microbatch in order if op == "F"]
        backwards = [(chunk, microbatch) for op, chunk, microbatch in order if op == "B"]
        places = [
            ((k % (stages * chunks)) // stages, k // (stages * chunks) * stages + k % stages) for k in range(total)
        ]
        assert forwards == places
        assert backwards == [(chunks - 1 - chunk, microbatch) for chunk, microbatch in places]
        warmup = min(2 * (stages - rank - 1) + (chunks - 1) * stages, total)
        ops = "".join(op for op, _, _ in order)
        assert ops == "F" * warmup + "FB" * (total - warmup) + "B" * warmup


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
def test_interleaved_in_paired_ticks_has_a_closed_form(stages, chunks, groups):
    """At tick k rank r does forward u = k - r and backward w = k - ((v - 1)p + 2(p - 1) - r)."""
    chunks = chunks if stages > 1 else 1
    schedule = make_schedule("interleaved_1f1b", stages=stages, microbatches=stages * groups, chunks=chunks)
    total = stages * groups * chunks
    assert len(schedule.ticks) == total + (chunks - 1) * stages + 2 * (stages - 1)
    for tick, row in enumerate(schedule.ticks):
        for rank, works in enumerate(row):
            want = []
            place = lambda k: ((k // stages) % chunks, k // (stages * chunks) * stages + k % stages)  # noqa: E731
            if 0 <= tick - rank < total:
                want.append(Work("F", *place(tick - rank)))
            backward = tick - ((chunks - 1) * stages + 2 * (stages - 1) - rank)
            if 0 <= backward < total:
                want.append(Work("B", chunks - 1 - place(backward)[0], place(backward)[1]))
            assert works == tuple(want)


@settings(max_examples=50, deadline=None)
@given(named_schedules(most_stages=8))
def test_segments_cover_all_ticks_and_no_rank_idles_in_a_full_one(schedule):
    segments = schedule.segments
    assert [tick for one in segments for tick in range(one.start, one.stop)] == list(range(len(schedule.ticks)))
    for one in segments:
        done = [[tuple(map(schedule.does, works)) for works in tick] for tick in schedule.ticks[one.start : one.stop]]
        assert one.ops == tuple(op for op in "FBIW" if any(op in works for tick in done for works in tick))
        if one.full:
            assert schedule.paired and all(works == one.ops for tick in done for works in tick)


@settings(max_examples=50)
@given(named_schedules(most_stages=8))
def test_later_backwards_are_a_valid_schedule_with_the_same_bubble(schedule):
    """No backward is in the tick of its own forward; at most one chunk more is in flight."""
    if not schedule.paired or not schedule.has_backward:
        return
    later = schedule.with_later_backwards().validate()
    for op in "FB":
        of = [[one for one in order if one.op == op] for order in schedule.orders()]
        assert of == [[one for one in order if one.op == op] for order in later.orders()]
    for tick in later.ticks:
        for works in tick:
            assert len({(work.chunk, work.microbatch) for work in works}) == len(works)
    assert slot_tables(later).stash_slots <= slot_tables(schedule).stash_slots + 1
    assert simulate_lockstep(later).bubble == pytest.approx(simulate_lockstep(schedule).bubble)


def test_interleaved_has_one_full_segment_between_ramps_of_p_minus_1_ticks():
    """GPT-3 175B's. Forwards are in ticks 0 to 198, backwards in 23 to 221; p - 1 = 7."""
    schedule = make_schedule("interleaved_1f1b", stages=8, microbatches=64, chunks=3)
    got = [(one.start, one.stop, "".join(one.ops), one.full) for one in schedule.segments]
    ramps = [(0, 23, "F", False), (23, 30, "FB", False), (192, 199, "FB", False), (199, 222, "B", False)]
    assert sorted(got) == sorted([*ramps, (30, 192, "FB", True)])


def test_gpipes_backwards_are_in_microbatch_order():
    assert text(orders("gpipe", 3, 3)[1]) == "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0"


PAPERS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("looped_bfs", 3),
]
ZERO_BUBBLE = [("zb_h1", 1), ("zb_h2", 1), ("zb_1p_interleaved", 2), ("zb_v", 2)]


@settings(max_examples=40)
@given(st.integers(2, 8), st.sampled_from(PAPERS), st.integers(1, 4))
def test_bubbles_are_the_papers(stages, kind, groups):
    """(p - 1)/m, and (p - 1)/(mv) interleaved; in lockstep no more than event by event."""
    name, chunks = kind
    microbatches = stages * groups
    schedule = make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    for simulate in (simulate_event, simulate_lockstep):
        assert simulate(schedule).bubble == pytest.approx((stages - 1) / (microbatches * chunks))


@settings(max_examples=40)
@given(st.integers(2, 8), st.sampled_from(ZERO_BUBBLE), st.integers(2, 4))
def test_zero_bubbles_are_the_papers(stages, kind, groups):
    """2401.10241 at tF = tI = tW, the drain counted: (p - 1)/(3mv)."""
    name, chunks = kind
    schedule = make_schedule(name, stages=stages, microbatches=stages * groups, chunks=chunks)
    for simulate in (simulate_event, simulate_lockstep):
        assert simulate(schedule).bubble == pytest.approx((stages - 1) / (3 * stages * groups * chunks))


@settings(max_examples=20)
@given(st.integers(2, 8), st.integers(2, 4))
def test_the_bubble_of_dualpipe_v_is_deepseeks(stages, groups):
    """(PP/2 - 1)(F&B + B - 3W) for PP = 2p stages on p devices, in DeepSeek's table; a pair F&B takes as long as F and B."""
    schedule = make_schedule("dualpipe_v", stages=stages, microbatches=stages * groups, chunks=2)
    for simulate in (simulate_event, simulate_lockstep):
        found = simulate(schedule)
        assert found.makespan - found.ideal == pytest.approx((stages - 1) * (3 + 2 - 3 * 1))


@pytest.mark.parametrize(
    ("name", "chunks", "cost"),
    [
        ("gpipe", 1, 117),
        ("1f1b", 1, 117),
        ("eager_1f1b", 1, 117),
        ("interleaved_1f1b", 2, 106.5),
        ("interleaved_1f1b", 4, 101.25),
        ("looped_bfs", 2, 106.5),
        ("looped_bfs", 4, 101.25),
        ("zb_h1", 1, 103),
        ("zb_h2", 1, 103),
        ("zb_1p_interleaved", 2, 99.5),
        ("zb_v", 2, 99.5),
        ("dualpipe_v", 2, 103),
        pytest.param("auto", 1, 103, marks=pytest.mark.slow),  # quick in test_greedy.py
        pytest.param("auto", 2, 99.5, marks=pytest.mark.slow),
    ],
)
def test_lockstep_costs_at_eight_stages(name, chunks, cost):
    """32 microbatches, in units of a stage's forward; 96 is ideal."""
    schedule = make_schedule(name, stages=8, microbatches=32, chunks=chunks)
    lockstep = simulate_lockstep(schedule)
    assert lockstep.makespan / chunks == pytest.approx(cost)
    assert simulate_event(schedule).makespan == pytest.approx(lockstep.makespan)


@settings(max_examples=50, deadline=None)
@given(named_schedules(most_stages=8))
def test_lockstep_is_as_fast_as_event_by_event(schedule):
    """At tF = tI = tW one SPMD program is as fast as processes that each run as soon as they can."""
    lockstep, event = simulate_lockstep(schedule).makespan, simulate_event(schedule).makespan
    assert event <= lockstep <= 1.01 * event


def test_no_rank_idles_between_its_first_and_last_operation_in_zb_h2():
    simulation = simulate_event(make_schedule("zb_h2", stages=8, microbatches=32))
    for rank in range(8):
        spans = [span for span in simulation.spans if span.rank == rank]
        assert max(s.stop for s in spans) - min(s.start for s in spans) == sum(s.stop - s.start for s in spans)


def test_zb_h2_is_faster_where_the_gradient_of_the_input_is_slow():
    """(p - 1)(tI - tW), the case of full recompute: 135 against 142 at p = 8, m = 32."""
    costs = Costs(1, 3, 2, 1)
    time = {
        name: simulate_event(make_schedule(name, stages=8, microbatches=32), costs).makespan
        for name in ("zb_h1", "zb_h2")
    }
    assert time == {"zb_h1": 142, "zb_h2": 135}


@pytest.mark.parametrize(("group_size", "peak"), [(4, 11), (8, 15), (16, 23)])
def test_larger_groups_hold_more(group_size, peak):
    """Megatron's (v - 1) group + 2(p - r - 1) + 1 chunks, in the same time."""
    schedule = make_schedule("interleaved_1f1b", stages=4, microbatches=16, chunks=2, group_size=group_size)
    simulation = simulate_lockstep(schedule)
    assert (simulation.peak_live[0], simulation.makespan) == (peak, 105)
    assert slot_tables(schedule).stash_slots == peak


@settings(max_examples=10)
@given(st.integers(1, 8), st.integers(1, 6))
def test_activations_in_flight(stages, groups):
    microbatches = stages * groups

    def peaks(name, chunks=1):
        schedule = make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
        return simulate_event(schedule).peak_live

    ranks = range(stages)
    assert peaks("gpipe") == (microbatches,) * stages
    assert all(peak <= stages - rank for rank, peak in zip(ranks, peaks("1f1b"), strict=True))
    assert all(peak <= 2 * (stages - rank) - 1 for rank, peak in zip(ranks, peaks("eager_1f1b"), strict=True))
    assert all(peak <= stages for peak in peaks("zb_h1"))
    assert all(peak <= 2 * stages - 1 for peak in peaks("zb_h2"))
    assert peaks("looped_bfs", 3) == (3 * microbatches,) * stages
    if stages > 1:
        bound = [min(2 * microbatches, stages + 2 * (stages - rank) - 1) for rank in ranks]
        assert all(peak <= most for peak, most in zip(peaks("interleaved_1f1b", 2), bound, strict=True))
        assert all(peak <= 2 * stages for peak in peaks("zb_v", 2))
    if groups > 1:
        assert all(peak <= 2 * stages + 1 for peak in peaks("dualpipe_v", 2))


def test_a_slow_link_costs_eager_1f1b_less_than_1f1b():
    """The purpose of eager 1F1B (2211.05322)."""

    def time(name):
        return simulate_event(make_schedule(name, stages=8, microbatches=32), Costs(latency=0.25)).makespan

    assert time("eager_1f1b") < time("1f1b")


def with_cell(schedule, tick, rank, works):
    """The schedule with another cell in its table."""
    row = list(schedule.ticks[tick])
    row[rank] = works
    return dataclasses.replace(schedule, ticks=(*schedule.ticks[:tick], tuple(row), *schedule.ticks[tick + 1 :]))


def test_broken_tables_are_refused_and_shown():
    schedule = make_schedule("eager_1f1b", stages=2, microbatches=2)
    with pytest.raises(ScheduleError, match="tick 1, rank 1: F0 of chunk 0 needs F of stage 0, microbatch 0 first"):
        with_cell(schedule, 0, 0, ()).validate()
    with pytest.raises(ScheduleError, match=r"I1 of chunk 0 on rank 0 \(stage 0\) is missing"):
        with_cell(schedule, 3, 0, ()).validate()
    with pytest.raises(ScheduleError, match="tick 1, rank 0: F0 of chunk 0 is done twice"):
        with_cell(schedule, 1, 0, (Work("F", 0, 0),)).validate()
    with pytest.raises(
        ScheduleError, match="tick 0, rank 1: F0 of chunk 0 needs F of stage 0, microbatch 0 first"
    ) as error:
        with_cell(schedule, 0, 1, (Work("F", 0, 0),)).validate()
    assert "\n" not in str(error.value) and ">F0.0<" in error.value.__notes__[0]
    with pytest.raises(ScheduleError, match="at most a forward and then a backward"):
        with_cell(schedule, 0, 0, (Work("F", 0, 0), Work("F", 0, 1))).validate()
    mixed = make_schedule("1f1b", stages=2, microbatches=2)
    with pytest.raises(ScheduleError, match="at most one piece of work"):
        with_cell(mixed, 0, 0, (Work("F", 0, 0), Work("B", 0, 0, 0, 2))).validate()


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1f1", {}, r"schedule '1f1' is unknown; did you mean 1f1b\?"),
        ("1f1b", {"chunks": 2}, "1f1b has one chunk on each rank, not 2; interleaved_1f1b, .* take several"),
        (
            "interleaved_1f1b",
            {"microbatches": 5},
            "takes a multiple of the 4 stages as microbatches, not 5",
        ),
        ("gpipe", {"microbatches": 0}, "microbatches is 0; it must be 1 or more"),
        ("zb_v", {}, "zb_v has two chunks on each rank, not 1"),
        ("dualpipe_v", {}, "dualpipe_v has two chunks on each rank, not 1"),
        ("dualpipe_v", {"chunks": 2}, "dualpipe_v takes at least 8 microbatches on 4 stages, not 4"),
        ("zb_h2", {"chunks": 2}, "zb_h2 has one chunk on each rank, not 2; .*zb_1p_interleaved, auto take several"),
        (
            "interleaved_1f1b",
            {"chunks": 2, "group_size": 2},
            "is 2; it must be between 4 stages and 4 microbatches",
        ),
        (
            "interleaved_1f1b",
            {"microbatches": 9, "group_size": 6},
            "is 6; .* no incomplete group, or one of at least 4",
        ),
        ("interleaved_1f1b", {"group": 6}, "has no option 'group': it has group_size"),
        ("gpipe", {"group_size": 6}, "gpipe has no option 'group_size': it has no options"),
    ],
)
def test_illegal_sizes_and_options_are_refused(name, sizes, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(name, **{"stages": 4, "microbatches": 4} | sizes)


def test_pipedream_2bw_is_eager_1f1b_in_its_steady_state():
    """Its ticks are those of a long eager 1F1B once the pipeline is full, microbatches counted from each step."""
    for stages, microbatches in ((1, 1), (2, 2), (2, 3), (4, 6), (4, 9)):
        steady = make_schedule("pipedream_2bw", stages=stages, microbatches=microbatches)
        long = make_schedule("eager_1f1b", stages=stages, microbatches=4 * microbatches)
        start = 2 * microbatches  # the pipeline is full after 2(p - 1) <= m ticks
        ticks = [
            tuple(tuple(work._replace(microbatch=work.microbatch % microbatches) for work in works) for works in row)
            for row in long.ticks[start : start + microbatches]
        ]
        assert list(steady.ticks) == ticks
        assert simulate_lockstep(steady).bubble == 0
        assert simulate_lockstep(steady).peak_live == simulate_lockstep(long).peak_live


@pytest.mark.parametrize("name", [spec.name for spec in specs() if spec.name != "auto"])
def test_docstrings_show_the_schedules(name):
    """Each generator's docstring has its table at a small size."""
    shown = re.search(r"p = (\d), m = (\d)(?:, v = (\d))?\n((?: +rank .*\n)+)", find(name).generate.__doc__)
    stages, microbatches, chunks = (int(number or 1) for number in shown.groups()[:3])
    schedule = make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    for rank, line in enumerate(shown[4].splitlines()):
        drawn = line.split()[2:]
        columns = [
            ["+".join(show(work, short=True) for work in tick[row]) or "." for row in range(stages)]
            for tick in schedule.ticks
        ]
        start = line.index(drawn[0])
        for column in columns:
            width = max(map(len, column))
            assert line[start : start + width].strip() == column[rank]
            start += width + 1
        assert not line[start:].strip()


def test_v_placement_is_its_own_inverse_pair():
    schedule = make_schedule("zb_v", stages=4, microbatches=4, chunks=2)
    assert [schedule.stage(1, rank) for rank in range(4)] == [7, 6, 5, 4]
    assert all(schedule.stage(*schedule.home(stage)) == stage for stage in range(8))
    assert slot_tables(schedule).stash_slots == 8


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 3])
def test_hanayos_bubble_falls_with_the_waves(stages, waves, rounds):
    """In chunk forwards at least 3(p - 1), the way of a microbatch to the last rank and back; 4(p - 1) with one wave and p
    microbatches, 2/3 of 1F1B's.
    """
    microbatches, chunks = rounds * stages, 2 * waves
    schedule = make_schedule("hanayo", stages=stages, microbatches=microbatches, chunks=chunks)
    simulation, least = simulate_lockstep(schedule), 3 * (stages - 1)
    bubble = simulation.makespan - simulation.ideal
    assert least <= bubble <= (1.5 if waves < 3 else 2.7) * least
    one = simulate_lockstep(make_schedule("1f1b", stages=stages, microbatches=microbatches))
    assert simulation.bubble <= (0.67 if waves == 1 else 0.5) * one.bubble
    if rounds == waves == 1:
        assert bubble == 4 * (stages - 1) and simulation.bubble == pytest.approx(2 / 3 * one.bubble)
    assert max(simulation.peak_live) <= (chunks * stages if rounds == 1 else (chunks + 1) * stages)
