"""The tables of a schedule, replayed without jax: every read must find the value that the schedule means."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.pipeline.slots import slot_tables
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from megajax.schedules.stages import loop, wave
from tests.schedules.cases import named_schedules


class At:
    """One rank's entries of a row in one tick, as Python ints: `At(row, tick, rank).stash`."""

    def __init__(self, row, tick, rank):
        self.row, self.place = row, (tick, rank)

    def __getattr__(self, name):
        return int(getattr(self.row, name)[self.place])


def replay(schedule):
    """Moves labels instead of arrays through stash, inboxes and routes, as executor.py moves activations.

    A label is (stage, microbatch). Returns the tables, the microbatches whose loss was computed, and those whose
    embedding was differentiated.
    """
    table = slot_tables(schedule)
    rows, ranks = table.rows, range(schedule.stages)
    stash = [[None] * max(table.stash_slots, 1) for _ in ranks]
    inbox = {d: [[None] * (table.inbox_slots[d] + 1) for _ in ranks] for d in (FORWARD, BACKWARD)}
    arrivals = {FORWARD: rows.activation_arrivals, BACKWARD: rows.gradient_arrivals}
    kept = [[None] * max(table.kept_slots, 1) for _ in ranks]
    losses, embedded, weighed = [], [], []

    def receive(direction, sent):
        for slots, route in zip(arrivals[direction], table.routes[direction], strict=True):
            for sender, receiver in route:
                inbox[direction][receiver][slots[tick, receiver]] = sent.get((direction, sender), "garbage")

    sent = {}
    for tick in range(len(schedule.ticks)):
        sent_before, sent = sent, {}
        segment = next(s for s in schedule.segments if s.start <= tick < s.stop)
        for rank in ranks:
            at = At(rows.forward, tick, rank)
            if FORWARD in segment.ops and (at.on or schedule.paired):
                label = (at.stage, at.microbatch) if at.on else "garbage"
                if at.on and not at.first and at.part == 0:
                    assert inbox[FORWARD][rank][at.inbox] == ("x", *label)
                if schedule.has_backward:
                    stash[rank][at.stash] = label
                    if at.on and at.last and at.part == at.parts - 1:
                        inbox[BACKWARD][rank][rows.loss_gradient[tick, rank]] = ("dy", *label)
                        losses.append(label[1])
                if at.on and at.part == at.parts - 1:
                    sent[FORWARD, rank] = ("x", label[0] + 1, label[1])
        if schedule.paired:
            receive(BACKWARD, sent_before)
        for rank in ranks:
            at = At(rows.backward, tick, rank)
            if {BACKWARD, INPUT} & set(segment.ops) and at.on:
                label = (at.stage, at.microbatch)
                assert stash[rank][at.stash] == label
                if at.part == 0:
                    assert inbox[BACKWARD][rank][at.inbox] == ("dy", *label)
                overlaps = not schedule.paired and At(rows.forward, tick, rank).on
                if schedule.split and not overlaps:
                    kept[rank][at.kept] = label
                if overlaps and at.part == at.parts - 1:
                    weighed.append(label)
                if at.part == at.parts - 1:
                    sent[BACKWARD, rank] = ("dy", label[0] - 1, label[1])
                    if at.first:
                        embedded.append(label[1])
            at = At(rows.weight, tick, rank)
            if WEIGHT in segment.ops and at.on:
                label = (at.stage, at.microbatch)
                assert stash[rank][at.stash] == kept[rank][at.kept] == label
                weighed.append(label)
        receive(FORWARD, sent)
        if not schedule.paired:
            receive(BACKWARD, sent)
    if schedule.split:
        assert len(set(weighed)) == len(weighed) == (schedule.last_stage + 1) * schedule.microbatches
    return table, losses, embedded


@settings(max_examples=80, deadline=None)
@given(named_schedules())
def test_every_read_finds_its_value(schedule):
    _, losses, embedded = replay(schedule)
    assert sorted(losses) == sorted(embedded) == list(range(schedule.microbatches))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), st.sampled_from([loop, wave]))
def test_every_read_finds_its_value_without_backwards(stages, microbatches, chunks, place):
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    replay(make_schedule("forward_only", **sizes, placement=place(stages, chunks)))


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 2), (8, 3), (8, 4)])
def test_interleaved_stash_and_inboxes_are_as_small_as_the_closed_forms(stages, chunks):
    """schedules.md: (v + 1)p - 1 chunk activations alive on rank 0, one receive buffer in each direction."""
    table = slot_tables(make_schedule("interleaved_1f1b", stages=stages, microbatches=8 * stages, chunks=chunks))
    assert table.stash_slots == (chunks + 1) * stages - 1
    assert table.inbox_slots == {FORWARD: 1, BACKWARD: 1}


@pytest.mark.parametrize("microbatches", [1, 3, 8, 64])
def test_1f1b_stashes_at_most_one_microbatch_per_stage(microbatches):
    table = slot_tables(make_schedule("1f1b", stages=4, microbatches=microbatches))
    assert table.stash_slots == min(4, microbatches)


@pytest.mark.parametrize("microbatches", [8, 64])
def test_zero_bubble_stashes_are_as_small_as_in_the_papers(microbatches):
    """In chunks: p for ZB-H1, 2p - 1 for ZB-H2, vp interleaved, 2p for ZB-V, 2p + 1 for DualPipeV; independent of m."""
    for name, chunks, slots in [
        *[("zb_h1", 1, 4), ("zb_h2", 1, 7), ("zb_1p_interleaved", 3, 12)],
        *[("zb_v", 2, 8), ("dualpipe_v", 2, 9)],
    ]:
        table = slot_tables(make_schedule(name, stages=4, microbatches=microbatches, chunks=chunks))
        assert (name, table.stash_slots) == (name, slots)


@pytest.mark.parametrize(
    ("name", "chunks", "routes"),
    [
        ("1f1b", 1, [[(0, 1), (1, 2), (2, 3)]]),
        ("interleaved_1f1b", 3, [[(0, 1), (1, 2), (2, 3), (3, 0)]]),
        ("zb_v", 2, [[(3, 3)], [(0, 1), (1, 2), (2, 3)], [(1, 0), (2, 1), (3, 2)]]),
    ],
)
def test_routes(name, chunks, routes):
    """Each route is one collective permute: no rank sends or receives twice. Gradients take them the other way."""
    table = slot_tables(make_schedule(name, stages=4, microbatches=8, chunks=chunks))
    for direction, turn in ((FORWARD, 1), (BACKWARD, -1)):
        expected = {frozenset(pair[::turn] for pair in route) for route in routes}
        assert {frozenset(route) for route in table.routes[direction]} == expected
        for route in table.routes[direction]:
            assert all(len({pair[end] for pair in route}) == len(route) for end in (0, 1))


@pytest.mark.parametrize("name", ["interleaved_1f1b", "1f1b"])
def test_shared_ends_run_on_all_ranks_together(name):
    """With `share_ends` every rank runs the embedding and the head in the ticks in which one rank does without it."""
    schedule = make_schedule(name, stages=4, microbatches=8, chunks=1)
    alone, shared = slot_tables(schedule).rows, slot_tables(schedule, share_ends=True).rows
    for end in ("embed", "head", "embed_backward"):
        one, every = getattr(alone, end), getattr(shared, end)
        assert one.on.sum() == schedule.microbatches
        assert one.on.sum(1).tolist() == every.on.min(1).tolist() == every.on.max(1).tolist()
        assert (every.microbatch * one.on == one.microbatch).all()
        assert sorted(every.microbatch[:, 0][every.on[:, 0] == 1]) == list(range(schedule.microbatches))


ALL = ("head", "embed_backward", "embed")


def test_ends_of_merged_interleaved_ticks_coincide():
    """p = 4, v = 2, m = 16, by hand: rank 0 embeds in ticks 0 to 3, 8 to 11, ..., 24 to 27, of which the last rank's head
    follows in ticks 7 to 10, ..., 31 to 34. Backwards start in tick 8, and rank 0's last chunk in tick 11: ticks 11 to 31
    are merged, and in 15 to 18 and 23 to 26 rank 0 completes microbatches.
    """
    schedule = make_schedule("interleaved_1f1b", stages=4, microbatches=16, chunks=2).with_later_backwards()
    table = slot_tables(schedule, share_ends=True)
    merged = next(segment for segment in schedule.segments if segment.full)
    assert (merged.start, merged.stop) == (11, 32)
    # Tick 31 has a head and completes a microbatch, and no tick of the segment follows.
    assert table.end_combinations(merged) == {(): 4 * 12, ALL: 4 * 8, ALL[:2]: 4}
    assert table.end_choices(merged) == {ALL: [ALL], ALL[:2]: [ALL[:2]], (): [()]}


def test_a_rare_combination_of_ends_runs_as_one_that_has_more():
    """eager_1f1b embeds and computes a loss in every tick; the last tick of the segment embeds for none."""
    schedule = make_schedule("eager_1f1b", stages=2, microbatches=32, chunks=1).with_later_backwards()
    table = slot_tables(schedule, share_ends=True)
    merged = next(segment for segment in schedule.segments if segment.full)
    assert table.end_combinations(merged) == {ALL: 2 * 28, ALL[:2]: 2}
    assert table.end_choices(merged) == {ALL: [ALL, ALL[:2]]}
