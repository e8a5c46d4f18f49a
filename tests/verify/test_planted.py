"""Errors planted in one layout are found, with the step, the layer and the tensor."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.checkpoint.layout import named
from megajax.pipeline import block_steps, executor, operations, rank
from megajax.train import optimizer
from tests.verify import planted

TWO_STAGES = {"data": 2, "pipe": 2, "schedule": "1f1b", "microbatches": 4}


@pytest.fixture(autouse=True, scope="module")
def reference():
    """Traces the reference before an error is planted, so that the reference does not contain it."""
    planted.reference_replay()


def found(verdict, step: int, key: str):
    """Asserts that the first difference is of this step and tensor; returns it with its details as one text."""
    assert verdict.difference is not None, "nothing was found"
    assert (verdict.difference.step, verdict.difference.entry.key) == (step, key)
    return verdict.difference, "\n".join(verdict.details)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout_of",
    [
        TWO_STAGES,
        {"data": 2, "pipe": 2, "schedule": "interleaved_1f1b", "chunks": 2, "zero": 1},
        {"pipe": 2, "schedule": "zb_h1", "microbatches": 8, "recompute": "full"},
        {"pipe": 2, "schedule": "zb_v", "chunks": 2, "tensor": 2, "recompute": "none"},
        {"data": 4, "schedule": "1f1b", "microbatches": 2, "zero": 3, "recompute": "full", "recompute_blocks": 2},
        {"pipe": 2, "schedule": "dualpipe_v", "chunks": 2, "microbatches": 4},
        {"data": 2, "pipe": 2, "schedule": "gpipe"},
        {"data": 2, "pipe": 3, "schedule": "1f1b"},  # 1, 2 and 1 of the 4 layers
    ],
    ids=str,
)
def test_layouts_without_errors_are_equal(layout_of):
    verdict = planted.compare(planted.replay_of(planted.make_run(**layout_of)))
    assert verdict.difference is None
    assert len(verdict.rows) == planted.STEPS
    for row in verdict.rows:
        assert all(distance <= 0.5 * tolerance for distance, tolerance in row.largest.values())


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [2, 3])
def test_sign_of_one_layers_gradient(pipe):
    replay = planted.replay_of(planted.make_run(pipe=pipe, schedule="1f1b", microbatches=2), planted.WrongSign)
    difference, details = found(planted.compare(replay), 1, "gradient/blocks/up/2")
    assert difference.entry.distance == pytest.approx(2, rel=1e-4)
    assert "layer 2 is on pipe rank 1" in details
    assert "the gradients of every microbatch differ" in details


@pytest.mark.slow
def test_stale_stash_slot():
    """The backward of microbatch 1 on rank 0 reads the slot of another microbatch."""

    def change(stash, row):
        tick = planted.tick_of(row, 0, 1)
        stash[row.microbatch[:, 0] == 1, 0] = (stash[tick, 0] + 1) % 2

    with planted.patched(executor, "slot_tables", planted.change_rows("backward", "stash", change)):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES)))
    difference, details = found(verdict, 1, "input_gradient/1")
    assert set(np.array(difference.exceeding) // 4) == {1}
    assert "microbatch 1 of 4" in details and "layer 1 is on pipe rank 0" in details


@pytest.mark.slow
def test_dropped_microbatch():
    """Microbatch 3 is replaced by microbatch 2."""
    wrap = lambda microbatch: lambda self, index: microbatch(self, jax.numpy.minimum(index, 2))  # noqa: E731
    with planted.patched(operations.Operations, "microbatch", wrap):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES)))
    difference, details = found(verdict, 1, "input/0")
    assert difference.exceeding == [12, 13, 14, 15] and "microbatch 3 of 4, every data rank" in details


@pytest.mark.slow
def test_weight_gradient_of_one_microbatch_dropped():
    """A W of the zero-bubble schedule is not run: no array between blocks differs."""

    def change(on, row):
        on[planted.tick_of(row, 1, 2), 1] = 0

    with planted.patched(executor, "slot_tables", planted.change_rows("weight", "on", change)):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES | {"schedule": "zb_h1"})))
    difference, details = found(verdict, 1, "gradient/blocks/down/3")
    assert "those of microbatch 2 of 4" in details and "layer 3 is on pipe rank 1" in details


@pytest.mark.slow
def test_loss_weight_of_one_microbatch():
    wrap = lambda run: lambda self, rows, carry, factors=None: run(self, rows, carry, factors.at[2].multiply(1.5))  # noqa: E731
    with planted.patched(rank.Rank, "run", wrap):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES)))
    difference, details = found(verdict, 1, "output_gradient/3")
    assert difference.exceeding == [8, 9, 10, 11] and difference.entry.distance == pytest.approx(0.5, rel=0.5)
    assert "microbatch 2 of 4" in details


@pytest.mark.slow
def test_wrong_order_of_layers_in_a_chunk():
    """The second stage runs its two layers in the wrong order, forward and backward."""

    def wrap(weights):
        def swapped(self, index):
            if self.per_chunk != 2:
                return weights(self, index)
            second = jax.lax.axis_index("pipe") == 1
            return weights(self, jax.numpy.where(second, 1 - index, index))

        return swapped

    with planted.patched(block_steps.BlockSteps, "_weights", wrap):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES)))
    difference, details = found(verdict, 1, "output/2")
    assert difference.entry.layer == 2 and "all samples" in details and "layer 2 is on pipe rank 1" in details


@pytest.mark.slow
def test_activation_sent_to_the_wrong_slot():
    """The input of the second stage is the activation of another microbatch."""

    def change(inbox, row):
        first, second = planted.tick_of(row, 1, 0), planted.tick_of(row, 1, 1)
        inbox[second, 1] = 1 - inbox[first, 1] if inbox[first, 1] == inbox[second, 1] else inbox[first, 1]

    with planted.patched(executor, "slot_tables", planted.change_rows("forward", "inbox", change)):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES)))
    difference, _ = found(verdict, 1, "input/2")
    assert difference.exceeding == [4, 5, 6, 7]


@pytest.mark.slow
def test_update_skipped_on_one_rank():
    """ZeRO-1: the device of data rank 1 and pipe rank 0 keeps its part of the weights in step 2.

    Four replicas have parts of each of a stage's two layers; two would have a layer each.
    """
    replay = planted.replay_of(planted.make_run(**TWO_STAGES | {"data": 4}, zero=1))
    device = replay.training.mesh.devices[1, 0, 0]

    def change(results):
        old = {s.device: np.asarray(s.data) for s in results.before.params["blocks"]["up"].addressable_shards}
        up = planted.corrupt_shard(results.after.params["blocks"]["up"], device, lambda part: old[device])
        params = {**results.after.params, "blocks": {**results.after.params["blocks"], "up": up}}
        return dataclasses.replace(results, after=dataclasses.replace(results.after, params=params))

    planted.after_step(replay, 2, change)
    difference, details = found(planted.compare(replay), 2, "update/blocks/up/0")
    assert "layer 0 is on pipe rank 0" in details
    assert "1 of the 4 devices that hold it differ: data 1, pipe 0, tensor 0" in details


@pytest.mark.slow
def test_bit_error_in_a_weight_on_one_rank():
    """One bit of one weight of layer 3 on data rank 1, after step 1: far below what a distance shows."""
    replay = planted.replay_of(planted.make_run(**TWO_STAGES))
    device = replay.training.mesh.devices[1, 1, 0]

    def flip(part):
        part.view(np.uint32)[0, 0, 1, 2, 3] ^= 1  # the last bit
        return part

    def change(results):
        down = planted.corrupt_shard(results.after.params["blocks"]["down"], device, flip)
        params = {**results.after.params, "blocks": {**results.after.params["blocks"], "down": down}}
        return dataclasses.replace(results, after=dataclasses.replace(results.after, params=params))

    planted.after_step(replay, 1, change)
    difference, _ = found(planted.compare(replay), 1, "replicas")
    assert "in layout b params/blocks/down of layer 3: the copies of" in difference.entry.text
    assert "data 0, pipe 1, tensor 0; data 1, pipe 1, tensor 0" in difference.entry.text  # two copies: no majority


@pytest.mark.slow
def test_weight_that_differs_on_one_rank_inside_the_step():
    """The cast weights of layer 1 are wrong on data rank 1: only its samples differ."""

    def wrap(weights):
        def wrong(self, index):
            rank_ = jax.lax.axis_index("data")
            here = (rank_ == 1) & (jax.lax.axis_index("pipe") == 0) & (index == 1)
            return jax.tree.map(lambda w: jax.numpy.where(here, w.at[0].multiply(1.5), w), weights(self, index))

        return wrong

    with planted.patched(block_steps.BlockSteps, "_weights", wrap):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES)))
    _, details = found(verdict, 1, "output/1")
    assert "data rank 1" in details and "every microbatch" in details and "layer 1 is on pipe rank 0" in details


@pytest.mark.slow
def test_decay_mask_of_one_parameter():
    replay = planted.replay_of(planted.make_run(**TWO_STAGES), planted.WrongDecay)
    difference, _ = found(planted.compare(replay), 1, "update/blocks/up/0")
    assert difference.others == planted.LAYERS - 1  # the other layers of the same parameter


@pytest.mark.slow
def test_optimizer_moment_not_restored():
    """Both start after a step of the reference; the layout under test has lost the second moments."""
    replay, reference = planted.replay_of(planted.make_run(**TWO_STAGES)), planted.reference_replay()
    state = reference.step(reference.training.init_state(), planted.Vectors().batch(0))[1].after
    leaves = {
        name: planted.moved(name, np.zeros_like(leaf) if "/nu/" in name else np.asarray(leaf), replay)
        for name, leaf in named(state).items()
    }
    lost = jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))
    live = planted.LiveReference(reference, planted.Vectors(), planted.Start(state))
    start = planted.Start(jax.device_put(lost, replay.training.state_sharding))
    verdict = planted.certify(live, replay, planted.Vectors(), 2, start)
    difference, _ = found(verdict, 0, "state/optimizer_state/nu/blocks/down/0")
    assert difference.entry.text.endswith("before the first step")


@pytest.mark.slow
def test_learning_rate_of_one_step():
    """In the update alone; the metric is right."""

    def wrap(context):
        def make(*given, rate_at, **more):
            wrong = lambda samples: rate_at(samples) * jax.numpy.where(samples == 2 * planted.SAMPLES, 1.01, 1)  # noqa: E731
            return context(*given, rate_at=wrong, **more)

        return make

    with planted.patched(optimizer, "OptimizerContext", wrap):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES)))
    difference, _ = found(verdict, 2, "update/blocks/down/0")
    assert difference.entry.distance == pytest.approx(0.01, rel=0.01)


@pytest.mark.slow
def test_gradient_not_summed_over_the_replicas():
    def wrap(reduce_gradients):
        def without(gradients, specs):
            own = jax.lax.pmean(gradients["shared"], ("data",))
            summed = reduce_gradients(gradients, specs)
            return {**summed, "shared": jax.tree.map(lambda a: jax.lax.psum(a, ("pipe",)), own)}

        return without

    with planted.patched(executor, "reduce_gradients", wrap):
        verdict = planted.compare(planted.replay_of(planted.make_run(**TWO_STAGES)))
    difference, _ = found(verdict, 1, "gradient/shared/table")
    assert difference.entry.distance == pytest.approx(0.5, rel=1e-3)
