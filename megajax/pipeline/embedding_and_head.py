"""The embedding, the head and the embedding's backward of one rank: what a tick runs besides blocks.

The first stage embeds, the last stage computes losses. If all ranks share the two (`ExecutorOptions.share_ends`), they run
them together, each with its rows of the vocabulary: the ranks whose stage it is not feed zeros and discard the result.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.pipeline.layout import vary
from megajax.pipeline.loops import prevent_hoisting, run_one_of, which
from megajax.pipeline.slots import TickRow
from megajax.pipeline.trained import merge, split
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, Segment

Tree = Any
ENDS = "ends"  # the named scope of the conditional in `run_together`


class EndState(NamedTuple):
    """What embedding and head read and update at a tick's end. Shapes are those on one rank and replica."""

    embedded: jax.Array  # [samples, sequence, hidden], the embedding for the first stage's next forward; () if unused
    shared_gradients: Tree  # fp32, of the weights that are trained
    output: Tree  # [microbatches, ...]: each microbatch's loss, or the result of `collect`
    gradients: jax.Array  # inbox of received gradients, [slots + 1, samples, sequence, hidden]


class EmbeddingAndHead:
    """The layers at the model's ends. Methods are `(zero, ...) -> new value`, for a loop's or a conditional's body.

    They call `prevent_hoisting` on all that they read: two hoisted collectives over the same ranks could run at the same
    time, and XLA's CPU backend would take them for one collective because all have channel id 1.

    Attributes:
      functions: the model's embed and head_loss (`executor.py`).
      shared: the weights outside of the blocks, on this rank.
      microbatch: index -> that microbatch, leaves [samples, ...].
      constrain: the sharding constraint of an activation.
      cotangents: fp32 [microbatches], the factors of each microbatch's loss in the gradients; None without backwards.
      collect: see `executor.forward_function`; None with backwards.
      trained: mask of the weights in `shared` that have gradients; None: all.
    """

    def __init__(
        self,
        functions,
        shared: Tree,
        microbatch: Callable[[jax.Array], Tree],
        constrain: Callable[[jax.Array], jax.Array],
        cotangents: jax.Array | None,
        collect: Callable | None,
        trained: Tree | None = None,
    ):
        self.functions, self.shared, self.microbatch, self.constrain = functions, shared, microbatch, constrain
        self.cotangents, self.collect, self.trained = cotangents, collect, trained

    def of_tick(
        self, segment: Segment, y: jax.Array, dx: jax.Array, row: TickRow, following: TickRow
    ) -> dict[str, tuple[jax.Array, Callable]]:
        """What may run at the end of a merged or mixed tick, by name: whether it does, and `(zero, state) -> state`.

        Args:
          segment: the tick's.
          y: the output [samples, sequence, hidden] of the tick's forward.
          dx: the gradient, likewise, that its backward returns.
          row: the tick's.
          following: the next tick's, whose embedding runs now.
        """
        ends = {}
        if FORWARD in segment.ops:
            ends["head"] = row.head.on, lambda zero, state: self.head(zero, state, y, row)
        if BACKWARD in segment.ops or INPUT in segment.ops:
            ends["embed_backward"] = (
                row.embed_backward.on,
                lambda zero, state: self.embed_backward(zero, state, dx, row),
            )
        if FORWARD in segment.ops:
            ahead = lambda zero, state: state._replace(embedded=self.embed(zero, state.embedded, following))  # noqa: E731
            ends["embed"] = following.embed.on, ahead
        return ends

    def embed(self, zero: jax.Array, x: jax.Array, row: TickRow) -> jax.Array:
        """The input [samples, sequence, hidden] of the row's forward: embedded on the first stage, else `x`."""
        first = (row.forward.on & row.forward.first) == 1
        microbatch = prevent_hoisting(zero, self.microbatch(row.embed.microbatch))
        return jnp.where(first, self.constrain(self.functions.embed(self.shared, microbatch)), x)

    def head(self, zero: jax.Array, state: EndState, y: jax.Array, row: TickRow) -> EndState:
        """The loss of the last stage's output `y` and its gradient, or the result of `collect`."""
        last, index = (row.forward.on & row.forward.last) == 1, row.head.microbatch
        inputs = (jnp.where(last, y, 0), self.microbatch(index))
        if self.collect is not None:
            result = self.collect(self.shared, *prevent_hoisting(zero, inputs))
            place = lambda whole, new: whole.at[index].set(jnp.where(last, new, whole[index]))  # noqa: E731
            return state._replace(output=jax.tree.map(place, state.output, vary(result)))
        cotangent = jnp.where(last, self.cotangents[index], 0)
        y, microbatch, cotangent = prevent_hoisting(zero, (*inputs, cotangent))
        trained, frozen = split(self.shared, self.trained)
        loss, vjp = jax.vjp(
            lambda trained, y: self.functions.head_loss(merge(trained, frozen), y, microbatch), trained, y
        )
        shared, dy = vjp(cotangent.astype(loss.dtype))
        gradients = lax.dynamic_update_index_in_dim(state.gradients, self.constrain(dy), row.loss_gradient, 0)
        return state._replace(
            shared_gradients=_accumulate(state.shared_gradients, shared),
            output=state.output.at[index].add(jnp.where(last, loss, 0)),
            gradients=jax.vmap(self.constrain)(gradients),
        )

    def embed_backward(self, zero: jax.Array, state: EndState, dx: jax.Array, row: TickRow) -> EndState:
        """The gradients of the embedding, where the first stage completes a microbatch's backward with gradient `dx`."""
        if not jax.tree.leaves(state.shared_gradients):
            return state
        complete = row.backward.part == row.backward.parts - 1
        first = (row.backward.on == 1) & complete & (row.backward.first == 1)
        inputs = jnp.where(first, dx, 0), self.microbatch(row.embed_backward.microbatch)
        cotangent, microbatch = prevent_hoisting(zero, inputs)
        trained, frozen = split(self.shared, self.trained)
        _, vjp = jax.vjp(lambda trained: self.functions.embed(merge(trained, frozen), microbatch), trained)
        return state._replace(shared_gradients=_accumulate(state.shared_gradients, vjp(cotangent)[0]))


def run_together(
    iterations: jax.Array,
    ends: Mapping[str, tuple[jax.Array, Callable]],
    choices: Mapping[tuple[str, ...], list[tuple[str, ...]]],
    state: EndState,
) -> tuple[jax.Array, EndState]:
    """Runs the ends that a tick has, as one conditional; returns as `loops.run_one_of` does.

    Args:
      iterations: as for `loops.counted_loop`.
      ends: as `EmbeddingAndHead.of_tick` returns them.
      choices: as `slots.Tables.end_choices` returns them.
      state: before the ends.
    """

    def branch(names: tuple[str, ...], zero: jax.Array, state: EndState) -> EndState:
        for name in names:
            with jax.named_scope(name):
                state = ends[name][1](zero, state)
        return state

    def has(names: tuple[str, ...]) -> jax.Array:
        return functools.reduce(jnp.logical_and, (on == (name in names) for name, (on, _) in ends.items()))

    branches = {names: served for names, served in choices.items() if names}
    index = which(functools.reduce(jnp.logical_or, map(has, served)) for served in branches.values())
    with jax.named_scope(ENDS):
        always = () not in choices
        return run_one_of(iterations, index, [functools.partial(branch, one) for one in branches], state, always=always)


def _accumulate(total: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new)
