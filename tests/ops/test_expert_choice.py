"""On how many replicas a token's experts are, against choices that are drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.ops.expert_choice import Choice

DEEPSEEK_V3 = Choice(256, 8, 8, 4)


def replicas_of(choice, degree, tokens, best):
    """Whether each token [tokens] has experts on each replica [degree]: scores alike, groups by the sum of their best."""
    scores = np.random.default_rng(0).normal(size=(tokens, choice.groups, choice.count // choice.groups))
    ranks = np.sort(scores, -1)[..., -best:].sum(-1)
    inside = ranks >= np.sort(ranks, -1)[:, -choice.groups_chosen, None]
    scores = np.where(inside[..., None], scores, -np.inf).reshape(tokens, -1)
    owners = scores.argsort(-1)[:, -choice.chosen :] // (choice.count // degree)
    return (owners[..., None] == np.arange(degree)).any(1)


def test_deepseek_v3_with_a_group_on_each_replica():
    """By hand: four of eight groups; without groups all but C(224, 8) of C(256, 8)."""
    assert DEEPSEEK_V3.destinations(8) == 4 and Choice(256, 8).destinations(8) == 8
    assert DEEPSEEK_V3.balanced_share(8) == pytest.approx(0.5)
    assert Choice(256, 8).balanced_share(8) == pytest.approx(0.6618, abs=1e-4)
    # Two replicas for a group: half of the tokens have two of its 32 experts, 16 of which are the replica's.
    assert DEEPSEEK_V3.balanced_share(16) == pytest.approx(0.5 * (1 - 120 / 496))
    assert DEEPSEEK_V3.destinations(16) == 8
    assert Choice(256, 8, 4, 1).destinations(8) == 2


@pytest.mark.parametrize("degree", [2, 4, 8, 16, 32])
@pytest.mark.parametrize(("choice", "best"), [(DEEPSEEK_V3, 2), (Choice(160, 6, 8, 3), 1), (Choice(160, 6), 1)])
def test_the_balanced_share_is_that_of_random_scores(choice, best, degree):
    """A little above it where a group is on several replicas, of which some have the group's best experts."""
    drawn = replicas_of(choice, degree, 20_000, best).mean()
    assert 0.98 * drawn < choice.balanced_share(degree) < 1.07 * drawn


@given(st.integers(1, 6), st.integers(2, 6), st.data())
def test_no_token_is_on_more_replicas_than_destinations(groups, size, data):
    count = groups * size
    degree = data.draw(st.sampled_from([one for one in range(1, count + 1) if count % one == 0]))
    groups_chosen = data.draw(st.integers(1, groups))
    choice = Choice(count, data.draw(st.integers(1, groups_chosen * size)), groups, groups_chosen)
    found = replicas_of(choice, degree, 200, best=1)
    assert found.sum(1).max() <= choice.destinations(degree)
    assert found.mean(0).max() <= 1.5 * choice.balanced_share(degree) + 0.1  # the largest share, of any replica
