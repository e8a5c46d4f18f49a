"""Ring collectives compared with XLA's, and collective matmuls compared with plain matmuls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ModelConfig
from megajax.estimate import hlo
from megajax.estimate.gpus import find_gpu
from megajax.ops import collective_matmul
from megajax.plan.compiler import compile_for
from tests import gpu

SIZES = [1, 2, 3, 4, 8]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32]


def on_ranks(function, x):
    """The results of `function` for each rank's x[rank], stacked: [ranks, ...]."""
    mesh = jax.make_mesh((len(x),), ("ring",), (AxisType.Auto,), devices=jax.devices()[: len(x)])
    stacked = lambda x: jax.tree.map(lambda a: a[None], function(x[0]))  # noqa: E731
    run = jax.shard_map(stacked, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"))
    return jax.tree.map(np.asarray, jax.jit(run)(x))


def whole_numbers(size, shape, dtype, seed=0):
    """Random integers so small that their sums are exact in every type, in any order."""
    drawn = np.random.default_rng(seed).integers(-8, 9, (size, *shape))
    return np.asarray(jnp.asarray(drawn, dtype))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        pytest.param(
            size,
            dtype,
            id=f"{size}-{dtype.__name__}",
            marks=() if size == 3 or (size, dtype) == (4, jnp.bfloat16) else pytest.mark.slow,
        )
        for size in SIZES
        for dtype in DTYPES
    ],
)
def test_equal_to_numpy_in_every_type(size, dtype):
    x = whole_numbers(size, (2 * size, 3), dtype)
    total = x.astype(np.float64).sum(0)
    gathered, scattered, reduced = on_ranks(
        lambda x: (
            collective_matmul.all_gather(x, "ring"),
            collective_matmul.reduce_scatter(x, "ring"),
            collective_matmul.all_reduce(x, "ring"),
        ),
        x,
    )
    assert gathered.dtype == scattered.dtype == reduced.dtype == x.dtype
    for rank in range(size):
        np.testing.assert_array_equal(gathered[rank], np.concatenate(x))
        np.testing.assert_array_equal(scattered[rank].astype(np.float64), total[2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(reduced[rank].astype(np.float64), total)


@hypothesis_settings(max_examples=5)
@given(
    size=st.sampled_from(SIZES),
    shape=st.lists(st.integers(1, 4), max_size=3),
    data=st.data(),
)
def test_equal_to_the_collectives_of_xla(size, shape, data):
    """Any shape, any axis; all-reduce pads where the ranks do not divide, scalars too."""
    x = np.random.default_rng(0).normal(size=(size, *shape)).astype(np.float32)
    close = dict(rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        on_ranks(lambda x: collective_matmul.all_reduce(x, "ring"), x), np.broadcast_to(x.sum(0), x.shape), **close
    )
    if shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        shape[axis] *= size
        x = np.random.default_rng(1).normal(size=(size, *shape)).astype(np.float32)

        def both(x):
            scattered = lax.psum_scatter(x, "ring", scatter_dimension=axis, tiled=True)
            gathered = lax.all_gather(x, "ring", axis=axis, tiled=True)
            return (collective_matmul.reduce_scatter(x, "ring", axis), scattered), (
                collective_matmul.all_gather(x, "ring", axis),
                gathered,
            )

        scattered, gathered = on_ranks(both, x)
        np.testing.assert_allclose(*scattered, **close)
        np.testing.assert_array_equal(*gathered)


def test_an_axis_that_the_ranks_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"axis 0 of \(6,\) cannot be split over the 4 ranks"):
        on_ranks(lambda x: collective_matmul.reduce_scatter(x, "ring"), np.zeros((4, 6), np.float32))


def test_every_rank_sends_the_formulas_bytes():
    """2 (t - 1) sends of a t-th each for an all-reduce, and no other collective."""
    size, length = 8, 64
    mesh = jax.make_mesh((size,), ("ring",), (AxisType.Auto,))
    run = jax.shard_map(
        lambda x: collective_matmul.all_reduce(x[0], "ring")[None], mesh=mesh, in_specs=P("ring"), out_specs=P("ring")
    )
    found = hlo.collectives(jax.jit(run).lower(np.zeros((size, length), np.float32)).compile().as_text())
    assert [(c.kind, c.shape) for c in found] == [("collective-permute", (length // size,))] * (2 * (size - 1))


# The pair of matmuls.

CASES = {  # kernels as the block has them: sizes, and the axis that is split
    "up": ((6, 8), 1),
    "gated up": ((6, 2, 8), 2),
    "qkv": ((6, 4, 3, 2), 1),
    "down": ((8, 6), 1),
    "output": ((4, 2, 6), 2),
}


def make_mesh(tensor):
    shape = {1: (2, 4, 1), 2: (2, 2, 2), 4: (1, 2, 4)}[tensor]
    return jax.make_mesh(shape, ("data", "pipe", "tensor"), axis_types=(AxisType.Auto,) * 3)


def column(name):
    return name in ("up", "gated up", "qkv")


def arguments(name, mesh, dtype):
    """(x, kernel, gradient of the product) sharded on the mesh, and in fp64 the product and both gradients."""
    kernel_shape, number = CASES[name]
    draw = lambda seed, shape: np.random.default_rng(seed).normal(size=shape)  # noqa: E731
    x_shape = (4, 8, 6) if column(name) else (4, 8, *kernel_shape[:number])
    contracted = 1 if column(name) else number
    values = [draw(0, x_shape), draw(1, kernel_shape)]
    values.append(draw(2, np.tensordot(*values, axes=contracted).shape))
    x, kernel, gradient = (np.asarray(jnp.asarray(value, dtype)) for value in values)
    wide = [a.astype(np.float64) for a in (x, kernel, gradient)]
    kept = kernel.ndim - contracted
    product = np.tensordot(wide[0], wide[1], axes=contracted)
    dx = np.tensordot(wide[2], wide[1], axes=(range(2, 2 + kept), range(contracted, kernel.ndim)))
    dkernel = np.tensordot(wide[0], wide[2], axes=((0, 1), (0, 1)))
    shard = lambda a, axis: jax.device_put(a, NamedSharding(mesh, P(*[None] * axis, "tensor")))  # noqa: E731
    if column(name):
        sharded = shard(x, 1), shard(kernel, number), shard(gradient, number + 1)
    else:
        sharded = shard(x, 2), shard(kernel, 0), shard(gradient, 1)
    return sharded, (product, dx, dkernel)


def both_ways(name, x, kernel, gradient):
    function = collective_matmul.column_matmul if column(name) else collective_matmul.row_matmul
    product, vjp = jax.vjp(lambda x, kernel: function(x, kernel, CASES[name][1]), x, kernel)
    return product, *vjp(gradient)


def check(got, want, dtype):
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 3e-2}[dtype]
    for got_, want_ in zip(got, want, strict=True):
        assert got_.dtype == dtype
        np.testing.assert_allclose(np.float64(got_), want_, rtol=tolerance, atol=tolerance * np.abs(want_).max())


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        pytest.param(name, tensor, marks=() if name in ("up", "down") and tensor != 2 else pytest.mark.slow)
        for tensor in (1, 4, 2)
        for name in CASES  # all are quick below, in the executor's shard_map
    ],
)
def test_matmuls_in_a_plain_jit_equal_numpy(name, tensor):
    mesh = make_mesh(tensor)
    sharded, want = arguments(name, mesh, jnp.float32)
    with jax.set_mesh(mesh):
        got = jax.jit(both_ways, static_argnums=0)(name, *sharded)
    check(got, want, jnp.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(name, jnp.float32, id=f"{name}-fp32") for name in CASES]
    + [pytest.param(name, jnp.bfloat16, id=f"{name}-bf16", marks=pytest.mark.slow) for name in CASES],
)
def test_matmuls_inside_the_executors_shard_map_equal_numpy(name, dtype):
    """Manual over data and pipe, automatic over tensor, and differentiated there, as in a block."""
    mesh = make_mesh(4)
    sharded, want = arguments(name, mesh, dtype)

    def step(*sharded):
        vary = lambda a: lax.pcast(a, ("data", "pipe"), to="varying")  # noqa: E731
        return jax.tree.map(lambda a: a[None], both_ways(name, *map(vary, sharded)))

    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(("data", "pipe")), axis_names={"data", "pipe"})
    )
    got = run(*sharded)
    for rank in range(2):  # all pipe ranks were given the same
        check([a[rank] for a in got], want, dtype)


def test_the_backward_has_only_the_conjugate_rings():
    """A column-parallel backward reduce-scatters and gathers its input again; a row-parallel one gathers once."""
    mesh = make_mesh(4)
    for name, rings in [("up", 2), ("down", 1)]:
        (x, kernel, gradient), _ = arguments(name, mesh, jnp.float32)
        function = collective_matmul.column_matmul if column(name) else collective_matmul.row_matmul
        with jax.set_mesh(mesh):
            vjp = jax.jit(lambda x, kernel: jax.vjp(lambda x, kernel: function(x, kernel, 1), x, kernel)[1])(x, kernel)  # noqa: B023
            text = jax.jit(lambda vjp, gradient: vjp(gradient)).lower(vjp, gradient).compile().as_text()
        sends = [(c.kind, c.shape) for c in hlo.collectives(text)]
        assert sends == [("collective-permute", (4, 2, 6))] * (3 * rings)  # t - 1 times [b, s / t, h]


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_the_sends_hide_behind_matmuls():
    """Blocks gather and scatter with sends only, and most sends start before a matmul and end after it."""
    model = ModelConfig(layers=2, hidden=12288, heads=96, vocabulary=512, sequence_length=2048)  # GPT-3's
    run = gpu.run_of(model, 4, data=2, tensor=8, tensor_overlap="ring", attention="xla")
    text = compile_for(run, find_gpu("h100-80gb"))[
        "hlo"
    ]  # with XLA's flags of a run on GPUs, unlike `gpu.compile_step`
    found = [c for c in hlo.collectives(text) if c.in_loop and not c.conditional]
    assert not [c for c in found if c.kind in ("all-gather", "reduce-scatter")]
    sends = [c for c in found if c.kind == "collective-permute"]
    rings = 2 * (1 + 2) + 2 * (1 + 1)  # two columns, two rows, forward and backward
    part = 2048 // 8 * model.hidden * 2  # bytes
    assert hlo.most_sent(sends) == 4 * model.layers * rings * (8 - 1) * part
    hidden = sum(c.times for c in sends if c.asynchronous and c.behind)
    assert hidden > 0.75 * sum(c.times for c in sends)
