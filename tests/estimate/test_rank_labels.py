"""Labels of values that are not known: which ranks share one, and how much memory they take."""

import tracemalloc

import numpy as np

from megajax.estimate.rank_labels import Labels, Value

GROUPS = [(0, 1), (2, 3), (4, 5), (6, 7)]


def classes(labels):
    """Which ranks have the same: the first of them, for each."""
    return [int(np.flatnonzero(labels == label)[0]) for label in labels]


def test_a_function_of_what_ranks_share_is_shared():
    labels = Labels(8)
    own, common = labels.differing("tokens"), labels.common("a weight")
    of_group = labels.shared_by(GROUPS, "a gather", own)
    known = Value(np.array([[0]] * 4 + [[1]] * 4))
    assert classes(own.labels) == list(range(8)) and classes(common.labels) == [0] * 8
    assert classes(of_group.labels) == [0, 0, 2, 2, 4, 4, 6, 6]
    assert classes(labels.computed([common, of_group]).labels) == [0, 0, 2, 2, 4, 4, 6, 6]
    assert classes(labels.computed([common, known]).labels) == [0] * 4 + [4] * 4
    assert classes(labels.computed([labels.computed([known, common]), of_group]).labels) == [0, 0, 2, 2, 4, 4, 6, 6]
    # Groups whose members have the same operands, member by member, gather the same.
    again = labels.shared_by([(0, 2), (1, 3), (4, 6), (5, 7)], "another", of_group)
    assert classes(again.labels) == [0, 0, 0, 0, 4, 4, 4, 4]
    partly = labels.chosen(np.arange(8) < 4, known, own)
    assert partly.labels.tolist()[:4] == [-1] * 4 and classes(labels.computed([partly]).labels) == [0] * 4 + [
        4,
        5,
        6,
        7,
    ]


def test_no_two_values_have_a_label_in_common_and_each_has_a_reason():
    labels = Labels(8)
    one, other = labels.differing("tokens"), labels.differing("weights")
    both = labels.computed([one, other])
    assert len({*one.labels, *other.labels, *both.labels}) == 24
    assert [labels.reason(value.labels[5]) for value in (one, other, both)] == ["tokens", "weights", "tokens"]
    assert labels.reason(labels.computed([], "an operation").labels[7]) == "an operation"


def test_memory_does_not_grow_with_what_is_computed():
    """DeepSeek-V3's step on 1,024 GPUs computes some 100,000 values that depend on data."""
    labels = Labels(1024)
    value = labels.differing("tokens")
    tracemalloc.start()
    for _ in range(500):
        value = labels.computed([value, value])
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 200_000, f"{grown} bytes"
