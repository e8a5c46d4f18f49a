"""Which layers each stage has: worked by hand, and its rule as properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.schedules.stages import StageLayers


@pytest.mark.parametrize(
    ("layers", "sizes", "counts"),
    [
        (126, (16, 1), [7] + [8] * 14 + [7]),  # Llama 3.1 405B (2407.21783 section 3.3.2)
        (7, (4, 1), [2, 2, 2, 1]),
        (5, (2, 2), [1, 2, 1, 1]),  # three are short: the last, the first, then the one before the last
        (7, (2, 2), [2, 2, 2, 1]),
        (6, (4, 1), [1, 2, 2, 1]),
        (9, (8, 1), [1, 2, 1, 1, 1, 1, 1, 1]),
        (8, (2, 2), [2, 2, 2, 2]),
        (4, (1, 1), [4]),
        (3, (2, 1), [2, 1]),
    ],
)
def test_layers_of_stages_by_hand(layers, sizes, counts):
    assert list(StageLayers(layers, *sizes).counts) == counts


@given(st.data(), st.integers(1, 20), st.integers(1, 5), st.integers(1, 3))
def test_stages_differ_by_one_group_and_the_order_is_the_documented_one(data, ranks, chunks, group):
    stages = ranks * chunks
    groups = data.draw(st.integers(stages, 6 * stages))
    where = StageLayers(groups * group, ranks, chunks, group=group)
    assert len(where.counts) == where.stages == stages and sum(where.counts) == where.layers
    assert where.slots == max(where.counts) and set(where.counts) <= {where.slots, where.slots - group}
    assert min(where.counts) >= group
    assert where.idle == stages * where.slots - where.layers < stages * group  # the fewest
    assert where.rank_slots == chunks * where.slots
    assert where.in_groups.counts == tuple(count // group for count in where.counts)
    is_short = [count < where.slots for count in where.counts]
    order = [is_short[-1], is_short[0], *reversed(is_short[1:-1])]
    assert order == sorted(order, reverse=True) or stages == 1


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (
            StageLayers(126, 16),
            "126 layers on 16 stages: 14 of 8 layers, 2 of 7 (the first and the last); 2 of 128 slots idle (1.6%)",
        ),
        (StageLayers(7, 4), "7 layers on 4 stages: 3 of 2 layers, 1 of 1 (the last); 1 of 8 slots idle (12.5%)"),
        (
            StageLayers(5, 2, 2),
            "5 layers on 4 stages: 1 of 2 layers, 3 of 1 (the first and the last 2); 3 of 8 slots idle (37.5%)",
        ),
        (
            StageLayers(126, 2, group=2, chunks=8),
            "126 layers on 16 stages: 15 of 8 layers, 1 of 6 (the last); 2 of 128 slots idle (1.6%)",
        ),
        (StageLayers(8, 2), "8 layers on 2 stages: 4 on each"),
    ],
)
def test_the_sentence(where, text):
    assert where.describe() == text
