"""A small model of vectors on two layouts, and errors that are planted in the second one."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments import own_model
from megajax.checkpoint.layout import is_block
from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.pipeline import layout
from megajax.verify.certify import LiveReference, Start, Verdict, certify
from megajax.verify.replay import Replay

SAMPLES, WIDTH, LAYERS, STEPS = 16, 8, 4, 3


class Vectors:
    """Batches of 4 microbatches of 4 samples; a layout splits them as it needs."""

    def batch(self, consumed: int) -> dict[str, np.ndarray]:
        clean, noise = np.random.default_rng(consumed).normal(size=(2, 4, 4, WIDTH)).astype(np.float32)
        return {"clean": np.sign(clean), "noisy": np.sign(clean) + noise}


def make_run(data=1, pipe=1, microbatches=4, **options) -> RunConfig:
    """A run of the denoiser of experiments/own_model.py."""
    parallel = ParallelConfig(data=data, pipe=pipe, microbatch_size=SAMPLES // (microbatches * data), **options)
    train = TrainConfig(
        global_batch_size=SAMPLES, steps=20, warmup_steps=4, learning_rate=3e-3, weight_decay=0.1, precision="fp32"
    )
    return RunConfig(own_model.DenoiserConfig(layers=LAYERS, width=WIDTH), parallel, train)


def replay_of(run: RunConfig, model: type | None = None) -> Replay:
    """The programs of a layout on the test's CPU devices; all but the step are compiled once for each layout."""
    replay, shared = Replay(run, jax.devices(), model), without_error(run)
    replay._sketch_start, replay._sketch_step = shared._sketch_start, shared._sketch_step
    replay.training._init, replay._replica_check = shared.training._init, shared._replica_check
    return replay


@functools.cache
def without_error(run: RunConfig) -> Replay:
    """The programs of a layout."""
    return Replay(run, jax.devices())


@functools.cache
def reference_replay() -> Replay:
    """One device, one stage; traced and compiled once, before anything is planted."""
    replay = replay_of(make_run(schedule="1f1b"))
    state = replay.training.init_state()
    replay.sketch_state(state)
    replay.perturbed_step(state, Vectors().batch(0), 0)
    return replay


def compare(replay: Replay, start: Start = Start(), data=None, steps: int = STEPS) -> Verdict:  # noqa: B008 (frozen)
    """The verdict on a layout, against the one of `reference_replay`."""
    reference = LiveReference(reference_replay(), Vectors())
    return certify(reference, replay, data or Vectors(), steps, start)


@contextlib.contextmanager
def patched(owner, name: str, wrap: Callable):
    """`owner.name` replaced by `wrap(owner.name)`."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def change_rows(field: str, column: str, change: Callable) -> Callable:
    """A wrapper of `slot_tables`: `change(values [ticks, ranks], row)` edits a copy of one column of the schedule's rows."""

    def wrap(slot_tables):
        def tables(schedule, **options):
            table = slot_tables(schedule, **options)
            if not schedule.has_backward:
                return table
            row = getattr(table.rows, field)
            values = np.array(getattr(row, column))
            change(values, row)
            rows = table.rows._replace(**{field: row._replace(**{column: values})})
            return (
                dataclasses.replace(table, rows=rows) if dataclasses.is_dataclass(table) else table._replace(rows=rows)
            )

        return tables

    return wrap


def tick_of(row, rank: int, microbatch: int) -> int:
    """The tick in which a rank runs an operation on a microbatch."""
    return int(np.flatnonzero((row.on[:, rank] == 1) & (row.microbatch[:, rank] == microbatch))[0])


@jax.custom_vjp
def negate_gradient(x):
    """x, with the sign of its gradient wrong."""
    return x


negate_gradient.defvjp(lambda x: (x, None), lambda _, dx: (-dx,))


class WrongSign(own_model.Denoiser):
    """The gradient of "up" of layer 2 has the wrong sign."""

    def block(self, weights, x, microbatch, layer):
        up = jnp.where(layer == 2, negate_gradient(weights["up"]), weights["up"])
        return super().block({**weights, "up": up}, x, microbatch, layer)


class WrongDecay(own_model.Denoiser):
    """The token table decays, "up" does not."""

    def decay_mask(self):
        mask = super().decay_mask()
        return {**mask, "blocks": {**mask["blocks"], "up": not mask["blocks"]["up"]}}


def corrupt_shard(array: jax.Array, device: jax.Device, change: Callable) -> jax.Array:
    """The array with one device's part replaced by `change(part)`, numpy to numpy."""
    parts = [
        jax.device_put(change(np.array(shard.data)), device) if shard.device == device else shard.data
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def after_step(replay: Replay, number: int, change: Callable) -> None:
    """Makes the replay's step `number` return `change(results)`."""
    execute, calls = replay.execute, []

    def changed(state, batch, factors=None):
        results = execute(state, batch, factors)
        calls.append(factors is None)
        return change(results) if sum(calls) == number and factors is None else results

    replay.execute = changed


def moved(name: str, leaf: np.ndarray, replay: Replay) -> np.ndarray:
    """A leaf of the reference's state in the layout of `replay`."""
    if not is_block(name):
        return leaf
    layers = leaf.reshape(-1, *leaf.shape[3:])  # the reference has one stage
    return np.asarray(layout.to_pipeline_layout(layers, replay.training.where))
