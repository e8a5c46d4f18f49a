"""megajax/pipeline/early_stash.py: the stash is as written at the end of a block; the matmul's result is read from it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from megajax.pipeline.early_stash import stash_as_computed, stash_at_end
from megajax.pipeline.stash import SlotApart, StashRef, empty_stash, with_shared
from tests import gpu


def block(x, w):
    """(result, (what a backward needs)): the result of a matmul, a constant, an activation, the input twice."""
    up = checkpoint_name(x @ w, "up")
    active = jnp.tanh(up)
    return x + active @ w.T, ([up, jnp.float32(2.0), active], {"x": x, "again": x})


def arguments():
    draw = np.random.default_rng(0)
    return jnp.asarray(draw.normal(size=(3, 4)), jnp.float32), jnp.asarray(draw.normal(size=(4, 5)), jnp.float32)


@pytest.mark.parametrize("slots", [1, 2])
def test_the_stash_is_that_of_a_write_at_the_end(slots):
    result, saved = block(*arguments())
    stash = StashRef(empty_stash(slots, 2, saved), jnp.int32(slots - 1))
    y, buffer = jax.jit(lambda *args: stash_as_computed(block, args, stash, jnp.int32(1)))(*arguments())
    np.testing.assert_allclose(y, result, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), buffer, stash.write(1, saved))


@pytest.mark.parametrize(("slots", "reads"), [(1, 1), (2, 0)])
def test_a_matmuls_result_is_read_from_a_slot_that_is_known(slots, reads):
    """`up` alone: XLA writes a matmul into the stash if nothing else reads its result. Other values wait for their write."""
    stash = StashRef(empty_stash(slots, 2, block(*arguments())[1]), jnp.int32(0))
    jaxpr = jax.make_jaxpr(lambda *args: stash_as_computed(block, args, stash, jnp.int32(1)))(*arguments()).jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("dynamic_slice") == reads
    assert names.count("dynamic_update_slice") == 5
    first = names.index("dot_general")  # x, which the result's sum reads, is written before
    assert names.index("dynamic_update_slice") < names.index("optimization_barrier") < first
    assert names[first:].index("dynamic_update_slice") < names[first:].index("tanh")


def sums(x, w):
    """As `block`, of which the result is the sum of a saved one and the result of a matmul."""
    middle = x + jnp.tanh(x)
    return middle + jnp.tanh(middle @ w) @ w.T, {"middle": middle, "x": x}


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("function", [block, sums])
def test_a_write_at_the_end(function, waits):
    result, saved = function(*arguments())
    stash = StashRef(empty_stash(2, 2, saved), jnp.int32(1))
    write = lambda *args: stash_at_end(function, args, stash, jnp.int32(1), waits=waits)  # noqa: E731
    y, buffer = jax.jit(write)(*arguments())
    np.testing.assert_allclose(y, result, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), buffer, stash.write(1, saved))


def test_a_sum_with_a_saved_value_waits_for_the_writes():
    """So that nothing reads the block's input after its result is computed, which then has the input's memory in a loop."""
    stash = StashRef(empty_stash(2, 2, sums(*arguments())[1]), jnp.int32(1))

    def traced(waits):
        return jax.make_jaxpr(lambda *args: stash_at_end(sums, args, stash, jnp.int32(1), waits=waits))(*arguments())

    assert "optimization_barrier" not in str(traced(False))  # where XLA's scheduler has no times of matmuls
    jaxpr = traced(True).jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    (barrier,) = (number for number, name in enumerate(names) if name == "optimization_barrier")
    assert names[:barrier].count("dynamic_update_slice") == 2
    assert names[barrier:].count("add") >= 1 and names[barrier:].count("dynamic_slice") == 1
    assert jaxpr.invars[0] not in [
        var for eqn in jaxpr.eqns[barrier + 1 :] for var in eqn.invars if var in jaxpr.invars
    ]


def test_slots_that_are_buffers_of_their_own():
    values = [jnp.arange(3.0), jnp.ones((2, 2))]
    stash = SlotApart(tuple(empty_stash(1, 2, values) for _ in range(2)), 1)
    first, second = stash.write(1, values)
    assert not any(a.any() for a in jax.tree.leaves(first))
    jax.tree.map(np.testing.assert_array_equal, SlotApart((first, second), 1).read(1), values)
    jax.tree.map(lambda a: np.testing.assert_array_equal(a[0, 0], 0), second)


def test_slots_that_share_an_array_are_written_while_the_other_is_read():
    """Of three blocks in merged ticks: a forward writes its block t after a backward has read block 2 - t."""
    buffers = with_shared(tuple(empty_stash(1, 3, [jnp.zeros(2), jnp.zeros(3)]) for _ in range(2)), frozenset({1}))
    assert len(jax.tree.leaves(buffers)) == 3
    of = lambda microbatch, block: [jnp.full(2, 10.0 * microbatch + block), jnp.full(3, 100.0 * microbatch + block)]  # noqa: E731
    for block in range(3):
        buffers = SlotApart(buffers, 0).write(block, of(0, block))
    for microbatch in range(1, 4):
        ahead, back = microbatch % 2, 1 - microbatch % 2
        for block in range(3):
            stash = SlotApart(buffers, back)
            got = stash.read(2 - block)
            stack, place = stash.stacks(2 - block)[1]
            np.testing.assert_array_equal(stack[place], got[1])
            jax.tree.map(np.testing.assert_array_equal, got, of(microbatch - 1, 2 - block))
            buffers = SlotApart(stash.after(got), ahead).write(block, of(microbatch, block))


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_the_stash_has_one_layout():
    """Without `with_layout_constraint` the all-to-all of attention's result has all of them stored heads first."""
    layout = {"pipe": 2, "context": 2, "context_exchange": "all_to_all", "chunks": 2, "attention": "cudnn"}
    text, _ = gpu.compile_step(dataclasses.replace(gpu.LARGE, layers=8), 8, **layout)
    found = set(re.findall(r"\bbf16\[([2-9],2,1,[\d,]*)\]\{([\d,]*)", text))  # [slots, blocks per chunk, ...]
    assert len(found) > 3
    assert all(order == ",".join(map(str, reversed(range(shape.count(",") + 1)))) for shape, order in found), found
