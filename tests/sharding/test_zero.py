"""The axis that replicas shard, and the all-gather and reduce-scatter over data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.sharding.zero import ZeroSharding, shard_over_data

FOUR = {"data": 4}


@pytest.mark.parametrize(
    ("spec", "shape", "replicas", "first", "want"),
    [
        (P(None, "tensor"), (12, 8), FOUR, 0, P("data", "tensor")),
        (P(), (6, 8), FOUR, 0, P(None, "data")),  # the longest that the replicas divide
        (P(), (8, 4), FOUR, 0, P("data", None)),
        (P("tensor"), (8,), FOUR, 0, P("tensor")),  # nothing is free
        (P(), (6,), FOUR, 0, P()),  # the replicas divide nothing
        (P(None, "pipe", None, None, "tensor"), (8, 2, 8, 4, 6), FOUR, 3, P(None, "pipe", None, "data", "tensor")),
        (P(), (6, 8), {"data": 2, "expert": 4}, 0, P(None, ("data", "expert"))),
        (P("expert"), (8, 6), {"data": 2, "expert": 4}, 0, P("expert", "data")),  # an expert's own replicas
        (P("expert"), (8, 6), {"data": 1, "expert": 4}, 0, P("expert")),
    ],
)
def test_the_longest_free_axis_is_sharded(spec, shape, replicas, first, want):
    assert shard_over_data(spec, shape, replicas, first) == want


def test_gather_and_scatter():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    whole = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    sharding = ZeroSharding.from_spec(P("data", "tensor"))
    assert (sharding.axis, sharding.tensor) == (0, P(None, "tensor"))

    def there_and_back(part):
        return sharding.scatter(sharding.gather(part) * (1.0 + jax.lax.axis_index("data")))

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(there_and_back, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        got = jax.jit(mapped)(jnp.asarray(whole))
    np.testing.assert_allclose(got, whole * (1 + 2 + 3 + 4), rtol=1e-6)


def test_a_replicated_array_is_returned_unchanged():
    x = jnp.ones(3)
    assert ZeroSharding.from_spec(P("tensor")).gather(x) is x and ZeroSharding.from_spec(P()).scatter(x) is x
