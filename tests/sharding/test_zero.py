"""Which axis replicas cut an array along, and that its parts come to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.sharding.zero import Cut, cut_over_data


@pytest.mark.parametrize(
    ("spec", "shape", "replicas", "first", "want"),
    [
        (P(None, "tensor"), (12, 8), 4, 0, P("data", "tensor")),
        (P(), (6, 8), 4, 0, P(None, "data")),  # the longest that can be cut
        (P(), (8, 4), 4, 0, P("data", None)),
        (P("tensor"), (8,), 4, 0, P("tensor")),  # nothing is free
        (P(), (6,), 4, 0, P()),  # nothing can be cut
        (P(None, "pipe", None, None, "tensor"), (8, 2, 8, 4, 6), 4, 3, P(None, "pipe", None, "data", "tensor")),
    ],
)
def test_the_longest_free_axis_is_cut(spec, shape, replicas, first, want):
    assert cut_over_data(spec, shape, replicas, first) == want


def test_parts_come_to_the_whole_and_sums_to_parts():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    whole = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    cut = Cut.of(P("data", "tensor"))
    assert (cut.axis, cut.tensor) == (0, P(None, "tensor"))

    def there_and_back(part):
        return cut.scatter(cut.gather(part) * (1.0 + jax.lax.axis_index("data")))

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(there_and_back, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        got = jax.jit(mapped)(jnp.asarray(whole))
    np.testing.assert_allclose(got, whole * (1 + 2 + 3 + 4), rtol=1e-6)


def test_what_is_whole_stays_as_it_is():
    x = jnp.ones(3)
    assert Cut.of(P("tensor")).gather(x) is x and Cut.of(P()).scatter(x) is x
