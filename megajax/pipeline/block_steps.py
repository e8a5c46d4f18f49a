"""One block in each operation of a tick: forward, backward, and its parts I and W. The block is the unit of differentiation.

The forward calls `jax.vjp(block, weights, x)` and writes to the stash the block's input x and the residuals that `jax.vjp`
saved beyond its arguments and the microbatch. Which residuals these are, the block decides with `jax.checkpoint`. Weights
are arguments, so the backward reads them from where they are stored; they are never copied to the stash. The backward
rebuilds the VJP from the stash and adds the weight gradients to fp32 accumulators in place.

Weights that are not trained (`trained.py`) are no arguments of the VJP, but are not copied to the stash either: the backward
reads those that it needs as the forward does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from megajax.pipeline.block_vjp import VJPTemplate, saved_residuals
from megajax.pipeline.chunk_work import ChunkWork
from megajax.pipeline.early_stash import saved_residual, stash_as_computed, stash_at_end
from megajax.pipeline.jaxprs import Addend, fp32_gradients, freed_arguments, reading_in_place, resharding
from megajax.pipeline.layout import fp32_zeros, in_row_major, vary
from megajax.pipeline.norm_equations import with_merged_norms
from megajax.pipeline.options import ExecutorOptions
from megajax.pipeline.split_backward import Split, split_backward
from megajax.pipeline.stash import SlotApart, StashRef, empty_stash
from megajax.pipeline.trained import merge, only_trained, split
from megajax.pipeline.uneven import StageBlocks
from megajax.runtime.compat import vjp_residuals
from megajax.sharding.zero import ZeroSharding

Tree = Any


class BlockSteps:
    """The blocks of one kind on one rank, and a step of each operation on one of them.

    A step is `step(slot, place, zero, state) -> state`: `slot` is the block's number among those of its kind in the chunk,
    `place` its index in `weights`, `zero` as for `loops.counted_loop`, and `state` a tuple.

    Attributes:
      block: `block(weights, x, microbatch, layer) -> x`; one block on one microbatch.
      weights: pytree of [local layers, ...], chunk after chunk; must vary over every manual mesh axis.
      blocks: the numbers of the stages' blocks.
      cut: like weights, how each weight of a block is sharded over `data` (ZeRO-3). It is all-gathered when its block
        runs, and its gradient is reduce-scattered at once. None: no weight is.
      trained: mask of the weights that have gradients (`trained.py`). None: all.
      in_place, unrolled, timed, serial: of `ExecutorOptions`; `serial_collectives` there.
      per_chunk: slots for blocks in a chunk.
    """

    def __init__(
        self,
        block: Callable,
        weights: Tree,
        blocks: StageBlocks,
        *,
        cut: Tree | None,
        trained: Tree | None,
        options: ExecutorOptions,
    ):
        """Arguments: see above."""
        self.block, self.weights, self.blocks, self.per_chunk = block, weights, blocks, blocks.slots
        self.in_place, self.unrolled, self.timed = options.in_place, options.unrolled, options.timed
        self.serial, self.trained = options.serial_collectives, trained
        self.cut = jax.tree.map(lambda _: ZeroSharding(None, PartitionSpec()), weights) if cut is None else cut
        self.trained_cut = only_trained(self.cut, trained)

    @property
    def chunks(self) -> int:
        """How many chunks the rank has, or versions of one (`pipedream_2bw`)."""
        return jax.tree.leaves(self.weights)[0].shape[0] // self.per_chunk

    @property
    def gathers_weights(self) -> bool:
        """Whether replicas gather a block's weights when it runs: ZeRO-3."""
        return any(cut.axis is not None for cut in _cuts(self.cut))

    def empty_gradients(self) -> Tree:
        """As `Stack.empty_gradients`."""
        zeros = fp32_zeros(only_trained(self.weights, self.trained))
        return tuple(jax.tree.map(lambda a: a[0], zeros) for _ in range(self.per_chunk)) if self.unrolled else zeros

    def empty_stash(self, slots: int, x: Tree, microbatch: Tree, *, on_host: bool) -> Tree:
        """As `Stack.empty_stash`."""
        values = self._template(x, microbatch).saved, x
        return empty_stash(slots, self.per_chunk, values, on_host=on_host)

    def freed(self, x: Tree, microbatch: Tree) -> frozenset[int]:
        """Which leaves of what a forward saves a backward's kernel reads last, in their stack (`jaxprs.freed_arguments`)."""
        if not self.in_place or self.gathers_weights:
            return frozenset()
        template, (weights, frozen) = self._template(x, microbatch), self._weights(0)
        zeros = jax.tree.map(lambda leaf: vary(jnp.zeros(leaf.shape, leaf.dtype)), (template.saved, x))
        leaves, structure = jax.tree.flatten(zeros)

        def backward(*leaves):
            saved, x = structure.unflatten(leaves)
            residuals = template.residuals(saved, (microbatch, frozen))
            return jax.tree.leaves(template.backward(residuals, weights, x, x))

        return freed_arguments(backward, *leaves)

    def empty_kept(self, slots: int, x: Tree, microbatch: Tree) -> Tree:
        """As `Stack.empty_kept`."""

        def keep(x, microbatch, layer):
            vjp, weights = self._vjp(0, layer, x, microbatch)[1], self._weights(0)[0]
            residuals = vjp_residuals(vjp)
            return self._split(VJPTemplate(vjp, (), self.serial), residuals, weights, x).input(
                residuals, weights, x, x
            )[2]

        shapes = jax.eval_shape(keep, x, microbatch, vary(jnp.zeros((), jnp.int32)))
        return empty_stash(slots, self.per_chunk, shapes)

    def plain_step(self, work: ChunkWork) -> Callable:
        """The forward, state (x,); saves nothing."""

        def step(slot, place, zero, state):
            (x,), weights = state, self._weights(place)
            y = self.block(merge(*weights), x, work.microbatch, self.blocks.number(work.stage, slot))
            return (self.blocks.select(work.stage, slot, y, x),)

        return step

    def residual(self, x: Tree, work: ChunkWork) -> tuple[int, int] | None:
        """`residual` of `early_stash.stash_as_computed` for a loop over all blocks; None: blocks return whole sums."""
        if work.recorder or self.gathers_weights or self.blocks.counts is not None or len(jax.tree.leaves(x)) > 1:
            return None
        arguments = self._weights(0), x, work.microbatch, vary(jnp.zeros((), jnp.int32))
        number = len(jax.tree.leaves(arguments[0]))
        leaves, structure = jax.tree.flatten(arguments)
        place = saved_residual(lambda *leaves: self._saving(*structure.unflatten(leaves)), leaves, number)
        return None if place is None else (number, place)

    def forward_step(
        self, work: ChunkWork, *, early: bool = False, residual: tuple[int, int] | None = None
    ) -> Callable:
        """The forward, state (x, the stash's buffer, records); writes to the stash, if `early` as soon as it can
        (`early_stash.py`), but for ZeRO-3: XLA then gathers weights later. With `residual` x is what is added to it.
        """
        early = early and not self.gathers_weights

        def step(slot, place, zero, state):
            x, buffer, records = state
            number, stash = self.blocks.number(work.stage, slot), dataclasses.replace(work.stash, buffer=buffer)
            y, buffer = self._stash(place, number, x, work.microbatch, stash, slot, early, residual)
            y = self.blocks.select(work.stage, slot, y, x)
            return y, buffer, work.record(records, place, input=x, output=y)

        return step

    def backward_step(self, dy: Tree, work: ChunkWork, keep=None, *, ahead: bool = False) -> Callable:
        """The backward, state (dy, the stash's buffer, gradients, records).

        If `ahead`, the state has (dy, what `resharded` returns for it) in place of dy.
        """
        template = self._template(dy, work.microbatch)

        def step(slot, place, zero, state):
            dy, buffer, gradients, records = state
            dy, known = dy if ahead else (dy, None)
            stashed = dataclasses.replace(work, stash=dataclasses.replace(work.stash, buffer=buffer))
            saved, stacks = self._saved(slot, place, stashed, template, zero)
            freed: list[jax.Array] = []
            dw, dx = self._backward(template.backward, *saved, dy, stacks=stacks, ahead=known, freed=freed)
            if isinstance(work.stash, SlotApart) and work.stash.shared and freed:
                buffer = stashed.stash.after(freed)
            dx = self.blocks.select(work.stage, slot, dx, dy)
            add = lambda total, new, cut: self._add_at(total, place, new, cut, keep)  # noqa: E731
            records = work.record(records, place, output_gradient=dy, input_gradient=dx)
            if ahead:
                dx = dx, resharding(template.backward, *saved, dy)(jax.tree.leaves(dx)[-1])
            if not self.unrolled:
                return dx, buffer, jax.tree.map(add, gradients, dw, self.trained_cut), records
            new = jax.tree.map(add, gradients[place], dw, self.trained_cut)
            return dx, buffer, (*gradients[:place], new, *gradients[place + 1 :]), records

        return step

    def resharded(self, dy: Tree, work: ChunkWork) -> list[jax.Array]:
        """The block's output gradient in the shardings in which its backward reads it too, such as gathered over tensor."""
        template = self._template(dy, work.microbatch)
        saved, _ = self._saved(0, 0, work, template, 0)
        return resharding(template.backward, *saved, dy)(jax.tree.leaves(dy)[-1])

    def input_step(self, dy: Tree, work: ChunkWork) -> Callable:
        """I, state (dy, gradients, the buffer of `work.kept`, records)."""
        template = self._template(dy, work.microbatch)

        def step(slot, place, zero, state):
            dy, gradients, buffer, records = state
            (residuals, weights, x), _ = self._saved(slot, place, work, template, zero)
            split = self._split(template, residuals, weights, x)
            dx, early, new = split.input(residuals, weights, x, dy)
            buffer = dataclasses.replace(work.kept, buffer=buffer).write(slot, new)
            dx = self.blocks.select(work.stage, slot, dx, dy)
            records = work.record(records, place, output_gradient=dy, input_gradient=dx)
            return dx, self._add(gradients, early, place, split.is_late, False), buffer, records

        return step

    def weight_step(self, x: Tree, work: ChunkWork) -> Callable:
        """W, state (gradients,)."""
        template = self._template(x, work.microbatch)

        def step(slot, place, zero, state):
            (residuals, weights, x), _ = self._saved(slot, place, work, template, zero)
            split = self._split(template, residuals, weights, x)
            kept = work.kept.read(slot, zero)
            late, _ = self._backward(lambda *saved: (split.weight(*saved), ()), residuals, weights, x, kept)
            return (self._add(state[0], late, place, split.is_late, True),)

        return step

    def _backward(self, backward: Callable, *arguments: Tree, **how) -> tuple[Tree, Tree]:
        """`backward(*arguments) -> (gradients, others)`; with `in_place`, see `fp32_gradients`."""
        how["rewrite"] = with_merged_norms
        return fp32_gradients(backward, *arguments, **how) if self.in_place else backward(*arguments)

    def _split(self, template: VJPTemplate, residuals: Tree, weights: Tree, x: Tree) -> Split:
        """The block's backward as I and W. A gradient has the type of its primal, so `x` is the example of dy too."""
        return split_backward(template.backward, residuals, weights, x, x)

    def _saved(self, slot, place, work: ChunkWork, template: VJPTemplate, zero) -> tuple[tuple[Tree, Tree, Tree], list]:
        """The arguments of a block's backward, and where those from the stash are in it (`fp32_gradients`).

        The arguments are residuals, weights that are trained, and the block's input.
        """
        saved, x = values = work.stash.read(slot, zero)
        on_host = isinstance(work.stash, StashRef) and work.stash.on_host
        stacks = [] if on_host or not self.in_place else work.stash.stacks(slot, zero)
        weights, frozen = self._weights(place)
        arguments = template.residuals(saved, (work.microbatch, frozen)), weights, x
        found = [*zip(jax.tree.leaves(values), stacks, strict=True)] if stacks else []
        return arguments, [*found, *self._weight_stacks((weights, frozen), place)]

    def _weights(self, index) -> tuple[Tree, Tree]:
        """The weights of one block, trained and frozen, all-gathered over `data` where they are sharded over it."""
        one = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), self.weights)
        return split(jax.tree.map(lambda leaf, cut: cut.gather(leaf), one, self.cut), self.trained)

    def _weight_stacks(self, weights: tuple[Tree, Tree], place) -> list:
        """Where the weights of one block, which no replica gathers, are (`jaxprs.Parts`)."""
        if not self.in_place or self.gathers_weights:
            return []
        stacks = jax.tree.leaves(split(self.weights, self.trained))
        return [(one, (stack, place)) for one, stack in zip(jax.tree.leaves(weights), stacks, strict=True)]

    def _add(self, totals: Tree, new: list, place, is_late: Tree, late: bool) -> Tree:
        """Adds the gradients `new`, in order, to the accumulators whose flag in `is_late` equals `late`."""
        values = iter(new)

        def add(total, flag, cut):
            return self._add_at(total, place, next(values), cut) if flag == late else total

        return jax.tree.map(add, totals, is_late, self.trained_cut)

    def _vjp(self, index, layer, x, microbatch) -> tuple:
        """(y, its VJP for the trained weights and x, the other arrays that the backward has too)."""
        return self._vjp_of(self._weights(index), x, microbatch, layer)

    def _vjp_of(self, weights: tuple[Tree, Tree], x: Tree, microbatch: Tree, layer) -> tuple:
        """As `_vjp`, of the weights of one block, trained and frozen."""
        trained, frozen = weights
        run = lambda trained, x: self.block(merge(trained, frozen), x, microbatch, layer)  # noqa: E731
        return *jax.vjp(run, trained, x), (microbatch, frozen)

    def _saving(self, weights: tuple[Tree, Tree], x: Tree, microbatch: Tree, layer) -> tuple[Tree, Tree]:
        """(the block's output, what it saves)."""
        y, vjp, given = self._vjp_of(weights, x, microbatch, layer)
        return y, (saved_residuals(vjp, given), x)

    def _stash(
        self, place, layer, x: Tree, microbatch: Tree, stash, slot, early: bool, residual=None
    ) -> tuple[Tree, Tree]:
        """(the block's output, the stash's buffer with what it saves)."""
        run = self._saving
        arguments, apart = (weights := self._weights(place), x, microbatch, layer), isinstance(stash, SlotApart)
        stacks = self._weight_stacks(weights, place)
        in_stacks = isinstance(stash, StashRef) and not stash.on_host
        if apart and early or in_stacks and (early or stacks):
            leaves, structure = jax.tree.flatten(arguments)
            flat = lambda *leaves: run(*jax.tree.unflatten(structure, leaves))  # noqa: E731
            own = stash.own if apart else stash
            if early:
                y, buffer = stash_as_computed(flat, leaves, own, slot, stacks, residual)
            else:
                y, buffer = stash_at_end(flat, leaves, own, slot, stacks, waits=self.timed)
            buffer = stash.replaced(buffer) if apart else buffer
        else:
            y, saved = reading_in_place(run, arguments, stacks) if stacks else run(*arguments)
            buffer = stash.write(slot, saved)
        # With several samples XLA stores what is gathered over tensor with the sequence first, in loops without a backward,
        # and copies the whole stash before the others.
        return y, in_row_major(buffer) if in_stacks and self.in_place else buffer

    def _add_at(self, total: jax.Array, place, new: jax.Array | Addend, cut: ZeroSharding, keep=None) -> jax.Array:
        """`total[place] += new`, what of `new` is this replica's; unless `keep` is False (see `backward_step`).

        With `in_place` nothing may stand between a matmul and this addition.
        """
        if isinstance(new, Addend):
            if keep is None and cut.axis is None and not self.unrolled:
                return new.added_to(total, place)
            new = new.value()
        new = cut.scatter(new.astype(total.dtype))
        new = new if keep is None else jnp.where(keep, new, 0)
        if self.unrolled:
            return total + new
        if not self.in_place:
            return total.at[place].add(new)
        sum_ = lax.dynamic_index_in_dim(total, place, 0, keepdims=False) + new
        return lax.dynamic_update_slice(total, sum_[None], (place, *[0] * new.ndim))

    def _template(self, x, microbatch) -> VJPTemplate:
        vjp_of = lambda x, microbatch, layer: self._vjp(0, layer, x, microbatch)[1:]  # noqa: E731
        return VJPTemplate.of(vjp_of, x, microbatch, self.serial)


def _cuts(tree: Tree) -> list[ZeroSharding]:
    return jax.tree.leaves(tree, is_leaf=lambda one: isinstance(one, ZeroSharding))
