"""Runs any schedule as one SPMD program: `jax.shard_map` over (data, pipe), one `lax.scan` per segment of ticks.

In a paired tick every rank runs a forward and then a backward, and what one way sends travels while the other way computes:
an activation during the tick's backward, a gradient during the next tick's forward. In a mixed tick a rank runs the one
it has work for. Where a rank has no work its loop over blocks runs zero times, and what it sends is garbage that is
masked out of every result. (A `lax.switch` would do, but XLA copies stash and accumulators through a conditional, and not
through a loop.) So only what is met inside a tensor group or by replicas may be in a block; ticks in which no rank
waits have loops of a length known in advance, which XLA runs without asking the device whether to go on.
Tensor parallelism is not seen here: the mesh axis `tensor` is left to XLA's partitioner. 2104.04473 section 2.2; section
3.2's scatter/gather falls out of sequence-sharded activations.

The executor knows no model. It is given `functions` with
  `embed(shared, microbatch) -> x`, `block(weights, x, microbatch, layer) -> x`,
  `head_loss(shared, y, microbatch) -> scalar sum`,
and params {"blocks": [chunks, pipe, layers per chunk, ...] sharded on axis 1, "shared"}, which lie as `Specs` says. Where
ranks share the model's ends (ops/vocabulary.py), embed and head_loss hold collectives over pipe: all ranks run them in
the ticks in which one rank has a microbatch there; what is not that rank's is zero going in, and dropped coming out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.pipeline.slots import slot_tables
from megajax.pipeline.specs import MANUAL, WHOLE, Specs, added, full_specs, is_spec, summed, vary
from megajax.pipeline.stage import Stack, counted_loop, held
from megajax.runtime.compat import set_xla_metadata
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, Segment
from megajax.sharding.zero import ZeroSharding

Tree = Any
BATCH = P(None, "data")
# Of a send: XLA's scheduler has one collective at a time on their common stream, so there a send would end before a loop
# over blocks, which gathers over tensor, began. On the stream for sends it stays under way.
OWN_STREAM = {"_xla_gpu_collective_stream": "p2p"}


class Carry(NamedTuple):
    """What a rank holds from tick to tick."""

    stash: Tree  # what forwards leave for their backwards, [slots, blocks per chunk, ...]
    activations: jax.Array  # inbox of received activations, [slots + 1, samples, sequence, hidden]
    gradients: jax.Array  # inbox of received gradients, likewise
    middle: jax.Array  # gradient between the parts of a backward; in paired ticks the one to send during the next tick
    kept: Tree  # what I leaves for W, [slots, blocks per chunk, ...]
    block_gradients: Tree  # fp32, [local layers, ...]
    shared_gradients: Tree  # fp32
    output: Tree  # each microbatch's loss, or what `collect` returned for each of them
    turns: jax.Array  # int32, of all loops over blocks so far; see `Rank.mixed_tick`


def gradient_function(
    functions,
    schedule: Schedule,
    mesh: Mesh,
    *,
    constrain: Callable,
    specs: Specs = WHOLE,
    share_ends: bool = False,
    offload: bool = False,
    unroll: bool = False,
    compute_bubbles: bool = False,
    poison_bubbles: bool = False,
) -> Callable:
    """`f(params, batch, cotangent) -> (losses, gradients)` for a whole batch, run by `schedule`.

    `losses` [microbatches] is `head_loss` summed over the replicas; `gradients` are fp32, in the layout of `params`, and
    those of cotangent * losses.sum(). They are summed over `data` once, after the last tick (but see `specs`).

    Args:
      constrain: `x -> x`, lays an activation between blocks over the axes that are not manual.
      specs: how params and gradients lie. A block's weight that is split over `data` is put together whenever its block
        runs, and its gradient is summed over `data` there.
      share_ends: whether all ranks run embed and head_loss together.
      offload: whether what forwards keep for their backwards waits in the host's memory.
      unroll: whether each block's weights are arrays of their own; see `stage.Stack`.
      compute_bubbles: whether, in paired ticks, ranks without work run their blocks all the same. They must where a block
        holds a `ppermute`, in which all ranks meet (a ring).
      poison_bubbles: feeds NaN to every bubble, to prove that bubbles touch no result.
    """

    def run(params: Tree, batch: Tree, cotangent: jax.Array, columns: Tree):
        options = {
            "specs": specs,
            "offload": offload,
            "unroll": unroll,
            "compute_bubbles": compute_bubbles,
            "poison": poison_bubbles,
        }
        rank = Rank(functions, schedule, table, constrain, params, batch, **options)
        cotangents = jnp.broadcast_to(cotangent, (schedule.microbatches,))
        carry = rank.run(rank_columns(columns), rank.start(), vary(cotangents))
        totals = {
            "blocks": jax.tree.map(lambda a, like: a.reshape(like.shape), carry.block_gradients, params["blocks"]),
            "shared": carry.shared_gradients,
        }
        return added(carry.output, MANUAL), summed(totals, specs)

    table = slot_tables(schedule, share_ends=share_ends)
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs.manual.weights, BATCH, P(), P(None, "pipe")),
        out_specs=(P(), specs.manual.gradients),
        axis_names=set(MANUAL),
    )
    return lambda params, batch, cotangent: mapped(params, batch, cotangent, table.columns)


def forward_function(
    functions,
    collect: Callable,
    schedule: Schedule,
    mesh: Mesh,
    *,
    constrain: Callable,
    specs: Specs = WHOLE,
    share_ends: bool = False,
) -> Callable:
    """`f(params, batch) -> outputs` by a forward-only schedule.

    `collect(shared, y, microbatch)` sees the last block's output and returns a pytree of [n, ...]; `outputs` holds them
    as [microbatches, data * n, ...]. With `share_ends` all ranks run it together, and the last stage's result counts.
    Ranks without work run their blocks too, so that every loop has a length known in advance.
    """

    def run(params: Tree, batch: Tree, columns: Tree):
        rank = Rank(functions, schedule, table, constrain, params, batch, collect=collect, specs=specs)
        return added(rank.run(rank_columns(columns), rank.start()).output, ("pipe",))

    table = slot_tables(schedule, share_ends=share_ends)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(specs.manual.weights, BATCH, P(None, "pipe")), out_specs=BATCH, axis_names=set(MANUAL)
    )
    return lambda params, batch: mapped(params, batch, table.columns)


def rank_columns(columns: Tree) -> Tree:
    """A rank's own columns, [ticks], of what `shard_map` gives it of the tables, [ticks, 1]."""
    return jax.tree.map(lambda column: vary(column[:, 0]), columns)


class Rank:
    """One rank's part of the program, while it is traced."""

    def __init__(
        self,
        functions,
        schedule,
        table,
        constrain,
        params,
        batch,
        *,
        collect=None,
        specs=WHOLE,
        offload=False,
        unroll=False,
        compute_bubbles=False,
        poison=False,
    ):
        self.functions, self.schedule, self.table = functions, schedule, table
        self.collect, self.compute_bubbles, self.poison = collect, compute_bubbles, poison
        self.pin = constrain
        specs = full_specs(specs.weights, params)["blocks"]
        self.batch, self.blocks = vary(batch), vary(params["blocks"])
        self.shared = vary(params["shared"])
        self.per_chunk = jax.tree.leaves(self.blocks)[0].shape[2]
        self.stack = Stack(
            functions.block,
            jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), self.blocks),
            self.per_chunk,
            jax.tree.map(
                lambda spec: ZeroSharding.from_spec(spec, 3), specs, is_leaf=is_spec
            ),  # without chunk, rank and layer
            offload=offload,
            unroll=unroll,
            parts=int(table.columns["backward_parts"].max()) if unroll else 1,
        )

    def start(self) -> Carry:
        """Empty stash, inboxes and accumulators."""
        first, count = self.microbatch(0), self.schedule.microbatches
        shape = jax.eval_shape(self.functions.embed, self.shared, first)
        x = self.pin(vary(jnp.zeros(shape.shape, shape.dtype)))
        inbox = {
            direction: jax.vmap(self.pin)(vary(jnp.zeros((slots + 1, *x.shape), x.dtype)))
            for direction, slots in self.table.inbox_slots.items()
        }
        if self.collect is None:
            stash = vary(self.stack.empty_stash(self.table.stash_slots, x, first))
            kept = vary(self.stack.empty_kept(self.table.kept_slots, x, first)) if self.table.kept_slots else ()
            zeros = lambda tree: jax.tree.map(lambda a: vary(jnp.zeros(a.shape, jnp.float32)), tree)  # noqa: E731
            totals = (zeros(self.stack.weights), zeros(self.shared))
            output = vary(jnp.zeros(count, jnp.float32))
        else:
            stash, kept, totals = (), (), ((), ())
            result = jax.eval_shape(self.collect, self.shared, x, first)
            output = jax.tree.map(lambda a: vary(jnp.zeros((count, *a.shape), a.dtype)), result)
        return Carry(stash, inbox[FORWARD], inbox[BACKWARD], x, kept, *totals, output, vary(jnp.int32(0)))

    def run(self, columns: Tree, carry: Carry, cotangents: jax.Array | None = None) -> Carry:
        """All ticks. `columns` are this rank's; `cotangents` [microbatches] multiply each microbatch's gradients."""
        self.cotangents = cotangents
        for segment in self.schedule.segments:
            rows = jax.tree.map(lambda column: column[segment.start : segment.stop], columns)  # noqa: B023
            tick = self.paired_tick if self.schedule.paired else self.mixed_tick
            carry, _ = lax.scan(lambda carry, row: (tick(segment, carry, row), None), carry, rows)  # noqa: B023
        return carry

    def block_count(self, on, segment: Segment):
        """How many of a chunk's blocks a tick runs: all, or none where `on` is 0. Known in advance if no rank waits."""
        always = self.schedule.paired and (segment.full or self.compute_bubbles)
        return self.per_chunk if always else on * self.per_chunk

    def paired_tick(self, segment: Segment, carry: Carry, row) -> Carry:
        """All ranks forward, then backward. Gradients of the tick before travel during the one, activations in the other.

        Barriers say until when: without them XLA ends a send before the loop that it could have travelled beside.
        """
        ops = segment.ops
        if BACKWARD in ops:
            gradients = self.send(BACKWARD, carry.middle)
        if FORWARD in ops:
            carry, y = self.forward(segment, carry, row)
            if BACKWARD in ops:
                gradients, y = lax.optimization_barrier((gradients, y))
            activations = self.send(FORWARD, y)
            carry = self.leave(carry, y, row)
        if BACKWARD in ops:
            carry = carry._replace(gradients=self.receive(BACKWARD, gradients, carry.gradients, row))
            with jax.named_scope(BACKWARD):
                carry, dx = self.backward(segment, carry, row)
            if FORWARD in ops:
                activations, dx = lax.optimization_barrier((activations, dx))
            with jax.named_scope(BACKWARD):
                carry = self.enter_backward(carry, dx, row)._replace(middle=dx)
        if FORWARD in ops:
            carry = carry._replace(activations=self.receive(FORWARD, activations, carry.activations, row))
        return carry

    def mixed_tick(self, segment: Segment, carry: Carry, row) -> Carry:
        """Each rank one op, then all send, and run the model's end together where they share it.

        Nothing that ranks meet in may come between the loops over blocks, or one rank's loop waits for another's and the
        tick takes as long as both. For CPUs XLA drops barriers before it puts operations in order, so each loop counts on
        from the turns of the one before, and what is sent depends on the sum.
        """
        ops = segment.ops
        back = INPUT if INPUT in ops else BACKWARD if BACKWARD in ops else None
        y = dx = carry.middle
        if FORWARD in ops:
            carry, y = self.forward(segment, carry, row)
        if back:
            with jax.named_scope(back):
                carry, dx = self.backward(segment, carry, row)
        if WEIGHT in ops:
            carry = self.weight_gradients(segment, carry, row)
        ended = carry.turns >= 0  # it always is, which XLA does not know
        y, dx = jnp.where(ended, y, 0), jnp.where(ended, dx, 0)
        if FORWARD in ops:
            carry = self.leave(carry, y, row)
            carry = carry._replace(activations=self.receive(FORWARD, self.send(FORWARD, y), carry.activations, row))
        if back:
            with jax.named_scope(back):
                carry = self.enter_backward(carry, dx, row)
            carry = carry._replace(gradients=self.receive(BACKWARD, self.send(BACKWARD, dx), carry.gradients, row))
        return carry

    @jax.named_scope(FORWARD)  # profiles show the schedule's names of operations
    def forward(self, segment: Segment, carry: Carry, row) -> tuple[Carry, jax.Array]:
        """The tick's forward; on the first stage the embedding too. Returns what to send on."""
        on, microbatch = row["forward_on"] == 1, self.microbatch(row["forward_microbatch"])
        x = self.pin(carry.activations[row["forward_inbox"]])
        first = on & (row["forward_first"] == 1)

        def embed(zero, x):
            entering = held(zero, self.microbatch(row["embed_microbatch"]))
            return jnp.where(first, self.pin(self.functions.embed(self.shared, entering)), x)

        turns, x = _run_if("embed", row, carry.turns, embed, x)
        x = self.pin(x)
        if self.poison:
            x = jnp.where(on, x, jnp.nan)
        chunk, stage = row["forward_chunk"], row["forward_stage"]
        if self.collect is not None:
            return carry._replace(turns=turns), self.pin(self.stack.forward(x, microbatch, chunk, stage))
        blocks = self.block_count(row["forward_on"], segment)
        y, stash, turns = self.stack.forward_stashing(
            x, microbatch, chunk, stage, carry.stash, row["forward_stash"], blocks, turns
        )
        return carry._replace(stash=stash, turns=turns), self.pin(y)

    @jax.named_scope(FORWARD)
    def leave(self, carry: Carry, y: jax.Array, row) -> Carry:
        """What the model's end makes of the last stage's output `y`: loss and its gradient, or what `collect` returns."""
        last, index = (row["forward_on"] & row["forward_last"]) == 1, row["head_microbatch"]
        inputs = (jnp.where(last, y, 0), self.microbatch(index))

        def collect(zero, output):
            result = self.collect(self.shared, *held(zero, inputs))
            place = lambda whole, new: whole.at[index].set(jnp.where(last, new, whole[index]))  # noqa: E731
            return jax.tree.map(place, output, vary(result))

        def score(zero, state):
            shared_gradients, losses, waiting = state
            own, leaving, cotangent = held(zero, (*inputs, jnp.where(last, self.cotangents[index], 0)))
            value, vjp = jax.vjp(lambda shared, y: self.functions.head_loss(shared, y, leaving), self.shared, own)
            shared, dy = vjp(cotangent.astype(value.dtype))
            waiting = waiting.at[row["forward_loss_gradient"]].set(self.pin(dy))
            losses = losses.at[index].add(jnp.where(last, value, 0))
            return _accumulate(shared_gradients, shared), losses, jax.vmap(self.pin)(waiting)

        if self.collect is not None:
            turns, output = _run_if("head", row, carry.turns, collect, carry.output)
            return carry._replace(output=output, turns=turns)
        state = (carry.shared_gradients, carry.output, carry.gradients)
        turns, (shared, output, gradients) = _run_if("head", row, carry.turns, score, state)
        return carry._replace(shared_gradients=shared, output=output, gradients=gradients, turns=turns)

    def backward(self, segment: Segment, carry: Carry, row) -> tuple[Carry, jax.Array]:
        """The tick's backward, whole, in part or I. Returns what to send back."""
        on, microbatch = row["backward_on"] == 1, self.microbatch(row["backward_microbatch"])
        dy = self.pin(carry.gradients[row["backward_inbox"]])
        place = (microbatch, row["backward_chunk"], carry.stash, row["backward_stash"], carry.block_gradients)
        if self.schedule.paired:
            dy = jnp.where(on, dy, jnp.nan) if self.poison else dy
            blocks = 0, self.block_count(row["backward_on"], segment)
            dx, block_gradients, turns = self.stack.backward(dy, *place, keep=on, blocks=blocks, turns=carry.turns)
        elif self.schedule.split:
            blocks = self.block_count(row["backward_on"], segment)
            kept_place = (carry.kept, row["backward_kept"])
            dx, block_gradients, kept, turns = self.stack.backward_input(dy, *place, *kept_place, blocks, carry.turns)
            carry = carry._replace(kept=kept)
        else:
            dy = jnp.where(on & (row["backward_part"] == 0), dy, carry.middle)
            low, high = self.stack.run_of(row["backward_part"], row["backward_parts"])
            blocks = low, jnp.where(on, high, low)
            dx, block_gradients, turns = self.stack.backward(dy, *place, blocks=blocks, turns=carry.turns)
            carry = carry._replace(middle=self.pin(dx))
        return carry._replace(block_gradients=block_gradients, turns=turns), self.pin(dx)

    def enter_backward(self, carry: Carry, dx: jax.Array, row) -> Carry:
        """The embedding's backward, where a microbatch's last gradient has come out of the first stage."""
        complete = row["backward_part"] == row["backward_parts"] - 1
        first = (row["backward_on"] == 1) & complete & (row["backward_first"] == 1)

        def embed_backward(zero, shared_gradients):
            out, entered = held(zero, (jnp.where(first, dx, 0), self.microbatch(row["embed_backward_microbatch"])))
            _, vjp = jax.vjp(lambda shared: self.functions.embed(shared, entered), self.shared)
            return _accumulate(shared_gradients, vjp(out)[0])

        turns, shared = _run_if("embed_backward", row, carry.turns, embed_backward, carry.shared_gradients)
        return carry._replace(shared_gradients=shared, turns=turns)

    @jax.named_scope(WEIGHT)
    def weight_gradients(self, segment: Segment, carry: Carry, row) -> Carry:
        """The tick's W: what an earlier I left undone."""
        microbatch, blocks = self.microbatch(row["weight_microbatch"]), self.block_count(row["weight_on"], segment)
        place = (microbatch, row["weight_chunk"], carry.stash, row["weight_stash"], carry.block_gradients)
        kept_place = (carry.kept, row["weight_kept"])
        block_gradients, turns = self.stack.backward_weight(carry.middle, *place, *kept_place, blocks, carry.turns)
        return carry._replace(block_gradients=block_gradients, turns=turns)

    @jax.named_scope("send")
    def send(self, direction: str, value: jax.Array) -> list[jax.Array]:
        """Sends along every route of a direction; returns what arrives by each."""
        with set_xla_metadata(**OWN_STREAM):
            return [
                value if all(a == b for a, b in route) else self.pin(lax.ppermute(value, "pipe", route))
                for route in self.table.routes[direction]
            ]

    def receive(self, direction: str, arrived: list[jax.Array], inbox: jax.Array, row) -> jax.Array:
        """Puts what arrived where the table says."""
        prefix = "forward" if direction == FORWARD else "backward"
        for index, value in enumerate(arrived):
            inbox = inbox.at[row[f"{prefix}_arrival_{index}"]].set(value)
        return jax.vmap(self.pin)(inbox)

    def microbatch(self, index) -> Tree:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.batch)


def _run_if(end: str, row, turns: jax.Array, function: Callable, state: Tree) -> tuple[jax.Array, Tree]:
    """`function(zero, state)` where one of the model's ends is on, else `state`; a loop, so updated in place.

    The loops of a tick count on one another's turns, so they run in one order on all ranks, and `function` must hold all it
    reads (`stage.held`): on CPU two sums over the same ranks at a time would be taken for one (all have channel 1).
    """
    with jax.named_scope(end):
        return counted_loop(turns, row[f"{end}_on"], lambda _, zero, state: function(zero, state), state)


def _accumulate(total: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new)
