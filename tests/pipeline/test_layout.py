"""The pipeline layout: which layers each rank stores, and how gradients are summed over the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.models.context import model_rules, model_shapes
from megajax.pipeline.layout import (
    Specs,
    from_pipeline_layout,
    pipeline_spec,
    reduce_gradients,
    to_pipeline_layout,
    vary,
)
from megajax.pipeline.parameters import parameter_specs
from megajax.schedules.schedule import Schedule
from megajax.schedules.stages import StageLayers, loop, wave
from tests import small


@pytest.mark.parametrize(
    ("place", "layers"),
    [(loop, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]), (wave, [[[0, 1], [2, 3]], [[6, 7], [4, 5]]])],
)
def test_layers_of_two_chunks_on_two_ranks(place, layers):
    """[chunk][rank] lists of layers, as the module's docstring shows them."""
    got = to_pipeline_layout({"w": np.arange(8)}, StageLayers(8, 2, 2, place(2, 2)))
    assert got["w"].tolist() == layers


@settings(max_examples=12)  # each shape compiles
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.sampled_from([loop, wave]))
def test_layers_are_where_the_schedule_places_their_stage(data, ranks, chunks, group, place):
    placement = place(ranks, chunks)
    groups = data.draw(st.integers(ranks * chunks, 3 * ranks * chunks))
    where = StageLayers(groups * group, ranks, chunks, placement, group)
    canonical = 1 + np.arange(where.layers * 3).reshape(-1, 3)
    blocks = np.asarray(to_pipeline_layout(canonical, where))
    assert blocks.shape == (chunks, ranks, where.slots, 3)
    schedule, done = Schedule("none", ranks, 1, chunks, True, (), placement), 0
    for stage, count in enumerate(where.counts):
        chunk, rank = schedule.home(stage)
        np.testing.assert_array_equal(blocks[chunk, rank, :count], canonical[done : done + count])
        assert not blocks[chunk, rank, count:].any()
        done += count
    np.testing.assert_array_equal(from_pipeline_layout(blocks, where), canonical)


def test_the_sharding_of_a_leaf_in_pipeline_layout():
    assert pipeline_spec(P(None, None, "tensor")) == P(None, "pipe", None, None, "tensor")


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"zero": 1}, P(None, "pipe", "data", None, None, "tensor")),
        ({"zero": 1, "recompute": "full", "recompute_blocks": 4}, P(None, "pipe", None, "data", None, "tensor")),
        ({"zero": 3}, P(None, "pipe", None, "data", None, "tensor")),
        ({"zero": 1, "chunks": 4}, P(None, "pipe", None, "data", None, "tensor")),
    ],
    ids=str,
)
def test_with_zero_1_replicas_have_whole_layers_if_they_divide_a_stages(options, want):
    """Of a gated matrix [chunks, pipe, slots, hidden, 2, feedforward], 8 layers on two stages."""
    run = small.make_run((2, 2, 2), model=small.LLAMA, **options)
    specs = parameter_specs(model_shapes(run), run.parallel, model_rules(run))
    assert specs.stored["blocks"]["feedforward"]["up"]["kernel"] == want


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 1)])
def test_gradients_are_summed_over_the_axes_that_the_weight_is_not_sharded_over(mesh_shape):
    """Shared weights: over data and pipe. Blocks: over data; as a reduce-scatter where the gradient is sharded over it."""
    data, pipe = mesh_shape
    mesh = jax.make_mesh((data, pipe, 1), ("data", "pipe", "tensor"), axis_types=(AxisType.Auto,) * 3)
    weights = {"blocks": {"whole": P(None, "pipe"), "zero1": P(None, "pipe")}, "shared": P()}
    gradients = {"blocks": {"whole": P(None, "pipe"), "zero1": P(None, "pipe", None, "data")}, "shared": P()}
    specs = Specs(weights, gradients)

    def run(x):
        factor = 1 + vary(jax.lax.axis_index("data") + 10 * jax.lax.axis_index("pipe"))  # differs on every device
        one = {"blocks": {"whole": x, "zero1": x}, "shared": x[0, 0, 0]}
        return reduce_gradients(jax.tree.map(lambda a: vary(a) * factor, one), specs)

    x = jnp.arange(1 * pipe * 1 * 4, dtype=jnp.float32).reshape(1, pipe, 1, 4)
    with jax.set_mesh(mesh):
        out_specs = specs.manual.gradients
        mapped = jax.shard_map(run, in_specs=P(None, "pipe"), out_specs=out_specs, axis_names={"data", "pipe"})
        got = jax.tree.map(np.asarray, jax.jit(mapped)(x))
    factors = 1 + np.arange(data)[:, None] + 10 * np.arange(pipe)
    want = np.asarray(x) * factors.sum(0)[:, None, None]
    np.testing.assert_allclose(got["blocks"]["whole"], want)
    np.testing.assert_allclose(got["blocks"]["zero1"], want)
    np.testing.assert_allclose(got["shared"], (np.asarray(x)[0, :, 0] * factors.sum(0)[:, None]).sum(0))


def test_an_experts_gradient_is_summed_over_its_own_replicas():
    """On data 2 x expert 2 x pipe 2, replicated and with ZeRO-1; other gradients over all four replicas."""
    mesh = jax.make_mesh((2, 2, 2, 1), ("data", "expert", "pipe", "tensor"), axis_types=(AxisType.Auto,) * 4)
    expert = P(None, "pipe", None, "expert")
    weights = {"blocks": {"expert": expert, "expert_zero1": expert, "zero1": P(None, "pipe")}, "shared": P()}
    sharded = {"expert_zero1": P(*expert, "data"), "zero1": P(None, "pipe", None, None, ("data", "expert"))}
    specs = Specs(weights, {"blocks": {"expert": expert, **sharded}, "shared": P()})

    def run(x):
        data, member, pipe = (jax.lax.axis_index(axis) for axis in ("data", "expert", "pipe"))
        one = {"blocks": {"expert": x, "expert_zero1": x, "zero1": x}, "shared": x[0, 0, 0]}
        return reduce_gradients(jax.tree.map(lambda a: vary(a) * vary(1 + data + 10 * member + 100 * pipe), one), specs)

    x = jnp.arange(2 * 3 * 4, dtype=jnp.float32).reshape(1, 2, 1, 3, 4)  # [chunks, pipe, slots, experts here, n]
    with jax.set_mesh(mesh):
        axes = {"data", "expert", "pipe"}
        mapped = jax.shard_map(run, in_specs=P(None, "pipe"), out_specs=specs.manual.gradients, axis_names=axes)
        got = jax.tree.map(np.asarray, jax.jit(mapped)(x))
    factors = 1 + np.arange(2)[:, None, None] + 10 * np.arange(2)[:, None] + 100 * np.arange(2)  # [data, expert, pipe]
    own = factors.sum(0)[:, :, None, None, None]  # [expert, pipe]
    want = np.concatenate(list(np.asarray(x)[0] * own), 2)[None]  # both members' experts, one after the other
    np.testing.assert_allclose(got["blocks"]["expert"], want)
    np.testing.assert_allclose(got["blocks"]["expert_zero1"], want)
    np.testing.assert_allclose(got["blocks"]["zero1"], np.asarray(x) * factors.sum((0, 1))[:, None, None, None])
    np.testing.assert_allclose(got["shared"], (np.asarray(x)[0, :, 0] * factors.sum((0, 1))[:, None, None]).sum(0))
