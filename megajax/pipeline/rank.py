"""The ticks of one rank, traced inside the executor's `shard_map`; `executor.py` explains the parts of a tick.

All ranks run the same program. They differ in their rows of the schedule's tables (`slots.TickRow`), in their shards
of the weights, and in the values that they send to each other. Every collective over the axis `pipe` is therefore
outside the loops that only some of the ranks run, and all ranks must reach it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.order import choose, wait_for, wait_for_all
from megajax.pipeline.carry import Carry
from megajax.pipeline.embedding_and_head import EmbeddingAndHead, run_together
from megajax.pipeline.layout import fp32_zeros, in_row_major, vary
from megajax.pipeline.loops import counted_loop, run_one_of, unknown
from megajax.pipeline.operations import Operations
from megajax.pipeline.options import SEND, ExecutorOptions, embeds_ahead
from megajax.pipeline.records import empty_records
from megajax.pipeline.slots import Tables, TickRow
from megajax.pipeline.trained import only_trained
from megajax.runtime.compat import set_xla_metadata
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Segment

Tree = Any
# XLA's scheduler allows one collective at a time on the default stream, so a send there would end before a loop over
# blocks that contains collectives over `tensor` begins. On the stream for point-to-point communication it overlaps the
# loop.
SEND_STREAM = {"_xla_gpu_collective_stream": "p2p"}


def local_rows(rows: TickRow) -> TickRow:
    """A rank's rows, int32 [ticks], from the [ticks, 1] that `shard_map` passes to it."""
    return jax.tree.map(lambda column: vary(column[:, 0]), rows)


def rows_after(after: Tree, rows: TickRow, options: ExecutorOptions) -> TickRow:
    """`rows`; with `serial_collectives` they, and so the trip counts of the ticks' loops, depend on `after`."""
    return wait_for_all(after, rows) if options.serial_collectives else rows


class Rank:
    """One rank's part of the program.

    Attributes:
      shared: the weights outside of the blocks (embedding, head), on this rank.
      blocks: the operations on this rank's blocks.
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
        self.shared = vary(params["shared"])
        self.blocks = Operations(functions, table, options, params, batch, collects=collect is not None)

    def start(self) -> Carry:
        """Empty stash and inboxes, and zero accumulators."""
        first, count = self.blocks.block_microbatch(0), self.schedule.microbatches
        shapes = jax.eval_shape(self.functions.embed, self.shared, first)
        x = self.constrain(vary(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)))
        activations, gradients = (self._empty_inbox(direction, x) for direction in (FORWARD, BACKWARD))
        if self.collect is None:
            stash = ()
            if not self.options.unrolled:
                stash = vary(self.blocks.empty_stash(x, first))
            kept = vary(self.blocks.stack.empty_kept(self.table.kept_slots, x, first)) if self.table.kept_slots else ()
            totals = vary((self.blocks.stack.empty_gradients(), fp32_zeros(self.trained_shared)))
            output = vary(self._empty_output(x, first))
        else:
            stash, kept, totals = (), (), ((), ())
            result = jax.eval_shape(self.collect, self.shared, x, first)
            output = jax.tree.map(lambda a: vary(jnp.zeros((count, *a.shape), a.dtype)), result)
        records = ()
        if self.options.statistics is not None:
            records = vary(empty_records(self.options.statistics, x, first, (self.blocks.places, count)))
        embedded = x if any(self.embeds_ahead(segment) for segment in self.schedule.segments) else ()
        unfinished = x if any(segment.overlaps for segment in self.schedule.segments) else ()
        iterations = vary(jnp.int32(0))
        return Carry(stash, activations, gradients, x, unfinished, kept, *totals, output, iterations, records, embedded)

    @property
    def trained_shared(self) -> Tree:
        """The weights outside of the blocks that have gradients."""
        return only_trained(self.shared, self.options.trained and self.options.trained["shared"])

    def _empty_inbox(self, direction: str, x: Tree) -> Tree:
        slots = self.table.inbox_slots[direction] + 1
        zeros = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), x)
        return jax.vmap(self.constrain)(vary(zeros))

    def _empty_output(self, x: Tree, microbatch: Tree) -> Tree:
        """Zeros for each microbatch's loss and, with `has_aux`, its outputs."""
        losses, count = jnp.zeros(self.schedule.microbatches, jnp.float32), self.schedule.microbatches
        if not self.options.has_aux:
            return losses
        _, outputs = jax.eval_shape(self.functions.head_loss, self.shared, x, microbatch)
        return losses, jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), outputs)

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
        self.ends = EmbeddingAndHead(
            self.functions, self.shared, self.blocks.microbatch, cotangents, self.collect, self.options
        )
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
            gradients = self.blocks.stack.stacked_gradients(carry.block_gradients)
            carry = carry._replace(
                block_gradients=in_row_major(gradients), shared_gradients=in_row_major(carry.shared_gradients)
            )
        # What is summed or gathered next: not during the last tick's loops.
        results = carry.block_gradients, carry.shared_gradients, carry.output, carry.records
        blocks, shared, output, records = self.wait_for([carry.iterations], results)
        return carry._replace(block_gradients=blocks, shared_gradients=shared, output=output, records=records)

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
            # The send starts after the embedding's backward of the previous tick.
            gradients = self.send(BACKWARD, self.wait_for([carry.iterations], carry.pending))
        if FORWARD in ops:
            carry, x = self.forward_input(segment, carry, row, before=gradients if BACKWARD in ops else ())
            carry, y = self.blocks.forward(segment, carry, x, row)
            if BACKWARD in ops:
                gradients, y = lax.optimization_barrier((gradients, y))
            activations = self.send(FORWARD, y)
            y = self.wait_for(activations, y)
            with jax.named_scope(FORWARD):
                end = lambda zero, state: self.ends.head(zero, state, y, row)  # noqa: E731
                carry = self.run_end("head", row.head.on, end, carry)
        if BACKWARD in ops:
            carry = carry._replace(gradients=self.receive(gradients, row.gradient_arrivals, carry.gradients))
            carry, dx = self.blocks.backward(segment, carry, self.backward_input(segment, carry, row), row)
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
        carry, x = self.forward_input(segment, carry, row)
        dy = self.backward_input(segment, carry, row)
        carry, y, dx = self.blocks.forward_and_backward(segment, carry, x, dy, row)
        return self.run_ends(segment, carry._replace(pending=dx), y, dx, row, following)

    def mixed_tick(self, segment: Segment, carry: Carry, row: TickRow, following: TickRow) -> Carry:
        """One operation on each rank, or parts of a forward and a backward that overlap; then `run_ends`, on all ranks.

        No collective over `pipe` may run between the tick's loops over blocks. It would synchronize a rank that runs
        the forward loop with a rank that runs the backward loop, and the tick would take as long as both. XLA's CPU
        backend drops optimization barriers before it schedules, so data dependences order the tick instead: each loop
        starts from the previous loop's iteration count, and the values to send depend on the final count.
        """
        ops = segment.ops
        forwards, backwards = FORWARD in ops, BACKWARD in ops or INPUT in ops
        y = dx = carry.pending
        if forwards:
            carry, y = self.forward_input(segment, carry, row)
        if backwards:
            dx = self.backward_input(segment, carry, row)
        if segment.overlaps and self.options.in_place:
            carry, y, dx = self.blocks.forward_and_backward(segment, carry, y, dx, row)
        if forwards:
            carry, y = self.blocks.forward(segment, carry, y, row)
        if backwards:
            carry, dx = self.blocks.backward(segment, carry, dx, row)
        if segment.overlaps:
            carry = carry._replace(unfinished=y)
        if WEIGHT in ops:
            carry = self.blocks.weight_gradients(segment, carry, row)
        ended = carry.iterations >= 0  # always True, but XLA cannot know it before the loops have ended
        return self.run_ends(segment, carry, choose(ended, y, 0), choose(ended, dx, 0), row, following)

    def prepare(self, segment: Segment, carry: Carry, row: TickRow) -> Carry:
        """Prepares the first tick of a segment, as `run_ends` prepares the next tick: its embedding, and before merged
        ticks the send of the gradient that a paired tick left.
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

    def run_ends(self, segment: Segment, carry: Carry, y: Tree, dx: Tree, row: TickRow, following: TickRow) -> Carry:
        """The end of a merged or mixed tick: head, embedding's backward, the next tick's embedding; beside them the sends.

        With `in_place` one conditional runs those that the tick has: the host waits for the device once, and the
        collectives of one overlap the others. Arguments: see `EmbeddingAndHead.of_tick`; `carry` is that after the tick's
        blocks, and `following` in a segment's last tick `idle_row`.
        """
        activations, gradients = self.sends(segment, y, dx, row)
        y, dx = (self.wait_for([*activations, *gradients], value) for value in (y, dx))
        ends = self.ends.of_tick(segment, y, dx, row, following)
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

    @jax.named_scope(FORWARD)
    def forward_input(
        self, segment: Segment, carry: Carry, row: TickRow, before: Iterable[Tree] = ()
    ) -> tuple[Carry, Tree]:
        """The input x of the tick's forward: received, embedded, or of the part before.

        `before`: what `send` returned earlier in the tick.
        """
        x = self.wait_for(before, self.constrain(jax.tree.map(lambda a: a[row.forward.inbox], carry.activations)))
        iterations = carry.iterations
        if self.embeds_ahead(segment):
            x = choose((row.forward.on & row.forward.first) == 1, carry.embedded, x)
        else:
            embed = lambda zero, x: self.ends.embed(zero, x, row)  # noqa: E731
            iterations, x = self.run_if("embed", row.embed.on, iterations, embed, x)
        x = self.constrain(x)
        if segment.overlaps:
            x = choose(row.forward.part > 0, carry.unfinished, x)
        carry = carry._replace(iterations=iterations)
        return carry, choose(row.forward.on == 1, x, jnp.nan) if self.options.poison_bubbles else x

    def backward_input(self, segment: Segment, carry: Carry, row: TickRow) -> Tree:
        """The gradient of the output of the tick's backward: received, or of the part before."""
        operation, on = row.backward, row.backward.on == 1
        dy = self.constrain(jax.tree.map(lambda a: a[operation.inbox], carry.gradients))
        if self.schedule.paired:
            return choose(on, dy, jnp.nan) if self.options.poison_bubbles else dy
        in_parts = segment.overlaps or not self.schedule.split
        return choose(on & (operation.part == 0), dy, carry.pending) if in_parts else dy

    def run_end(self, scope: str, on: jax.Array, end: Callable, carry: Carry) -> Carry:
        """One of the ends of a paired tick, `end(zero, EndState) -> EndState`, where `on` is 1."""
        iterations, state = self.run_if(scope, on, carry.iterations, end, carry.end_state)
        return carry._replace(iterations=iterations, **state._asdict())

    def sends(self, segment: Segment, y: Tree, dx: Tree, row: TickRow) -> tuple[list[Tree], list[Tree]]:
        """Sends activations and gradients at the end of a merged or mixed tick; returns the received ones.

        In most ticks of operations that overlap no rank has completed one, and none sends.
        """
        backwards = BACKWARD in segment.ops or INPUT in segment.ops

        def send(y: Tree, dx: Tree):
            activations = self.send(FORWARD, y) if FORWARD in segment.ops else []
            return activations, self.send(BACKWARD, dx) if backwards else []

        if not (segment.overlaps and self.options.in_place):
            return send(y, dx)

        def nothing(y: Tree, dx: Tree):
            routes = self.table.routes
            activations = [y for _ in routes[FORWARD]] if FORWARD in segment.ops else []
            return activations, [dx for _ in routes[BACKWARD]] if backwards else []

        with jax.named_scope(SEND):
            return lax.cond(row.sends == 1, send, nothing, y, dx)

    @jax.named_scope(SEND)
    def send(self, direction: str, value: Tree) -> list[Tree]:
        """Sends an activation or a gradient along every route of a direction; returns what each route delivers."""
        with set_xla_metadata(**SEND_STREAM):
            return [
                value if all(a == b for a, b in route) else self.constrain(lax.ppermute(value, "pipe", route))
                for route in self.table.routes[direction]
            ]

    def wait_for(self, received: Iterable[Tree], values: Tree) -> Tree:
        """`values`; with `serial_collectives`, what is computed from them runs after `received` (see `loops.wait_for`)."""
        return wait_for(received, values) if self.options.serial_collectives else values

    def receive(self, received: list[Tree], arrivals: tuple, inbox: Tree) -> Tree:
        """Writes the value received by each route to its slot of the inbox, leaves [slots + 1, samples, ...]."""
        for slot, value in zip(arrivals, received, strict=True):
            inbox = jax.tree.map(
                lambda whole, new, slot=slot: lax.dynamic_update_index_in_dim(whole, new, slot, 0), inbox, value
            )
        return jax.vmap(self.constrain)(inbox)

    def run_if(
        self, scope: str, on: jax.Array, iterations: jax.Array, function: Callable, state: Tree
    ) -> tuple[jax.Array, Tree]:
        """`function(zero, state)` if `on` is 1, else `state`: a loop, or with `in_place` a conditional.

        Each loop of a tick starts from the previous loop's iteration count, so all ranks run them in the same order.
        """
        with jax.named_scope(scope):
            if self.options.in_place:
                return run_one_of(iterations, on - 1, [function], state, always=False)
            on = unknown(on, iterations) if self.options.serial_collectives else on
            return counted_loop(iterations, on, lambda _, zero, state: function(zero, state), state)
