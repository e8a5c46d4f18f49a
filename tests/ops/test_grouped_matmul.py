"""The permutation that sorts rows by group, and the grouped matmul, against loops in numpy."""

import jax
import numpy as np

from megajax.ops.grouped_matmul import combine, dispatch, group_sizes, grouped_matmul, sort_by_group

TOKENS, CHOICES, GROUPS, INTO, OUT = 5, 3, 2, 4, 6


def test_rows_of_groups_that_are_elsewhere():
    """They come last, so that the first rows are enough; they add nothing to results and gradients."""
    draw = np.random.default_rng(0)
    groups = np.array(
        [0, 2, 1, 2, 2, 0, 1, 0, 2, 2, 2, 2, 1, 2, 0], np.int32
    )  # 2: elsewhere; two choices at most are here
    x = draw.normal(size=(TOKENS, INTO)).astype(np.float32)
    kernels = draw.normal(size=(GROUPS, INTO, OUT)).astype(np.float32)
    slopes = draw.normal(size=(TOKENS, OUT)).astype(np.float32)

    def run(x, kernels, rows):
        order, places = sort_by_group(groups)
        order, sizes = order[:rows], group_sizes(groups, GROUPS)
        return combine(grouped_matmul(dispatch(x, order, places), kernels, sizes), order, places, TOKENS)

    want, want_dx, want_dk = np.zeros((TOKENS, OUT)), np.zeros_like(x), np.zeros_like(kernels)
    for row, group in enumerate(groups):
        token = row // CHOICES
        if group < GROUPS:
            want[token] += x[token] @ kernels[group]
            want_dx[token] += slopes[token] @ kernels[group].T
            want_dk[group] += np.outer(x[token], slopes[token])
    for rows in (TOKENS * CHOICES, TOKENS * 2):
        got, transpose = jax.vjp(lambda x, kernels, rows=rows: run(x, kernels, rows), x, kernels)
        for value, expected in zip((got, *transpose(slopes)), (want, want_dx, want_dk), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
