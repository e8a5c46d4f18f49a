"""The compiled step: its loss and gradients, its memory, its collectives and sends, and where they run."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.estimate.hlo import collectives
from megajax.models.interface import mean_loss
from megajax.pipeline.slots import slot_tables
from tests import small

MODEL = dataclasses.replace(small.MODEL, hidden=64, sequence_length=64)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@functools.cache
def compiled(mesh, schedule, chunks, microbatches, sequence_parallel=True, sequence_length=MODEL.sequence_length):
    """The step of a run with microbatches of one sample on each replica."""
    data, pipe, tensor = mesh
    run = RunConfig(
        dataclasses.replace(MODEL, sequence_length=sequence_length),
        ParallelConfig(
            data=data, pipe=pipe, tensor=tensor, chunks=chunks, schedule=schedule, sequence_parallel=sequence_parallel
        ),
        TrainConfig(global_batch_size=microbatches * data, precision="fp32"),
    )
    run.validate()
    training = small.training_of(run)
    shape = (microbatches, data, sequence_length)
    whole = lambda dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    batch = {
        "tokens": whole(np.int32),
        "labels": whole(np.int32),
        "weights": whole(np.float32),
        "sample": jax.ShapeDtypeStruct(shape[:2], np.uint32),
    }
    return training, training.compile_train_step(jax.eval_shape(training._fresh_state), batch)


def test_the_steps_loss_and_gradients_equal_the_unpipelined_model():
    """The gradients are read off Adam's first moment, which was zero. Other cases: the slow tests of test_equivalence.py."""
    training, step = compiled((2, 2, 2), "1f1b", 1, 4)
    train, params = training.run.train, small.busy_params(MODEL)
    batch = {name: a[:, :8] for name, a in small.make_batch(small.make_run(microbatches=1, model=MODEL)).items()}
    unpipelined = small.build_model(MODEL, recompute="none")
    want_loss, want = jax.jit(jax.value_and_grad(lambda params: mean_loss(unpipelined, params, batch)))(params)
    want = jax.tree.map(np.asarray, want)
    norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(want)))

    state = jax.tree.map(
        lambda leaf, sharding: jax.device_put(np.zeros(leaf.shape, leaf.dtype), sharding),
        training.state_shapes,
        training.state_sharding,
    )
    scale = jax.tree.map(lambda leaf: leaf + 1, state.loss_scale)
    state = dataclasses.replace(state, params=small.place(training, params), loss_scale=scale)
    batch = training.place({name: a.reshape(4, 2, *a.shape[2:]) for name, a in batch.items()})
    state, metrics = step(state, batch, np.int32(0))
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    clipped = (1 - train.beta1) * min(1, train.clip_norm / norm)
    gradients = jax.tree.map(lambda leaf: leaf / clipped, small.canonical(state.optimizer_state[1].mu, training))
    small.assert_gradients_close(gradients, want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks", "grows"),
    [
        ("1f1b", 1, False),
        ("eager_1f1b", 1, False),
        ("interleaved_1f1b", 2, False),
        ("zb_h1", 1, False),
        ("zb_h2", 1, False),
        ("zb_1p_interleaved", 2, False),
        ("zb_v", 2, False),
        ("dualpipe_v", 2, False),
        ("gpipe", 1, True),
        ("looped_bfs", 2, True),
    ],
)
def test_memory_does_not_grow_with_microbatches(schedule, chunks, grows):
    """Sequences are so long that the schedule's table, a few hundred bytes per tick, is negligible."""

    def temporaries(microbatches):
        _, step = compiled((1, 4, 2), schedule, chunks, microbatches, sequence_length=1024)
        return step.memory_analysis().temp_size_in_bytes

    few, many = temporaries(8), temporaries(64)
    if grows:
        assert many > 2 * few
    else:
        assert abs(many / few - 1) < 0.01


@pytest.mark.parametrize(("schedule", "chunks"), [slow("interleaved_1f1b", 2), ("1f1b", 1)])
def test_no_loop_has_a_collective_over_data(schedule, chunks):
    """Gradients are summed over replicas once per step, after the last tick."""
    training, step = compiled((2, 2, 2), schedule, chunks, 4)
    replica = {device.id: index[0] for index, device in np.ndenumerate(training.mesh.devices)}
    found = collectives(step.as_text())
    across = [c for c in found if any(len({replica[device] for device in group}) > 1 for group in c.groups)]
    assert across and not [c for c in across if c.in_loop]
    assert [c for c in found if c.in_loop and c.kind != "collective-permute"], (
        "tensor parallelism has collectives in the loop"
    )


@pytest.mark.parametrize(
    ("mesh", "schedule", "chunks", "sequence_parallel"),
    [
        ((2, 2, 2), "1f1b", 1, True),
        slow((1, 2, 4), "interleaved_1f1b", 2, True),
        slow((1, 2, 4), "interleaved_1f1b", 2, False),
    ],
)
def test_a_send_is_one_tensor_rank_of_the_activation(mesh, schedule, chunks, sequence_parallel):
    """2104.04473 section 4.1's scatter/gather: with sequence parallelism each rank sends 1/t to its peer."""
    training, step = compiled(mesh, schedule, chunks, 4, **({} if sequence_parallel else {"sequence_parallel": False}))
    place = {device.id: index for index, device in np.ndenumerate(training.mesh.devices)}
    sends = [c for c in collectives(step.as_text()) if c.kind == "collective-permute"]
    between = [c for c in sends if any(place[a][1] != place[b][1] for a, b in c.groups)]
    split = mesh[2] if sequence_parallel else 1
    assert between and {c.shape for c in between} == {(1, MODEL.sequence_length // split, MODEL.hidden)}
    for send in between:
        assert all(place[a][0] == place[b][0] and place[a][2] == place[b][2] for a, b in send.groups)
    assert any(send.in_loop for send in between)  # a segment of one tick has no loop


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), slow("interleaved_1f1b", 2)])
def test_the_stash_and_the_accumulators_are_not_copied_in_a_loop(schedule, chunks):
    """XLA copies arrays that it cannot update in place; copying either in every tick would cost more than the compute."""
    training, step = compiled((2, 2, 2), schedule, chunks, 4)
    slots = slot_tables(training.schedule).stash_slots
    local_layers, hidden = MODEL.layers // 2, MODEL.hidden
    big = {
        f"f32[{slots},{local_layers // chunks},1,{MODEL.sequence_length // 2},{hidden}]",  # block inputs
        f"f32[{slots},{local_layers // chunks},1,{MODEL.sequence_length},{MODEL.feedforward_size // 2}]",  # "up"
        f"f32[{local_layers},{hidden},{MODEL.feedforward_size // 2}]",  # gradient of the up projection
    }
    text = step.as_text()
    assert all(shape in text for shape in big)
    copies = [line for line in text.splitlines() if " copy(" in line and any(shape in line for shape in big)]
    entry = text[text.index("ENTRY ") :]
    assert [line for line in copies if line not in entry] == []


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), slow("zb_v", 2)])
def test_a_mixed_tick_has_no_collective_between_its_loops(schedule, chunks):
    """Ranks run different operations there; a collective between two loops would make ranks wait for each other."""
    _, step = compiled((2, 2, 2), schedule, chunks, 4)
    loop_over_blocks = re.compile(r" while\(.*/[FBIW]/while\"")
    collective = re.compile(
        r" while\(.*/(head|embed_backward)/while\"| collective-permute(-start)?\(.*/send/ppermute\""
    )
    seen = 0
    for computation in step.as_text().split("\n\n"):
        lines = computation.splitlines()  # in the order in which they run
        loops = [at for at, line in enumerate(lines) if loop_over_blocks.search(line)]
        collective_lines = [at for at, line in enumerate(lines) if collective.search(line)]
        if loops and collective_lines:
            assert min(collective_lines) > max(loops)
            seen += len(loops) > 1
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved_1f1b", 2), ("zb_v", 2)])
def test_a_blocks_operations_stay_inside_its_loop(schedule, chunks):
    """A loop may have zero iterations. Operations that XLA hoists out of it run in every tick."""
    training, step = compiled((1, 4, 1), schedule, chunks, 8)
    ticks = [
        text for text in step.as_text().split("\n\n") if re.search(r" collective-permute\(.*/send/ppermute\"", text)
    ]
    assert ticks
    loops = r"/(head|embed|embed_backward)/while/" if training.schedule.paired else r"/while/body/.*/while/"

    def inside_loops(text):
        found = re.findall(r" (all-reduce|all-gather|reduce-scatter|dot)\(.*op_name=\"([^\"]*)", text)
        return [name for _, name in found if re.search(loops, name)]

    assert inside_loops(step.as_text())  # such operations exist, in separate computations
    for text in ticks:
        assert inside_loops(text) == []


@pytest.mark.parametrize(("schedule", "chunks"), [slow("interleaved_1f1b", 2), ("1f1b", 1)])
def test_sends_run_on_a_separate_stream(schedule, chunks):
    """Otherwise XLA on GPUs completes them before the blocks that they should overlap; see tests/plan/test_papers_fit.py."""
    _, step = compiled((2, 2, 2), schedule, chunks, 4)
    sends = [line for line in step.as_text().splitlines() if " collective-permute(" in line and "send/ppermute" in line]
    assert sends and all('_xla_gpu_collective_stream="p2p"' in line for line in sends)
