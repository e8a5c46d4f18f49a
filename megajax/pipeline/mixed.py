"""Blocks of several kinds in one stack, such as dense and sparse layers: a `Stack` for each kind, run in the model's order.

Parameters, gradients and what is saved for the backward are stacked apart for each kind, {kind: [places of the kind, ...]},
because kinds differ in their shapes. A chunk has as many places for a kind as the most layers of it on any stage, so that
all ranks run one program; a stage with fewer leaves the last ones empty, and does not run them. For 8 layers, of which the
first is dense (d), on 2 ranks:

    rank 0    d0 s0 s1 s2        places of a rank: 1 of kind d, 4 of kind s
    rank 1    s0 s1 s2 s3

Which kind a block is depends on the stage, that is, on the rank. Collectives inside a block are over tensor and over the
replicas, whose ranks run the same stage, so a rank may skip a kind as it skips an operation without work: with loops of
zero or one iteration, or with `in_place` in one conditional for the whole chunk, a branch for each order of kinds that any
stage of the chunk has. In a branch the order is known at compile time: a loop for each run of layers of one kind, and around
it one over the periods of a periodic order. If all stages have the same order, as with every n-th layer sparse where n
divides the layers of a stage, there is no conditional.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.config.layer_kinds import period_of
from megajax.pipeline.chunk_work import ChunkParts, ChunkWork
from megajax.pipeline.loops import counted_loop, run_one_of, which
from megajax.pipeline.records import Recorder
from megajax.pipeline.stage import Stack
from megajax.pipeline.uneven import StageBlocks
from megajax.schedules.schedule import BACKWARD, FORWARD
from megajax.schedules.stages import StageLayers, stage_number

__all__ = ["MixedStack"]

Tree = Any


class MixedStack(ChunkParts):
    """The blocks of one rank, of several kinds, run by chunk; it has the methods of `Stack` for ticks that are not merged.

    Attributes:
      stacks: of each kind.
      where: the layers of each stage.
      per_chunk: blocks in a chunk, at most.
      in_place: as for `Stack`.
    """

    def __init__(
        self,
        block: Callable,
        weights: Tree,
        where: StageLayers,
        *,
        cut: Tree,
        in_place: bool = False,
    ):
        """Arguments: as for `Stack`, `weights` and `cut` for each kind."""
        self.where, self.per_chunk, self.in_place = where, where.slots, in_place
        self.stacks = {
            kind: _KindStack(block, weights[kind], where.of(kind), cut=cut[kind], in_place=in_place)
            for kind in where.kind_names
        }
        kinds = [[*row, *[""] * (self.per_chunk - len(row))] for row in where.stage_kinds]
        own = [[row[:slot].count(kind) for slot, kind in enumerate(row)] for row in kinds]
        self._kinds = jnp.array([[where.kind_names.index(kind) if kind else -1 for kind in row] for row in kinds])
        self._own = jnp.array(own, jnp.int32)
        self._first = jnp.array(where.firsts, jnp.int32)
        self._order = jnp.array([where.orders.index(row) for row in where.stage_kinds])

    def empty_gradients(self) -> Tree:
        """As `Stack.empty_gradients`, for each kind."""
        return {kind: stack.empty_gradients() for kind, stack in self.stacks.items()}

    def stacked_gradients(self, gradients: Tree) -> Tree:
        """The accumulators themselves."""
        return gradients

    def empty_stash(self, slots: int, x: jax.Array, microbatch: Tree, *, on_host: bool = False) -> Tree:
        """As `Stack.empty_stash`, for each kind."""
        return {kind: stack.empty_stash(slots, x, microbatch, on_host=on_host) for kind, stack in self.stacks.items()}

    def empty_kept(self, slots: int, x: jax.Array, microbatch: Tree) -> Tree:
        """As `Stack.empty_kept`, for each kind."""
        return {kind: stack.empty_kept(slots, x, microbatch) for kind, stack in self.stacks.items()}

    def forward(self, x: jax.Array, work: ChunkWork) -> jax.Array:
        """As `Stack.forward`."""

        def of(kind: str) -> Callable:
            stack = self.stacks[kind]
            return lambda slot, place, zero, x: stack.forward_block(slot, place, x, work)

        return self._run_blocks(0, work, of, x)[1]

    def forward_stashing(self, x: jax.Array, work: ChunkWork, iterations=0) -> tuple[jax.Array, Tree, jax.Array, Tree]:
        """As `Stack.forward_stashing`."""

        def of(kind: str) -> Callable:
            forward = self.stacks[kind].forward_step(self._of_kind(work, kind))

            def step(slot, place, zero, state):
                x, buffer, records = state
                x, own, records = forward(slot, place, zero, (x, buffer[kind], records))
                return x, {**buffer, kind: own}, records

            return step

        state = (x, work.stash.buffer, work.records)
        iterations, (y, buffer, records) = self._run_blocks(iterations, work, of, state)
        return y, buffer, iterations, records

    def backward(
        self, dy: jax.Array, work: ChunkWork, gradients: Tree, *, keep=None, iterations=0
    ) -> tuple[jax.Array, Tree, jax.Array, Tree]:
        """As `Stack.backward`."""

        def of(kind: str) -> Callable:
            backward = self.stacks[kind].backward_step(dy, self._of_kind(work, kind), keep)

            def step(slot, place, zero, state):
                dy, gradients, records = state
                own = (dy, work.stash.buffer[kind], gradients[kind], records)
                dx, new, records = backward(slot, place, zero, own)
                return dx, {**gradients, kind: new}, records

            return step

        state = (dy, gradients, work.records)
        iterations, (dx, gradients, records) = self._run_blocks(iterations, work, of, state, backwards=True)
        return dx, gradients, iterations, records

    def backward_input(
        self, dy: jax.Array, work: ChunkWork, gradients: Tree, iterations=0
    ) -> tuple[jax.Array, Tree, Tree, jax.Array, Tree]:
        """As `Stack.backward_input`."""

        def of(kind: str) -> Callable:
            backward = self.stacks[kind].input_step(dy, self._of_kind(work, kind))

            def step(slot, place, zero, state):
                dy, gradients, kept, records = state
                dx, new, own, records = backward(slot, place, zero, (dy, gradients[kind], kept[kind], records))
                return dx, {**gradients, kind: new}, {**kept, kind: own}, records

            return step

        state = (dy, gradients, work.kept.buffer, work.records)
        iterations, (dx, gradients, kept, records) = self._run_blocks(iterations, work, of, state, backwards=True)
        return dx, gradients, kept, iterations, records

    def backward_weight(self, x: jax.Array, work: ChunkWork, gradients: Tree, iterations=0) -> tuple[Tree, jax.Array]:
        """As `Stack.backward_weight`."""

        def of(kind: str) -> Callable:
            backward = self.stacks[kind].weight_step(x, self._of_kind(work, kind))
            return lambda slot, place, zero, gradients: {
                **gradients,
                kind: backward(slot, place, zero, gradients[kind]),
            }

        iterations, gradients = self._run_blocks(iterations, work, of, gradients)
        return gradients, iterations

    def forward_and_backward(
        self,
        x: jax.Array,
        dy: jax.Array,
        works: tuple[ChunkWork, ChunkWork],
        gradients: Tree,
        pairs: Sequence,
        iterations,
    ) -> tuple[jax.Array, jax.Array, Tree, Tree, jax.Array, Tree]:
        """As `Stack.forward_and_backward`, but one after the other: their blocks may be of different kinds."""
        low, high = works[1].blocks  # the same part of both, and a backward's first part is the last blocks
        back = dataclasses.replace(works[1], blocks=(self.per_chunk - high, self.per_chunk - low))
        with jax.named_scope(BACKWARD):
            dx, gradients, iterations, records = self.backward(dy, back, gradients, iterations=iterations)
        with jax.named_scope(FORWARD):
            ahead = dataclasses.replace(works[0], records=records)
            y, buffer, iterations, records = self.forward_stashing(x, ahead, iterations)
        return y, dx, buffer, gradients, iterations, records

    def _of_kind(self, work: ChunkWork, kind: str) -> ChunkWork:
        """The work as a kind's stack gets it: with its part of the buffers, and a recorder that knows its blocks' places."""
        changes = {}
        for name in ("stash", "kept"):
            buffer = getattr(work, name).buffer
            changes[name] = dataclasses.replace(getattr(work, name), buffer=buffer[kind] if buffer else ())
        if work.recorder:
            own = self.stacks[kind]

            def place_of(place):
                number = own.blocks.number(work.stage, place % own.per_chunk)
                return work.chunk * self.per_chunk + number - self._first[work.stage]

            changes["recorder"] = _PlacedRecorder(work.recorder, place_of)
        return dataclasses.replace(work, **changes)

    def _run_blocks(
        self, iterations, work: ChunkWork, step_of: Callable, state: Tree, *, backwards=False
    ) -> tuple[jax.Array, Tree]:
        """As `Stack._run_blocks`, with a step for each kind.

        Args:
          step_of: kind -> `step(slot, place, zero, state) -> state`; `slot` is the block's number among those of its kind in
            the chunk, and `place` its index in the kind's stack.
        """
        steps = {kind: step_of(kind) for kind in self.stacks}
        chunk, (low, high) = work.chunk, (0, self.per_chunk) if work.blocks is None else work.blocks
        if self.in_place:
            return self._run_branches(iterations, work, (low, high), steps, state, backwards=backwards)

        def one(count, zero, state):
            index = high - 1 - count if backwards else low + count
            kind, own = self._kinds[work.stage, index], self._own[work.stage, index]
            for number, (name, step) in enumerate(steps.items()):
                place = (chunk + zero) * self.stacks[name].per_chunk + own
                run = lambda _, again, state: step(own, place + again, zero + again, state)  # noqa: B023, E731
                _, state = counted_loop(zero, (kind == number).astype(jnp.int32), run, state)
            return state

        return counted_loop(iterations, high - low, one, state)

    def _run_branches(
        self, iterations, work: ChunkWork, blocks: tuple, steps: dict[str, Callable], state: Tree, *, backwards: bool
    ) -> tuple[jax.Array, Tree]:
        """`_run_blocks` with `in_place`: a branch for each chunk, order of kinds and range of blocks."""
        low, high = blocks
        choices = [
            (chunk, order, start, stop)
            for chunk in range(self.where.chunks)
            for order in self._orders_of(chunk)
            for start, stop in self.ranges(work.parts, backwards=backwards)
        ]

        def branch(chunk, order, start, stop, zero, state):
            first = {kind: chunk * stack.per_chunk for kind, stack in self.stacks.items()}
            return _run_in_order(order, (start, stop), first, steps, zero, state, backwards=backwards)

        always = isinstance(high, int)
        if always and len(choices) == 1:
            return iterations + high - low, branch(*choices[0], 0, state)
        index = which(
            (work.chunk == chunk)
            & (self._order[work.stage] == self.where.orders.index(order))
            & (low == start)
            & (high == stop)
            for chunk, order, start, stop in choices
        )
        branches = [functools.partial(branch, *choice) for choice in choices]
        return run_one_of(iterations, index, branches, state, always=always)

    def _orders_of(self, chunk: int) -> list[tuple[str, ...]]:
        """The orders of kinds of the stages that a chunk is, on any rank."""
        ranks, placement = self.where.ranks, self.where.placement
        stages = {stage_number(chunk, rank, ranks, placement) for rank in range(ranks)}
        return sorted({self.where.stage_kinds[stage] for stage in stages})


class _KindStack(Stack):
    """The blocks of one kind: in the steps of `Stack` a block's slot is its number among those of its kind in the chunk."""

    def __init__(self, block: Callable, weights: Tree, where: StageLayers, cut: Tree, in_place: bool):
        """Arguments: as for `Stack`, and where the layers of the kind are."""
        super().__init__(block, weights, where.slots, cut=cut, in_place=in_place)
        self.blocks = _KindBlocks(where)

    def forward_block(self, slot: jax.Array, place: jax.Array, x: jax.Array, work: ChunkWork) -> jax.Array:
        """One block; saves nothing."""
        return self.block(self._weights(place), x, work.microbatch, self.blocks.number(work.stage, slot))


class _KindBlocks(StageBlocks):
    """`StageBlocks` of one kind, of which no empty slot is run."""

    def __init__(self, where: StageLayers):
        super().__init__(where.slots)
        numbers = iter(where.numbers)
        rows = [[next(numbers) for _ in range(count)] for count in where.counts]
        table = jnp.array([[*row, *[0] * (where.slots - len(row))] for row in rows], jnp.int32)
        object.__setattr__(self, "numbers", table)

    def number(self, stage: jax.Array, slot: jax.Array) -> jax.Array:
        """The model's number of the block."""
        return self.numbers[stage, slot]

    def select(self, stage: jax.Array, slot: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        """`new`."""
        return new


@dataclasses.dataclass(frozen=True)
class _PlacedRecorder:
    """A recorder for the blocks of one kind; `place`: the place among blocks of any kind of one in the kind's stack."""

    recorder: Recorder
    place: Callable[[jax.Array], jax.Array]

    def write(self, buffers: dict, block: jax.Array, microbatch: Tree, values: dict[str, jax.Array]) -> dict:
        """As `Recorder.write`."""
        return self.recorder.write(buffers, self.place(block), microbatch, values)


def _run_in_order(
    order: tuple[str, ...],
    blocks: tuple[int, int],
    first: dict[str, int],
    steps: dict[str, Callable],
    zero: jax.Array | int,
    state: Tree,
    *,
    backwards: bool,
) -> Tree:
    """Runs a range of a chunk's blocks, whose kinds are known: loops over runs of one kind, in one over periods.

    Args:
      order: the kinds of the chunk's blocks.
      blocks: the range.
      first: for each kind the place of the chunk's first block.
      steps: for each kind, see `MixedStack._run_blocks`.
      zero, state: passed to the steps.
      backwards: last block first.
    """
    done = {kind: order[: blocks[0]].count(kind) for kind in steps}
    order = order[slice(*blocks)]
    if not order:
        return state
    period = period_of(order)
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(order[:period])]
    starts = [sum(count for other, count in runs[:number] if other == kind) for number, (kind, _) in enumerate(runs)]
    in_period = {kind: order[:period].count(kind) for kind in steps}

    def loop(count: int, body: Callable, state: Tree) -> Tree:
        number = lambda index: count - 1 - index if backwards else index  # noqa: E731
        if count == 1:
            return body(0, state)
        return lax.fori_loop(0, count, lambda index, state: body(number(index), state), state)

    def one_period(number, state):
        for (kind, count), start in list(zip(runs, starts, strict=True))[:: -1 if backwards else 1]:

            def one(index, state, kind=kind, start=start):
                slot = done[kind] + number * in_period[kind] + start + index
                return steps[kind](slot, first[kind] + slot, zero, state)

            state = loop(count, one, state)
        return state

    return loop(len(order) // period, one_period, state)
