"""Ring attention over a sequence split over ranks, compared with plain attention over the whole sequence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError
from megajax.estimate.hlo import collectives
from megajax.ops.attention import Scoring, document_starts, fused_attention, plain_attention
from megajax.ops.attention_kernels import INTERPRETED, XLA
from megajax.ops.ring_attention import ring_attention, split_batch, zigzag
from tests.gradients import both_ways

SAMPLES, SEQUENCE, GROUPS, SHARED, SIZE = 2, 32, 2, 2, 8


def inputs(scale=1.0, dtype=np.float32):
    """Queries, keys and values of the whole sequence, and a gradient of the attention's output."""
    draw = np.random.default_rng(0)
    query, gradient = (draw.normal(size=(SAMPLES, SEQUENCE, GROUPS, SHARED, SIZE)) for _ in range(2))
    key, value = (draw.normal(size=(SAMPLES, SEQUENCE, GROUPS, SIZE)) for _ in range(2))
    return [np.asarray(jnp.asarray(a, dtype)) for a in (scale * query, scale * key, value, gradient)]


def plainly(query, key, value, gradient, **mask):
    """Output and gradients of attention on one device in fp32."""
    plain = lambda *arrays: plain_attention(*arrays, Scoring(), **mask)  # noqa: E731
    return both_ways(plain)(*(np.float32(a) for a in (gradient, query, key, value)))


def in_a_ring(
    ranks,
    arrays,
    axis="context",
    groups=1,
    tensor=1,
    document=None,
    window=None,
    kernel=XLA,
    padding=None,
    share=ring_attention,
    drop=None,
):
    """The same on `ranks` ranks of an axis; `groups` rings on it have the same samples. Returns the first ring's results.

    And the compiled program.

    `share`: what makes the kernel one for several ranks. With `padding`, the numbers of tokens at the samples' ends that
    nothing attends to, there is no causal mask. `drop`: dropout of the whole samples.
    """
    further = {} if document is None else {"document": np.asarray(document_starts(document))}
    if drop is not None:
        further["keys"] = np.moveaxis(np.asarray(drop.keys), 1, 2)  # of the sequence's queries
    arrays = [*arrays, *further.values()]
    places = zigzag(SEQUENCE, ranks)
    mesh = jax.make_mesh(
        (groups * ranks, tensor), (axis, "tensor"), (AxisType.Auto,) * 2, devices=_devices(groups * ranks * tensor)
    )
    shared = [
        np.tile(np.concatenate([a[:, place] for place in places], 1), (1, groups, *[1] * (a.ndim - 2))) for a in arrays
    ]
    kernel = share(kernel, axis, ranks, window)

    def local(query, key, value, gradient, *others):
        own = dict(zip(further, others, strict=True))
        dropped = drop and dataclasses.replace(drop, keys=jnp.moveaxis(own["keys"], 2, 1))
        masks = own.get("document"), padding, padding is None, None, dropped
        attend = lambda *arrays: fused_attention(*arrays, kernel, *masks)  # noqa: E731
        output, vjp = jax.vjp(attend, query, key, value)
        return output, *vjp(gradient)

    spec = P(None, axis)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={axis}))
    run = run.lower(*shared).compile()
    order = np.argsort(places.reshape(-1))
    return [np.asarray(a)[:, :SEQUENCE][:, order] for a in run(*shared)], run


def _devices(count):
    return jax.devices()[:count]


@pytest.mark.parametrize(
    ("ranks", "groups", "tensor"),
    [pytest.param(*ring, marks=pytest.mark.slow) for ring in [(4, 1, 2), (2, 1, 1), (8, 1, 1), (2, 2, 2)]],
)
def test_equal_to_plain_attention(ranks, groups, tensor):
    """Output and every gradient to 1e-5, with two query heads per key, and several rings on one axis."""
    arrays = inputs()
    got, _ = in_a_ring(ranks, arrays, "data" if groups > 1 else "context", groups, tensor)
    for got_, want in zip(got, plainly(*arrays), strict=True):
        np.testing.assert_allclose(got_, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [XLA, pytest.param(INTERPRETED, marks=pytest.mark.slow)], ids=["xla", "interpreted"])
@pytest.mark.parametrize(("ranks", "groups", "tensor"), [(2, 1, 1), pytest.param(4, 1, 2, marks=pytest.mark.slow)])
def test_without_a_causal_mask_equal_to_plain_attention(ranks, groups, tensor, kernel):
    """One sample whose last 13 tokens are padding, which ends inside a piece of several ranks, and one without."""
    arrays, padding = inputs(), jnp.array([13, 0], jnp.int32)
    got, _ = in_a_ring(ranks, arrays, groups=groups, tensor=tensor, kernel=kernel, padding=padding)
    for got_, want in zip(got, plainly(*arrays, causal=False, padding=padding), strict=True):
        np.testing.assert_allclose(got_, want, rtol=1e-5, atol=1e-5)


NUMBERS = np.cumsum(np.isin(np.arange(SEQUENCE), (1, 8, 9, 20, 28)), dtype=np.int32)
DOCUMENTS = np.stack([NUMBERS, np.int32(np.arange(SEQUENCE) >= 17)])  # in, at and across the borders of pieces


MASKS = {
    "documents": {"document": DOCUMENTS},
    "window 1": {"window": 1},
    "window 6": {"window": 6},
    "window 40": {"window": 40},
    "both": {"document": DOCUMENTS, "window": 10},
}
RINGS = {
    "xla, 2": (2, 1, 1, XLA),
    "xla, 4": (4, 1, 2, XLA),
    "interpreted, 2": (2, 2, 1, INTERPRETED),
    "interpreted, 4": (4, 1, 2, INTERPRETED),
}
QUICK = [("xla, 4", "both")]


@pytest.mark.parametrize(
    ("ranks", "groups", "tensor", "kernel", "mask"),
    [
        pytest.param(*ring, mask, id=f"{name}, {kind}", marks=[] if (name, kind) in QUICK else pytest.mark.slow)
        for name, ring in RINGS.items()
        for kind, mask in MASKS.items()
    ],
)
def test_documents_and_windows_equal_plain_attention(ranks, groups, tensor, kernel, mask):
    arrays = inputs()
    axis = "data" if groups > 1 else "context"
    got, _ = in_a_ring(ranks, arrays, axis, groups, tensor, kernel=kernel, **mask)
    for got_, want in zip(got, plainly(*arrays, **mask), strict=True):
        np.testing.assert_allclose(got_, want, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def large_scores():
    """Arrays, results and compiled program of a ring of 4."""
    arrays = inputs(scale=30)
    return arrays, *in_a_ring(4, arrays)


@pytest.mark.slow
def test_large_scores_neither_overflow_nor_vanish(large_scores):
    """With scores of several thousand, every exponential except the largest key's is 0, and none is infinite."""
    arrays, got, _ = large_scores
    for got_, want in zip(got, plainly(*arrays), strict=True):
        assert np.isfinite(got_).all()
        np.testing.assert_allclose(got_, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.slow
def test_bf16_stays_close_to_fp32():
    arrays = inputs(dtype=jnp.bfloat16)
    got, _ = in_a_ring(2, arrays)
    for got_, want in zip(got, plainly(*arrays), strict=True):
        assert got_.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(got_), want, atol=0.03 * np.abs(want).max())


def test_no_scores_of_the_whole_sequence_and_the_sends_of_the_formula(large_scores):
    """C - 1 sends of keys and of values, C of each of their gradients, and no other collective."""
    ranks = 4
    compiled = large_scores[-1].as_text()
    found = collectives(compiled)
    assert {c.kind for c in found} == {"collective-permute"}
    assert {c.shape for c in found} == {(SAMPLES, SEQUENCE // ranks, GROUPS, SIZE)}
    assert (
        len(found) == 2 * (ranks - 1) + 2 * ranks
    )  # XLA merges the backward's sends of keys and values with the forward's
    assert f"{SEQUENCE},{SEQUENCE}]" not in compiled


def test_zigzag_gives_every_rank_the_same_work():
    for ranks in (1, 2, 4):
        places = zigzag(16, ranks)
        assert sorted(places.reshape(-1)) == list(range(16))
        seen = (places + 1).sum(1)  # keys that the queries of each rank see
        assert len(set(seen)) == 1 and seen.sum() == 16 * 17 / 2
    assert zigzag(8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_a_sequence_that_the_ranks_do_not_divide_is_one_clear_line():
    with pytest.raises(
        ConfigError, match=r"sequence_length = 12 cannot be split into 2 \* context = 8 .* --sequence-length 16"
    ):
        zigzag(12, 4)


def test_split_batch_by_hand():
    """Two replicas of two samples on two context ranks: rows are ordered by replica, context rank, sample."""
    tokens = np.arange(1 * 4 * 8).reshape(1, 4, 8)
    batch = split_batch({"tokens": tokens, "sample": np.arange(4)[None]}, data=2, context=2)
    first, second = [0, 1, 6, 7], [2, 3, 4, 5]
    assert np.array(batch["sample"]).tolist() == [[0, 1, 0, 1, 2, 3, 2, 3]]
    assert np.array(batch["positions"]).tolist() == [[first, first, second, second] * 2]
    assert np.array(batch["places"]).tolist() == np.array(batch["positions"]).tolist()
    want = [tokens[0, row][part] for row, part in [(0, first), (1, first), (0, second), (1, second)]]
    np.testing.assert_array_equal(batch["tokens"][0, :4], want)
    assert split_batch({"tokens": tokens}, data=2, context=1)["tokens"] is tokens
    own = {"document": np.arange(24).reshape(1, 4, 6)}  # an array of a model of one's own
    assert split_batch(own, data=2, context=1) == own


def test_split_batch_keeps_positions_and_gives_the_start_of_each_document():
    numbers = np.array([[[5, 5, 5, 6, 6, 9, 9, 9]]])
    reset = np.array([[[0, 1, 2, 0, 1, 0, 1, 2]]])
    tokens = np.zeros((1, 1, 8), int)
    batch = split_batch({"tokens": tokens, "document": numbers, "positions": reset}, data=1, context=2)
    assert np.array(batch["document"]).tolist() == [[[0, 0, 5, 5], [0, 3, 3, 5]]]
    assert np.array(batch["positions"]).tolist() == [[[0, 1, 1, 2], [2, 0, 1, 0]]]
    assert np.array(batch["places"]).tolist() == [[[0, 1, 6, 7], [2, 3, 4, 5]]]
    whole = split_batch({"tokens": tokens, "document": numbers}, data=1, context=1)
    assert np.array(whole["document"]).tolist() == [[[0, 0, 0, 3, 3, 5, 5, 5]]]


def test_a_ring_inside_the_executors_shard_map_equals_plain_attention():
    """Manual over data and pipe, with keys sent around the data axis and heads split over tensor by XLA."""
    arrays, ranks = inputs(), 2
    mesh = jax.make_mesh((2, 2, 2), ("data", "pipe", "tensor"), axis_types=(AxisType.Auto,) * 3)
    places = zigzag(SEQUENCE, ranks)
    shared = [np.concatenate([a[:, place] for place in places]) for a in arrays]  # rows by rank, then sample
    kernel = ring_attention(XLA, "data", ranks)

    def step(*shared):
        query, key, value, gradient = (lax.pcast(a, "pipe", to="varying") for a in shared)
        output, vjp = jax.vjp(lambda *arrays: fused_attention(*arrays, kernel), query, key, value)
        return jax.tree.map(lambda a: lax.psum(a, "pipe") / 2, (output, *vjp(gradient)))

    run = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data", "pipe"})
    order = np.argsort(places.reshape(-1))
    for got, want in zip(jax.jit(run)(*shared), plainly(*arrays), strict=True):
        whole = np.concatenate(np.split(np.asarray(got), ranks), 1)[:, order]
        np.testing.assert_allclose(whole, want, rtol=1e-5, atol=1e-5)
