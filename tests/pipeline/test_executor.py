"""The executor on a model of this file, not a transformer: any pure embed, block and head_loss, and any schedule."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.ops.attention_choice import Choice
from megajax.pipeline import layout
from megajax.pipeline.executor import ExecutorOptions, gradient_function
from megajax.pipeline.options import stashes_nothing
from megajax.pipeline.program import StepProgram
from megajax.pipeline.split_backward import split_backward
from megajax.schedules.greedy import list_schedule
from megajax.schedules.io import save
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import Schedule, pack
from megajax.schedules.simulate import Costs
from megajax.schedules.stages import Placement, StageLayers
from tests import small

LAYERS, WIDTH, SAMPLES, LENGTH = 8, 8, 2, 4


def embed(shared, microbatch):
    return shared["in"] * microbatch["x"]


def block(weights, x, microbatch, layer):
    """Two matmuls, a bias and a nonlinearity; the result depends on the layer's number and on the microbatch."""
    return (
        x
        + jnp.tanh(x @ weights["up"] + weights["bias"] + 0.1 * layer)
        @ weights["down"]
        * microbatch["gain"][:, None, None]
    )


def head_loss(shared, y, microbatch):
    return ((y @ shared["out"] - microbatch["y"]) ** 2).sum()


FUNCTIONS = types.SimpleNamespace(
    prepare_microbatch=lambda microbatch: microbatch, embed=embed, block=block, head_loss=head_loss
)


def problem(microbatches, data, layers=LAYERS):
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)  # noqa: E731
    blocks = {
        "up": normal(layers, WIDTH, WIDTH),
        "bias": normal(layers, WIDTH),
        "down": normal(layers, WIDTH, WIDTH) / layers,
    }
    params = {"blocks": blocks, "shared": {"in": normal(WIDTH), "out": normal(WIDTH, WIDTH)}}
    shape = (microbatches, SAMPLES * data, LENGTH, WIDTH)
    return params, {"x": normal(*shape), "y": normal(*shape), "gain": 1 + 0.1 * normal(*shape[:2])}


def reference(params, batch):
    layers = params["blocks"]["up"].shape[0]

    def one(total, microbatch):
        step = lambda x, layer: (block(layer[0], x, microbatch, layer[1]), None)  # noqa: E731
        y, _ = lax.scan(step, embed(params["shared"], microbatch), (params["blocks"], jnp.arange(layers)))
        return total + head_loss(params["shared"], y, microbatch), None

    return lax.scan(one, jnp.float32(0), batch)[0]


one_part = jax.jit(jax.value_and_grad(reference))


def expected(params, batch):
    """Loss and gradients: the sums of those of SAMPLES samples at a time, so that all tests share one program."""
    parts = {name: array.reshape(-1, 1, SAMPLES, *array.shape[2:]) for name, array in batch.items()}
    each = [one_part(params, {name: array[i] for name, array in parts.items()}) for i in range(len(parts["x"]))]
    return jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)), *each)


def layers_for(stages, chunks):
    return max(LAYERS, stages * chunks)


def run(name, stages, microbatches, chunks, data=1, program=None, layers=None, own=None, **options):
    """`own`: the layers of each stage."""
    schedule = make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks, **options)
    placement = dataclasses.replace(schedule.placement, layers=own)
    mesh = jax.make_mesh((data, stages, 1), ("data", "pipe", "tensor"), axis_types=(AxisType.Auto,) * 3)
    where = StageLayers(layers or layers_for(stages, chunks), stages, chunks, placement)
    params, batch = problem(microbatches, data, where.layers)
    blocks = layout.to_pipeline_layout(params["blocks"], where)
    counts = {"block_counts": where.counts} if where.idle else {}
    with jax.set_mesh(mesh):
        blocks = jax.device_put(blocks, NamedSharding(mesh, P(None, "pipe")))
        batch = jax.device_put(batch, NamedSharding(mesh, P(None, "data")))
        run = gradient_function(FUNCTIONS, schedule, mesh, ExecutorOptions(**(program or {}) | counts))
        losses, gradients, _ = jax.jit(run)({**params, "blocks": blocks}, batch, jnp.float32(2))
    check_empty_slots(gradients["blocks"], where)
    blocks = layout.from_pipeline_layout(jax.tree.map(np.asarray, gradients["blocks"]), where)
    return losses.sum(), jax.tree.map(np.asarray, {**gradients, "blocks": blocks})


def check_empty_slots(gradients, where):
    """Gradients of slots without a block are zero, and NaN is not."""
    empty = np.asarray(layout.to_pipeline_layout(np.ones(where.layers), where)) == 0
    assert empty.sum() == where.idle
    assert all((np.asarray(leaf)[empty] == 0).all() for leaf in jax.tree.leaves(gradients))


def check(name, stages, microbatches, chunks, data=1, layers=None, **options):
    loss, gradients = run(name, stages, microbatches, chunks, data, layers=layers, **options)
    layers = layers or layers_for(stages, chunks)
    want, slopes = expected(*problem(microbatches, data, layers))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for path, gradient in jax.tree.leaves_with_path(gradients):
        target = 2 * np.asarray(dict(jax.tree.leaves_with_path(slopes))[path])
        assert np.abs(gradient - target).max() <= 1e-5 * np.abs(target).max(), (name, jax.tree_util.keystr(path))


# Quick: paired ticks in `test_bubbles_do_not_affect_results`, mixed ticks with split backwards in test_layer_argument.py.
CASES = [
    ("zb_h2", 4, 6, 1, 1),
    ("interleaved_1f1b", 4, 8, 2, 1),
    ("gpipe", 2, 3, 1, 2),
    ("1f1b", 2, 5, 1, 2),
    ("looped_bfs", 2, 3, 2, 1),
    ("eager_1f1b", 4, 4, 1, 1),
    ("zb_1p_interleaved", 2, 4, 4, 1),
    ("zb_h1", 4, 6, 1, 2),
    ("zb_h1", 1, 2, 1, 1),
    ("zb_v", 4, 6, 2, 2),
    ("zb_v", 4, 3, 2, 1),
    ("dualpipe_v", 2, 5, 2, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "data"),
    CASES,
)
def test_gradients_equal_those_of_the_unpipelined_model(name, stages, microbatches, chunks, data):
    check(name, stages, microbatches, chunks, data)


@pytest.mark.slow
def test_gradients_with_a_schedules_own_options():
    check("interleaved_1f1b", 2, 5, 2, group_size=3)
    check("auto", 2, 3, 2, live_chunks=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks"), [pytest.param("gpipe", 1, marks=pytest.mark.slow), ("interleaved_1f1b", 2)]
)
def test_bubbles_do_not_affect_results(name, chunks):
    """With `compute_bubbles` ranks without work run their blocks too; here every bubble's input is NaN."""
    check(name, 2, 6, chunks, program={"compute_bubbles": True, "poison_bubbles": True})


@pytest.mark.slow
@pytest.mark.parametrize("poison", [True, False])
def test_poison_reaches_the_blocks_of_bubbles(poison, monkeypatch):
    """This shows that the tests with poisoned inputs depend on the bubbles being computed."""
    seen = []

    def watched(weights, x, microbatch, layer):
        jax.debug.callback(lambda bad: seen.append(bool(bad)), jnp.isnan(x).any())
        return block(weights, x, microbatch, layer)

    monkeypatch.setattr(FUNCTIONS, "block", watched)
    run("gpipe", 2, 3, 1, program={"compute_bubbles": True, "poison_bubbles": poison})
    jax.effects_barrier()
    assert set(seen) == ({True, False} if poison else {False})


IN_PLACE = [  # quick: chunks of two ranks, in `MERGED`
    ("dualpipe_v", 1, 3, 2),  # forwards beside backwards
    ("dualpipe_v", 2, 4, 2),
    ("interleaved_1f1b", 2, 4, 2),
    ("1f1b", 2, 5, 1), ("zb_v", 4, 6, 2), ("gpipe", 1, 3, 1), ("eager_1f1b", 4, 8, 1), ("zb_h1", 4, 6, 1),
    ("dualpipe_v", 4, 9, 2),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), IN_PLACE)
def test_gradients_in_place(name, stages, microbatches, chunks):
    """Branches for chunks, and fp32 weight gradients: the program for GPUs with jax 0.12."""
    check(name, stages, microbatches, chunks, program={"in_place": True})


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 6, 8])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_pairs_beside_whole_backwards(in_place, layers, tmp_path):
    """1F1B whose forwards overlap backwards: backwards alone run in two parts, others in three; stages of 1 to 4 blocks."""
    pair = lambda forward, backward: [["F", 0, forward], ["B", 0, backward]]  # noqa: E731
    first = [["F", 0, 0], ["F", 0, 1], pair(2, 0), pair(3, 1), ["B", 0, 2], ["B", 0, 3]]
    second = [["F", 0, 0], ["B", 0, 0], ["F", 0, 1], pair(2, 1), ["F", 0, 3], ["B", 0, 2], ["B", 0, 3]]
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"orders": [first, second], "paired": False}))
    assert any(segment.overlaps for segment in make_schedule(str(path), stages=2, microbatches=4).segments)
    check(str(path), 2, 4, 1, layers=layers, program={"in_place": in_place})


# The second: the stash's slots are apart. The third: no tick can be merged, and the only one has both passes.
MERGED = [("interleaved_1f1b", 2, 6, 2, 2), ("interleaved_1f1b", 1, 5, 1, 1), ("interleaved_1f1b", 1, 1, 1, 1)]
MERGED_LONG = [
    ("eager_1f1b", 4, 8, 1, 1),
    ("interleaved_1f1b", 4, 12, 2, 1), ("interleaved_1f1b", 2, 4, 4, 1), ("gpipe", 1, 3, 1, 1), ("looped_bfs", 2, 4, 2, 1),
    ("eager_1f1b", 2, 1, 1, 1), ("interleaved_1f1b", 1, 2, 1, 2), ("1f1b", 2, 4, 1, 1),
    ("interleaved_1f1b", 1, 1, 2, 1), ("eager_1f1b", 2, 3, 1, 1), ("looped_bfs", 1, 3, 2, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "data"),
    MERGED + [pytest.param(*case, marks=pytest.mark.slow) for case in MERGED_LONG],
)
def test_gradients_with_merged_ticks(name, stages, microbatches, chunks, data):
    """A forward and a backward in one loop over blocks; some of the schedules have no tick to merge."""
    check(name, stages, microbatches, chunks, data, program={"in_place": True, "merged": True})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks", "data"), MERGED)
def test_gradients_with_merged_ticks_where_xla_has_no_times_of_matmuls(name, stages, microbatches, chunks, data):
    check(name, stages, microbatches, chunks, data, program={"in_place": True, "merged": True, "timed": False})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved_1f1b", "eager_1f1b"])
def test_gradients_without_loops_and_stash(name):
    """The program for one GPU: each backward runs in the tick of its forward."""
    assert stashes_nothing(make_schedule(name, stages=1, microbatches=3))
    check(name, 1, 3, 1, data=2, program={"in_place": True, "unrolled": True})


def test_which_schedules_stash_nothing():
    later = [
        ("gpipe", 1, 1),
        ("1f1b", 1, 1),
        ("looped_bfs", 1, 1),
        ("interleaved_1f1b", 1, 2),
        ("interleaved_1f1b", 2, 1),
    ]
    unrolls = lambda run: StepProgram.of(run, Choice("cudnn", "for a test")).unrolls  # noqa: E731
    assert unrolls(small.make_run()) and not unrolls(small.make_run(schedule="pipedream_2bw"))
    for name, stages, chunks in later:
        assert not stashes_nothing(make_schedule(name, stages=stages, microbatches=4, chunks=chunks)), name


PAIRED = ("gpipe", "eager_1f1b", "interleaved_1f1b", "looped_bfs")
CASES_LONG_UNEVEN = [
    ("gpipe", 4, 4, 1), ("1f1b", 4, 5, 1), ("eager_1f1b", 2, 5, 1), ("interleaved_1f1b", 2, 6, 2), ("looped_bfs", 2, 4, 2),
    ("zb_h1", 4, 6, 1), ("zb_1p_interleaved", 2, 4, 2), ("zb_v", 4, 6, 2), ("dualpipe_v", 2, 5, 2), ("auto", 2, 4, 2),
]  # fmt: skip
UNEVEN = [("zb_v", 2, 4, 2, 7, {}), ("1f1b", 4, 5, 1, 6, {"in_place": True})] + [
    (name, stages, microbatches, chunks, layers, program)
    for name, stages, microbatches, chunks in CASES_LONG_UNEVEN
    for layers in range(stages * chunks + 1, 3 * stages * chunks, 2)
    if layers % (stages * chunks)
    for program in ({}, {"in_place": True}, {"in_place": True, "merged": True}, {"compute_bubbles": True})
    if name in PAIRED or not ("merged" in program or "compute_bubbles" in program)
]


@pytest.mark.slow  # quick: the evaluation of tests/train/test_uneven.py
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks", "layers", "program"), UNEVEN)
def test_gradients_with_uneven_stages(name, stages, microbatches, chunks, layers, program):
    """All stages have as many slots as the largest has blocks; the gradients are those of the model's blocks alone."""
    check(name, stages, microbatches, chunks, layers=layers, program=program)


@pytest.mark.slow
@pytest.mark.parametrize("program", [{}, {"in_place": True}], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_nan_from_empty_slots_reaches_nothing(name, program, monkeypatch):
    """A block whose output and gradients are NaN where its weights are zero, as they are in an empty slot."""

    def dividing(weights, x, microbatch, layer):
        return block(weights, x, microbatch, layer) / jnp.sign(jnp.square(weights["down"]).sum())

    monkeypatch.setattr(FUNCTIONS, "block", dividing)
    check(name, 2, 4, 1, layers=5, program=program)


@pytest.mark.slow
@pytest.mark.parametrize("share_ends", [False, True])
@pytest.mark.parametrize(
    ("name", "chunks", "options"), [("interleaved_1f1b", 2, {"group_size": 8}), ("zb_h1", 1, {}), ("1f1b", 1, {})]
)
def test_gradients_when_the_ends_do_not_coincide(name, chunks, options, share_ends):
    """Several combinations of head, embedding and its backward, in branches of one conditional, some of them masked."""
    check(name, 4, 16, chunks, program={"in_place": True, "merged": True, "share_ends": share_ends}, **options)


OWN = ("hanayo", 2, 3, 2, (0, 3, 5, 0), {})  # a wave, unequal stages, and ends on stages of their own
OWN_LONG = [
    ("hanayo", 4, 6, 4, None, {}), ("hanayo", 2, 4, 4, (0, 2, 1, 1, 0, 3, 1, 0), {}),
    ("hanayo", 2, 2, 2, None, {"in_place": True}), ("1f1b", 4, 3, 1, (0, 3, 5, 0), {"in_place": True}),
    ("zb_h1", 4, 5, 1, (0, 4, 4, 0), {}), ("gpipe", 4, 4, 1, (0, 4, 4, 0), {"compute_bubbles": True}),
    ("interleaved_1f1b", 2, 4, 2, (0, 5, 1, 2), {}), ("interleaved_1f1b", 2, 4, 2, (0, 5, 3, 0), {"in_place": True}),
    ("eager_1f1b", 4, 5, 1, (0, 5, 3, 0), {"in_place": True, "share_ends": True}), ("looped_bfs", 2, 4, 2, (3, 1, 4, 0), {}),
    ("zb_v", 2, 4, 2, (0, 4, 3, 1), {}), ("zb_v", 4, 6, 2, (0, 1, 3, 0, 2, 1, 1, 0), {"in_place": True}),
    ("dualpipe_v", 2, 5, 2, (0, 4, 4, 0), {}), ("dualpipe_v", 2, 5, 2, (0, 3, 5, 0), {"in_place": True}),
    ("zb_1p_interleaved", 2, 4, 2, (1, 4, 2, 1), {"in_place": True}), ("1f1b", 4, 5, 1, (0, 4, 4, 0), {"share_ends": True}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "own", "program"),
    [OWN] + [pytest.param(*case, marks=pytest.mark.slow) for case in OWN_LONG],
)
def test_gradients_with_waves_and_stages_of_any_number_of_layers(name, stages, microbatches, chunks, own, program):
    """Stages without blocks only embed or compute the loss, or pass on what they receive."""
    check(name, stages, microbatches, chunks, layers=own and sum(own), own=own, program=program)


@pytest.mark.slow
@pytest.mark.parametrize("program", [{}, {"in_place": True}], ids=str)
def test_gradients_in_an_order_of_chunks_of_ones_own(program, tmp_path):
    """Rank 0 has the first two stages and the fifth; rank 1 two that follow each other, and the last."""
    placement, own = Placement(((0, 2), (1, 3), (4, 5))), (1, 2, 0, 3, 1, 1)
    table = Schedule("mine", 2, 4, 3, False, (), dataclasses.replace(placement, layers=own))
    orders = list_schedule(table, Costs(), 12, lambda operation, rank: (operation.microbatch, -operation.chunk))
    made = pack("mine", orders, microbatches=4, chunks=3, paired=False, placement=table.placement)
    save(made, str(tmp_path / "mine.json"))
    check(str(tmp_path / "mine.json"), 2, 4, 3, layers=8, own=own, program=program)


ONE_CHUNK = ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2", "auto")
GRID = [(name, 1) for name in ONE_CHUNK] + [
    (name, chunks) for name in ("interleaved_1f1b", "looped_bfs", "zb_1p_interleaved") for chunks in (1, 2, 4)
] + [("zb_v", 2), ("dualpipe_v", 2), ("auto", 2)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), GRID)
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_gradients_on_a_grid(name, chunks, stages, groups):
    if name == "dualpipe_v" and groups == 1:
        pytest.skip("dualpipe_v needs 2p microbatches or more")
    check(name, stages, stages * groups, chunks)


def test_a_split_backward_repeats_no_matmul():
    """I and W together have the matmuls of the whole backward: 2 for the input's gradient and 2 for the weights'.

    `backward` here also contains the forward: its last matmul, y itself, is needed by neither part.
    """
    params, batch = problem(1, 1)
    weights = jax.tree.map(lambda a: a[0], params["blocks"])
    microbatch = jax.tree.map(lambda a: a[0], batch)
    x = microbatch["x"]
    backward = lambda residuals, weights, x, dy: jax.vjp(  # noqa: E731
        lambda weights, x: block(weights, x, microbatch, 0), weights, x
    )[1](dy)
    split = split_backward(backward, (), weights, x, x)
    matmuls = lambda f, *arguments: str(jax.make_jaxpr(f)(*arguments)).count("dot_general")  # noqa: E731
    dx, early, kept = split.input((), weights, x, x)
    late = split.weight((), weights, x, kept)
    got = {"bias": early[0], "down": late[0], "up": late[1]}
    want, want_dx = backward((), weights, x, x)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert jax.tree.map(bool, split.is_late) == {"bias": False, "down": True, "up": True}
    assert matmuls(split.weight, (), weights, x, kept) == 2
    assert matmuls(split.input, (), weights, x, x) + 2 == matmuls(backward, (), weights, x, x) - 1
