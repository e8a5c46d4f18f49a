"""Evaluation of inlined jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.pipeline.jaxprs import evaluate


def test_operands_that_were_traced_as_equal_on_all_devices_may_vary():
    """As a constant of a block that the forward pass has stored: `jnp.take` compares its indices with 0."""

    @jax.jit
    def normalised(index):
        return jnp.where(index < 0, index + 4, index) * lax.psum(jnp.int32(1), "pipe")

    def step(x, index):
        traced = jax.make_jaxpr(lambda x, index: x[normalised(index)])(x, np.arange(3, dtype=np.int32))
        return evaluate(traced.jaxpr, traced.consts, [x, index])[0]

    mesh = jax.make_mesh((2,), ("pipe",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(step, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe"))
    x, index = jnp.arange(8.0), jnp.array([0, 1, -1, 1, 0, -4], jnp.int32)
    # Each half of x [4], at twice its indices.
    np.testing.assert_array_equal(run(x, index), [0, 2, 3, 6, 4, 4])
