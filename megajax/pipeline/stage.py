"""Forward and backward of one chunk of blocks. The block is the unit of differentiation.

The forward of a chunk is a loop over its blocks. For block i it calls `jax.vjp(block, weights_i, x)` and writes to
the stash the block's input x and the residuals that `jax.vjp` saved beyond its arguments and the microbatch. Which
residuals these are, the block decides with `jax.checkpoint`. Weights are arguments, so the backward reads them from
where they are stored; they are never copied to the stash. The backward is a loop over the same blocks, last block first.
It rebuilds each VJP from the stash and adds the weight gradients to fp32 accumulators in place.

    forward     x ── block 0 ── block 1 ── ... ── y          stash[slot, i] = (residuals of block i, its input)
    backward   dx ── block 0 ── block 1 ── ... ── dy         gradients[chunk * blocks per chunk + i] += dw of block i
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from megajax.pipeline.block_vjp import VJPTemplate, saved_residuals
from megajax.pipeline.chunk_work import ChunkParts, ChunkWork
from megajax.pipeline.jaxprs import with_fp32_gradients
from megajax.pipeline.layout import fp32_zeros, vary
from megajax.pipeline.loops import counted_loop, run_one_of, which
from megajax.pipeline.options import MERGED
from megajax.pipeline.split_backward import Split, split_backward
from megajax.pipeline.stash import empty_stash
from megajax.pipeline.uneven import StageBlocks
from megajax.runtime.compat import vjp_residuals
from megajax.schedules.schedule import BACKWARD, FORWARD
from megajax.sharding.zero import ZeroSharding

Tree = Any


class Stack(ChunkParts):
    """The blocks of one rank, run by chunk.

    Attributes:
      block: `block(weights, x, microbatch, layer) -> x`; one block on one microbatch, x of [samples, sequence, hidden].
      weights: pytree of [local layers, ...], chunk after chunk; must vary over every manual mesh axis.
      per_chunk: slots for blocks in a chunk.
      cut: like weights, how each weight of a block is sharded over `data` (ZeRO-3). It is all-gathered when its block
        runs, and its gradient is reduce-scattered at once.
      in_place: XLA's matmuls and conditionals update arrays in place; see `_run_blocks`.
      unrolled: blocks are traced one after the other, without a loop; the stack has one chunk.
      blocks: the numbers of the stages' blocks.
    """

    def __init__(
        self,
        block: Callable,
        weights: Tree,
        per_chunk: int,
        *,
        cut: Tree | None = None,
        in_place: bool = False,
        unrolled: bool = False,
        counts: Sequence[int] | None = None,
    ):
        """Arguments: see above, and `counts` as of `StageBlocks`."""
        self.block, self.weights, self.per_chunk = block, weights, per_chunk
        self.in_place, self.unrolled = in_place, unrolled
        self.blocks = StageBlocks(per_chunk, counts)
        self.cut = jax.tree.map(lambda _: ZeroSharding(None, PartitionSpec()), weights) if cut is None else cut

    def empty_gradients(self) -> Tree:
        """Zero accumulators for `backward`: fp32, like the weights; with `unrolled` a tuple of those of each block.

        In a program without loops XLA adds a matmul's result in place to an array of its own, not to a part of one.
        """
        zeros = fp32_zeros(self.weights)
        return tuple(jax.tree.map(lambda a: a[0], zeros) for _ in range(self.per_chunk)) if self.unrolled else zeros

    def stacked_gradients(self, gradients: Tree) -> Tree:
        """Accumulators like those of `empty_gradients`, fp32 [local layers, ...]."""
        return jax.tree.map(lambda *blocks: jnp.stack(blocks), *gradients) if self.unrolled else gradients

    def empty_stash(self, slots: int, x: jax.Array, microbatch: Tree, *, on_host: bool = False) -> Tree:
        """An empty stash, (residuals, x) of [slots, blocks per chunk, ...].

        Args:
          slots: chunk activations to hold at once.
          x: a block's input, [samples, sequence, hidden]; only its type is read, as of `microbatch`.
          on_host: in host memory.
        """
        values = self._template(x, microbatch).saved, x
        return empty_stash(slots, self.per_chunk, values, on_host=on_host)

    def empty_kept(self, slots: int, x: jax.Array, microbatch: Tree) -> Tree:
        """An empty buffer [slots, blocks per chunk, ...] for what `backward_input` keeps for `backward_weight`."""

        def keep(x, microbatch, layer):
            vjp, weights = self._vjp(0, layer, x, microbatch)[1], self._weights(0)
            residuals = vjp_residuals(vjp)
            return self._split(VJPTemplate(vjp, ()), residuals, weights, x).input(residuals, weights, x, x)[2]

        shapes = jax.eval_shape(keep, x, microbatch, vary(jnp.zeros((), jnp.int32)))
        return empty_stash(slots, self.per_chunk, shapes)

    def forward(self, x: jax.Array, work: ChunkWork) -> jax.Array:
        """x of [samples, sequence, hidden] through the blocks of a chunk; saves nothing."""

        def step(index, x):
            weights = self._weights(work.chunk * self.per_chunk + index)
            y = self.block(weights, x, work.microbatch, self.blocks.number(work.stage, index))
            return self.blocks.select(work.stage, index, y, x)

        return lax.fori_loop(*(work.blocks or (0, self.per_chunk)), step, x)

    def forward_stashing(self, x: jax.Array, work: ChunkWork, iterations=0) -> tuple[jax.Array, Tree, jax.Array, Tree]:
        """As `forward`, and writes each block's residuals and input to `work.stash`.

        Args:
          iterations: here and below, the iteration count of earlier loops; see `loops.counted_loop`.

        Returns:
          (y of [samples, sequence, hidden], the stash's buffer, the iteration count, the records).
        """
        state = (x, work.stash.buffer, work.records)
        iterations, (y, buffer, records) = self._run_blocks(iterations, work, self.forward_step(work), state)
        return y, buffer, iterations, records

    def backward(
        self, dy: jax.Array, work: ChunkWork, gradients: Tree, *, keep=None, iterations=0
    ) -> tuple[jax.Array, Tree, jax.Array, Tree]:
        """Gradients of a chunk, or of the range `work.blocks` of its blocks, last block first.

        Args:
          dy: gradient of the output of the last of these blocks, [samples, sequence, hidden].
          gradients: fp32 accumulators like `weights`, updated in place.
          keep: bool scalar; False in a bubble that runs its blocks anyway. Its gradients may have any value, including
            NaN, and are discarded. None: always True.

        Returns:
          (gradient of the first block's input, the accumulators, the iteration count, the records).
        """
        backward = self.backward_step(dy, work, keep)

        def step(index, place, zero, state):
            return backward(index, place, zero, (state[0], work.stash.buffer, *state[1:]))

        state = (dy, gradients, work.records)
        iterations, (dx, gradients, records) = self._run_blocks(iterations, work, step, state, backwards=True)
        return dx, gradients, iterations, records

    def forward_and_backward(
        self,
        x: jax.Array,
        dy: jax.Array,
        works: tuple[ChunkWork, ChunkWork],
        gradients: Tree,
        pairs: Sequence,
        iterations,
    ) -> tuple[jax.Array, jax.Array, Tree, Tree, jax.Array, Tree]:
        """`forward_stashing` and `backward`, which do not depend on each other, in one loop: a block of each an iteration.

        On GPUs the collectives of one run beside the matmuls of the other.

        Args:
          x: the forward's input, [samples, sequence, hidden].
          dy: the backward's.
          works: of the forward and of the backward; they share a stash, and records. Both have blocks, as many, or neither.
          gradients: as for `backward`.
          pairs: the (forward's chunk, backward's chunk) that occur, Python ints.

        Returns:
          (y, dx, the stash's buffer, the accumulators, the iteration count, the records).
        """
        write, read = self.forward_step(works[0]), self.backward_step(dy, works[1])

        def both(starts, low, high, zero, state):
            first, last = starts[0] * self.per_chunk, (starts[1] + 1) * self.per_chunk - 1

            def one(count, state):
                x, dy, buffer, gradients, records = state
                with jax.named_scope(BACKWARD):
                    back = self.per_chunk - 1 - count
                    dy, gradients, records = read(back, last - count, zero, (dy, buffer, gradients, records))
                # The forward writes after the backward's reads: in the other order XLA copies the whole stash. Its
                # scheduler has no reason to choose either (seen with jax 0.12 and profile-guided latencies).
                dy, buffer = lax.optimization_barrier((dy, buffer))
                with jax.named_scope(FORWARD):
                    x, buffer, records = write(count, first + count, zero, (x, buffer, records))
                return x, dy, buffer, gradients, records

            return lax.fori_loop(low, high, one, state)

        state, (low, high) = (x, dy, works[0].stash.buffer, gradients, works[0].records), works[0].blocks
        choices = [(pair, *bounds) for pair in pairs for bounds in self.ranges(works[0].parts)]
        always = isinstance(high, int)
        if always and len(choices) == 1:
            iterations, state = iterations + self.per_chunk, both(*choices[0], 0, state)
        else:
            forward, backward = (work.chunk for work in works)
            index = which(
                (forward == pair[0]) & (backward == pair[1]) & (low == start) & (high == stop)
                for pair, start, stop in choices
            )
            branches = [functools.partial(both, *choice) for choice in choices]
            with jax.named_scope(MERGED):
                iterations, state = run_one_of(iterations, index, branches, state, always=always)
        x, dy, buffer, gradients, records = state
        return x, dy, buffer, gradients, iterations, records

    def backward_input(
        self, dy: jax.Array, work: ChunkWork, gradients: Tree, iterations=0
    ) -> tuple[jax.Array, Tree, Tree, jax.Array, Tree]:
        """I: the gradients of a chunk's input, and of the weights whose gradient needs no matmul (biases, norms).

        Writes to `work.kept` the values that `backward_weight` needs in addition to the stash.

        Returns:
          (gradient of the chunk's input [samples, sequence, hidden], the accumulators, the buffer of `work.kept`, the
          iteration count, the records).
        """
        state, step = (dy, gradients, work.kept.buffer, work.records), self.input_step(dy, work)
        iterations, (dx, gradients, buffer, records) = self._run_blocks(iterations, work, step, state, backwards=True)
        return dx, gradients, buffer, iterations, records

    def backward_weight(self, x: jax.Array, work: ChunkWork, gradients: Tree, iterations=0) -> tuple[Tree, jax.Array]:
        """W: the weight gradients that `backward_input` did not compute; only the type of `x` is read.

        Returns:
          (the accumulators, the iteration count).
        """
        iterations, gradients = self._run_blocks(iterations, work, self.weight_step(x, work), gradients)
        return gradients, iterations

    def forward_step(self, work: ChunkWork) -> Callable:
        """`step(index, place, zero, (x, stash's buffer, records))`: a block's forward, which writes to the stash."""

        def step(index, place, zero, state):
            x, buffer, records = state
            y, vjp = self._vjp(place, self.blocks.number(work.stage, index), x, work.microbatch)
            y = self.blocks.select(work.stage, index, y, x)
            stash = dataclasses.replace(work.stash, buffer=buffer)
            records = work.record(records, place, input=x, output=y)
            return y, stash.write(index, (saved_residuals(vjp, work.microbatch), x)), records

        return step

    def backward_step(self, dy: jax.Array, work: ChunkWork, keep=None) -> Callable:
        """`step(index, place, zero, (dy, stash's buffer, gradients, records)) -> (dx, gradients, records)`, of a block."""
        template = self._template(dy, work.microbatch)

        def step(index, place, zero, state):
            dy, buffer, gradients, records = state
            saved = self._saved(
                index,
                place,
                dataclasses.replace(work, stash=dataclasses.replace(work.stash, buffer=buffer)),
                template,
                zero,
            )
            dw, dx = self._backward(template.backward, *saved, dy)
            dx = self.blocks.select(work.stage, index, dx, dy)

            def add(total, new, cut):
                new = cut.scatter(new.astype(total.dtype))
                return self._add_at(total, place, new if keep is None else jnp.where(keep, new, 0))

            records = work.record(records, place, output_gradient=dy, input_gradient=dx)
            if not self.unrolled:
                return dx, jax.tree.map(add, gradients, dw, self.cut), records
            new = jax.tree.map(add, gradients[place], dw, self.cut)
            return dx, (*gradients[:place], new, *gradients[place + 1 :]), records

        return step

    def input_step(self, dy: jax.Array, work: ChunkWork) -> Callable:
        """`step(index, place, zero, (dy, gradients, buffer of work.kept, records))`: a block's I."""
        template = self._template(dy, work.microbatch)

        def step(index, place, zero, state):
            dy, gradients, buffer, records = state
            residuals, weights, x = self._saved(index, place, work, template, zero)
            split = self._split(template, residuals, weights, x)
            dx, early, new = split.input(residuals, weights, x, dy)
            buffer = dataclasses.replace(work.kept, buffer=buffer).write(index, new)
            dx = self.blocks.select(work.stage, index, dx, dy)
            records = work.record(records, place, output_gradient=dy, input_gradient=dx)
            return dx, self._add(gradients, early, place, split.is_late, False), buffer, records

        return step

    def weight_step(self, x: jax.Array, work: ChunkWork) -> Callable:
        """`step(index, place, zero, gradients) -> gradients`: a block's W."""
        template = self._template(x, work.microbatch)

        def step(index, place, zero, gradients):
            residuals, weights, x = self._saved(index, place, work, template, zero)
            split = self._split(template, residuals, weights, x)
            kept = work.kept.read(index, zero)
            late, _ = self._backward(lambda *saved: (split.weight(*saved), ()), residuals, weights, x, kept)
            return self._add(gradients, late, place, split.is_late, True)

        return step

    def _run_blocks(
        self, iterations, work: ChunkWork, step: Callable, state: Tree, *, backwards=False
    ) -> tuple[jax.Array, Tree]:
        """Runs `step(index, place, zero, state) -> state` for each block of `work.blocks`.

        `index` is the block's number in the chunk and `place` its index in `weights`.

        A loop over blocks of any chunk has an index that is known at run time only, so XLA copies each block's weights, and
        adds each gradient, in kernels of their own. With `in_place`, each chunk, and each part of one, is a branch with a
        loop whose trip count and first block are known at compile time: XLA's matmuls then read the weights, and add to the
        gradients, where they are in the stacked arrays, and the host waits for the device once for a chunk instead of once
        for a block. If there is one chunk and the range is known at compile time, there is no branch.

        Returns:
          (the iteration count, the final state).
        """
        chunk, (low, high) = work.chunk, (0, self.per_chunk) if work.blocks is None else work.blocks
        if not self.in_place:

            def one(count, zero, state):
                index = high - 1 - count if backwards else low + count
                return step(index, (chunk + zero) * self.per_chunk + index, zero, state)

            return counted_loop(iterations, high - low, one, state)

        def several(first, low, high, zero, state):
            def one(count, state):
                index = high - 1 - count if backwards else low + count
                return step(index, first + high - 1 - count if backwards else first + low + count, zero, state)

            if self.unrolled:
                return functools.reduce(lambda state, count: one(count, state), range(high - low), state)
            return lax.fori_loop(0, high - low, one, state)

        layers, always = jax.tree.leaves(self.weights)[0].shape[0], isinstance(high, int)
        if always and layers == self.per_chunk:
            return iterations + high - low, several(0, low, high, 0, state)
        ranges = self.ranges(work.parts, backwards=backwards)
        choices = [(first, start, stop) for first in range(0, layers, self.per_chunk) for start, stop in ranges]
        index = which(
            (chunk * self.per_chunk == first) & (low == start) & (high == stop) for first, start, stop in choices
        )
        branches = [functools.partial(several, *choice) for choice in choices]
        return run_one_of(iterations, index, branches, state, always=always)

    def _backward(self, backward: Callable, *arguments: Tree) -> tuple[Tree, Tree]:
        """`backward(*arguments) -> (gradients, others)`; with `in_place`, gradients that are matmuls are in fp32."""
        if not self.in_place:
            return backward(*arguments)
        leaves, structure = jax.tree.flatten(arguments)
        gradients, others = jax.eval_shape(backward, *arguments)
        count, results = len(jax.tree.leaves(gradients)), jax.tree.structure((gradients, others))
        flat = lambda *leaves: jax.tree.leaves(backward(*jax.tree.unflatten(structure, leaves)))  # noqa: E731
        return jax.tree.unflatten(results, with_fp32_gradients(flat, count, *leaves))

    def _split(self, template: VJPTemplate, residuals: Tree, weights: Tree, x: jax.Array) -> Split:
        """The block's backward as I and W. A gradient has the type of its primal, so `x` is the example of dy too."""
        return split_backward(template.backward, residuals, weights, x, x)

    def _saved(self, index, place, work: ChunkWork, template: VJPTemplate, zero) -> tuple[Tree, Tree, jax.Array]:
        """The arguments of a block's backward: residuals, weights, and the block's input."""
        saved, x = work.stash.read(index, zero)
        return template.residuals(saved, work.microbatch), self._weights(place), x

    def _weights(self, index) -> Tree:
        """The weights of one block, all-gathered over `data` where they are sharded over it."""
        one = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), self.weights)
        return jax.tree.map(lambda leaf, cut: cut.gather(leaf), one, self.cut)

    def _add(self, totals: Tree, new: list, place, is_late: Tree, late: bool) -> Tree:
        """Adds the gradients `new`, in order, to the accumulators whose flag in `is_late` equals `late`."""
        values = iter(new)

        def add(total, flag, cut):
            return self._add_at(total, place, cut.scatter(next(values).astype(total.dtype))) if flag == late else total

        return jax.tree.map(add, totals, is_late, self.cut)

    def _vjp(self, index, layer, x, microbatch):
        return jax.vjp(lambda weights, x: self.block(weights, x, microbatch, layer), self._weights(index), x)

    def _add_at(self, total: jax.Array, place, new: jax.Array) -> jax.Array:
        """`total[place] += new`. With `in_place` nothing may stand between a matmul and this addition."""
        if self.unrolled:
            return total + new
        if not self.in_place:
            return total.at[place].add(new)
        sum_ = lax.dynamic_index_in_dim(total, place, 0, keepdims=False) + new
        return lax.dynamic_update_slice(total, sum_[None], (place, *[0] * new.ndim))

    def _template(self, x, microbatch) -> VJPTemplate:
        return VJPTemplate.of(lambda x, microbatch, layer: self._vjp(0, layer, x, microbatch)[1], x, microbatch)
