"""A chunk of blocks, forwards and backwards: the block is the unit of differentiation.

The forward keeps in the *stash* what each block's backward needs: its input, and whatever `jax.vjp` saves beyond its
arguments (what that is, the block decides through `jax.checkpoint`). Weights are arguments, so they are read again from
where they lie and never copied into the stash.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from megajax.pipeline.split_backward import Split, split_backward
from megajax.runtime.compat import rebuild_vjp, vjp_residuals
from megajax.sharding.zero import ZeroSharding

Tree = Any
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Stack:
    """The blocks of one rank, run by chunk.

    Attributes:
      block: `block(weights, x, microbatch, layer) -> x`, one block on one microbatch.
      weights: pytree of [local layers, ...], chunk after chunk; must vary over every manual mesh axis.
      per_chunk: blocks in a chunk.
      cut: like weights, `ZeroSharding`s of a block's weights over `data`. They are put together when the block runs, and the
        gradients summed and cut again at once (ZeRO-3).
      offload: whether the stash lies in the host's memory; a block's part goes there and comes back on its own.
      parts: the most parts that a backward is cut into; see `run_of`.
      separate: each block's weights as arrays of their own, which matmuls read where they are; empty where blocks take
        turns in one loop, that copies each block's weights out of the stack (XLA's matmuls take whole arrays).
    """

    def __init__(
        self,
        block: Callable,
        weights: Tree,
        per_chunk: int,
        cut: Tree | None = None,
        *,
        offload: bool = False,
        unroll: bool = False,
        parts: int = 1,
    ):
        """Wraps the stack; nothing is copied, but for separate arrays."""
        self.block, self.weights, self.per_chunk, self.offload = block, weights, per_chunk, offload
        self.parts, self.separate = parts, []
        if unroll:
            layers = range(jax.tree.leaves(weights)[0].shape[0])
            whole = lax.optimization_barrier(
                weights
            )  # or XLA casts the parts, and gathers (ZeRO-1) what is not cast yet
            self.separate = [jax.tree.map(lambda leaf: leaf[layer], whole) for layer in layers]  # noqa: B023
        self.cut = jax.tree.map(lambda _: ZeroSharding(None, PartitionSpec()), weights) if cut is None else cut

    def empty_stash(self, slots: int, x: jax.Array, microbatch: Tree) -> Tree:
        """Zeros of [slots, blocks per chunk, ...] for one block's residuals and its input `x`; structure only is read."""

        def empty(leaf):
            shape = (slots, self.per_chunk, *leaf.shape)
            if not self.offload:
                return jnp.zeros(shape, leaf.dtype)
            # One number, repeated there: XLA then makes room in the host's memory and copies nothing.
            return jnp.broadcast_to(jax.device_put(jnp.zeros([1] * len(shape), leaf.dtype), HOST), shape)

        return jax.tree.map(empty, (vjp_residuals(self._template(x, microbatch)), x))

    def _write(self, stash: Tree, slot, index, values: Tree) -> Tree:
        """One block's values into its place, in place."""

        def write(whole, new):
            if not self.offload:
                return whole.at[slot, index].set(new)
            new = jax.device_put(new[None, None], HOST)
            return lax.dynamic_update_slice(whole, new, (slot, index, *[0] * (new.ndim - 2)))

        return jax.tree.map(write, stash, values)

    def _read(self, stash: Tree, slot, index) -> Tree:
        """What `_write` wrote."""

        def read(whole):
            if not self.offload:
                return whole[slot, index]
            place = (slot, index, *[0] * (whole.ndim - 2))
            return jax.device_put(lax.dynamic_slice(whole, place, (1, 1, *whole.shape[2:])), DEVICE)[0, 0]

        return jax.tree.map(read, stash)

    def forward(self, x: jax.Array, microbatch: Tree, chunk, stage) -> jax.Array:
        """x of [samples, sequence, hidden] through a chunk; keeps nothing."""

        def step(index, x):
            weights = self._weights(chunk * self.per_chunk + index)
            return self.block(weights, x, microbatch, stage * self.per_chunk + index)

        return lax.fori_loop(0, self.per_chunk, step, x)

    def forward_stashing(
        self, x: jax.Array, microbatch: Tree, chunk, stage, stash: Tree, slot, blocks=None, turns=0
    ) -> tuple[jax.Array, Tree, jax.Array]:
        """As `forward`, writing each block's residuals into `stash[slot, block]` in place.

        Args:
          blocks: how many blocks to run where that is decided at run time: all, or none in a bubble.
          turns: a count, here and below; see `counted_loop`.
        """

        def step(index, place, zero, carry):
            x, stash = carry
            y, vjp = self._vjp(place, stage * self.per_chunk + index, x, microbatch)
            return y, self._write(stash, slot, index, (vjp_residuals(vjp), x))

        run = 0, self.per_chunk if blocks is None else blocks
        turns, (y, stash) = self._each(turns, chunk, run, step, (x, stash))
        return y, stash, turns

    def backward(
        self,
        dy: jax.Array,
        microbatch: Tree,
        chunk,
        stash: Tree,
        slot,
        gradients: Tree,
        *,
        keep=None,
        blocks=None,
        turns=0,
    ) -> tuple[jax.Array, Tree, jax.Array]:
        """Gradient of a chunk, or of a run of its blocks, last block first.

        Args:
          dy: gradient of what the (run of the) chunk put out, [samples, sequence, hidden].
          gradients: fp32 accumulators like `weights`; added to in place.
          keep: bool scalar: whether this is real work. A bubble's gradients may be anything, NaN too, and are dropped.
            None: it always is.
          blocks: (low, high), the run of the chunk's blocks, where that is decided at run time; none in a bubble.

        Returns:
          gradient of the input, the accumulators, and turns.
        """
        template = self._template(dy, microbatch)

        def step(index, place, zero, carry):
            dy, gradients = carry
            residuals, weights, x = self._stashed(index, place, stash, slot, zero)
            dw, dx = rebuild_vjp(template, residuals, (weights, x))(dy)

            def add(total, new, cut):
                new = cut.scatter(new.astype(total.dtype))
                return total.at[place].add(new if keep is None else jnp.where(keep, new, 0))

            return dx, jax.tree.map(add, gradients, dw, self.cut)

        run = (0, self.per_chunk) if blocks is None else blocks
        turns, (dx, gradients) = self._each(turns, chunk, run, step, (dy, gradients), backwards=True)
        return dx, gradients, turns

    def empty_kept(self, slots: int, x: jax.Array, microbatch: Tree) -> Tree:
        """Zeros of [slots, blocks per chunk, ...] for what `backward_input` leaves for `backward_weight`."""

        def keep(x, microbatch, layer):
            vjp, weights = self._vjp(0, layer, x, microbatch)[1], self._weights(0)
            residuals = vjp_residuals(vjp)
            return self._split(vjp, residuals, weights, x).input(residuals, weights, x, x)[2]

        shapes = jax.eval_shape(keep, x, microbatch, jnp.zeros((), jnp.int32))
        return [jnp.zeros((slots, self.per_chunk, *leaf.shape), leaf.dtype) for leaf in shapes]

    def backward_input(
        self,
        dy: jax.Array,
        microbatch: Tree,
        chunk,
        stash: Tree,
        slot,
        gradients: Tree,
        kept: Tree,
        kept_slot,
        blocks,
        turns,
    ) -> tuple[jax.Array, Tree, Tree, jax.Array]:
        """I: the gradient of a chunk's input, and of the weights that take no matmul.

        What `backward_weight` needs beside the stash goes to `kept[kept_slot, block]`. `blocks`: all, or none in a bubble.
        """
        template = self._template(dy, microbatch)

        def step(index, place, zero, carry):
            dy, gradients, kept = carry
            residuals, weights, x = self._stashed(index, place, stash, slot, zero)
            split = self._split(template, residuals, weights, x)
            dx, early, new = split.input(residuals, weights, x, dy)
            kept = [whole.at[kept_slot, index].set(value) for whole, value in zip(kept, new, strict=True)]
            return dx, self._add(gradients, early, place, split.is_late, False), kept

        state = (dy, gradients, kept)
        turns, (dx, gradients, kept) = self._each(turns, chunk, (0, blocks), step, state, backwards=True)
        return dx, gradients, kept, turns

    def backward_weight(
        self,
        x: jax.Array,
        microbatch: Tree,
        chunk,
        stash: Tree,
        slot,
        gradients: Tree,
        kept: Tree,
        kept_slot,
        blocks,
        turns,
    ) -> tuple[Tree, jax.Array]:
        """W: the gradients of a chunk's weights that `backward_input` left; of `x` only the type is read."""
        template = self._template(x, microbatch)

        def step(index, place, zero, gradients):
            residuals, weights, x = self._stashed(index, place, stash, slot, zero)
            split = self._split(template, residuals, weights, x)
            late = split.weight(residuals, weights, x, [whole[kept_slot + zero, index] for whole in kept])
            return self._add(gradients, late, place, split.is_late, True)

        turns, gradients = self._each(turns, chunk, (0, blocks), step, gradients)
        return gradients, turns

    def _each(self, turns, chunk, run, step: Callable, state: Tree, *, backwards=False) -> tuple[jax.Array, Tree]:
        """`step(index, place, zero, state)` for each block of a run (low, high) of a chunk's; and `turns` (`counted_loop`).

        `place` is where the block lies among the weights. With separate arrays that has to be known in advance: each chunk,
        and each part of one, is then a loop of one turn or none, of as many blocks; or just these, if there is no other.
        """
        low, high = run
        if not self.separate:

            def one(count, zero, state):
                index = high - 1 - count if backwards else low + count
                return step(index, (chunk + zero) * self.per_chunk + index, zero, state)

            return counted_loop(turns, high - low, one, state)

        def several(first, low, high, zero, state):
            for index in reversed(range(low, high)) if backwards else range(low, high):
                state = step(index, first + index, zero, state)
            return state

        if len(self.separate) == self.per_chunk and isinstance(high, int):
            return turns + high - low, several(0, low, high, 0, state)
        parts = [self.run_of(part, self.parts) for part in range(self.parts)] if backwards else [(0, self.per_chunk)]
        for first in range(0, len(self.separate), self.per_chunk):
            for start, stop in filter(lambda part: part[0] < part[1], parts):
                here = (chunk * self.per_chunk == first) & (low <= start) & (stop <= high)
                turns, state = counted_loop(
                    turns,
                    jnp.asarray(here, jnp.int32),
                    lambda _, zero, state: several(first, start, stop, zero, state),  # noqa: B023
                    state,
                )
        return turns, state

    def _split(self, template, residuals: Tree, weights: Tree, x: jax.Array) -> Split:
        """The block's backward in two; a gradient has the type of what it is the gradient of."""
        return split_backward(lambda r, w, x, dy: rebuild_vjp(template, r, (w, x))(dy), residuals, weights, x, x)

    def run_of(self, part, parts) -> tuple[jax.Array, jax.Array]:
        """(low, high) blocks of part `part` of `parts` of a backward: the last blocks are part 0, and as many or more."""
        bound = lambda part: self.per_chunk - -(-self.per_chunk * part // parts)  # noqa: E731
        return bound(part + 1), bound(part)

    def _stashed(self, index, place, stash: Tree, slot, zero) -> tuple[Tree, Tree, jax.Array]:
        """What a block's backward starts from: residuals, weights, and input."""
        residuals, x = self._read(stash, slot + zero, index)
        return residuals, self._weights(place), x

    def _weights(self, index) -> Tree:
        if self.separate:
            return self.separate[index]
        one = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), self.weights)
        return jax.tree.map(lambda leaf, cut: cut.gather(leaf), one, self.cut)

    def _add(self, totals: Tree, new: list, place, is_late: Tree, late: bool) -> Tree:
        """Adds the next of `new` at `place` of each total whose flag in `is_late` is `late`."""
        values = iter(new)

        def add(total, flag, cut):
            return total.at[place].add(cut.scatter(next(values).astype(total.dtype))) if flag == late else total

        return jax.tree.map(add, totals, is_late, self.cut)

    def _vjp(self, index, layer, x, microbatch):
        return jax.vjp(lambda weights, x: self.block(weights, x, microbatch, layer), self._weights(index), x)

    def _template(self, x, microbatch):
        """The VJP object's structure, with shapes for leaves. Two traces of a block give the same one."""
        layer = jnp.zeros((), jnp.int32)
        return jax.eval_shape(lambda x, microbatch, layer: self._vjp(0, layer, x, microbatch)[1], x, microbatch, layer)


def counted_loop(turns, count, step: Callable, state: Tree) -> tuple[jax.Array, Tree]:
    """`lax.fori_loop` from 0 to `count`, for loops that may take no turn; and `turns` plus those it took.

    Nobody knows the sum before the loop's end. `step(index, zero, state)` gets a number that is 0 and that XLA takes for one
    that changes from turn to turn. Work that depends on it stays in the loop; other work that is the same in all turns XLA
    does once before the loop, so even where there is no turn.
    """

    def counted(index, counted_state):
        turns, zero, state = counted_state
        return turns + 1, zero + jnp.minimum(turns, 0), step(index, zero, state)

    turns = jnp.asarray(turns, jnp.int32)
    turns, _, state = lax.fori_loop(0, count, counted, (turns, jnp.zeros_like(turns), state))
    return turns, state


def held(zero: jax.Array, values: Tree) -> Tree:
    """The values, which XLA takes for others in each turn of the `counted_loop` whose `zero` it is."""
    return jax.tree.map(lambda value: jnp.where(zero == 0, value, jnp.zeros_like(value)), values)
