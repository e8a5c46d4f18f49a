"""The tables of a schedule, replayed without jax: every read must find the value it is meant for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.pipeline.slots import slot_tables
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from tests.schedules.cases import named_schedules


def replay(schedule):
    """Moves labels instead of arrays through stash, inboxes and routes, as executor.py moves activations."""
    table = slot_tables(schedule)
    ranks = range(schedule.stages)
    stash = [[None] * max(table.stash_slots, 1) for _ in ranks]
    inbox = {d: [[None] * (table.inbox_slots[d] + 1) for _ in ranks] for d in (FORWARD, BACKWARD)}
    column = {name: values.tolist() for name, values in table.columns.items()}
    kept = [[None] * max(table.kept_slots, 1) for _ in ranks]
    scored, embedded, weighed = [], [], []

    def arrive(direction, sent):
        prefix = {FORWARD: "forward", BACKWARD: "backward"}[direction]
        for index, route in enumerate(table.routes[direction]):
            for sender, receiver in route:
                slot = column[f"{prefix}_arrival_{index}"][tick][receiver]
                inbox[direction][receiver][slot] = sent.get((direction, sender), "garbage")

    sent = {}
    for tick in range(len(schedule.ticks)):
        sent_before, sent = sent, {}
        segment = next(s for s in schedule.segments if s.start <= tick < s.stop)
        for rank in ranks:
            at = lambda name: column[name][tick][rank]  # noqa: B023, E731
            if FORWARD in segment.ops and (at("forward_on") or schedule.paired):
                label = (at("forward_stage"), at("forward_microbatch")) if at("forward_on") else "garbage"
                if at("forward_on") and not at("forward_first"):
                    assert inbox[FORWARD][rank][at("forward_inbox")] == ("x", *label)
                if schedule.has_backward:
                    stash[rank][at("forward_stash")] = label
                    if at("forward_on") and at("forward_last"):
                        inbox[BACKWARD][rank][at("forward_loss_gradient")] = ("dy", *label)
                        scored.append(label[1])
                if at("forward_on"):
                    sent[FORWARD, rank] = ("x", label[0] + 1, label[1])
        if schedule.paired:
            arrive(BACKWARD, sent_before)
        for rank in ranks:
            at = lambda name: column[name][tick][rank]  # noqa: B023, E731
            if {BACKWARD, INPUT} & set(segment.ops) and at("backward_on"):
                label = (at("backward_stage"), at("backward_microbatch"))
                assert stash[rank][at("backward_stash")] == label
                if at("backward_part") == 0:
                    assert inbox[BACKWARD][rank][at("backward_inbox")] == ("dy", *label)
                if schedule.split:
                    kept[rank][at("backward_kept")] = label
                if at("backward_part") == at("backward_parts") - 1:
                    sent[BACKWARD, rank] = ("dy", label[0] - 1, label[1])
                    if at("backward_first"):
                        embedded.append(label[1])
            if WEIGHT in segment.ops and at("weight_on"):
                label = (at("weight_stage"), at("weight_microbatch"))
                assert stash[rank][at("weight_stash")] == kept[rank][at("weight_kept")] == label
                weighed.append(label)
        arrive(FORWARD, sent)
        if not schedule.paired:
            arrive(BACKWARD, sent)
    if schedule.split:
        assert len(set(weighed)) == len(weighed) == (schedule.last_stage + 1) * schedule.microbatches
    return table, scored, embedded


@settings(max_examples=80, deadline=None)
@given(named_schedules())
def test_every_read_finds_its_value(schedule):
    _, scored, embedded = replay(schedule)
    assert sorted(scored) == sorted(embedded) == list(range(schedule.microbatches))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), st.sampled_from(["loop", "v"]))
def test_every_read_finds_its_value_without_backwards(stages, microbatches, chunks, placement):
    chunks = 2 if placement == "v" else chunks
    replay(make_schedule("forward_only", stages=stages, microbatches=microbatches, chunks=chunks, placement=placement))


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 2), (8, 3), (8, 4)])
def test_interleaved_stash_and_inboxes_are_as_small_as_the_closed_forms(stages, chunks):
    """schedules.md: (v + 1)p - 1 chunks alive on rank 0, one buffer to receive in each way."""
    table = slot_tables(make_schedule("interleaved_1f1b", stages=stages, microbatches=8 * stages, chunks=chunks))
    assert table.stash_slots == (chunks + 1) * stages - 1
    assert table.inbox_slots == {FORWARD: 1, BACKWARD: 1}


@pytest.mark.parametrize("microbatches", [1, 3, 8, 64])
def test_1f1b_stashes_at_most_one_microbatch_a_stage(microbatches):
    table = slot_tables(make_schedule("1f1b", stages=4, microbatches=microbatches))
    assert table.stash_slots == min(4, microbatches)


@pytest.mark.parametrize("microbatches", [8, 64])
def test_zero_bubble_stashes_are_as_small_as_the_papers_say(microbatches):
    """In chunks: p for ZB-H1, 2p - 1 for ZB-H2, vp interleaved, 2p for ZB-V, 2p + 1 for DualPipeV; whatever m."""
    for name, chunks, slots in [
        *[("zb_h1", 1, 4), ("zb_h2", 1, 7), ("zb_1p_interleaved", 3, 12)],
        *[("zb_v", 2, 8), ("dualpipe_v", 2, 9)],
    ]:
        table = slot_tables(make_schedule(name, stages=4, microbatches=microbatches, chunks=chunks))
        assert (name, table.stash_slots) == (name, slots)


def test_no_route_closes_a_ring():
    for name, chunks in (("interleaved_1f1b", 3), ("1f1b", 1)):
        table = slot_tables(make_schedule(name, stages=4, microbatches=8, chunks=chunks))
        routes = [route for routes in table.routes.values() for route in routes]
        links = {link for route in routes for link in route}  # both ways between neighbours; round the ring with chunks
        assert {(r, r + 1) for r in range(3)} | {(r + 1, r) for r in range(3)} <= links
        assert ({(3, 0), (0, 3)} <= links) == (chunks > 1)
        for route in routes:
            after = dict(route)
            for start in after:
                place = start
                while place in after:
                    place = after[place]
                    assert place != start
