"""PipeDream-2BW (2006.09503): a pipeline that is never drained, with two versions of the weights.

A step runs the ticks of eager 1F1B in its steady state: m ticks for m microbatches, with one forward and one backward
on every rank, where a schedule that drains needs m + 2(p - 1) ticks on p ranks. At the end of a step the last
microbatches are still in the pipeline, and their activations in the stash; their remaining operations run in the
first ticks of the next step. On 2 ranks with 4 microbatches a batch (a' is microbatch a of the previous batch):

    tick       0          1          2          3
    rank 0     F0 B2'     F1 B3'     F2 B0      F3 B1
    rank 1     F3' B3'    F0 B0      F1 B1      F2 B2

The forward and the backward of a microbatch use the same version of the weights: the one at the start of the step in
which the microbatch entered. So the gradient is one step stale,

    W(t + 1) = W(t) - update(gradient of batch t - 1 at W(t - 1)),

and the loss curve differs from that of a schedule that drains. Two batches and two versions of the weights are
stored, each in one half of a buffer. The newest batch and version are in half step % 2. The executor's rows
(`slots.TickRow`) use the number of the half as the chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.pipeline.carry import Carry
from megajax.pipeline.layout import batch_spec, is_spec, manual_axes_of, reduce_gradients, sum_over, vary
from megajax.pipeline.options import DEFAULT_OPTIONS, ExecutorOptions, on_devices
from megajax.pipeline.rank import Rank, local_rows, rows_after
from megajax.pipeline.slots import EndRow, OperationRow, Tables, TickRow, slot_tables
from megajax.pipeline.trained import only_trained
from megajax.pipeline.uneven import clear_empty_slots
from megajax.schedules.one_f_one_b import backward_lag
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import BACKWARD, FORWARD

Tree = Any


class InFlight(NamedTuple):
    """The state of the pipeline between two steps."""

    step: jax.Array  # int32 scalar, the number of steps run
    weights: Tree  # in the compute dtype: {"blocks": [2, pipe, layers / pipe, ...], "shared": [2, ...]}
    batch: Tree  # [2 * microbatches, data * samples, ...]
    cotangents: jax.Array  # fp32 [2 * microbatches]
    carry: Carry  # each rank's, leaves [data, pipe, ...], or [data, expert, pipe, ...]


class VersionedFunctions(NamedTuple):
    """A model's functions for two versions of the shared weights; `microbatch["version"]` selects one."""

    prepare_microbatch: Callable
    embed: Callable
    block: Callable
    head_loss: Callable


class PipeDream2BW:
    """The program of a step.

    Attributes:
      schedule: one step's ticks.
    """

    def __init__(
        self, functions, stages: int, microbatches: int, mesh: Mesh, options: ExecutorOptions = DEFAULT_OPTIONS
    ):
        """Arguments as for `executor.gradient_function`; the model has one chunk on each of the `stages` ranks.

        Of the options constrain, specs, share_ends, in_place, block_counts and stage_kinds apply.
        """
        self.mesh, self.axes = mesh, manual_axes_of(mesh)
        self.schedule = make_schedule("pipedream_2bw", stages=stages, microbatches=microbatches)
        applied = ExecutorOptions(
            options.constrain,
            options.specs,
            options.share_ends,
            in_place=options.in_place,
            block_counts=options.block_counts,
            stage_kinds=options.stage_kinds,
            trained=options.trained,
        )
        self.options = on_devices(applied, mesh)
        weights = options.specs.manual.weights
        shared = jax.tree.map(lambda spec: P(None, *spec), weights["shared"], is_leaf=is_spec)
        self.versioned_specs = {"blocks": weights["blocks"], "shared": shared}
        self.functions = _versioned(functions)
        eager = slot_tables(make_schedule("eager_1f1b", stages=stages, microbatches=microbatches))
        two_batches = dataclasses.replace(self.schedule, microbatches=2 * microbatches)
        self.table = Tables(two_batches, None, 2 * stages - 1, 0, {FORWARD: 1, BACKWARD: 1}, eager.routes)

    def start(self, params: Tree, batch: Tree) -> InFlight:
        """An empty pipeline for params and batches of these shapes; see `step`."""
        count = 2 * self.schedule.microbatches
        double = lambda a: jnp.zeros((2 * a.shape[0], *a.shape[1:]), a.dtype)  # noqa: E731
        weights = {
            "blocks": jax.tree.map(double, params["blocks"]),
            "shared": jax.tree.map(lambda a: jnp.zeros((2, *a.shape), a.dtype), params["shared"]),
        }
        batches = jax.tree.map(double, batch)
        make = lambda weights, batch: self._with_mesh_axes(self._rank(weights, batch).start())  # noqa: E731
        carry = self._map(make, (self.versioned_specs, batch_spec(self.mesh)), P(*self.axes))(
            weights, self._with_version(batches)
        )
        return InFlight(jnp.int32(0), weights, batches, jnp.zeros(count, jnp.float32), carry)

    def step(
        self, params: Tree, batch: Tree, cotangent: jax.Array, in_flight: InFlight, after: Tree = ()
    ) -> tuple[jax.Array, jax.Array, Tree, InFlight]:
        """Runs one step of m ticks.

        Args:
          params: the newest version, {"blocks": [1, pipe, layers / pipe, ...], "shared"}, in the compute dtype.
          batch: pytree of [microbatches, data * samples, ...].
          cotangent: fp32 scalar, the factor of this batch's losses in its gradients.
          in_flight: the state after the previous step.
          after: as for `executor.gradient_function`.

        Returns:
          losses: fp32 [2 * microbatches], of the microbatches whose head ran in this step, and 0 for the others. There
            are m of them (fewer in the first step); their batch is the returned `InFlight.batch`.
          counted: bool [2 * microbatches], which microbatches these are.
          gradients: of the previous batch, fp32, in the layout of `params` (0 in the first step).
          in_flight: the state for the next step.
        """
        count, newest = self.schedule.microbatches, in_flight.step % 2
        put = lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new.astype(whole.dtype), newest, 0)  # noqa: E731
        weights = {
            "blocks": jax.tree.map(put, in_flight.weights["blocks"], params["blocks"]),
            "shared": jax.tree.map(
                lambda whole, new: put(whole, new[None]), in_flight.weights["shared"], params["shared"]
            ),
        }
        batches = jax.tree.map(
            lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new.astype(whole.dtype), newest * count, 0),
            in_flight.batch,
            batch,
        )
        cotangents = jnp.where(jnp.arange(2 * count) // count == newest, cotangent, in_flight.cotangents)
        rows = rows_after(after, self._rows(in_flight.step), self.options)

        specs = self.options.specs.of_trained(self.options.trained)

        def run(weights, batch, cotangents, rows, newest, carry):
            rank = self._rank(weights, batch)
            carry = jax.tree.map(lambda a: a[(0,) * len(self.axes)], carry)
            half = vary(newest)  # the newest batch's; the optimizer has applied the gradients that it holds
            in_halves = lambda a: a.reshape(2, -1, *a.shape[1:])  # noqa: E731
            clear = lambda a: lax.dynamic_update_index_in_dim(a, jnp.zeros_like(a[0]), half, 0)  # noqa: E731
            carry = carry._replace(
                block_gradients=jax.tree.map(lambda a: clear(in_halves(a)).reshape(a.shape), carry.block_gradients),
                shared_gradients=jax.tree.map(clear, carry.shared_gradients),
                output=jnp.zeros_like(carry.output),
            )
            carry = rank.run(local_rows(rows), carry, vary(cotangents))
            # The other half's gradients are complete. Clearing them before the optimizer reads them would copy both halves.
            take = lambda a: lax.dynamic_index_in_dim(a, 1 - half, 0, keepdims=False)  # noqa: E731
            complete = lambda a, like: take(in_halves(a)).reshape(1, *like.shape[1:])  # noqa: E731
            trained = only_trained(weights, self.options.trained)
            blocks = jax.tree.map(complete, carry.block_gradients, trained["blocks"])
            gradients = {
                "blocks": clear_empty_slots(blocks, self.options.block_counts, self.schedule),
                "shared": jax.tree.map(take, carry.shared_gradients),
            }
            losses = sum_over(carry.output, self.axes)
            return losses, reduce_gradients(gradients, specs), self._with_mesh_axes(carry)

        in_specs = (self.versioned_specs, batch_spec(self.mesh), P(), P(None, "pipe"), P(), P(*self.axes))
        mapped = self._map(run, in_specs, (P(), specs.manual.gradients, P(*self.axes)))
        losses, gradients, carry = mapped(
            weights, self._with_version(batches), cotangents, rows, newest, in_flight.carry
        )
        of_last_rank = jax.tree.map(lambda column: column[:, -1], rows.forward)
        counted = jnp.zeros(2 * count, bool).at[of_last_rank.microbatch].set(of_last_rank.on == 1)
        return losses, counted, gradients, InFlight(in_flight.step + 1, weights, batches, cotangents, carry)

    def newest_weights(self, in_flight: InFlight) -> Tree:
        """Of the batch that entered last, {"blocks": [1, pipe, layers / pipe, ...], "shared"}: the one still in flight."""
        half = (in_flight.step - 1) % 2
        take = lambda a: lax.dynamic_index_in_dim(a, half, 0, keepdims=False)  # noqa: E731
        weights = in_flight.weights
        in_halves = lambda a: a.reshape(2, -1, *a.shape[1:])  # noqa: E731
        return {
            "blocks": jax.tree.map(lambda a: take(in_halves(a)), weights["blocks"]),
            "shared": jax.tree.map(take, weights["shared"]),
        }

    def _rank(self, weights: Tree, batch: Tree) -> Rank:
        return Rank(self.functions, self.table, self.options, weights, batch)

    def _map(self, function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.axes)
        )

    def _with_mesh_axes(self, carry: Carry) -> Carry:
        """Adds the manual axes in front of a rank's leaves, which are sharded over them outside the `shard_map`."""
        return jax.tree.map(lambda a: a[(None,) * len(self.axes)], carry)

    def _with_version(self, batches: Tree) -> Tree:
        """Adds "version", int32 [2 * microbatches, data * samples]: the half of each microbatch and of its weights."""
        leaf = jax.tree.leaves(batches)[0]
        half = jnp.arange(leaf.shape[0], dtype=jnp.int32) // self.schedule.microbatches
        return {**batches, "version": jnp.broadcast_to(half[:, None], leaf.shape[:2])}

    def _rows(self, step: jax.Array) -> TickRow:
        """The executor's rows of a step, int32 [ticks, ranks] in each field; `step` is traced."""
        stages, count, newest = self.schedule.stages, self.schedule.microbatches, step % 2
        ranks, ticks = jnp.arange(stages), jnp.arange(count)[:, None]
        is_last = ranks == stages - 1
        slots = self.table.stash_slots

        def operation(lag) -> OperationRow:
            number = ticks - lag  # the microbatch of the newest batch; negative: of the previous batch
            half = jnp.where(number < 0, 1 - newest, newest)
            return OperationRow(
                on=(number >= 0) | (step > 0),
                chunk=half,
                stage=ranks,
                microbatch=half * count + number % count,
                first=ranks == 0,
                last=is_last,
                part=0,
                parts=1,
                stash=(step % slots * count + number) % slots,
                kept=0,
                inbox=0,
            )

        def end(row: OperationRow, rank: int) -> EndRow:
            on, microbatch = (jnp.broadcast_to(a, (count, stages))[:, rank, None] for a in (row.on, row.microbatch))
            return EndRow(on & (self.options.share_ends | (ranks == ranks[rank])), microbatch)

        forward, backward = operation(ranks), operation(backward_lag(ranks, stages))
        rows = TickRow(
            forward,
            backward,
            weight=OperationRow(*[0] * len(OperationRow._fields)),  # backwards are not split
            embed=end(forward, 0),
            head=end(forward, -1),
            embed_backward=end(backward, 0),
            loss_gradient=~is_last,  # slot 0 of the inbox on the last rank, the extra slot 1 elsewhere
            activation_arrivals=(ranks == 0,) * len(self.table.routes[FORWARD]),  # of one rank there is no route
            gradient_arrivals=(is_last,) * len(self.table.routes[BACKWARD]),
            sends=1,
        )
        return jax.tree.map(lambda column: jnp.broadcast_to(jnp.asarray(column, jnp.int32), (count, stages)), rows)


def _versioned(functions) -> VersionedFunctions:
    """The functions with `shared` of [2, ...], of which each microbatch uses its version."""

    def select(shared: Tree, microbatch: Tree) -> Tree:
        version = microbatch["version"][0]
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, version, 0, keepdims=False), shared)

    return VersionedFunctions(
        functions.prepare_microbatch,
        lambda shared, microbatch: functions.embed(select(shared, microbatch), microbatch),
        functions.block,
        lambda shared, y, microbatch: functions.head_loss(select(shared, microbatch), y, microbatch),
    )
