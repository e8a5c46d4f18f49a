"""The backward in Pallas's interpreter, after XLA's forward, compared with a softmax written out in numpy, in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_day.kernels import attention_in_numpy as in_numpy
from megajax.ops.attention_kernels import INTERPRETED
from megajax.ops.flash_attention import HIDDEN_SCORE


def inputs(samples, queries, keys, heads, groups, size, dtype=np.float32):
    """Queries, keys, values, and a gradient of the output."""
    draw = np.random.default_rng(0)
    query, gradient = (draw.normal(size=(samples, queries, heads, size)) for _ in range(2))
    key, value = (draw.normal(size=(samples, keys, groups, size)) for _ in range(2))
    return [np.asarray(jnp.asarray(a, dtype)) for a in (query, key, value, gradient)]


# Jitted once, so that tests of equal shapes share their programs.
forward = jax.jit(INTERPRETED.forward, static_argnames="causal")
backward = jax.jit(INTERPRETED.backward, static_argnames="causal")


def by_kernel(query, key, value, gradient, causal, first):
    output, statistics = forward(query, key, value, causal=causal, first=first)
    results = (output, statistics, gradient)
    return output, statistics, *backward(query, key, value, *results, causal=causal, first=first)


def documents(length: int, *starts: int) -> np.ndarray:
    """The start of each token's document, [length]."""
    starts = np.array([0, *starts])
    return starts[np.searchsorted(starts, np.arange(length), side="right") - 1].astype(np.int32)


def window(length: int, size: int, start: int = 0) -> np.ndarray:
    return (start + np.arange(length) - (size - 1)).astype(np.int32)


# Tiles have 64 queries and 64 keys.
CASES = {
    "causal": ((2, 40, 40, 4, 2, 8), True, None),
    "all keys, of another length": ((1, 33, 70, 4, 2, 16), False, None),
    "documents that end inside tiles and at their borders": (
        (2, 256, 256, 2, 1, 8),
        True,
        [documents(256, 64, 100, 128, 192), documents(256, 1, 63, 65, 255)],
    ),
    "documents of one token": ((1, 130, 130, 4, 2, 24), True, [documents(130, *range(60, 70), 129)]),
    "one document for each token": ((1, 20, 20, 2, 2, 8), True, [np.arange(20)]),
    "window 1": ((1, 70, 70, 2, 1, 8), True, [window(70, 1)]),
    "window of a tile": ((1, 200, 200, 1, 1, 8), True, [window(200, 64)]),
    "window longer than the sequence": ((1, 40, 40, 2, 2, 8), True, [window(40, 100)]),
    "window and documents": ((1, 150, 150, 2, 1, 8), True, [np.maximum(window(150, 20), documents(150, 77, 78, 140))]),
    "a piece of a ring": ((2, 64, 64, 4, 2, 8), False, [np.minimum(window(64, 20, 64), 63), window(64, 70, 64)]),
    "head size 160": ((1, 40, 40, 1, 1, 160), True, [documents(40, 13)]),
}


QUICK = (
    "all keys, of another length",
    "window and documents",
)


@pytest.mark.parametrize(
    ("shape", "causal", "first"),
    [pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()],
)
def test_equal_to_numpy(shape, causal, first):
    arrays, first = inputs(*shape), None if first is None else np.stack(first).astype(np.int32)
    for got, want in zip(by_kernel(*arrays, causal, first), in_numpy(*arrays, causal, first), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bf16_stays_close_to_fp32():
    arrays, first = inputs(1, 70, 70, 4, 2, 16, jnp.bfloat16), documents(70, 30)[None]
    for got, want in zip(by_kernel(*arrays, True, first), in_numpy(*arrays, True, first), strict=True):
        np.testing.assert_allclose(np.float32(got), want, atol=0.03 * np.abs(want).max())


def test_large_scores_neither_overflow_nor_vanish():
    query, key, *others = inputs(*CASES["window and documents"][0])
    arrays, first = (30 * query, key, *others), documents(150, 30)[None]
    for got, want in zip(by_kernel(*arrays, True, first), in_numpy(*arrays, True, first), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_queries_that_see_no_key():
    """In ring attention a whole piece of keys can be before a query's document: no output, no gradient, no NaN."""
    query, key, value, gradient = inputs(1, 80, 80, 2, 1, 8)
    first = np.where(np.arange(80) < 30, 10, 80).astype(np.int32)[None]
    output, statistics, of_query, of_key, of_value = by_kernel(query, key, value, gradient, False, first)
    want = in_numpy(query[:, :30], key, value, gradient[:, :30], False, first[:, :30])
    for got, want_ in zip(
        (output[:, :30], statistics[..., :30], of_query[:, :30], of_key, of_value), want, strict=True
    ):
        np.testing.assert_allclose(got, want_, rtol=1e-5, atol=1e-5)
    assert not output[:, 30:].any() and not of_query[:, 30:].any() and (statistics[..., 30:] == HIDDEN_SCORE).all()


def test_a_backward_with_the_statistics_of_more_keys_is_their_part():
    """What ring attention sums: two halves of the keys, each with the whole softmax's output and statistics."""
    query, key, value, gradient = inputs(*CASES["all keys, of another length"][0])
    output, statistics = forward(query, key, value, causal=False)
    halves = [
        backward(query, key[:, half], value[:, half], output, statistics, gradient, causal=False)
        for half in (slice(35), slice(35, None))
    ]
    _, _, of_query, of_key, of_value = in_numpy(query, key, value, gradient, False, None)
    np.testing.assert_allclose(halves[0][0] + halves[1][0], of_query, rtol=1e-5, atol=1e-5)
    for index, want in ((1, of_key), (2, of_value)):
        got = np.concatenate([half[index] for half in halves], 1)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_tiles_in_which_nothing_is_seen_are_not_computed():
    """NaN in one document reaches no gradient of the other, if tiles end where documents do."""
    length, start = 150, 128
    arrays, first = inputs(*CASES["window and documents"][0]), documents(length, start)[None]
    output, statistics, *want = in_numpy(*arrays, True, first)
    statistics = np.float32(statistics)
    for kept in (np.arange(length) >= start, np.arange(length) < start):
        poison = lambda a, kept=kept: np.where(kept[:, None, None], np.float32(a), np.nan)  # noqa: E731
        query, key, value, gradient, output_ = map(poison, (*arrays, output))
        got = backward(query, key, value, output_, statistics, gradient, causal=True, first=first)
        for got_, want_ in zip(got, want, strict=True):
            np.testing.assert_allclose(got_[:, kept], want_[:, kept], rtol=1e-5, atol=1e-5)
