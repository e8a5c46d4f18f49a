"""The collectives of replicas that split the experts, against the arrays of all replicas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.ops.expert_group import WHOLE_GROUP, ExpertGroup

GROUP = ExpertGroup(2, P(None, "tensor", None))
ROWS = P(("data", "expert"))


def on_mesh(function, *arrays):
    """`function` on each replica's part of arrays [4 b, ...], on data 2 x expert 2 x tensor 2."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(function, in_specs=ROWS, out_specs=ROWS, axis_names={"data", "expert"})
        return jax.tree.map(np.asarray, jax.jit(mapped)(*arrays))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gather_and_sum_scatter_are_each_other_s_transposes(dtype):
    draw = np.random.default_rng(0)
    x, whole = (jnp.asarray(draw.normal(size=(n, 4, 6)), dtype) for n in (8, 16))

    def both(x, whole):
        gathered, gather_transpose = jax.vjp(GROUP.gather, x)
        summed, sum_transpose = jax.vjp(GROUP.sum_scatter, whole)
        return gathered, *gather_transpose(whole), summed, *sum_transpose(x)

    gathered, gather_gradient, summed, sum_gradient = on_mesh(both, x, whole)
    samples = np.asarray(x).reshape(2, 1, 4, 4, 6)  # [data, 1, the group's samples, s, h]
    all_samples = np.broadcast_to(samples, (2, 2, 4, 4, 6)).reshape(16, 4, 6)
    sums = np.asarray(whole).reshape(2, 2, 4, 4, 6).astype(np.float32).sum(1).reshape(8, 4, 6)
    for got in (gathered, sum_gradient):
        np.testing.assert_array_equal(got, all_samples)
    for got in (gather_gradient, summed):
        np.testing.assert_array_equal(got, sums.astype(np.asarray(x).dtype))


def test_each_replica_has_its_part_of_the_experts():
    experts = np.array([[0, 5], [2, 3], [4, 1], [5, 2]], np.int32)
    (local,) = on_mesh(lambda experts: (GROUP.local_experts(experts, 6)[0],), experts)
    np.testing.assert_array_equal(
        local, [[0, 3], [3, 0], [3, 1], [2, 3]]
    )  # rows of the first and of the second replica
    assert on_mesh(GROUP.gather_choices, experts).tolist() == [*experts[:2].tolist() * 2, *experts[2:].tolist() * 2]


def test_one_replica_has_all():
    x = np.arange(6).reshape(2, 3)
    assert WHOLE_GROUP.gather(x) is x and WHOLE_GROUP.sum_scatter(x) is x and WHOLE_GROUP.local_experts(x, 6) == (x, 6)
