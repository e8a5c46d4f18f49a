"""The steps of one layout with all that is compared: the layout's own training step, which also returns what it computed.

The step's program is `Training.traced_step`, of which `Training.train_step` is the first result. It differs from the
program of a training run in three ways: gradients, losses and the sketches of the arrays between blocks are results; the
state is not donated, so that a step can be repeated; each microbatch's loss has a factor in the gradients, which is 1. The
schedule, the order of operations, the collectives and the shardings are those of the run.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import is_block, named
from megajax.config import ConfigError, RunConfig
from megajax.data.loader import PADDING
from megajax.pipeline import layout
from megajax.pipeline.program import StepProgram
from megajax.runtime.mesh import make_mesh
from megajax.train.precision import compute_dtype
from megajax.train.replica_check import ReplicaCheck
from megajax.train.step import TrainState, make_training
from megajax.verify.locations import Locations
from megajax.verify.replicas import differing_replicas
from megajax.verify.sketch import WIDTH, add_parts, tensor_sketches, tree_sketch, well_conditioned

Tree = Any
Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What is compared of one step. Samples are in the order of the batch, layers in that of the model.

    Attributes:
      batch: by name, uint32 [samples], a checksum of each sample.
      samples: samples without padding.
      losses: fp32 [microbatches], summed over the samples of each.
      metrics: those of the step, float.
      blocks: by name (`records.RECORDED`), sketches [groups, samples, WIDTH]; a group is `group` layers.
      group: layers that are recomputed together, of which only the first's input and the last's output are recorded.
      tensors: by kind, then by name: sketches [layers, WIDTH], or [1, WIDTH] of a tensor that is not one of the blocks.
        Kinds: "gradient"; "update" of the parameters (`sketch.well_conditioned`); "optimizer_state" after the step.
      replicas: of the state after the step, the devices that differ from their replicas (see `replicas`).
    """

    batch: dict[str, np.ndarray]
    samples: int
    losses: np.ndarray
    metrics: dict[str, float]
    blocks: dict[str, np.ndarray]
    group: int
    tensors: dict[str, dict[str, np.ndarray]]
    replicas: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Results:
    """The arrays of a step, on the devices."""

    before: TrainState
    after: TrainState
    gradients: Tree
    metrics: dict[str, jax.Array]
    losses: jax.Array
    records: Tree


class Replay:
    """The programs of one layout, and its steps as functions of the state.

    Attributes:
      run, training: its configuration and programs.
      locations: where the layout computes layers and samples.
    """

    def __init__(self, run: RunConfig, devices: Sequence[jax.Device], model: type | None = None, rules: Any = None):
        """Builds the programs; nothing is compiled before the first step.

        Raises:
          ConfigError: the run is not legal, or its schedule does not finish a step before the next one.
        """
        run.validate()
        if not StepProgram.of(run).drains:
            raise ConfigError(
                f"schedule = {run.parallel.schedule} computes a step's gradients from the weights of the step before, so "
                "its steps equal those of no other layout: pass --schedule 1f1b to compare the rest of the layout."
            )
        self.run, self.training = run, make_training(run, make_mesh(run.parallel, devices), model, rules)
        self.locations, self._replica_check = Locations(self.training), ReplicaCheck(self.training.state_layout)
        training, replicated = self.training, NamedSharding(self.training.mesh, P())
        state = training.state_sharding
        step = jax.jit(
            partial(training.traced_step, statistics=self._statistics),
            in_shardings=(state, training.batch_sharding, replicated, replicated),
            out_shardings=(
                (state, replicated),
                training.only_trained(training.params_sharding),
                replicated,
                replicated,
            ),
        )
        self._step = training.checked(step)
        self._sketch_start = jax.jit(self._sketches_of_state, out_shardings=replicated)
        self._sketch_step = jax.jit(self._sketches_of_step, out_shardings=replicated)
        self._perturb = jax.jit(self._perturbed, out_shardings=training.params_sharding)
        self._move = jax.jit(
            lambda old, new, base: jax.tree.map(lambda o, n, p: p + (n - o), old, new, base),
            out_shardings=training.params_sharding,
        )

    def sketch_state(self, state: TrainState) -> dict[str, np.ndarray]:
        """The sketches of a state's tensors by name, as in `StepRecord.tensors`."""
        with jax.set_mesh(self.training.mesh):
            return jax.device_get(self._sketch_start(state))

    def split(self, batch: Batch) -> dict[str, np.ndarray]:
        """A batch [microbatches, samples, ...] of any layout, split as this layout's."""
        each = self.run.parallel.microbatch_size * self.run.parallel.data
        return {name: np.asarray(a).reshape(-1, each, *a.shape[2:]) for name, a in batch.items()}

    def step(self, state: TrainState, batch: Batch) -> tuple[StepRecord, Results]:
        """One step; `batch` may be of any layout."""
        batch = self.split(batch)
        results = self.execute(state, batch)
        return self._record(results, batch), results

    def perturbed_step(self, state: TrainState, batch: Batch, seed: int) -> tuple[StepRecord, TrainState]:
        """As `step`, with a rounding error of random sign in every weight; returns the record and the new state.

        The weights that the step computes with are p (1 + eps) or p (1 - eps), with eps of the number format; the update
        is applied to p.
        """
        batch = self.split(batch)
        with jax.set_mesh(self.training.mesh):
            perturbed = self._perturb(state.params, np.uint32(seed))
        results = self.execute(dataclasses.replace(state, params=perturbed), batch)
        with jax.set_mesh(self.training.mesh):
            params = self._move(perturbed, results.after.params, state.params)
        return self._record(results, batch), dataclasses.replace(results.after, params=params)

    def execute(self, state: TrainState, batch: Batch, factors: np.ndarray | None = None) -> Results:
        """Runs the step; `state` stays usable.

        Args:
          batch: split for this layout.
          factors: fp32 [microbatches], of each microbatch's loss in the gradients; None: 1.
        """
        if factors is None:
            factors = np.ones(len(next(iter(batch.values()))), np.float32)
        with jax.set_mesh(self.training.mesh):
            placed = self.training.place(dict(batch))
            (after, metrics), gradients, losses, records = self._step(state, placed, np.int32(0), factors)
            jax.block_until_ready(after)  # CPU devices that run several programs at once can deadlock
        return Results(state, after, gradients, metrics, losses, records)

    def _record(self, results: Results, batch: Batch) -> StepRecord:
        parallel = self.run.parallel
        with jax.set_mesh(self.training.mesh):
            tensors = self._sketch_step(results.before, results.gradients, results.after)
        metrics, losses, records, tensors = jax.device_get((results.metrics, results.losses, results.records, tensors))
        count = np.asarray(next(iter(batch.values()))).shape[:2]
        samples = int((batch["sample"] != PADDING).sum()) if "sample" in batch else int(np.prod(count))
        return StepRecord(
            batch={name: _sample_checksums(a) for name, a in batch.items()},
            samples=samples,
            losses=losses,
            metrics={name: float(value) for name, value in metrics.items() if value.ndim == 0},  # not of layers
            blocks={name: self._canonical(record) for name, record in records.items()},
            group=parallel.recompute_blocks,
            tensors=tensors,
            replicas=differing_replicas(results.after, self._replica_check, self.locations),
        )

    def _canonical(self, record: np.ndarray) -> np.ndarray:
        """The executor's record [chunks, pipe, groups, microbatches, data * context * samples, WIDTH], as in StepRecord."""
        parallel = self.run.parallel
        layers = np.asarray(layout.from_pipeline_layout(record, self.training.where.without_kinds.in_groups))
        shape = (*layers.shape[:2], parallel.data, parallel.context, parallel.microbatch_size, WIDTH)
        layers = layers.reshape(shape)
        whole = layers[:, :, :, 0] if parallel.context == 1 else add_parts(layers, 3)
        return whole.reshape(len(layers), -1, WIDTH)

    # The functions below are traced.

    def _statistics(self, x: Tree, microbatch: Tree) -> jax.Array:
        return tree_sketch(x, microbatch["places"] if self.run.parallel.context > 1 else None)

    def _sketches_of_state(self, state: TrainState) -> dict[str, jax.Array]:
        parts = {name: getattr(state, name) for name in ("params", "ema", "optimizer_state", "loss_scale")}
        return tensor_sketches(parts, self.training.where)

    def _sketches_of_step(self, before: TrainState, gradients: Tree, after: TrainState) -> dict:
        where, old = self.training.where, named(before.params)
        slopes = named(gradients)
        update = {
            name: well_conditioned(new - old[name], slopes[name], 3 if is_block(name) else 0)
            for name, new in named(self.training.only_trained(after.params)).items()
        }
        state = {name: getattr(after, name) for name in ("ema", "optimizer_state", "loss_scale")}
        return {
            "gradient": tensor_sketches(gradients, where),
            "update": tensor_sketches(update, where),
            "optimizer_state": tensor_sketches(state, where),
        }

    def _perturbed(self, params: Tree, seed: jax.Array) -> Tree:
        epsilon = float(jnp.finfo(compute_dtype(self.run.train.precision)).eps)
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        moved = [
            leaf * (1 + epsilon * jax.random.rademacher(key, leaf.shape, leaf.dtype))
            for leaf, key in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(structure, moved)


def _sample_checksums(array: np.ndarray) -> np.ndarray:
    """uint32 [microbatches * samples] of an array [microbatches, samples, ...]."""
    flat = np.ascontiguousarray(array).reshape(array.shape[0] * array.shape[1], -1)
    return np.array([zlib.crc32(row.tobytes()) for row in flat], np.uint32)
