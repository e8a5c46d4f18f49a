"""`with_loops_in_order`: the same values, and no collective that may run beside a loop of them, read off the program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.pipeline.loop_order import with_loops_in_order
from tests.collective_order import beside_loops

DEVICES = 2


def apart(x, y, key, count):
    """A loop of `count` all-reduces, between an all-gather and an all-reduce, as a recomputed one, that do not need it."""
    before = lax.all_gather(jnp.sin(x), "data")
    looped = lax.fori_loop(0, lax.pmax(count, "data"), lambda _, y: lax.psum(y, "data") / DEVICES + 1, y)
    recomputed = lax.psum(jnp.cos(x), "data")
    return {"before": before, "after": looped.sum() * recomputed, "drawn": jax.random.uniform(key)}


def compiled(function):
    mesh = jax.make_mesh((DEVICES,), ("data",), devices=jax.devices()[:DEVICES])
    split = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    x, y = jnp.arange(8.0), jnp.ones(3)
    given = x, y, jax.random.key(1), jnp.int32(2)
    program = jax.jit(split).lower(*given).compile()
    return program, program(*given)


@pytest.fixture(scope="module")
def plain():
    return compiled(apart)


def test_of_what_may_run_beside_a_loop_nothing_is_left(plain):
    program, values = compiled(with_loops_in_order(apart))
    assert beside_loops(plain[0].as_text())[0]
    pairs, loops = beside_loops(program.as_text())
    assert loops == 1 and not pairs
    jax.tree.map(np.testing.assert_array_equal, values, plain[1])


def test_no_loop_waits_for_what_is_there():
    """Of an argument that is there before, nothing is computed; of one that a collective may have computed, a bit is."""
    waits = lambda given: str(jax.make_jaxpr(with_loops_in_order(looped_and_more, given))(jnp.ones(4), jnp.int32(3)))  # noqa: E731
    assert waits(0).count("reduce_and") == waits(1).count("reduce_and") + 1


def looped_and_more(x, count):
    return lax.fori_loop(0, count, lambda _, total: total + 1, jnp.zeros(2)), x + 1


def test_without_a_loop_the_function_is_traced_as_it_is():
    function, x = partial(jnp.dot, jnp.ones((3, 3))), jnp.ones(3)
    assert str(jax.make_jaxpr(with_loops_in_order(function))(x)) == str(jax.make_jaxpr(function)(x))
