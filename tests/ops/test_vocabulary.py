"""Lookups in a sharded table: in a plain jit, in a partly manual shard_map, and in one rank's branch there.

And what a rank holds and multiplies of a large vocabulary, in steps compiled for H100s.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ModelConfig
from megajax.estimate import hlo
from megajax.ops.vocabulary import lookup, over_pipe, token_scores
from tests import gpu

ROWS, HIDDEN = 16, 8
QUICK = ("bf16-whole-1", "fp32-split-2", "fp32-whole-4", "bf16-split-4")  # every value of each
CASES = {
    f"{precision}-{layout}-{tensor}": (dtype, layout == "split", tensor)
    for precision, dtype in (("fp32", jnp.float32), ("bf16", jnp.bfloat16))
    for layout in ("whole", "split")
    for tensor in (1, 2, 4)
}
cases = pytest.mark.parametrize(
    ("dtype", "sequence_parallel", "tensor"),
    [pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()],
)


def make_mesh(tensor):
    shape = {1: (2, 4, 1), 2: (2, 2, 2), 4: (1, 2, 4)}[tensor]
    return jax.make_mesh(shape, ("data", "pipe", "tensor"), axis_types=(AxisType.Auto,) * 3)


def inputs(mesh, dtype):
    """(table, tokens, gradient) on the mesh, and the rows and table gradient expected of them."""
    draw = np.random.default_rng(0)
    table = jnp.asarray(draw.normal(size=(ROWS, HIDDEN)), dtype)
    tokens = draw.integers(0, ROWS, (4, 8), np.int32)
    gradient = jnp.asarray(draw.normal(size=(4, 8, HIDDEN)), dtype)
    expected = np.zeros((ROWS, HIDDEN))
    np.add.at(expected, tokens, np.float64(gradient))
    laid = jax.device_put(table, NamedSharding(mesh, P("tensor")))
    return (laid, tokens, gradient), np.asarray(table)[tokens], expected


def both_ways(sequence_parallel, table, tokens, gradient):
    rows, vjp = jax.vjp(lambda table: lookup(table, tokens, sequence_parallel), table)
    return rows, vjp(gradient)[0]


def check(got, rows, gradient, dtype, parts=1):
    np.testing.assert_array_equal(np.float32(got[0]), np.float32(rows))  # a copy, in any type
    tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-8 * parts  # one rounding to bf16 for each of the parts
    np.testing.assert_allclose(np.float64(got[1]), gradient, rtol=tolerance, atol=tolerance)


@cases
def test_lookups_in_a_plain_jit(dtype, sequence_parallel, tensor):
    mesh = make_mesh(tensor)
    arguments, rows, gradient = inputs(mesh, dtype)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(both_ways, sequence_parallel))(*arguments)
    assert got[1].sharding.shard_shape(got[1].shape) == (ROWS // tensor, HIDDEN)  # as the table's
    check(got, rows, gradient, dtype)


def test_a_table_in_fp32_sends_rows_in_16_bits():
    """Of a table that a step does not cast: the rows of one in bf16, a gradient that is not rounded, half the bytes sent."""
    mesh = make_mesh(2)
    (table, tokens, gradient), *_ = inputs(mesh, jnp.float32)

    def both(table, tokens, gradient):
        rows, vjp = jax.vjp(lambda table: lookup(table, tokens, True, jnp.bfloat16), table)
        return rows, vjp(gradient.astype(jnp.bfloat16))[0]

    with jax.set_mesh(mesh):
        compiled = jax.jit(both).lower(table, tokens, gradient).compile()
        rows, of_table = compiled(table, tokens, gradient)
    assert (rows.dtype, of_table.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(np.float32(rows), np.float32(np.asarray(table).astype(jnp.bfloat16)[tokens]))
    expected = np.zeros((ROWS, HIDDEN))
    np.add.at(expected, tokens, np.float64(gradient.astype(jnp.bfloat16)))
    np.testing.assert_allclose(np.float64(of_table), expected, rtol=1e-5, atol=1e-5)
    (sent,) = re.findall(r" = u32\[([\d,]+)\]\S* reduce-scatter\(", compiled.as_text())
    assert math.prod(map(int, sent.split(","))) == tokens.size // 2 * HIDDEN // 2  # pairs of bf16


@cases
def test_lookups_in_a_branch_of_one_pipeline_rank(dtype, sequence_parallel, tensor):
    """Its collectives stay in a tensor group: ranks outside the branch do not participate and would cause a deadlock."""
    mesh = make_mesh(tensor)
    arguments, rows, gradient = inputs(mesh, dtype)
    everywhere = ("data", "pipe")

    def vary(x):
        return lax.pcast(x, tuple(set(everywhere) - jax.typeof(x).mat.varying), to="varying")

    def step(*arguments):
        on = partial(both_ways, sequence_parallel, *map(vary, arguments))
        off = lambda: jax.tree.map(lambda a: vary(jnp.zeros(a.shape, a.dtype)), jax.eval_shape(on))  # noqa: E731
        found, gradient = lax.cond(lax.axis_index("pipe") == 1, on, off)
        found = lax.psum(found.astype(jnp.float32), "pipe")
        return found, lax.psum(gradient.astype(jnp.float32), everywhere)

    specs = dict(in_specs=(P(), P("data"), P("data")), out_specs=(P("data"), P()))
    run = jax.jit(jax.shard_map(step, mesh=mesh, axis_names=set(everywhere), check_vma=True, **specs))
    compiled = run.lower(*arguments).compile()
    assert "collective-permute" not in compiled.as_text()
    assert "all-to-all" not in compiled.as_text()
    check(compiled(*arguments), rows, gradient, dtype, parts=mesh.shape["data"])


@pytest.mark.parametrize(("dtype", "hidden"), [(jnp.bfloat16, 8), (jnp.bfloat16, 6), (jnp.float32, 8)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_the_heads_input_are_summed_in_fp32(dtype, hidden, sequence_parallel):
    """In bf16 each partial sum would be rounded to 8 bits; of 6 elements four ranks cannot sum a part each."""
    mesh = jax.make_mesh((4, 2), ("pipe", "tensor"), axis_types=(AxisType.Auto,) * 2)
    gradient = jax.random.normal(jax.random.key(0), (4, 1, 2, hidden)).astype(dtype)
    ranks = over_pipe(sequence_parallel)[1]

    def backward(gradient):
        _, vjp = jax.vjp(ranks.broadcast, jnp.zeros_like(gradient[0]))
        return vjp(gradient[0])[0][None]

    with jax.set_mesh(mesh):
        split = dict(in_specs=P("pipe"), out_specs=P("pipe"), axis_names={"pipe"})
        found = jax.jit(jax.shard_map(backward, **split))(gradient)
    expected = np.asarray(gradient, np.float32).sum(0).astype(dtype)
    for rank in range(4):
        np.testing.assert_array_equal(np.asarray(found[rank], np.float32), expected.astype(np.float32))


def test_a_frequent_token_loses_nothing_in_bf16():
    """1,024 gradients of 1 + 1/128 are added to one row: a bf16 sum would saturate at 256."""
    mesh = make_mesh(2)
    with jax.set_mesh(mesh):
        table = jax.device_put(jnp.zeros((ROWS, HIDDEN), jnp.bfloat16), NamedSharding(mesh, P("tensor")))
        tokens, gradient = jnp.full((1, 1024), 3), jnp.full((1, 1024, HIDDEN), 1 + 1 / 128, jnp.bfloat16)
        rows = jax.jit(partial(both_ways, True))(table, tokens, gradient)[1]
    np.testing.assert_array_equal(np.float32(rows[3]), 1032)
    assert (np.float32(rows).sum(-1) != 0).sum() == 1


LARGE = ModelConfig(layers=8, hidden=1024, heads=8, vocabulary=128 * 1024, sequence_length=2048)
STAGES, MICROBATCHES = 8, 8


@pytest.mark.compiler
@pytest.mark.slow
def test_with_a_128k_vocabulary_every_stage_has_an_eighth_of_megatrons_last_stage():
    """The head's matmuls, in what runs it once per microbatch: table, logits, and gradients of both.

    With Megatron's placement ("tensor") only the last stage runs it, though all ranks allocate memory for it, as
    they run the same program; with "pipe" all ranks run it.
    """
    heads, peaks = {}, {}
    for placement in ("tensor", "pipe"):
        text, peaks[placement] = gpu.compile_step(
            LARGE, MICROBATCHES, pipe=STAGES, vocab_parallel=placement, attention="xla"
        )
        matmuls = hlo.read(text, {"head": MICROBATCHES, "head/cond": MICROBATCHES}).matmuls  # a loop, a conditional
        heads[placement] = [one for one in matmuls if one.scope == "head"]
    tokens, hidden, vocabulary = LARGE.sequence_length, LARGE.hidden, LARGE.vocabulary
    for placement, rows in (("tensor", vocabulary), ("pipe", vocabulary // STAGES)):
        made = {math.prod(one.shape) for one in heads[placement]}
        assert {tokens * rows, rows * hidden} <= made  # the logits and the gradient of the table
        assert max(made) == max(tokens * rows, rows * hidden)
        flops = sum(one.flops for one in heads[placement])
        assert flops == pytest.approx(MICROBATCHES * 3 * 2 * tokens * hidden * rows)
    table = vocabulary * hidden
    held = 4 + 8 + 4 + 2  # bytes of an element: fp32, AdamW's moments, gradient, and in 16 bit
    # Not all of the logits: with "pipe" they are small, and the peak is in the blocks, which need memory of their own.
    logits = 2 * tokens * vocabulary
    assert (
        (1 - 1 / STAGES) * held * table < peaks["tensor"] - peaks["pipe"] < (1 - 1 / STAGES) * (held * table + logits)
    )


def test_token_scores_are_numpys_with_ties_and_padded_rows():
    """The first of equal logits is the most likely token, and a padded row never is."""
    draw = np.random.default_rng(1)
    logits = draw.integers(0, 4, (3, 40, 16)).astype(np.float32)  # many ties
    logits[..., 13:] = 9
    labels = draw.integers(0, 13, (3, 40))
    losses, right = jax.jit(partial(token_scores, vocabulary=13))(logits, labels)
    exact = np.float64(logits[..., :13])
    wanted = np.log(np.exp(exact).sum(-1)) - np.take_along_axis(exact, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    np.testing.assert_array_equal(right, exact.argmax(-1) == labels)
    assert 5 < right.sum() < 60
