"""The operations of one rank on its blocks: forward, backward, its parts I and W, and a forward beside a backward.

`rank.py` has the ticks in which they run, and the values that they exchange.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.pipeline.carry import Carry
from megajax.pipeline.chunk_work import ChunkWork
from megajax.pipeline.layout import full_specs, in_row_major, is_spec, vary
from megajax.pipeline.loops import unknown
from megajax.pipeline.options import ExecutorOptions
from megajax.pipeline.records import Recorder
from megajax.pipeline.slots import OperationRow, Tables, TickRow
from megajax.pipeline.stage import Stack
from megajax.pipeline.stash import SlotApart, StashRef, TickStash, with_shared
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, OVERLAP_PARTS, WEIGHT, Segment
from megajax.sharding.zero import ZeroSharding

Tree = Any


def overlapping(row: TickRow) -> jax.Array:
    """1 if the rank overlaps a forward and a backward in this mixed tick, else 0."""
    return row.forward.on & row.backward.on


def slots_alternate(rows: TickRow) -> bool:
    """Whether one stage's forward writes one slot while a backward reads the other in all ticks but the first and the last.

    The first has a forward alone, the last a backward alone.
    """
    forward, backward = (row.on[:, 0] == 1 for row in (rows.forward, rows.backward))
    both = (forward & backward)[1:-1]
    return bool(both.all() and forward[0] and not backward[0] and backward[-1] and not forward[-1])


class Operations:
    """What a rank runs on its blocks in a tick. Methods take the carry and the tick's row, and return the new carry.

    Attributes:
      per_chunk, places: slots for blocks in a chunk, and in all of them.
      batch: pytree of [microbatches, samples, ...], this replica's.
      stack: the blocks.
    """

    def __init__(
        self, functions, table: Tables, options: ExecutorOptions, params: Tree, batch: Tree, *, collects: bool
    ):
        """Arguments as for `rank.Rank`; `collects`: forwards save nothing for backwards."""
        self.functions, self.table, self.schedule, self.options = functions, table, table.schedule, options
        self.constrain, self.collects = options.constrain, collects
        self.slots_apart = options.merged and not options.offload and table.slots_apart and not collects
        specs = full_specs(options.specs.weights, params)["blocks"]
        self.batch, blocks = vary(batch), vary(params["blocks"])
        chunks, _, slots = jax.tree.leaves(blocks)[0].shape[:3]
        self.per_chunk = options.stage_kinds.slots if options.stage_kinds else slots
        self.places = chunks * self.per_chunk
        weights = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), blocks)
        weights = in_row_major(weights) if options.in_place else weights
        self.stack = Stack(
            functions.block,
            weights,
            self.per_chunk,
            cut=jax.tree.map(lambda spec: ZeroSharding.from_spec(spec, 3), specs, is_leaf=is_spec),
            options=options,
        )

    @jax.named_scope(FORWARD)  # profiles show the schedule's names of operations
    def forward(self, segment: Segment, carry: Carry, x: Tree, row: TickRow) -> tuple[Carry, Tree]:
        """The tick's forward, or one part, from `x`. Returns the activation to send."""
        blocks, parts = self.block_range(row.forward, segment, carry.iterations), (1,)
        if segment.overlaps and self.options.in_place:
            blocks = 0, self.per_chunk * (row.forward.on & ~overlapping(row))
        elif segment.overlaps:
            blocks, parts = self.stack.part_range(row.forward, row.forward.on), (1, OVERLAP_PARTS)
        work = self.work(row.forward, carry, blocks, parts)
        if self.slots_apart:
            work = work.at_slot(self.table.only_slot(self.table.rows.forward, segment))
        if self.collects:
            return carry, self.constrain(self.stack.forward(x, work))
        # Where ticks merge a block has collectives: of a sum that they compute XLA copies nothing, and a write that is early
        # no longer overlaps them.
        early = self.options.in_place and (self.slots_apart or not self.options.merged)
        y, stash, iterations, records = self.stack.forward_stashing(x, work, carry.iterations, early=early)
        return carry._replace(stash=stash, iterations=iterations, records=records), self.constrain(y)

    def forward_and_backward(
        self, segment: Segment, carry: Carry, x: Tree, dy: Tree, row: TickRow
    ) -> tuple[Carry, Tree, Tree]:
        """The blocks of a merged tick, or of the parts that overlap on a rank of a mixed one, from inputs `x` and `dy`."""
        if self.schedule.paired:
            blocks, parts = (0, self.per_chunk), (1,)
        else:
            blocks, parts = self.stack.part_range(row.forward, overlapping(row)), (OVERLAP_PARTS,)
        works = self.work(row.forward, carry, blocks, parts), self.work(row.backward, carry, blocks, parts)
        pairs = self.table.pairs(segment, "chunk")
        slots = self.table.pairs(segment, "stash") if self.slots_apart else []
        y, dx, stash, totals, iterations, records = self.stack.forward_and_backward(
            x, dy, works, carry.block_gradients, pairs, slots, carry.iterations
        )
        carry = carry._replace(stash=stash, block_gradients=totals, iterations=iterations, records=records)
        return carry, self.constrain(y), self.constrain(dx)

    def backward(self, segment: Segment, carry: Carry, dy: Tree, row: TickRow) -> tuple[Carry, Tree]:
        """The tick's backward, from `dy`: whole, one part, or I. Returns the gradient to send."""
        operation, on, ops = row.backward, row.backward.on, segment.ops
        if self.schedule.paired:
            blocks = self.block_range(operation, segment, carry.iterations)
            keep = on == 1 if self.options.compute_bubbles and not segment.full else None
            work = self.work(operation, carry, blocks)
            if self.slots_apart:
                work = work.at_slot(self.table.only_slot(self.table.rows.backward, segment))
            return self.whole_backward(carry, dy, work, keep)
        both = overlapping(row) if segment.overlaps else jnp.zeros_like(on)
        if INPUT in ops:
            carry, dy = self.input_gradient(carry, dy, self.work(operation, carry, (0, self.per_chunk * (on & ~both))))
        if BACKWARD in ops:
            parts = [] if self.schedule.split else self.table.backward_parts
            on = both if self.schedule.split else on
            if segment.overlaps and self.options.in_place:
                on = on & ~both
            elif segment.overlaps:
                parts = [*parts, OVERLAP_PARTS]
            if parts:
                work = self.work(operation, carry, self.stack.part_range(operation, on, backwards=True), parts)
                carry, dy = self.whole_backward(carry, dy, work)
        in_parts = segment.overlaps or not self.schedule.split
        return carry._replace(pending=dy) if in_parts else carry, dy

    @jax.named_scope(BACKWARD)
    def whole_backward(self, carry: Carry, dy: Tree, work: ChunkWork, keep=None) -> tuple[Carry, Tree]:
        """The backward, or one part, with the gradients of the weights; arguments as for `Stack.backward`."""
        dx, totals, iterations, records = self.stack.backward(
            dy, work, carry.block_gradients, keep=keep, iterations=carry.iterations
        )
        return carry._replace(block_gradients=totals, iterations=iterations, records=records), self.constrain(dx)

    @jax.named_scope(INPUT)
    def input_gradient(self, carry: Carry, dy: Tree, work: ChunkWork) -> tuple[Carry, Tree]:
        """The tick's I."""
        dx, totals, kept, iterations, records = self.stack.backward_input(
            dy, work, carry.block_gradients, carry.iterations
        )
        carry = carry._replace(block_gradients=totals, kept=kept, iterations=iterations, records=records)
        return carry, self.constrain(dx)

    @jax.named_scope(WEIGHT)
    def weight_gradients(self, segment: Segment, carry: Carry, row: TickRow) -> Carry:
        """The tick's W: the weight gradients that an earlier I did not compute."""
        work = self.work(row.weight, carry, self.block_range(row.weight, segment, carry.iterations))
        totals, iterations = self.stack.backward_weight(carry.pending, work, carry.block_gradients, carry.iterations)
        return carry._replace(block_gradients=totals, iterations=iterations)

    def microbatch(self, index) -> Tree:
        """One microbatch of the batch, leaves [samples, ...]."""
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.batch)

    def block_microbatch(self, index) -> Tree:
        """The same, with the arrays that the model adds for its blocks."""
        return vary(self.functions.prepare_microbatch(self.microbatch(index)))

    def block_range(self, operation: OperationRow, segment: Segment, iterations: jax.Array) -> tuple:
        """(0, number of blocks to run): all blocks of the chunk, or none where the rank has no work.

        A Python int if every rank runs all its blocks in every tick of the segment. XLA then runs the loop without
        reading a predicate from the device. `iterations`: those of the loops before.
        """
        all_run = self.schedule.paired and (segment.full or self.options.compute_bubbles)
        if not (all_run or self.collects):
            return 0, operation.on * self.per_chunk
        inlined = self.per_chunk == 1 and self.options.serial_collectives
        return 0, unknown(self.per_chunk, iterations) if inlined else self.per_chunk

    def work(self, operation: OperationRow, carry: Carry, blocks: tuple, parts: Sequence[int] = (1,)) -> ChunkWork:
        """The arguments of the stack for one operation of a tick."""
        statistics = self.options.statistics
        return ChunkWork(
            self.block_microbatch(operation.microbatch),
            operation.chunk,
            operation.stage,
            self.stash(carry, operation),
            StashRef(carry.kept, operation.kept),
            blocks,
            parts,
            statistics and Recorder(statistics, operation.microbatch, operation.on == 1),
            carry.records,
        )

    def empty_stash(self, x: Tree, microbatch: Tree) -> Tree:
        """The stash at the start; arguments as for `Stack.empty_stash`."""
        if self.slots_apart:
            apart = tuple(self.stack.empty_stash(1, x, microbatch) for _ in range(self.table.stash_slots))
            return with_shared(apart, self.stack.freed(x, microbatch)) if slots_alternate(self.table.rows) else apart
        return self.stack.empty_stash(self.table.stash_slots, x, microbatch, on_host=self.options.offload)

    def stash(self, carry: Carry, operation: OperationRow) -> StashRef | SlotApart | TickStash:
        """Where an operation's forward saves, or has saved, what its backward reads."""
        if self.slots_apart:
            return SlotApart(carry.stash, operation.stash)
        if self.options.unrolled:
            return TickStash(carry.stash or ((),) * self.per_chunk)
        return StashRef(carry.stash, operation.stash, self.options.offload)
