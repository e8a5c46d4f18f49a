"""Forward and backward of one chunk of blocks: loops over its blocks, of one kind or of several.

The forward of a chunk is a loop over its blocks, and the backward a loop over the same blocks, last block first; what they
do for one of them is in `block_steps.py`.

    forward     x ── block 0 ── block 1 ── ... ── y          stash[slot, i] = (residuals of block i, its input)
    backward   dx ── block 0 ── block 1 ── ... ── dy         gradients[chunk * blocks per chunk + i] += dw of block i

Blocks of several kinds, such as dense and sparse layers, differ in the shapes of their parameters. So parameters, gradients
and what is saved for the backward are stacked apart for each kind, {kind: [places of the kind, ...]}. A chunk has as many
places for a kind as the most layers of it on any stage, so that all ranks run one program; a stage with fewer leaves the
last ones empty, and does not run them. For 8 layers, of which the first is dense (d), on 2 ranks:

    rank 0    d0 s0 s1 s2        places of a rank: 1 of kind d, 4 of kind s
    rank 1    s0 s1 s2 s3

Which kind a block is depends on the stage, that is, on the rank. Collectives inside a block are over tensor and over the
replicas, whose ranks run the same stage, so a rank may skip a kind as it skips an operation without work: with loops of
zero or one iteration, or with `in_place` in one conditional for the whole chunk, a branch for each order of kinds that any
stage of the chunk has (`run_in_order`). If all stages have the same order, as with blocks of one kind, or with every n-th
layer sparse where n divides the layers of a stage, there is a branch for each chunk only.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.pipeline.block_steps import BlockSteps
from megajax.pipeline.chunk_work import ONE, ChunkParts, ChunkWork
from megajax.pipeline.loops import counted_loop, run_one_of, which
from megajax.pipeline.options import DEFAULT_OPTIONS, KIND, MERGED, ExecutorOptions
from megajax.pipeline.run_in_order import run_in_order
from megajax.pipeline.run_pairs import of_kinds_or_counts
from megajax.pipeline.stash import SlotApart
from megajax.pipeline.uneven import StageBlocks
from megajax.schedules.schedule import BACKWARD, FORWARD

Tree = Any


class Stack(ChunkParts):
    """The blocks of one rank, run by chunk.

    A tree of the stack, of weights, gradients or saved values, is of the blocks' one kind, or {kind: tree}.

    Attributes:
      weights: see `BlockSteps`.
      in_place: XLA's matmuls and conditionals update arrays in place; see `_run_blocks`.
      unrolled: blocks are traced one after the other, without a loop; the stack has one chunk, and one kind.
      kinds: the blocks of each kind.
    """

    def __init__(
        self,
        block: Callable,
        weights: Tree,
        per_chunk: int,
        *,
        cut: Tree | None = None,
        options: ExecutorOptions = DEFAULT_OPTIONS,
    ):
        """Arguments: see above, and `block` and `cut` of `BlockSteps`."""
        where, trained = options.stage_kinds, options.trained and options.trained["blocks"]
        super().__init__(per_chunk, where)
        self.weights, self.in_place, self.unrolled = weights, options.in_place, options.unrolled
        make = functools.partial(BlockSteps, block, options=options)
        if where is None:
            own = StageBlocks(per_chunk, options.block_counts)
            self.kinds = {ONE: make(weights, own, cut=cut, trained=trained)}
            if own.skips and not options.compute_bubbles:
                self.counts = own.counts
            return
        names = where.kind_names
        of = lambda kind: {"cut": cut[kind], "trained": trained and trained[kind]}  # noqa: E731
        self.kinds = {kind: make(weights[kind], StageBlocks.of_kind(where.of(kind)), **of(kind)) for kind in names}
        rows = [[*row, *[None] * (per_chunk - len(row))] for row in where.stage_kinds]
        slots = [[row[:number].count(kind) for number, kind in enumerate(row)] for row in rows]
        self._kinds = jnp.array([[names.index(kind) if kind else -1 for kind in row] for row in rows])
        self._slots = jnp.array(slots, jnp.int32)
        self._order = jnp.array([where.orders.index(row) for row in where.stage_kinds])

    def empty_gradients(self) -> Tree:
        """Zero accumulators for `backward`: fp32, like the trained weights; with `unrolled` a tuple of those of each block.

        In a program without loops XLA adds a matmul's result in place to an array of its own, not to a part of one.
        """
        return self._of_kinds(BlockSteps.empty_gradients)

    def stacked_gradients(self, gradients: Tree) -> Tree:
        """Accumulators like those of `empty_gradients`, fp32 [local layers, ...]."""
        return jax.tree.map(lambda *blocks: jnp.stack(blocks), *gradients) if self.unrolled else gradients

    def empty_stash(self, slots: int, x: Tree, microbatch: Tree, *, on_host: bool = False) -> Tree:
        """An empty stash, (residuals, x) of [slots, blocks per chunk, ...].

        Args:
          slots: chunk activations to hold at once.
          x: a block's input; only its type is read, as of `microbatch`.
          on_host: in host memory.
        """
        return self._of_kinds(lambda own: own.empty_stash(slots, x, microbatch, on_host=on_host))

    def freed(self, x: Tree, microbatch: Tree) -> frozenset[int]:
        """As `BlockSteps.freed`, if there is one kind."""
        return frozenset() if self.where else self.kinds[ONE].freed(x, microbatch)

    def empty_kept(self, slots: int, x: Tree, microbatch: Tree) -> Tree:
        """An empty buffer [slots, blocks per chunk, ...] for what `backward_input` keeps for `backward_weight`."""
        return self._of_kinds(lambda own: own.empty_kept(slots, x, microbatch))

    def forward(self, x: Tree, work: ChunkWork) -> Tree:
        """x through the blocks of a chunk; saves nothing."""
        steps = self.steps(work, BlockSteps.plain_step)
        if self.where:
            return self._run_blocks(0, work, steps, (x,))[1][0]
        one = lambda index, state: steps[ONE](index, work.chunk * self.per_chunk + index, 0, state)  # noqa: E731
        return lax.fori_loop(*(work.blocks or (0, self.per_chunk)), one, (x,))[0]

    def forward_stashing(
        self, x: Tree, work: ChunkWork, iterations=0, *, early: bool = False
    ) -> tuple[Tree, Tree, jax.Array, Tree]:
        """As `forward`, and writes each block's residuals and input to `work.stash`.

        Args:
          iterations: here and below, the iteration count of earlier loops; see `loops.counted_loop`.
          early: each value is written as soon as it can be (`early_stash.py`).

        Returns:
          (y, the stash's buffer, the iteration count, the records).
        """
        steps = self.steps(work, lambda own, work: own.forward_step(work, early=early), 1)
        state = (x, work.stash.buffer, work.records)
        iterations, (y, buffer, records) = self._run_blocks(iterations, work, steps, state)
        return y, buffer, iterations, records

    def backward(
        self, dy: Tree, work: ChunkWork, gradients: Tree, *, keep=None, iterations=0
    ) -> tuple[Tree, Tree, jax.Array, Tree]:
        """Gradients of a chunk, or of the range `work.blocks` of its blocks, last block first.

        Args:
          dy: gradient of the output of the last of these blocks.
          gradients: fp32 accumulators like `weights`, updated in place.
          keep: bool scalar; False in a bubble that runs its blocks anyway. Its gradients may have any value, including
            NaN, and are discarded. None: always True.

        Returns:
          (gradient of the first block's input, the accumulators, the iteration count, the records).
        """

        def step_of(own: BlockSteps, work: ChunkWork) -> Callable:
            backward = own.backward_step(dy, work, keep)

            def step(slot, place, zero, state):
                dy, *others = state
                dx, _, *others = backward(slot, place, zero, (dy, work.stash.buffer, *others))
                return dx, *others

            return step

        steps, state = self.steps(work, step_of, 1), (dy, gradients, work.records)
        iterations, (dx, gradients, records) = self._run_blocks(iterations, work, steps, state, backwards=True)
        return dx, gradients, iterations, records

    def forward_and_backward(
        self,
        x: Tree,
        dy: Tree,
        works: tuple[ChunkWork, ChunkWork],
        gradients: Tree,
        pairs: Sequence,
        slots: Sequence,
        iterations,
    ) -> tuple[Tree, Tree, Tree, Tree, jax.Array, Tree]:
        """`forward_stashing` and `backward`, which do not depend on each other, in one loop: a block of each an iteration.

        On GPUs the collectives of one run beside the matmuls of the other. Blocks of several kinds: see `run_pairs`.

        Args:
          x: the forward's input.
          dy: the backward's.
          works: of the forward and of the backward; they share a stash, and records. Both have blocks, as many, or neither.
          gradients: as for `backward`.
          pairs: the (forward's chunk, backward's chunk) that occur, Python ints.
          slots: the (forward's slot, backward's slot) that occur, if the stash is a `SlotApart`; else empty.

        Returns:
          (y, dx, the stash's buffer, the accumulators, the iteration count, the records).
        """
        if self.where or self.counts:
            return of_kinds_or_counts(self, (x, dy), works, gradients, pairs, iterations)

        residual = self.kinds[ONE].residual(x, works[0]) if slots else None

        def both(starts, slots, low, high, zero, state):
            ahead, back = (work.at_slot(slot) for work, slot in zip(works, slots, strict=True)) if slots else works
            write = self.kinds[ONE].forward_step(ahead, early=bool(slots), residual=residual)
            # With one stage: with several there are few blocks, and a gradient in two shardings is more memory. With ZeRO-3
            # XLA copies what it then saves.
            early = bool(slots) and self.kinds[ONE].timed and not self.kinds[ONE].gathers_weights
            read = self.kinds[ONE].backward_step(state[1], back, ahead=early)
            first, last = starts[0] * self.per_chunk, (starts[1] + 1) * self.per_chunk - 1
            if early:  # an iteration begins with dy: gathered in the one before, beside the weights' gradients
                x, dy, *others = state
                state = x, (dy, self.kinds[ONE].resharded(dy, back)), *others
            if residual:  # the first block finds its input where the last one will leave its residual, and adds 0
                x, dy, buffer, *others = state
                buffer = dataclasses.replace(ahead.stash, buffer=buffer).write_leaf(residual[1], self.per_chunk - 1, x)
                state = jnp.zeros_like(x), dy, buffer, *others

            def one(count, state):
                x, dy, buffer, gradients, records = state
                with jax.named_scope(BACKWARD):
                    block = self.per_chunk - 1 - count
                    dy, buffer, gradients, records = read(block, last - count, zero, (dy, buffer, gradients, records))
                # The forward writes after the backward's reads: in the other order XLA copies the whole stash. Its
                # scheduler has no reason to choose either (seen with jax 0.12 and profile-guided latencies).
                dy, buffer = (dy, buffer) if slots else lax.optimization_barrier((dy, buffer))
                with jax.named_scope(FORWARD):
                    x, buffer, records = write(count, first + count, zero, (x, buffer, records))
                return x, dy, buffer, gradients, records

            x, dy, *others = lax.fori_loop(low, high, one, state)
            return x, dy[0] if early else dy, *others

        state, (low, high) = (x, dy, works[0].stash.buffer, gradients, works[0].records), works[0].blocks
        bounds = self.ranges(works[0].parts)
        choices = [(*one, *part) for one in itertools.product(pairs, slots or [()]) for part in bounds]
        always = isinstance(high, int)
        if always and len(choices) == 1:
            iterations, state = iterations + self.per_chunk, both(*choices[0], 0, state)
        else:

            def holds(chunks, slots, start, stop):
                same = (works[0].chunk == chunks[0]) & (works[1].chunk == chunks[1]) & (low == start) & (high == stop)
                if not slots:
                    return same
                return same & (works[0].stash.slot == slots[0]) & (works[1].stash.slot == slots[1])

            index = which(holds(*choice) for choice in choices)
            branches = [functools.partial(both, *choice) for choice in choices]
            with jax.named_scope(MERGED):
                iterations, state = run_one_of(iterations, index, branches, state, always=always)
        x, dy, buffer, gradients, records = state
        x = self._last_residual(buffer, works[0].stash.slot, residual[1]) + x if residual else x
        return x, dy, buffer, gradients, iterations, records

    def _last_residual(self, buffer: Tree, slot: jax.Array, leaf: int) -> jax.Array:
        """What a chunk's last block has saved for a leaf in one of two slots; in a branch XLA would copy the slot."""
        first, second = (SlotApart(buffer, number).read_leaf(leaf, self.per_chunk - 1) for number in range(2))
        return jnp.where(slot == 0, first, second)

    def backward_input(
        self, dy: Tree, work: ChunkWork, gradients: Tree, iterations=0
    ) -> tuple[Tree, Tree, Tree, jax.Array, Tree]:
        """I: the gradients of a chunk's input, and of the weights whose gradient needs no matmul (biases, norms).

        Writes to `work.kept` the values that `backward_weight` needs in addition to the stash.

        Returns:
          (gradient of the chunk's input, the accumulators, the buffer of `work.kept`, the
          iteration count, the records).
        """
        steps = self.steps(work, lambda own, work: own.input_step(dy, work), 1, 2)
        state = (dy, gradients, work.kept.buffer, work.records)
        iterations, (dx, gradients, buffer, records) = self._run_blocks(iterations, work, steps, state, backwards=True)
        return dx, gradients, buffer, iterations, records

    def backward_weight(self, x: Tree, work: ChunkWork, gradients: Tree, iterations=0) -> tuple[Tree, jax.Array]:
        """W: the weight gradients that `backward_input` did not compute; only the type of `x` is read.

        Returns:
          (the accumulators, the iteration count).
        """
        steps = self.steps(work, lambda own, work: own.weight_step(x, work), 0)
        iterations, (gradients,) = self._run_blocks(iterations, work, steps, (gradients,))
        return gradients, iterations

    def _of_kinds(self, function: Callable[[BlockSteps], Tree]) -> Tree:
        """A tree of the stack: `function` of the blocks of each kind."""
        trees = {kind: function(own) for kind, own in self.kinds.items()}
        return trees if self.where else trees[ONE]

    def steps(self, work: ChunkWork, step_of: Callable, *apart: int) -> dict[str, Callable]:
        """For each kind `step_of(blocks, work)`: a step as `BlockSteps` has them, for the state of all kinds.

        `apart` are the elements of the state that are trees of the stack: the step gets and returns those of its kind.
        """
        if self.where is None:
            return {ONE: step_of(self.kinds[ONE], work)}

        def of(kind: str) -> Callable:
            step = step_of(self.kinds[kind], self._of_kind(work, kind))

            def run(slot, place, zero, state):
                state = list(state)
                new = step(slot, place, zero, [a[kind] if i in apart else a for i, a in enumerate(state)])
                return tuple({**state[i], kind: a} if i in apart else a for i, a in enumerate(new))

            return run

        return {kind: of(kind) for kind in self.kinds}

    def _of_kind(self, work: ChunkWork, kind: str) -> ChunkWork:
        """The work for one of several kinds: its part of the buffers, and a recorder that knows its blocks' places."""
        changes, own = {}, self.kinds[kind]
        for name in ("stash", "kept"):
            buffer = getattr(work, name).buffer
            changes[name] = dataclasses.replace(getattr(work, name), buffer=buffer[kind] if buffer else ())
        if work.recorder:
            first = work.chunk * self.per_chunk - jnp.array(self.where.firsts, jnp.int32)[work.stage]
            row = lambda place: first + own.blocks.number(work.stage, place % own.per_chunk)  # noqa: E731
            changes["recorder"] = dataclasses.replace(work.recorder, row=row)
        return dataclasses.replace(work, **changes)

    def _run_blocks(
        self, iterations, work: ChunkWork, steps: dict[str, Callable], state: tuple, *, backwards=False
    ) -> tuple[jax.Array, tuple]:
        """Runs the step of its kind for each block of `work.blocks`; for steps and state see `BlockSteps`.

        A loop over blocks of any chunk has an index that is known at run time only, so XLA copies each block's weights, and
        adds each gradient, in kernels of their own. With `in_place`, each chunk, each order of kinds in it, and each part of
        one, is a branch with loops whose trip counts and first blocks are known at compile time: XLA's matmuls then read the
        weights, and add to the gradients, where they are in the stacked arrays, and the host waits for the device once for a
        chunk instead of once for a block. If there is one choice and the range is known at compile time, there is no branch.

        Returns:
          (the iteration count, the final state).
        """
        low, high = (0, self.per_chunk) if work.blocks is None else work.blocks
        if not self.in_place:
            if self.counts:
                own = jnp.array(self.counts, jnp.int32)[work.stage]
                low, high = jnp.minimum(low, own), jnp.minimum(high, own)

            def one(count, zero, state):
                return self._run_one(high - 1 - count if backwards else low + count, work, steps, zero, state)

            return counted_loop(iterations, high - low, one, state)
        versions = next(iter(self.kinds.values())).chunks
        choices = self.choices(versions, work.parts, backwards=backwards)

        def branch(chunk, order, start, stop, zero, state):
            first = {kind: chunk * own.per_chunk for kind, own in self.kinds.items()}
            how = {"backwards": backwards, "unrolled": self.unrolled}
            return run_in_order(order, (start, stop), first, steps, zero, state, **how)

        always = isinstance(high, int)
        if always and len(choices) == 1:
            return iterations + high - low, branch(*choices[0], 0, state)

        def holds(chunk, order, start, stop):
            return (work.chunk == chunk) & (low == start) & (high == stop) & self.has_order(work, order)

        index = which(holds(*choice) for choice in choices)
        branches = [functools.partial(branch, *choice) for choice in choices]
        return run_one_of(iterations, index, branches, state, always=always)

    def has_order(self, work: ChunkWork, order: tuple[str, ...]) -> jax.Array | bool:
        """Whether the work's stage has this order of kinds, or number of blocks."""
        if self.counts:
            return jnp.array(self.counts, jnp.int32)[work.stage] == len(order)
        return self.where is None or self._order[work.stage] == self.where.orders.index(order)

    def _run_one(self, index: jax.Array, work: ChunkWork, steps: dict[str, Callable], zero, state: tuple) -> tuple:
        """Runs the block number `index` of a chunk: of several kinds with a loop of zero or one iteration for each."""
        chunk = work.chunk + zero
        if self.where is None:
            return steps[ONE](index, chunk * self.per_chunk + index, zero, state)
        number, slot = self._kinds[work.stage, index], self._slots[work.stage, index]
        for own, (kind, step) in enumerate(steps.items()):
            place = chunk * self.kinds[kind].per_chunk + slot
            run = lambda _, again, state: step(slot, place + again, zero + again, state)  # noqa: B023, E731
            with jax.named_scope(f"{KIND}{own}"):
                _, state = counted_loop(zero, (number == own).astype(jnp.int32), run, state)
        return state
