"""Dropout of attention probabilities: masks of parts of the scores, and attention of several ranks that drops by them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.attention import Scoring, fused_attention, plain_attention
from megajax.ops.attention_kernels import XLA, with_one_size
from megajax.ops.score_dropout import ScoreDropout
from tests.gradients import both_ways
from tests.ops.test_exchanged_attention import exchanged
from tests.ops.test_ring_attention import (
    DOCUMENTS,
    GROUPS,
    SAMPLES,
    SEQUENCE,
    SHARED,
    in_a_ring,
    inputs,
    ring_attention,
)

HEADS = GROUPS * SHARED
SCORES = (SAMPLES, GROUPS, SHARED, SEQUENCE, SEQUENCE)
PADDING = np.array([13, 0], np.int32)


def dropout(rate=0.3, seed=0):
    keys = jax.random.split(jax.random.key(seed), SAMPLES * HEADS * SEQUENCE)
    return ScoreDropout(jax.random.key_data(keys).reshape(SAMPLES, HEADS, SEQUENCE, -1), rate=rate)


def test_the_rate_and_no_two_masks_alike():
    kept = np.asarray(dropout(0.3).kept(SCORES))
    assert abs(kept.mean() - 0.7) < 0.01
    rows = kept.reshape(-1, SEQUENCE)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert np.abs(rows.mean(0) - 0.7).max() < 0.1  # no column is dropped more often
    assert np.abs(np.corrcoef(rows.T) - np.eye(SEQUENCE)).max() < 0.25
    assert not (kept == np.asarray(dropout(0.3, seed=1).kept(SCORES))).all()
    assert np.asarray(dropout(1e-12).kept(SCORES)).all()


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_part_of_the_scores_has_its_part_of_the_mask(is_reversed):
    drop = dataclasses.replace(dropout(), is_reversed=is_reversed)
    whole = np.asarray(drop.kept(SCORES)).reshape(SAMPLES, HEADS, SEQUENCE, SEQUENCE)
    queries, places = slice(8, 24), np.array([30, 2, 3, 17])
    part = drop.at(drop.keys[:, 1:3, queries], places, SEQUENCE).kept((SAMPLES, 2, 16, 4))
    np.testing.assert_array_equal(part, whole[:, 1:3, queries][..., places])
    of_last = drop.at(drop.keys[1:], jnp.asarray(places[None]), SEQUENCE).kept((1, HEADS, SEQUENCE, 4))
    np.testing.assert_array_equal(of_last, whole[1:][..., places])
    if is_reversed:
        forth = dataclasses.replace(drop, is_reversed=False)
        np.testing.assert_array_equal(np.flip(whole, -1).ravel(), np.asarray(forth.kept(SCORES)).ravel())


def by_hand(arrays, drop, causal=True, document=None, window=None, padding=None):
    """Output and gradients of dropout(softmax(scores)) values, of whole samples in fp32."""
    kept = np.asarray(drop.kept(SCORES))
    row, column = np.indices((SEQUENCE, SEQUENCE))
    seen = np.broadcast_to(column <= row if causal else True, (SAMPLES, SEQUENCE, SEQUENCE))
    if window is not None:
        seen = seen & (column > row - window)
    if document is not None:
        seen = seen & (document[:, :, None] == document[:, None])
    if padding is not None:
        seen = seen & (column < SEQUENCE - padding[:, None, None])

    def attend(query, key, value):
        scores = jnp.einsum("bsgnd,btgd->bgnst", query, key) / query.shape[-1] ** 0.5
        p = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf))
        return jnp.einsum("bgnst,btgd->bsgnd", p * kept / (1 - drop.rate), value)

    query, key, value, gradient = (np.float32(a) for a in arrays)
    return both_ways(attend)(gradient, query, key, value)


def check(got, want):
    for got_, want_ in zip(got, want, strict=True):
        np.testing.assert_allclose(got_, want_, rtol=1e-5, atol=1e-5)


def test_plain_attention_drops_by_the_mask():
    arrays, drop = inputs(), dropout()
    query, key, value, gradient = arrays
    plain = both_ways(lambda *arrays: plain_attention(*arrays, Scoring(drop)))
    check(plain(gradient, query, key, value), by_hand(arrays, drop))


KINDS = {
    "causal": {},
    "documents and a window": {"document": DOCUMENTS, "window": 10},
    "padding": {"padding": PADDING},
}
QUICK = [("ring", 4, "documents and a window"), ("exchange", 2, "padding")]


@pytest.mark.parametrize(
    ("share", "ranks", "kind"),
    [
        pytest.param(share, ranks, kind, marks=[] if (share, ranks, kind) in QUICK else pytest.mark.slow)
        for share in ("ring", "exchange")
        for ranks in (2, 4)
        for kind in KINDS
    ],
)
def test_ranks_that_share_samples_drop_what_one_device_drops(share, ranks, kind):
    arrays, drop, mask = inputs(), dropout(), KINDS[kind]
    makes = {"ring": ring_attention, "exchange": exchanged}[share]
    got, _ = in_a_ring(ranks, arrays, tensor=2 if ranks * 2 <= 4 else 1, share=makes, drop=drop, **mask)
    check(got, by_hand(arrays, drop, causal="padding" not in mask, **mask))


def test_fused_kernels_have_none():
    query, key, value, _ = inputs()
    with pytest.raises(AssertionError, match="no dropout"):
        fused_attention(query, key, value, with_one_size(XLA), drop=dropout())
