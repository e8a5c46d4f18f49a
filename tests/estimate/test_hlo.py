"""Counts read from compiled HLO, for modules whose counts are known, and for XLA's text for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.estimate import hlo
from megajax.runtime.mesh import make_mesh

SIZE, TURNS, LENGTH = 4, 5, 32
# Bytes of one of SIZE equal parts of a device's LENGTH fp32 numbers, which ring algorithms send one after the other.
PART = LENGTH // SIZE * 4
CASES = {
    "all-reduce": (lambda x: lax.psum(x, "ring"), 2 * (SIZE - 1) * PART),
    "all-gather": (lambda x: lax.all_gather(x[: LENGTH // SIZE], "ring", tiled=True), (SIZE - 1) * PART),
    "reduce-scatter": (lambda x: jnp.tile(lax.psum_scatter(x, "ring", tiled=True), SIZE), (SIZE - 1) * PART),
    "all-to-all": (lambda x: lax.all_to_all(x, "ring", 0, 0, tiled=True), (SIZE - 1) * PART),
    "collective-permute": (lambda x: lax.ppermute(x, "ring", [(0, 1), (2, 3)]), SIZE * PART),
}


def compiled(step, trip_count=None):
    """The text of a loop of `step`s over [LENGTH] on SIZE devices, with a dynamic trip count if `trip_count` is None."""
    mesh = jax.make_mesh((SIZE,), ("ring",), (AxisType.Auto,), devices=jax.devices()[:SIZE])

    def run(x, count):
        varying = lambda x: lax.pcast(x, tuple({"ring"} - jax.typeof(x).mat.varying), to="varying")  # noqa: E731
        return lax.fori_loop(0, count if trip_count is None else trip_count, lambda _, x: jnp.sin(varying(step(x))), x)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("ring"), P()), out_specs=P("ring"))
    return jax.jit(mapped).lower(np.zeros(SIZE * LENGTH, np.float32), 3).compile().as_text()


@pytest.mark.parametrize("kind", CASES)
def test_a_collective_counts_once_for_each_iteration_of_its_loop(kind):
    step, sent = CASES[kind]
    (one,) = hlo.collectives(compiled(step, TURNS))
    assert (one.kind, one.times, one.in_loop, one.conditional) == (kind, TURNS, True, False)
    senders = {0, 2} if kind == "collective-permute" else set(range(SIZE))
    assert one.sent() == {device: TURNS * sent for device in senders}
    assert hlo.most_sent([one, one]) == 2 * TURNS * sent


def test_a_loop_with_a_dynamic_trip_count_counts_once_and_is_marked():
    (one,) = hlo.collectives(compiled(CASES["all-reduce"][0]))
    assert (one.times, one.conditional, one.in_loop) == (1, True, True)


def test_a_branch_is_marked():
    step = lambda x: lax.cond(x.sum() > 0, lambda x: lax.psum(x, "ring"), lambda x: x, x)  # noqa: E731
    mesh = jax.make_mesh((SIZE,), ("ring",), (AxisType.Auto,), devices=jax.devices()[:SIZE])
    run = jax.shard_map(step, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"), check_vma=False)
    (one,) = hlo.collectives(jax.jit(run).lower(np.zeros(SIZE * LENGTH, np.float32)).compile().as_text())
    assert (one.times, one.conditional, one.in_loop) == (1, True, False)


def test_matmuls_of_a_loop():
    """A chain of [8, 16] times [16, 16], and one outside the loop of [3, 8] times [8, 16]."""

    def run(x, w, y):
        x = lax.fori_loop(0, TURNS, lambda _, x: jnp.sin(x @ w), x)
        return y @ x

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16), (3, 8))]
    read = hlo.read(jax.jit(run).lower(*shapes).compile().as_text())
    assert read.flops() == read.flops("") == 2 * (TURNS * 8 * 16 * 16 + 3 * 8 * 16)
    assert {one.shape for one in read.matmuls} == {(8, 16), (3, 16)}


def test_the_branches_of_a_conditional_count_by_scope():
    """Four executions, of which three take one of two branches: these are taken equally often, and the third is empty."""

    def run(x, w, wide, chosen):
        branches = [lambda x: jnp.sin(x @ w), lambda x: jnp.sin((x @ wide) @ wide.T), lambda x: x]
        with jax.named_scope("F"):
            return lax.fori_loop(0, 4, lambda i, x: lax.switch(chosen[i], branches, x), x)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16), (16, 32))]
    text = jax.jit(run).lower(*shapes, jax.ShapeDtypeStruct((4,), jnp.int32)).compile().as_text()
    matmuls = (2 * 8 * 16 * 16, 2 * 2 * 8 * 16 * 32)
    assert hlo.read(text, {"F": 7, "F/cond": 3}).flops("F") == 3 / 2 * sum(matmuls)
    assert hlo.read(text).flops() == 4 * sum(matmuls)  # without a count: as if each branch ran each time


def test_branches_that_are_not_taken_equally_often_count_by_their_index():
    """Of six executions one takes the first branch and three the second; the same where another conditional has two."""

    def run(x, w, wide, chosen):
        branches = [lambda x: jnp.sin(x @ w), lambda x: jnp.sin((x @ wide) @ wide.T), lambda x: x]
        with jax.named_scope("F"):
            x = lax.fori_loop(0, 6, lambda i, x: lax.switch(chosen[i], branches, x), x)
            return lax.fori_loop(0, 8, lambda i, x: lax.cond(chosen[i] > 0, branches[1], branches[0], x), x)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16), (16, 32))]
    text = jax.jit(run).lower(*shapes, jax.ShapeDtypeStruct((8,), jnp.int32)).compile().as_text()
    one, other = 2 * 8 * 16 * 16, 2 * 2 * 8 * 16 * 32
    three = {"F/cond/3/0": 1, "F/cond/3/1": 3}
    assert hlo.read(text, three | {"F": 1, "F/cond/2/0": 7, "F/cond/2/1": 1}).flops("F") == 8 * one + 4 * other
    assert hlo.read(text, three | {"F/cond": 4}).flops("F") == 3 * one + 5 * other


def test_loops_with_dynamic_trip_counts_count_by_scope():
    """Ten iterations of a loop that runs four times, three of them in a loop; a loop in no given scope counts once."""

    def named(name, x, w, count):
        with jax.named_scope(name):
            return lax.fori_loop(0, count, lambda _, x: jnp.sin(x @ w), x)

    def run(x, w, count):
        x = lax.fori_loop(0, 3, lambda _, x: named("inner", named("outer", x, w, count), w, count), x)
        with jax.named_scope("outer"):
            return named("inner", x, w, count)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16))]
    text = jax.jit(run).lower(*shapes, 5).compile().as_text()
    one = 2 * 8 * 16 * 16
    read = hlo.read(text, {"inner": 10})
    assert (read.flops("inner"), read.flops("")) == (10 * one, 3 * one)
    assert hlo.read(text, {"inner": 10, "outer": 6}).flops("outer") == 6 * one
    assert hlo.read(text).flops() == 7 * one


def test_loops_of_which_one_execution_is_known():
    """Five iterations of one that has half an iteration of another, on average."""

    def run(x, w, count, sometimes):
        def one(_, x):
            with jax.named_scope("kind0"):
                return lax.fori_loop(0, sometimes, lambda _, x: jnp.sin(x @ w), x)

        with jax.named_scope("F"):
            return lax.fori_loop(0, count, one, x)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16))]
    text = jax.jit(run).lower(*shapes, 5, 1).compile().as_text()
    assert hlo.read(text, {"F": 5, "kind0/each": 0.5}).flops("F") == 5 / 2 * 2 * 8 * 16 * 16


def test_heads_that_xla_takes_out_of_loops_are_not_counted_twice():
    """Of four heads one is in a loop of one iteration, which XLA removes: three are left for the other loop."""

    def head(x, w, count):
        with jax.named_scope("head"):
            return lax.fori_loop(0, count, lambda _, x: jnp.sin(x @ w), x)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16))]
    text = jax.jit(lambda x, w, count: head(head(x, w, count), w, 1)).lower(*shapes, 5).compile().as_text()
    read, one = hlo.read(text, {"head": 4}), 2 * 8 * 16 * 16
    assert (read.flops("head"), read.flops("")) == (3 * one, one)


def test_a_loop_of_which_only_the_counter_is_left_takes_no_iterations():
    """Nothing reads the array of the first loop, and XLA takes it out: all ten iterations are the second's."""

    def count_and_array(x, w, count):
        with jax.named_scope("embed"):
            return lax.while_loop(lambda both: both[0] < count, lambda both: (both[0] + 1, both[1] @ w), (0, x))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16))]
    compiled = jax.jit(lambda x, w, count: count_and_array(x, w, count_and_array(x, w, count)[0])).lower(*shapes, 5)
    text = compiled.compile().as_text()
    assert text.count(" while(") == 2
    assert hlo.read(text, {"embed": 10}).flops() == 10 * 2 * 8 * 16 * 16


@pytest.mark.parametrize(("layers", "parts"), [(4, 1), (8, 2), (12, 2)])
def test_a_backward_of_one_block_is_not_in_two_parts(layers, parts):
    """1F1B splits a rank's backward over two ticks; of one block, all of it is in one of them."""
    model = ModelConfig(layers=layers, hidden=8, heads=2, vocabulary=64, sequence_length=8)
    run = RunConfig(model, ParallelConfig(pipe=4, schedule="1f1b"), TrainConfig(global_batch_size=6))
    counts = hlo.loop_trip_counts(run)
    assert (counts["F/cond"], counts["B/cond"]) == (6, 6 * parts)


@pytest.mark.parametrize("order", [("data", "pipe", "tensor"), ("pipe", "data", "tensor"), ("tensor", "data", "pipe")])
def test_axes_of_a_collective_on_any_mesh(order):
    parallel = ParallelConfig(data=2, pipe=2, tensor=2, axis_order=order)
    mesh = make_mesh(parallel)
    for axes in (("data",), ("pipe",), ("tensor",), ("data", "pipe")):
        run = jax.shard_map(
            lambda x: lax.psum(x, axes),  # noqa: B023
            mesh=mesh,
            in_specs=P(mesh.axis_names),
            out_specs=P(tuple(name for name in mesh.axis_names if name not in axes)),
        )
        (one,) = hlo.collectives(jax.jit(run).lower(np.zeros(8, np.float32)).compile().as_text())
        assert one.axes((2, 2, 2)) == axes


# Scheduled HLO for GPUs: starts return operands and results, and groups have three forms.
FOR_A_GPU = """HloModule jit_step, is_scheduled=true

%fused (p: bf16[8,4]) -> bf16[8,4] {
  ROOT %tanh = bf16[8,4]{1,0} tanh(%p)
}

%gemm_computation (p.1: bf16[8,4], p.2: bf16[4,6]) -> bf16[8,6] {
  %p.1 = bf16[8,4]{1,0} parameter(0)
  %p.2 = bf16[4,6]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,6]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (q: (s32[], bf16[4,4])) -> (s32[], bf16[4,4]) {
  %x = bf16[4,4]{1,0} get-tuple-element(%q), index=1
  %all-gather-start.1 = (bf16[4,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %gemm = bf16[8,6]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_computation
  %all-gather-done.1 = bf16[8,4]{1,0} all-gather-done(%all-gather-start.1)
  %reduce-scatter-start.1 = ((bf16[8,4]{1,0}, f32[2]{0}), (bf16[4,4]{1,0}, f32[1]{0})) reduce-scatter-start(%all-gather-done.1, %c), replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %other = bf16[8,4]{1,0} fusion(%all-gather-done.1), kind=kLoop, calls=%fused
  %reduce-scatter-done.1 = (bf16[4,4]{1,0}, f32[1]{0}) reduce-scatter-done(%reduce-scatter-start.1)
  %collective-permute-start.1 = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%d), source_target_pairs={{0,2},{1,3}}, backend_config={"collective_backend_config":{"is_sync":true}}
  %cublas = (bf16[8,6]{1,0}, s8[64]{0}) custom-call(%all-gather-done.1, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %collective-permute-done.1 = f32[3]{0} collective-permute-done(%collective-permute-start.1)
  ROOT %out = (s32[], bf16[4,4]{1,0}) tuple(%i, %x)
}

ENTRY %main (a: bf16[4,4]) -> bf16[4,4] {
  %loop = (s32[], /*index=1*/bf16[4,4]{1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %all-reduce-start.1 = (f32[10]{0}, f32[2,3]{1,0}) all-reduce-start(%e, %f), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %all-reduce-done.1 = (f32[10]{0}, f32[2,3]{1,0}) all-reduce-done(%all-reduce-start.1)
  ROOT %r = bf16[4,4]{1,0} copy(%a)
}
"""  # noqa: E501


def test_hlo_for_gpus():
    read = hlo.read(FOR_A_GPU)
    found = {one.kind: one for one in read.collectives}
    gather, scatter, send, reduce = (
        found[kind] for kind in ("all-gather", "reduce-scatter", "collective-permute", "all-reduce")
    )
    assert (gather.bytes, gather.shape, gather.times, gather.groups[1]) == (8 * 4 * 2, (8, 4), 7, (2, 3))
    assert (scatter.bytes, scatter.groups) == (4 * 4 * 2 + 4, ((0, 1), (2, 3), (4, 5), (6, 7)))
    assert (send.bytes, send.groups) == (12, ((0, 2), (1, 3)))
    assert (reduce.bytes, reduce.times, reduce.in_loop, len(reduce.groups[0])) == (4 * 16, 1, False, 4)
    assert [(c.asynchronous, c.behind, c.overlapped) for c in (gather, scatter, send, reduce)] == [
        (True, 1, 1),  # the fused matmul
        (True, 0, 1),  # what is between computes, but is no matmul
        (False, 1, 1),
        (True, 0, 0),
    ]
    assert gather.sent()[5] == 7 * 8 * 4 * 2 / 2 and scatter.sent()[5] == 7 * (4 * 4 * 2 + 4)
    assert reduce.sent()[0] == 2 * 3 / 4 * 64 and send.sent() == {0: 7 * 12, 1: 7 * 12}
    assert read.flops() == 7 * 2 * (2 * 8 * 4 * 6)
    assert read.kernels == {"__cublas$lt$matmul": 7}


RAGGED = """ENTRY %main (x: bf16[8,4], y: bf16[32,4], n: s64[4]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = bf16[32,4]{1,0} parameter(1)
  %n = s64[4]{0} parameter(2)
  %out = ((bf16[8,4]{1,0}, bf16[32,4]{1,0:S(7)}, s64[4]{0}, s64[4]{0}, s64[4]{0}, /*index=5*/s64[4]{0}), bf16[32,4]{1,0:S(7)}) ragged-all-to-all-start(%x, %y, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1,2,3}}, backend_config={"collective_backend_config":{"is_sync":false}}
  %there = bf16[32,4]{1,0:S(7)} ragged-all-to-all-done(%out)
  ROOT %back = bf16[8,4]{1,0} ragged-all-to-all(%there, %x, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1,2,3}}
}
"""  # noqa: E501


def test_a_ragged_all_to_all_sends_a_part_of_the_rows_that_it_has_room_for():
    """32 rows of 8 bytes, on the side that receives or sends; three quarters of them for others, of which a half is sent."""
    there, back = hlo.read(RAGGED, ragged_part=0.5).collectives
    assert there.kind == back.kind == "ragged-all-to-all"
    assert (there.shape, back.shape, there.asynchronous, back.asynchronous) == ((32, 4), (8, 4), True, False)
    assert there.sent() == back.sent() == dict.fromkeys(range(4), 32 * 8 * 3 / 4 / 2)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("[4,2]<=[8]", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("pipe",)),
        ("[2,4]<=[8]", ("pipe", "tensor")),
        ("[1,8]<=[8]", ("data", "pipe", "tensor")),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ("pipe",)),
        ("mesh['a'=2,'b'=4] {'a'}", ("data",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",)),
    ],
)
def test_replica_groups_in_every_form(groups, axes):
    found = hlo.collectives(FOR_A_GPU.replace("[4,2]<=[8]", groups))
    assert [one.axes((2, 2, 2)) for one in found if one.kind == "all-gather"] == [axes]
