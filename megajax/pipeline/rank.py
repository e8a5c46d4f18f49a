"""The ticks of one rank, traced inside the executor's `shard_map`; `executor.py` explains the parts of a tick.

All ranks run the same program. They differ in their rows of the schedule's tables (`slots.TickRow`), in their shards
of the weights, and in the values that they send to each other. Every collective over the axis `pipe` is therefore
outside the loops that only some of the ranks run, and all ranks must reach it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.pipeline.chunk_work import ChunkWork
from megajax.pipeline.ends import Ends, EndState, run_together
from megajax.pipeline.layout import fp32_zeros, full_specs, in_row_major, is_spec, vary
from megajax.pipeline.loops import counted_loop, run_one_of
from megajax.pipeline.mixed import MixedStack
from megajax.pipeline.options import ExecutorOptions, embeds_ahead
from megajax.pipeline.records import Recorder, empty_records
from megajax.pipeline.slots import OperationRow, Tables, TickRow
from megajax.pipeline.stage import Stack
from megajax.pipeline.stash import StashRef, TickStash
from megajax.runtime.compat import set_xla_metadata
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Segment
from megajax.sharding.zero import ZeroSharding

Tree = Any
# XLA's scheduler allows one collective at a time on the default stream, so a send there would end before a loop over
# blocks that contains collectives over `tensor` begins. On the stream for point-to-point communication it overlaps the
# loop.
SEND_STREAM = {"_xla_gpu_collective_stream": "p2p"}


class Carry(NamedTuple):
    """The state of one rank between ticks. Shapes are those on one rank and replica."""

    stash: Tree  # written by forwards, read by their backwards; [slots, blocks per chunk, ...]
    activations: jax.Array  # inbox of received activations, [slots + 1, samples, sequence, hidden]
    gradients: jax.Array  # inbox of received gradients, likewise
    pending: jax.Array  # gradient between the parts of a backward; in paired ticks, the one to send in the next tick
    kept: Tree  # written by I, read by W; [slots, blocks per chunk, ...]
    block_gradients: Tree  # fp32, [local layers, ...]
    shared_gradients: Tree  # fp32
    output: Tree  # [microbatches, ...]: each microbatch's loss, or the result of `collect`
    iterations: jax.Array  # int32, of all loops so far; see `Rank.mixed_tick`
    records: Tree  # `ExecutorOptions.statistics` of each block and microbatch; empty without
    embedded: Tree  # the embedding for the next tick's forward, [samples, sequence, hidden]; () in paired ticks

    @property
    def end_state(self) -> EndState:
        return EndState(*(getattr(self, name) for name in EndState._fields))


def local_rows(rows: TickRow) -> TickRow:
    """A rank's rows, int32 [ticks], from the [ticks, 1] that `shard_map` passes to it."""
    return jax.tree.map(lambda column: vary(column[:, 0]), rows)


class Rank:
    """One rank's part of the program.

    Attributes:
      shared: the weights outside of the blocks (embedding, head), on this rank.
      batch: pytree of [microbatches, samples, ...], this replica's.
      stack: this rank's blocks.
      per_chunk, places: slots for blocks in a chunk, and in all of them.
    """

    def __init__(
        self,
        functions,
        table: Tables,
        options: ExecutorOptions,
        params: Tree,
        batch: Tree,
        *,
        collect: Callable | None = None,
    ):
        """Arguments as for `executor.gradient_function`, and `collect` as for `executor.forward_function`, else None.

        `params` and `batch` are this rank's shards: blocks [chunks, 1, slots of a stage, ...], batch
        [microbatches, samples, ...].
        """
        self.functions, self.table, self.schedule, self.options = functions, table, table.schedule, options
        self.collect, self.constrain = collect, options.constrain
        specs = full_specs(options.specs.weights, params)["blocks"]
        self.batch, blocks = vary(batch), vary(params["blocks"])
        self.shared = vary(params["shared"])
        where = options.stage_kinds
        self.per_chunk = where.slots if where else jax.tree.leaves(blocks)[0].shape[2]
        self.places = jax.tree.leaves(blocks)[0].shape[0] * self.per_chunk
        weights = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), blocks)
        weights = in_row_major(weights) if options.in_place else weights
        cut = jax.tree.map(lambda spec: ZeroSharding.from_spec(spec, 3), specs, is_leaf=is_spec)
        how = {"in_place": options.in_place, "parts": table.backward_parts}
        if where:
            self.stack = MixedStack(functions.block, weights, where, cut=cut, **how)
        else:
            more = {"unrolled": options.unrolled, "counts": options.block_counts}
            self.stack = Stack(functions.block, weights, self.per_chunk, cut=cut, **how, **more)

    def start(self) -> Carry:
        """Empty stash and inboxes, and zero accumulators."""
        first, count = self.block_microbatch(0), self.schedule.microbatches
        shape = jax.eval_shape(self.functions.embed, self.shared, first)
        x = self.constrain(vary(jnp.zeros(shape.shape, shape.dtype)))
        activations, gradients = (
            jax.vmap(self.constrain)(vary(jnp.zeros((self.table.inbox_slots[direction] + 1, *x.shape), x.dtype)))
            for direction in (FORWARD, BACKWARD)
        )
        if self.collect is None:
            stash = ()
            if not self.options.unrolled:
                stash = vary(self.stack.empty_stash(self.table.stash_slots, x, first, on_host=self.options.offload))
            kept = vary(self.stack.empty_kept(self.table.kept_slots, x, first)) if self.table.kept_slots else ()
            totals = vary((self.stack.empty_gradients(), fp32_zeros(self.shared)))
            output = vary(jnp.zeros(count, jnp.float32))
        else:
            stash, kept, totals = (), (), ((), ())
            result = jax.eval_shape(self.collect, self.shared, x, first)
            output = jax.tree.map(lambda a: vary(jnp.zeros((count, *a.shape), a.dtype)), result)
        records = ()
        if self.options.statistics is not None:
            records = vary(empty_records(self.options.statistics, x, first, (self.places, count)))
        embedded = x if any(self.embeds_ahead(segment) for segment in self.schedule.segments) else ()
        return Carry(stash, activations, gradients, x, kept, *totals, output, vary(jnp.int32(0)), records, embedded)

    def embeds_ahead(self, segment: Segment) -> bool:
        """Whether the segment's ticks are merged or mixed, and so embed for the next tick (`run_ends`)."""
        return embeds_ahead(self.schedule, segment, self.options.merged)

    def run(self, rows: TickRow, carry: Carry, cotangents: jax.Array | None = None) -> Carry:
        """Runs all ticks, one `lax.scan` per segment.

        Args:
          rows: this rank's, int32 [ticks].
          carry: from `start`, or of the step before (pipedream_2bw).
          cotangents: fp32 [microbatches], the factors of each microbatch's loss in the gradients.
        """
        self.ends = Ends(self.functions, self.shared, self.microbatch, self.constrain, cotangents, self.collect)
        columns, names = jax.tree.flatten(rows)
        table = jnp.stack(columns, axis=1)  # one array, so that a tick reads its row in one kernel
        idle = jnp.stack(jax.tree.leaves(self.idle_row(rows)))[None]
        for segment in self.schedule.segments:
            tick, ticks = self.paired_tick, (table[segment.start : segment.stop],)
            if self.embeds_ahead(segment):
                tick = self.merged_tick if self.schedule.paired else self.mixed_tick
                ticks += (jnp.concatenate([ticks[0][1:], idle]),)
                carry = self.prepare(segment, carry, jax.tree.unflatten(names, list(ticks[0][0])))

            def step(carry, ticks, segment=segment, tick=tick):
                return tick(segment, carry, *(jax.tree.unflatten(names, list(row)) for row in ticks)), None

            carry, _ = lax.scan(step, carry, ticks)
        if self.options.in_place:
            gradients = self.stack.stacked_gradients(carry.block_gradients)
            carry = carry._replace(block_gradients=in_row_major(gradients))
        return carry

    def idle_row(self, rows: TickRow) -> TickRow:
        """The row, int32 scalars, of a tick in which no rank has work; it receives into the inbox's extra slot."""
        row = jax.tree.map(lambda column: jnp.zeros_like(column[0]), rows)
        return row._replace(
            gradient_arrivals=tuple(a + self.table.inbox_slots[BACKWARD] for a in row.gradient_arrivals)
        )

    def paired_tick(self, segment: Segment, carry: Carry, row: TickRow) -> Carry:
        """A forward and then a backward on every rank.

        The gradient of the previous tick is sent during the forward, and this tick's activation during the backward.
        The barriers make a send end after the computation that it overlaps; without them XLA ends it before the loop
        over blocks.
        """
        ops = segment.ops
        if BACKWARD in ops:
            gradients = self.send(BACKWARD, carry.pending)
        if FORWARD in ops:
            carry, y = self.forward(segment, carry, row)
            if BACKWARD in ops:
                gradients, y = lax.optimization_barrier((gradients, y))
            activations = self.send(FORWARD, y)
            with jax.named_scope(FORWARD):
                end = lambda zero, state: self.ends.head(zero, state, y, row)  # noqa: E731
                carry = self.run_end("head", row.head.on, end, carry)
        if BACKWARD in ops:
            carry = carry._replace(gradients=self.receive(gradients, row.gradient_arrivals, carry.gradients))
            with jax.named_scope(BACKWARD):
                carry, dx = self.backward(segment, carry, row)
            if FORWARD in ops:
                activations, dx = lax.optimization_barrier((activations, dx))
            with jax.named_scope(BACKWARD):
                last = lambda zero, state: self.ends.embed_backward(zero, state, dx, row)  # noqa: E731
                carry = self.run_end("embed_backward", row.embed_backward.on, last, carry)._replace(pending=dx)
            if self.options.unrolled:
                carry = carry._replace(stash=())
        if FORWARD in ops:
            carry = carry._replace(activations=self.receive(activations, row.activation_arrivals, carry.activations))
        return carry

    def merged_tick(self, segment: Segment, carry: Carry, row: TickRow, following: TickRow) -> Carry:
        """A forward and a backward on every rank, of different microbatches, in one loop over blocks; then `run_ends`."""
        with jax.named_scope(FORWARD):
            iterations, x = self.forward_input(segment, carry, row)
        blocks = 0, self.per_chunk
        works = self.work(row.forward, carry, blocks), self.work(row.backward, carry, blocks)
        dy = self.constrain(carry.gradients[row.backward.inbox])
        y, dx, stash, totals, iterations, records = self.stack.forward_and_backward(
            x, dy, works, carry.block_gradients, self.table.chunk_pairs(segment), iterations
        )
        y, dx = self.constrain(y), self.constrain(dx)
        carry = carry._replace(stash=stash, block_gradients=totals, iterations=iterations, records=records, pending=dx)
        return self.run_ends(segment, carry, y, dx, row, following)

    def mixed_tick(self, segment: Segment, carry: Carry, row: TickRow, following: TickRow) -> Carry:
        """One operation on each rank, then `run_ends`, on all ranks.

        No collective over `pipe` may run between the tick's loops over blocks. It would synchronize a rank that runs
        the forward loop with a rank that runs the backward loop, and the tick would take as long as both. XLA's CPU
        backend drops optimization barriers before it schedules, so data dependences order the tick instead: each loop
        starts from the previous loop's iteration count, and the values to send depend on the final count.
        """
        ops = segment.ops
        y = dx = carry.pending
        if FORWARD in ops:
            carry, y = self.forward(segment, carry, row)
        if BACKWARD in ops or INPUT in ops:
            with jax.named_scope(BACKWARD if BACKWARD in ops else INPUT):
                carry, dx = self.backward(segment, carry, row)
        if WEIGHT in ops:
            carry = self.weight_gradients(segment, carry, row)
        ended = carry.iterations >= 0  # always True, but XLA cannot know it before the loops have ended
        return self.run_ends(segment, carry, jnp.where(ended, y, 0), jnp.where(ended, dx, 0), row, following)

    def prepare(self, segment: Segment, carry: Carry, row: TickRow) -> Carry:
        """What a tick's `run_ends` does for the next one, for the segment's first: its embedding, and before merged ticks
        the send of the gradient that a paired tick left.
        """
        if self.schedule.paired:
            gradients = self.send(BACKWARD, carry.pending)
            carry = carry._replace(gradients=self.receive(gradients, row.gradient_arrivals, carry.gradients))
        if FORWARD not in segment.ops:
            return carry
        with jax.named_scope(FORWARD):
            embed = lambda zero, x: self.ends.embed(zero, x, row)  # noqa: E731
            iterations, embedded = self.run_if("embed", row.embed.on, carry.iterations, embed, carry.embedded)
        return carry._replace(embedded=embedded, iterations=iterations)

    def run_ends(
        self, segment: Segment, carry: Carry, y: jax.Array, dx: jax.Array, row: TickRow, following: TickRow
    ) -> Carry:
        """The end of a merged or mixed tick: head, embedding's backward, the next tick's embedding; beside them the sends.

        With `in_place` one conditional runs those that the tick has: the host waits for the device once, and the
        collectives of one overlap the others. Arguments: see `Ends.of_tick`; `carry` is that after the tick's blocks, and
        `following` in a segment's last tick `idle_row`.
        """
        ends = self.ends.of_tick(segment, y, dx, row, following)
        activations = self.send(FORWARD, y) if "head" in ends else []
        gradients = self.send(BACKWARD, dx) if "embed_backward" in ends else []
        iterations, state = carry.iterations, carry.end_state
        if self.options.in_place:
            iterations, state = run_together(iterations, ends, self.table.end_choices(segment), state)
        else:
            for scope, (on, end) in ends.items():
                iterations, state = self.run_if(scope, on, iterations, end, state)
        activations, gradients, state = lax.optimization_barrier((activations, gradients, state))
        carry = carry._replace(iterations=iterations, **state._asdict())
        if activations:
            carry = carry._replace(activations=self.receive(activations, row.activation_arrivals, carry.activations))
        if gradients:
            arrivals = following.gradient_arrivals if self.schedule.paired else row.gradient_arrivals
            carry = carry._replace(gradients=self.receive(gradients, arrivals, carry.gradients))
        return carry

    @jax.named_scope(FORWARD)  # profiles show the schedule's names of operations
    def forward(self, segment: Segment, carry: Carry, row: TickRow) -> tuple[Carry, jax.Array]:
        """The tick's forward, and on the first stage the embedding.

        Returns the activation [samples, sequence, hidden] to send.
        """
        work = self.work(row.forward, carry, self.block_range(row.forward, segment))
        iterations, x = self.forward_input(segment, carry, row)
        if self.collect is not None:
            return carry._replace(iterations=iterations), self.constrain(self.stack.forward(x, work))
        y, stash, iterations, records = self.stack.forward_stashing(x, work, iterations)
        return carry._replace(stash=stash, iterations=iterations, records=records), self.constrain(y)

    def forward_input(self, segment: Segment, carry: Carry, row: TickRow) -> tuple[jax.Array, jax.Array]:
        """The iteration count and the input [samples, sequence, hidden] of the tick's forward: received, or embedded."""
        x, iterations = self.constrain(carry.activations[row.forward.inbox]), carry.iterations
        if self.embeds_ahead(segment):
            x = jnp.where((row.forward.on & row.forward.first) == 1, carry.embedded, x)
        else:
            embed = lambda zero, x: self.ends.embed(zero, x, row)  # noqa: E731
            iterations, x = self.run_if("embed", row.embed.on, iterations, embed, x)
        x = self.constrain(x)
        return iterations, jnp.where(row.forward.on == 1, x, jnp.nan) if self.options.poison_bubbles else x

    def run_end(self, scope: str, on: jax.Array, end: Callable, carry: Carry) -> Carry:
        """One of the ends of a paired tick, `end(zero, EndState) -> EndState`, where `on` is 1."""
        iterations, state = self.run_if(scope, on, carry.iterations, end, carry.end_state)
        return carry._replace(iterations=iterations, **state._asdict())

    def backward(self, segment: Segment, carry: Carry, row: TickRow) -> tuple[Carry, jax.Array]:
        """The tick's backward: whole, one part, or I. Returns the gradient [samples, sequence, hidden] to send."""
        operation, on, totals = row.backward, row.backward.on == 1, carry.block_gradients
        dy = self.constrain(carry.gradients[operation.inbox])
        work = self.work(operation, carry, self.block_range(operation, segment))
        if self.schedule.paired:
            dy = jnp.where(on, dy, jnp.nan) if self.options.poison_bubbles else dy
            keep = on if self.options.compute_bubbles and not segment.full else None
            dx, totals, *rest = self.stack.backward(dy, work, totals, keep=keep, iterations=carry.iterations)
        elif self.schedule.split:
            dx, totals, kept, *rest = self.stack.backward_input(dy, work, totals, carry.iterations)
            carry = carry._replace(kept=kept)
        else:
            dy = jnp.where(on & (operation.part == 0), dy, carry.pending)
            low, high = self.stack.part_bounds(operation.part, operation.parts)
            work = dataclasses.replace(work, blocks=(low, jnp.where(on, high, low)))
            dx, totals, *rest = self.stack.backward(dy, work, totals, iterations=carry.iterations)
            carry = carry._replace(pending=self.constrain(dx))
        iterations, records = rest
        return carry._replace(block_gradients=totals, iterations=iterations, records=records), self.constrain(dx)

    @jax.named_scope(WEIGHT)
    def weight_gradients(self, segment: Segment, carry: Carry, row: TickRow) -> Carry:
        """The tick's W: the weight gradients that an earlier I did not compute."""
        work = self.work(row.weight, carry, self.block_range(row.weight, segment))
        totals, iterations = self.stack.backward_weight(carry.pending, work, carry.block_gradients, carry.iterations)
        return carry._replace(block_gradients=totals, iterations=iterations)

    @jax.named_scope("send")
    def send(self, direction: str, value: jax.Array) -> list[jax.Array]:
        """Sends [samples, sequence, hidden] along every route of a direction; returns what each route delivers."""
        with set_xla_metadata(**SEND_STREAM):
            return [
                value if all(a == b for a, b in route) else self.constrain(lax.ppermute(value, "pipe", route))
                for route in self.table.routes[direction]
            ]

    def receive(self, received: list[jax.Array], arrivals: tuple, inbox: jax.Array) -> jax.Array:
        """Writes the value received by each route to its slot of the inbox [slots + 1, samples, sequence, hidden]."""
        for slot, value in zip(arrivals, received, strict=True):
            inbox = lax.dynamic_update_index_in_dim(inbox, value, slot, 0)
        return jax.vmap(self.constrain)(inbox)

    def microbatch(self, index) -> Tree:
        """One microbatch of the batch, leaves [samples, ...]."""
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.batch)

    def block_microbatch(self, index) -> Tree:
        """The same, with the arrays that the model adds for its blocks."""
        return vary(self.functions.prepare_microbatch(self.microbatch(index)))

    def block_range(self, operation: OperationRow, segment: Segment) -> tuple:
        """(0, number of blocks to run): all blocks of the chunk, or none where the rank has no work.

        A Python int if every rank runs all its blocks in every tick of the segment. XLA then runs the loop without
        reading a predicate from the device.
        """
        always = self.schedule.paired and (segment.full or self.options.compute_bubbles)
        return 0, self.per_chunk if always else operation.on * self.per_chunk

    def work(self, operation: OperationRow, carry: Carry, blocks: tuple) -> ChunkWork:
        """The arguments of the stack for one operation of a tick."""
        statistics = self.options.statistics
        return ChunkWork(
            self.block_microbatch(operation.microbatch),
            operation.chunk,
            operation.stage,
            self.stash(carry, operation),
            StashRef(carry.kept, operation.kept),
            blocks,
            statistics and Recorder(statistics, operation.microbatch, operation.on == 1),
            carry.records,
        )

    def stash(self, carry: Carry, operation: OperationRow) -> StashRef | TickStash:
        """Where an operation's forward saves, or has saved, what its backward reads."""
        if self.options.unrolled:
            return TickStash(carry.stash or ((),) * self.per_chunk)
        return StashRef(carry.stash, operation.stash, self.options.offload)

    def run_if(
        self, scope: str, on: jax.Array, iterations: jax.Array, function: Callable, state: Tree
    ) -> tuple[jax.Array, Tree]:
        """`function(zero, state)` if `on` is 1, else `state`: a loop, or with `in_place` a conditional.

        Each loop of a tick starts from the previous loop's iteration count, so all ranks run them in the same order.
        """
        with jax.named_scope(scope):
            if self.options.in_place:
                return run_one_of(iterations, on - 1, [function], state, always=False)
            return counted_loop(iterations, on, lambda _, zero, state: function(zero, state), state)
