"""Sketches: independent of sharding, layout and padding; distances are estimated from them; checksums are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.pipeline import layout
from megajax.schedules.stages import StageLayers, wave
from megajax.verify import sketch

RANDOM = np.random.default_rng(3)
SKETCH = jax.jit(sketch.sketch, static_argnums=1)


def array(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def assert_equal_up_to_sums(got, want):
    np.testing.assert_array_equal(sketch.checksums(got), sketch.checksums(want))
    scale = np.abs(want[..., : sketch.PROJECTIONS]).max()
    np.testing.assert_allclose(got, want, atol=1e-5 * scale, rtol=0)


def test_a_sketch_does_not_depend_on_sharding_layout_or_padding():
    layers = array(8, 6, 10)
    want = np.asarray(sketch.tensor_sketches({"blocks": {"w": layers[None, None]}}, StageLayers(8))["blocks/w"])
    assert want.shape == (8, sketch.WIDTH)
    mesh = jax.make_mesh((2, 2), ("pipe", "tensor"), axis_types=(AxisType.Auto,) * 2)
    where = StageLayers(8, ranks=2, chunks=2, placement=wave(2, 2))
    pieces = layout.to_pipeline_layout(layers, where)
    pieces = jax.device_put(pieces, NamedSharding(mesh, P(None, "pipe", None, None, "tensor")))
    got = jax.jit(lambda w: sketch.tensor_sketches({"blocks": {"w": w}}, where))(pieces)["blocks/w"]
    assert_equal_up_to_sums(np.asarray(got), want)
    padded = np.pad(layers[0], [(0, 3), (0, 0)])  # as the rows of a vocabulary
    assert_equal_up_to_sums(np.asarray(SKETCH(padded, 0)), np.asarray(SKETCH(layers[0], 0)))


def test_parts_of_a_sequence_add_up_to_the_sketch_of_the_whole():
    x, positions = array(3, 8, 5), np.array([[0, 1, 6, 7], [2, 3, 4, 5]])
    parts = [np.asarray(SKETCH(jnp.asarray(x[:, own]), 1, jnp.broadcast_to(own, (3, 4)))) for own in positions]
    assert_equal_up_to_sums(sketch.add_parts(np.stack(parts, 1), 1), np.asarray(SKETCH(x, 1)))


@pytest.mark.parametrize("relative", [1e-4, 1e-2, 1.0])
def test_the_distance_is_within_a_factor_of_two(relative):
    """200 pairs: the standard deviation of the estimate is a quarter of the distance."""
    a, change = array(200, 300), array(200, 300)
    b = a + np.float32(relative) * change
    true = np.linalg.norm(np.float64(b) - a, axis=1) / np.linalg.norm(a, axis=1)
    one, other = np.asarray(SKETCH(a, 1)), np.asarray(SKETCH(b, 1))
    quotient = sketch.distance(one, other, np.linalg.norm(a, axis=1)) / true
    assert 0.25 < quotient.min() and quotient.max() < 2
    assert 0.9 < np.sqrt(np.square(quotient).mean()) < 1.1


def test_one_bit_changes_the_checksum():
    x = array(40)
    changed = x.copy()
    changed.view(np.uint32)[7] ^= 1
    one, other = (np.asarray(SKETCH(a, 0)) for a in (x, changed))
    assert sketch.checksums(one) != sketch.checksums(other)
    assert sketch.distance(one, one, np.float64(1)) == 0 < sketch.distance(one, other, np.float64(1))


def test_values_that_are_not_finite():
    good, bad = np.ones((1, sketch.WIDTH), np.float32), np.full((1, sketch.WIDTH), np.nan, np.float32)
    assert sketch.distance(bad, bad, np.float64(1)) == 0  # both layouts have them at the same place
    assert sketch.distance(good, bad, np.float64(1)) == np.inf


def test_updates_of_elements_without_gradient_are_damped():
    gradient = jnp.array([1.0, 1e-9, -1.0])
    update = jnp.array([-1.0, 1.0, 1.0])
    np.testing.assert_allclose(sketch.well_conditioned(update, gradient, 0), [-1, 0, 1], atol=1e-5)
    np.testing.assert_array_equal(sketch.well_conditioned(update, 0 * gradient, 0), update)  # weight decay alone
