"""Runs any schedule as one SPMD program: `jax.shard_map` over (data, pipe), one `lax.scan` per segment of ticks.

In a paired tick every rank runs a forward and a backward, each followed by its send; bubbles compute on garbage that is
masked out of every result. In a mixed tick a rank runs the one it has work for: the other's loop over blocks runs zero
times there. (A `lax.switch` would do, but XLA copies stash and accumulators through a conditional, and not through a
loop.) So in a mixed tick only collectives inside a tensor group may happen before the sends, which is all a block needs.
Tensor parallelism is not seen here: the mesh axis `tensor` is left to XLA's partitioner. 2104.04473 section 2.2; section
3.2's scatter/gather falls out of sequence-sharded activations.

The executor knows no model. It is given `functions` with
  `embed(shared, microbatch) -> x`, `block(weights, x, microbatch, layer) -> x`,
  `head_loss(shared, y, microbatch) -> scalar sum`,
and params {"blocks": [chunks, pipe, layers per chunk, ...] sharded on axis 1, "shared": replicated over data and pipe}.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.pipeline import tables
from megajax.pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule
from megajax.pipeline.stage import Stack

Tree = Any
MANUAL = ("data", "pipe")
BLOCKS = P(None, "pipe")
BATCH = P(None, "data")


class Carry(NamedTuple):
    """What a rank holds from tick to tick."""

    stash: Tree  # what forwards leave for their backwards, [slots, blocks per chunk, ...]
    activations: jax.Array  # inbox of received activations, [slots + 1, samples, sequence, hidden]
    gradients: jax.Array  # inbox of received gradients, likewise
    middle: jax.Array  # gradient between the parts of a backward
    kept: Tree  # what I leaves for W, [slots, blocks per chunk, ...]
    block_gradients: Tree  # fp32, [local layers, ...]
    shared_gradients: Tree  # fp32
    output: Tree  # loss summed over microbatches, or what `collect` returned for each of them


def gradient_function(
    functions, schedule: Schedule, mesh: Mesh, *, constrain: Callable, poison_bubbles: bool = False
) -> Callable:
    """`f(params, batch, cotangent) -> (loss, gradients)` for a whole batch, run by `schedule`.

    `loss` is `head_loss` summed over the batch; `gradients` are fp32, in the layout of `params`, and those of
    cotangent * loss. They are summed over `data` once, after the last tick.

    Args:
      constrain: `x -> x`, lays an activation between blocks over the axes that are not manual.
      poison_bubbles: feeds NaN to every bubble, to prove that bubbles touch no result.
    """

    def run(params: Tree, batch: Tree, cotangent: jax.Array, columns: Tree):
        rank = _Rank(functions, schedule, table, constrain, params, batch, poison=poison_bubbles)
        carry = rank.run(columns, rank.start(), cotangent=_vary(cotangent))
        blocks = jax.tree.map(
            lambda total, weights: lax.psum(total.reshape(weights.shape), "data"),
            carry.block_gradients,
            params["blocks"],
        )
        shared = jax.tree.map(lambda total: lax.psum(total, MANUAL), carry.shared_gradients)
        return lax.psum(carry.output, MANUAL), {"blocks": blocks, "shared": shared}

    table = tables.build(schedule)
    layout = {"blocks": BLOCKS, "shared": P()}
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(layout, BATCH, P(), P(None, "pipe")), out_specs=(P(), layout), axis_names=set(MANUAL)
    )
    return lambda params, batch, cotangent: mapped(params, batch, cotangent, table.columns)


def forward_function(functions, collect: Callable, schedule: Schedule, mesh: Mesh, *, constrain: Callable) -> Callable:
    """`f(params, batch) -> outputs` by a forward-only schedule.

    `collect(shared, y, microbatch)` sees the last block's output and returns a pytree of [n, ...]; `outputs` holds them
    as [microbatches, data * n, ...].
    """

    def run(params: Tree, batch: Tree, columns: Tree):
        rank = _Rank(functions, schedule, table, constrain, params, batch, collect=collect)
        return lax.psum(rank.run(columns, rank.start()).output, "pipe")

    table = tables.build(schedule)
    layout = {"blocks": BLOCKS, "shared": P()}
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(layout, BATCH, P(None, "pipe")), out_specs=BATCH, axis_names=set(MANUAL)
    )
    return lambda params, batch: mapped(params, batch, table.columns)


def _vary(tree: Tree) -> Tree:
    """Marks values as differing between ranks and replicas.

    Without it `jax.vjp` of something replicated would sum its gradient over the mesh inside the tick loop.
    """

    def vary(leaf):
        missing = tuple(axis for axis in MANUAL if axis not in jax.typeof(leaf).mat.varying)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree)


class _Rank:
    """One rank's part of the program, while it is traced."""

    def __init__(self, functions, schedule, table, constrain, params, batch, *, collect=None, poison=False):
        self.functions, self.schedule, self.table = functions, schedule, table
        self.collect, self.poison = collect, poison
        self.pin = constrain
        self.shared, self.batch = _vary(params["shared"]), _vary(batch)
        blocks = _vary(params["blocks"])
        self.per_chunk = jax.tree.leaves(blocks)[0].shape[2]
        self.stack = Stack(functions.block, jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), blocks), self.per_chunk)

    def start(self) -> Carry:
        """Empty stash, inboxes and accumulators."""
        first = self.microbatch(0)
        shape = jax.eval_shape(self.functions.embed, self.shared, first)
        x = self.pin(_vary(jnp.zeros(shape.shape, shape.dtype)))
        inbox = {
            direction: jax.vmap(self.pin)(_vary(jnp.zeros((slots + 1, *x.shape), x.dtype)))
            for direction, slots in self.table.inbox_slots.items()
        }
        if self.collect is None:
            stash = _vary(self.stack.empty_stash(self.table.stash_slots, x, first))
            kept = _vary(self.stack.empty_kept(self.table.kept_slots, x, first)) if self.table.kept_slots else ()
            zeros = lambda tree: jax.tree.map(lambda a: _vary(jnp.zeros(a.shape, jnp.float32)), tree)  # noqa: E731
            totals, output = (zeros(self.stack.weights), zeros(self.shared)), _vary(jnp.zeros((), jnp.float32))
        else:
            stash, kept, totals = (), (), ((), ())
            count = self.schedule.microbatches
            result = jax.eval_shape(self.collect, self.shared, x, first)
            output = jax.tree.map(lambda a: _vary(jnp.zeros((count, *a.shape), a.dtype)), result)
        return Carry(stash, inbox[FORWARD], inbox[BACKWARD], x, kept, *totals, output)

    def run(self, columns: Tree, carry: Carry, cotangent=None) -> Carry:
        """All ticks. `columns` are this rank's, [ticks, 1]."""
        self.cotangent = cotangent
        columns = jax.tree.map(lambda column: _vary(column[:, 0]), columns)
        for segment in self.schedule.segments:
            rows = jax.tree.map(lambda column: column[segment.start : segment.stop], columns)  # noqa: B023
            tick = self.paired_tick if self.schedule.paired else self.mixed_tick
            carry, _ = lax.scan(lambda carry, row: (tick(segment.ops, carry, row), None), carry, rows)  # noqa: B023
        return carry

    def paired_tick(self, ops, carry: Carry, row) -> Carry:
        """All ranks forward, send, backward, send. The first send has the whole backward to arrive."""
        if FORWARD in ops:
            carry, y = self.forward(carry, row)
            carry = carry._replace(activations=self.send(FORWARD, y, carry.activations, row))
        if BACKWARD in ops:
            with jax.named_scope(BACKWARD):
                carry, dx = self.backward(carry, row)
            carry = carry._replace(gradients=self.send(BACKWARD, dx, carry.gradients, row))
        return carry

    def mixed_tick(self, ops, carry: Carry, row) -> Carry:
        """Each rank one op, then all send. No send before all work, or one rank's waits for the other's."""
        y = dx = carry.middle
        if FORWARD in ops:
            carry, y = self.forward(carry, row)
        if BACKWARD in ops or INPUT in ops:
            with jax.named_scope(INPUT if INPUT in ops else BACKWARD):
                carry, dx = self.backward(carry, row)
        if WEIGHT in ops:
            carry = self.weight_gradients(carry, row)
        y, dx = lax.optimization_barrier((y, dx))
        if FORWARD in ops:
            carry = carry._replace(activations=self.send(FORWARD, y, carry.activations, row))
        if BACKWARD in ops or INPUT in ops:
            carry = carry._replace(gradients=self.send(BACKWARD, dx, carry.gradients, row))
        return carry

    @jax.named_scope(FORWARD)  # profiles show the schedule's names of operations
    def forward(self, carry: Carry, row) -> tuple[Carry, jax.Array]:
        """The tick's forward; on the last stage the head too. Returns what to send on."""
        on, microbatch = row["forward_on"] == 1, self.microbatch(row["forward_microbatch"])
        x = self.pin(carry.activations[row["forward_inbox"]])
        x = _run_if(
            on & (row["forward_first"] == 1), lambda x: self.pin(self.functions.embed(self.shared, microbatch)), x
        )
        if self.poison:
            x = jnp.where(on, x, jnp.nan)
        last = on & (row["forward_last"] == 1)
        chunk, stage = row["forward_chunk"], row["forward_stage"]
        if self.collect is not None:
            y = self.pin(self.stack.forward(x, microbatch, chunk, stage))
            return carry._replace(output=self.store(carry.output, last, y, microbatch, row["forward_microbatch"])), y
        blocks = None if self.schedule.paired else row["forward_on"] * self.per_chunk
        y, stash = self.stack.forward_stashing(x, microbatch, chunk, stage, carry.stash, row["forward_stash"], blocks)
        y = self.pin(y)

        def score(state):
            shared_gradients, loss, waiting = state
            value, vjp = jax.vjp(lambda shared, y: self.functions.head_loss(shared, y, microbatch), self.shared, y)
            shared, dy = vjp(self.cotangent.astype(value.dtype))
            waiting = waiting.at[row["forward_loss_gradient"]].set(self.pin(dy))
            return _accumulate(shared_gradients, shared), loss + value, jax.vmap(self.pin)(waiting)

        scored = _run_if(last, score, (carry.shared_gradients, carry.output, carry.gradients))
        return carry._replace(stash=stash, shared_gradients=scored[0], output=scored[1], gradients=scored[2]), y

    def store(self, output, last, y, microbatch, index):
        """What `collect` makes of the last block's output, kept in the microbatch's place."""

        def collect(output):
            result = self.collect(self.shared, y, microbatch)
            return jax.tree.map(lambda whole, new: whole.at[index].set(new), output, result)

        return _run_if(last, collect, output)

    def backward(self, carry: Carry, row) -> tuple[Carry, jax.Array]:
        """The tick's backward, whole, in part or I; on the first stage the embedding's too. Returns what to send back."""
        on, microbatch = row["backward_on"] == 1, self.microbatch(row["backward_microbatch"])
        dy = self.pin(carry.gradients[row["backward_inbox"]])
        place = (microbatch, row["backward_chunk"], carry.stash, row["backward_stash"], carry.block_gradients)
        if self.schedule.paired:
            dy = jnp.where(on, dy, jnp.nan) if self.poison else dy
            dx, block_gradients = self.stack.backward(dy, *place, keep=on)
        elif self.schedule.split:
            blocks = row["backward_on"] * self.per_chunk
            dx, block_gradients, kept = self.stack.backward_input(dy, *place, carry.kept, row["backward_kept"], blocks)
            carry = carry._replace(kept=kept)
        else:
            dy = jnp.where(on & (row["backward_part"] == 0), dy, carry.middle)
            low, high = self.stack.run_of(row["backward_part"], row["backward_parts"])
            dx, block_gradients = self.stack.backward(dy, *place, blocks=(low, jnp.where(on, high, low)))
            carry = carry._replace(middle=self.pin(dx))
        carry, dx = carry._replace(block_gradients=block_gradients), self.pin(dx)

        def embed_backward(shared_gradients):
            _, vjp = jax.vjp(lambda shared: self.functions.embed(shared, microbatch), self.shared)
            return _accumulate(shared_gradients, vjp(dx)[0])

        complete = row["backward_part"] == row["backward_parts"] - 1
        first = on & complete & (row["backward_first"] == 1)
        return carry._replace(shared_gradients=_run_if(first, embed_backward, carry.shared_gradients)), dx

    @jax.named_scope(WEIGHT)
    def weight_gradients(self, carry: Carry, row) -> Carry:
        """The tick's W: what an earlier I left undone."""
        microbatch, blocks = self.microbatch(row["weight_microbatch"]), row["weight_on"] * self.per_chunk
        place = (microbatch, row["weight_chunk"], carry.stash, row["weight_stash"], carry.block_gradients)
        block_gradients = self.stack.backward_weight(carry.middle, *place, carry.kept, row["weight_kept"], blocks)
        return carry._replace(block_gradients=block_gradients)

    @jax.named_scope("send")
    def send(self, direction: str, value: jax.Array, inbox: jax.Array, row) -> jax.Array:
        """Sends along every route of a direction, and puts what arrives where the table says."""
        prefix = "forward" if direction == FORWARD else "backward"
        for index, route in enumerate(self.table.routes[direction]):
            arrived = value if all(a == b for a, b in route) else self.pin(lax.ppermute(value, "pipe", route))
            inbox = inbox.at[row[f"{prefix}_arrival_{index}"]].set(arrived)
        return jax.vmap(self.pin)(inbox)

    def microbatch(self, index) -> Tree:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.batch)


def _run_if(condition: jax.Array, function: Callable, state: Tree) -> Tree:
    """`function(state)` where `condition`, else `state`: a loop of one turn or none, which XLA updates in place."""
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, state: function(state), state)


def _accumulate(total: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new)
