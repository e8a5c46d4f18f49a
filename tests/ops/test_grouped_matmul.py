"""The permutation that sorts rows by group, and the two matmuls of experts, against loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from megajax.ops.group_order import combine, dispatch
from megajax.ops.grouped_matmul import INTERPRETED, XLA, GroupedMatmuls, route

TOKENS, CHOICES, GROUPS, INTO, INNER = 5, 3, 2, 4, 6
# 2: elsewhere; two choices of a token at most are here.
CHOSEN = np.array([0, 2, 1, 2, 2, 0, 1, 0, 2, 2, 2, 2, 1, 2, 0], np.int32)


def arrays():
    draw = np.random.default_rng(0)
    shapes = (TOKENS, INTO), (GROUPS, INTO, 2, INNER), (GROUPS, INNER, INTO), (TOKENS, INTO)
    return [draw.normal(size=shape).astype(np.float32) for shape in shapes]


def experts(how, x, up, down, rows=None):
    """Both matmuls, with a product of two gates between them."""
    routing = route(CHOSEN, GROUPS, rows)
    middle = how.column(x, up, routing)
    return how.row(middle[:, 0] * middle[:, 1], down, routing, TOKENS)


def in_numpy(x, up, down, slopes):
    """The result, and the gradients of x, up and down."""
    x, up, down, slopes = (np.float64(a) for a in (x, up, down, slopes))
    out, dx, dup, ddown = np.zeros_like(x), np.zeros_like(x), np.zeros_like(up), np.zeros_like(down)
    for row, group in enumerate(CHOSEN):
        token = row // CHOICES
        if group < GROUPS:
            gate, value = x[token] @ up[group, :, 0], x[token] @ up[group, :, 1]
            out[token] += (gate * value) @ down[group]
            slope = down[group] @ slopes[token]
            dx[token] += up[group, :, 0] @ (slope * value) + up[group, :, 1] @ (slope * gate)
            dup[group] += np.stack([np.outer(x[token], slope * value), np.outer(x[token], slope * gate)], 1)
            ddown[group] += np.outer(gate * value, slopes[token])
    return out, dx, dup, ddown


def check(how, **settings):
    *given, slopes = arrays()

    @jax.jit
    def both(*given):
        out, transpose = jax.vjp(lambda *given: experts(how, *given, **settings), *given)
        return out, *transpose(jnp.asarray(slopes))

    for value, expected in zip(both(*given), in_numpy(*given, slopes), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [None, TOKENS * 2])
def test_rows_of_groups_that_are_elsewhere(rows):
    """They come last, so that the first rows are enough; they add nothing to results and gradients."""
    check(GroupedMatmuls(), rows=rows)


@pytest.mark.parametrize(
    ("kernel", "split"), [(XLA, True), pytest.param(INTERPRETED, True, marks=pytest.mark.slow), (XLA, False)]
)
def test_on_a_tensor_group(kernel, split):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        check(GroupedMatmuls(kernel, True, split))


@pytest.mark.parametrize("kernel", [XLA, pytest.param(INTERPRETED, marks=pytest.mark.slow)])
def test_on_a_tensor_group_whose_ranks_have_whole_kernels(kernel):
    """Each of two ranks has one of the groups, and rows of its own: the tokens' results are the sums of both."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    how = GroupedMatmuls(kernel, True, over_groups=True)
    ranks = jnp.arange(GROUPS)[:, None]
    routing = jax.vmap(lambda groups: route(groups, 1))(jnp.where(CHOSEN == ranks, 0, 1))

    def run(x, up, down):
        middle = how.column(jnp.broadcast_to(x, (GROUPS, *x.shape)), up, routing)
        return how.row(middle[:, :, 0] * middle[:, :, 1], down, routing, TOKENS).sum(0)

    *given, slopes = arrays()
    with jax.set_mesh(mesh):
        out, transpose = jax.vjp(jax.jit(run), *given)
        found = out, *transpose(jnp.asarray(slopes))
    for value, expected in zip(found, in_numpy(*given, slopes), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_read_by_their_index_alone():
    """No comparison with 0, an array that XLA shares between a merged tick's passes: it then joins their kernels."""
    routing, x = route(CHOSEN, GROUPS, 9), np.ones((TOKENS, INTO), np.float32)
    program = jax.make_jaxpr(lambda x: combine(dispatch(x, routing.order, routing.places), *routing[:2], TOKENS))(x)
    text = str(program)
    assert text.count("gather[") == 2
    assert not {"lt", "rem", "sign"} & {word for line in text.splitlines() for word in line.replace("[", " ").split()}
