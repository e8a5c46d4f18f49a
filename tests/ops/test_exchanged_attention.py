"""Attention over a sequence split over ranks that exchange it for heads, compared with attention over the whole sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.config.model_split import can_exchange
from megajax.estimate.hlo import collectives
from megajax.ops.attention_kernels import INTERPRETED, XLA, with_window
from megajax.ops.exchanged_attention import exchanged_attention
from tests.ops.test_ring_attention import DOCUMENTS, MASKS, SAMPLES, SEQUENCE, SIZE, in_a_ring, inputs, plainly


def exchanged(kernel, axis, ranks, window):
    return exchanged_attention(with_window(kernel, window), axis, ranks)


def check(ranks, arrays=None, tolerance=1e-5, **how):
    arrays = arrays or inputs()
    mask = {name: how[name] for name in ("document", "window") if name in how}
    if "padding" in how:
        mask = {"causal": False, "padding": how["padding"]}
    got, compiled = in_a_ring(ranks, arrays, share=exchanged, **how)
    for got_, want in zip(got, plainly(*arrays, **mask), strict=True):
        np.testing.assert_allclose(np.float32(got_), want, rtol=tolerance, atol=tolerance * max(1, np.abs(want).max()))
    return compiled.as_text()


@pytest.fixture(scope="module")
def four():
    """The program of four ranks: two heads of keys, each sent to two of them."""
    return check(4, document=DOCUMENTS, window=10)


def test_documents_and_a_window_equal_plain_attention_with_keys_that_are_copied(four):
    """And no collective but all-to-alls: of queries, keys, values and results four forward and eight backward."""
    found = collectives(four)
    assert {one.kind for one in found} == {"all-to-all"}
    sent = [one for one in found if one.shape and one.shape[-1] == SIZE]
    assert 4 + 8 - 4 <= len(sent) <= 4 + 8  # XLA may merge some of the backward's with the forward's
    assert {one.shape[0] for one in sent} == {SAMPLES} and f"{SEQUENCE * 4},{SIZE}]" not in four


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "groups", "tensor", "kernel"),
    [(2, 1, 1, XLA), (4, 1, 1, XLA), (2, 2, 1, XLA), (2, 2, 2, XLA), (4, 2, 1, INTERPRETED)],
)
@pytest.mark.parametrize("mask", [{}, *MASKS.values()], ids=["causal", *MASKS])
def test_equal_to_plain_attention(ranks, groups, tensor, kernel, mask):
    check(ranks, axis="data" if groups > 1 else "context", groups=groups, tensor=tensor, kernel=kernel, **mask)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_without_a_causal_mask_equal_to_plain_attention(ranks):
    check(ranks, padding=jnp.array([13, 0], jnp.int32))


@pytest.mark.slow
def test_bf16_stays_close_to_fp32():
    check(2, inputs(dtype=jnp.bfloat16), tolerance=0.03)


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "legal"),
    [(8, 8, 4, True), (8, 2, 4, True), (8, 1, 8, True), (8, 8, 3, False), (8, 4, 8, True), (12, 4, 6, False)],
)
def test_heads_that_ranks_can_split(queries, keys, ranks, legal):
    assert can_exchange(queries, keys, ranks) == legal


def test_heads_that_they_cannot_are_one_line():
    shapes = [jax.ShapeDtypeStruct((1, 8, heads, 4), jnp.float32) for heads in (2, 2, 2)]
    kernel = exchanged_attention(XLA, "context", 4)
    with pytest.raises(
        ConfigError, match=r"cannot split 2 heads of queries .* context = 4: pass --context-exchange ring"
    ):
        kernel.forward(*shapes, True)
