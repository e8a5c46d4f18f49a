"""PipeDream-2BW (2006.09503): a pipeline that is never drained, on two versions of the weights.

A step's ticks are those of eager 1F1B in its steady state, one forward and one backward on every rank and nothing else: m
ticks for m microbatches, where a schedule that drains takes m + 2(p - 1). So when a step ends, its last microbatches are
still on their way, with what they stashed; they go on while the next step's first ones fill in behind them. A microbatch
meets one version of the weights in its forward and its backward: that of the start of the step that it came in with.

    W(t + 1) = W(t) - update(gradient of batch t - 1 at W(t - 1))

The gradient is one step stale, so the loss curve is not that of a schedule that drains. Batches and versions of the
weights take turns in two halves of a buffer, the newest in half step % 2; a half's index stands in the executor's tables
where a schedule's chunk would stand.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.pipeline.executor import BATCH, Carry, Rank, rank_columns
from megajax.pipeline.slots import Tables, slot_tables
from megajax.pipeline.specs import MANUAL, WHOLE, Specs, added, is_spec, summed, vary
from megajax.schedules.one_f_one_b import backward_lag
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import BACKWARD, FORWARD

Tree = Any


class InFlight(NamedTuple):
    """What goes over from one step to the next."""

    step: jax.Array  # int32, how many steps there were
    weights: Tree  # {"blocks": [2, pipe, layers / pipe, ...], "shared": [2, ...]}, as they are computed with
    batch: Tree  # [2 * microbatches, ...]
    cotangents: jax.Array  # fp32 [2 * microbatches]
    carry: Carry  # each rank's, [data, pipe, ...]


class Functions(NamedTuple):
    """A model's functions where `shared` is two versions and the microbatch says which."""

    embed: Callable
    block: Callable
    head_loss: Callable


class Continuous:
    """The program of a step.

    Attributes:
      schedule: one step's ticks.
    """

    def __init__(
        self,
        functions,
        stages: int,
        microbatches: int,
        mesh: Mesh,
        *,
        constrain: Callable,
        specs: Specs = WHOLE,
        share_ends: bool = False,
    ):
        """Arguments as for `executor.gradient_function`; the model has `stages` chunks, one a rank."""
        self.share_ends = share_ends
        self.schedule = make_schedule("pipedream_2bw", stages=stages, microbatches=microbatches)
        self.specs = specs
        weights = specs.manual.weights
        shared = jax.tree.map(lambda spec: P(None, *spec), weights["shared"], is_leaf=is_spec)
        self.versions = {"blocks": weights["blocks"], "shared": shared}
        self.functions, self.mesh, self.constrain = _versioned(functions), mesh, constrain
        eager = slot_tables(make_schedule("eager_1f1b", stages=stages, microbatches=microbatches))
        self.table = Tables({}, 2 * stages - 1, 0, {FORWARD: 1, BACKWARD: 1}, eager.routes)

    def start(self, params: Tree, batch: Tree) -> InFlight:
        """An empty pipeline, for params and batches like these."""
        count = 2 * self.schedule.microbatches
        double = lambda a: jnp.zeros((2 * a.shape[0], *a.shape[1:]), a.dtype)  # noqa: E731
        weights = {
            "blocks": jax.tree.map(double, params["blocks"]),
            "shared": jax.tree.map(lambda a: jnp.zeros((2, *a.shape), a.dtype), params["shared"]),
        }
        batches = jax.tree.map(double, batch)
        make = lambda weights, batch: _spread(self._rank(weights, batch).start())  # noqa: E731
        carry = self._map(make, (self.versions, BATCH), P(*MANUAL))(weights, self._tag(batches))
        return InFlight(jnp.int32(0), weights, batches, jnp.zeros(count, jnp.float32), carry)

    def step(
        self, params: Tree, batch: Tree, cotangent: jax.Array, flying: InFlight
    ) -> tuple[jax.Array, jax.Array, Tree, InFlight]:
        """m ticks.

        Args:
          params: the newest version, {"blocks": [1, pipe, layers / pipe, ...], "shared"}, in the type to compute with.
          cotangent: fp32 scalar, what this batch's gradients are multiplied by.

        Returns:
          losses [2m], of the microbatches that passed the head in this step (m of them; 0 for the others, and fewer in
          the first step); the batch's weights are `flying.batch`. Then [2m] bool, which ones these are; the gradients of
          the batch before, fp32, in the layout of `params` (0 in the first step); and what goes over to the next step.
        """
        count, newest = self.schedule.microbatches, flying.step % 2
        put = lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new.astype(whole.dtype), newest, 0)  # noqa: E731
        weights = {
            "blocks": jax.tree.map(put, flying.weights["blocks"], params["blocks"]),
            "shared": jax.tree.map(
                lambda whole, new: put(whole, new[None]), flying.weights["shared"], params["shared"]
            ),
        }
        batches = jax.tree.map(
            lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new.astype(whole.dtype), newest * count, 0),
            flying.batch,
            batch,
        )
        cotangents = jnp.where(jnp.arange(2 * count) // count == newest, cotangent, flying.cotangents)
        columns = self._columns(flying.step)

        def run(weights, batch, cotangents, columns, newest, carry):
            rank = self._rank(weights, batch)
            carry = jax.tree.map(lambda a: a[0, 0], carry)
            carry = carry._replace(output=jnp.zeros_like(carry.output))
            carry = rank.run(rank_columns(columns), carry, vary(cotangents))
            done = vary(1 - newest)
            halves = jax.tree.map(
                lambda total, like: total.reshape(like.shape), carry.block_gradients, weights["blocks"]
            )
            take = lambda a: lax.dynamic_index_in_dim(a, done, 0, keepdims=False)  # noqa: E731
            totals = {
                "blocks": jax.tree.map(lambda a: take(a)[None], halves),
                "shared": jax.tree.map(take, carry.shared_gradients),
            }
            clear = lambda a: lax.dynamic_update_index_in_dim(a, jnp.zeros_like(take(a)), done, 0)  # noqa: E731
            blocks = jax.tree.map(lambda a: clear(a).reshape(-1, *a.shape[3:]), halves)
            left = carry._replace(block_gradients=blocks, shared_gradients=jax.tree.map(clear, carry.shared_gradients))
            return added(carry.output, MANUAL), summed(totals, self.specs), _spread(left)

        arguments = (self.versions, BATCH, P(), P(None, "pipe"), P(), P(*MANUAL))
        mapped = self._map(run, arguments, (P(), self.specs.manual.gradients, P(*MANUAL)))
        losses, gradients, carry = mapped(weights, self._tag(batches), cotangents, columns, newest, flying.carry)
        heads = columns["forward_microbatch"][:, -1], columns["forward_on"][:, -1] == 1
        counted = jnp.zeros(2 * count, bool).at[heads[0]].set(heads[1])
        return losses, counted, gradients, InFlight(flying.step + 1, weights, batches, cotangents, carry)

    def _rank(self, weights: Tree, batch: Tree) -> Rank:
        both = dataclasses.replace(self.schedule, microbatches=2 * self.schedule.microbatches)
        return Rank(self.functions, both, self.table, self.constrain, weights, batch)

    def _map(self, function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(MANUAL))

    def _tag(self, batches: Tree) -> Tree:
        """The batches with the half that each microbatch, and so its version of the weights, lies in."""
        leaf = jax.tree.leaves(batches)[0]
        half = jnp.arange(leaf.shape[0], dtype=jnp.int32) // self.schedule.microbatches
        return {**batches, "version": jnp.broadcast_to(half[:, None], leaf.shape[:2])}

    def _columns(self, step: jax.Array) -> dict[str, jax.Array]:
        """The executor's tables of a step, int32 [ticks, ranks]; see `slots.Tables`."""
        stages, count, newest = self.schedule.stages, self.schedule.microbatches, step % 2
        ranks, ticks = jnp.arange(stages), jnp.arange(count)[:, None]
        is_last = ranks == stages - 1
        columns: dict[str, Any] = {
            "forward_loss_gradient": ~is_last,  # slot 0 of the inbox on the last rank, the spare slot 1 elsewhere
            "forward_arrival_0": ranks == 0,
            "backward_arrival_0": is_last,
        }
        for prefix, lag in (("forward", ranks), ("backward", backward_lag(ranks, stages))):
            number = ticks - lag  # of the newest batch's microbatches; below 0, of those of the batch before
            half = jnp.where(number < 0, 1 - newest, newest)
            values = dict(
                on=(number >= 0) | (step > 0),
                chunk=half,
                stage=ranks,
                microbatch=half * count + number % count,
                first=ranks == 0,
                last=is_last,
                stash=(step % self.table.stash_slots * count + number) % self.table.stash_slots,
                part=0,
                parts=1,
                inbox=0,
            )
            columns |= {f"{prefix}_{name}": value for name, value in values.items()}
        for end, prefix, where in (("embed", "forward", 0), ("head", "forward", -1), ("embed_backward", "backward", 0)):
            on, microbatch = (jnp.broadcast_to(columns[f"{prefix}_{name}"], (count, stages))[:, where, None]
                              for name in ("on", "microbatch"))  # fmt: skip
            here = self.share_ends | (ranks == ranks[where])
            columns |= {f"{end}_on": on & here, f"{end}_microbatch": microbatch}
        return {
            name: jnp.broadcast_to(jnp.asarray(value, jnp.int32), (count, stages)) for name, value in columns.items()
        }


def _spread(carry: Carry) -> Carry:
    """A rank's values with axes for the ranks they differ between."""
    return jax.tree.map(lambda a: a[None, None], carry)


def _versioned(functions) -> Functions:
    def own(shared: Tree, microbatch: Tree) -> Tree:
        version = microbatch["version"][0]
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, version, 0, keepdims=False), shared)

    return Functions(
        lambda shared, microbatch: functions.embed(own(shared, microbatch), microbatch),
        functions.block,
        lambda shared, y, microbatch: functions.head_loss(own(shared, microbatch), y, microbatch),
    )
