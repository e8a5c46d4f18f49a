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

from megajax.ops.order import choose
from megajax.pipeline.jaxprs import Addend, fp32_gradients
from megajax.pipeline.layout import vary
from megajax.pipeline.loop_order import with_loops_in_order
from megajax.pipeline.loops import prevent_hoisting, run_one_of, which
from megajax.pipeline.options import ExecutorOptions
from megajax.pipeline.slots import TickRow
from megajax.pipeline.trained import merge, split
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, Segment

Tree = Any
ENDS = "ends"  # the named scope of the conditional in `run_together`


class EndState(NamedTuple):
    """What embedding and head read and update at a tick's end. Shapes are those on one rank and replica."""

    embedded: Tree  # x, the embedding for the first stage's next forward; () if unused
    shared_gradients: Tree  # fp32, of the weights that are trained
    output: Tree  # [microbatches, ...]: each microbatch's loss (with `has_aux` also its outputs), or the result of `collect`
    gradients: Tree  # inbox of received gradients, leaves [slots + 1, samples, ...]


class EmbeddingAndHead:
    """The layers at the model's ends. Methods are `(zero, ...) -> new value`, for a loop's or a conditional's body.

    They call `prevent_hoisting` on all that they read: two hoisted collectives over the same ranks could run at the same
    time, and XLA's CPU backend would take them for one collective because all have channel id 1.

    Attributes:
      functions: the model's embed and head_loss (`executor.py`).
      shared: the weights outside of the blocks, on this rank.
      microbatch: index -> that microbatch, leaves [samples, ...].
      cotangents: fp32 [microbatches], the factors of each microbatch's loss in the gradients; None without backwards.
      collect: see `executor.forward_function`; None with backwards.
      constrain, has_aux, in_place, serial: see `ExecutorOptions`, and `serial_collectives` there; with `in_place` the head's
        matmul and the embedding's scatter add the gradients of their weights where these are.
      trained: mask of the weights in `shared` that have gradients; None: all.
    """

    def __init__(
        self,
        functions,
        shared: Tree,
        microbatch: Callable[[jax.Array], Tree],
        cotangents: jax.Array | None,
        collect: Callable | None,
        options: ExecutorOptions,
    ):
        self.functions, self.shared, self.microbatch = functions, shared, microbatch
        self.cotangents, self.collect, self.constrain = cotangents, collect, options.constrain
        self.has_aux, self.in_place, self.serial = options.has_aux, options.in_place, options.serial_collectives
        self.trained = options.trained and options.trained["shared"]

    def of_tick(
        self, segment: Segment, y: Tree, dx: Tree, row: TickRow, following: TickRow
    ) -> dict[str, tuple[jax.Array, Callable]]:
        """What may run at the end of a merged or mixed tick, by name: whether it does, and `(zero, state) -> state`.

        Args:
          segment: the tick's.
          y: the output of the tick's forward.
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

    def embed(self, zero: jax.Array, x: Tree, row: TickRow) -> Tree:
        """The input of the row's forward: embedded on the first stage, else `x`."""
        first = (row.forward.on & row.forward.first) == 1
        microbatch = prevent_hoisting(zero, self.microbatch(row.embed.microbatch))
        return choose(first, self.constrain(self.functions.embed(self.shared, microbatch)), x)

    def head(self, zero: jax.Array, state: EndState, y: Tree, row: TickRow) -> EndState:
        """The loss of the last stage's output `y` and its gradient, or the result of `collect`."""
        last, index = (row.forward.on & row.forward.last) == 1, row.head.microbatch
        inputs = (choose(last, y, 0), self.microbatch(index))
        if self.collect is not None:
            result = self.collect(self.shared, *prevent_hoisting(zero, inputs))
            return state._replace(output=_placed(state.output, result, index, last))
        cotangent = jnp.where(last, self.cotangents[index], 0)
        y, microbatch, cotangent = prevent_hoisting(zero, (*inputs, cotangent))
        losses, outputs = state.output if self.has_aux else (state.output, ())

        def backward(trained, frozen, y, microbatch, cotangent):
            head_loss = lambda trained, y: self.functions.head_loss(merge(trained, frozen), y, microbatch)  # noqa: E731
            loss, vjp, *aux = jax.vjp(head_loss, trained, y, has_aux=self.has_aux)
            shared, dy = vjp(cotangent.astype(loss.dtype))
            return shared, (dy, loss, *aux)

        if self.serial:  # multi-token prediction has blocks of its own
            backward = with_loops_in_order(backward, 2)
        arguments = *split(self.shared, self.trained), y, microbatch, cotangent
        shared, (dy, loss, *aux) = fp32_gradients(backward, *arguments) if self.in_place else backward(*arguments)
        losses = losses.at[index].add(jnp.where(last, loss, 0))
        put = lambda inbox, new: lax.dynamic_update_index_in_dim(inbox, new, row.loss_gradient, 0)  # noqa: E731
        gradients = jax.tree.map(put, state.gradients, self.constrain(dy))
        return state._replace(
            shared_gradients=_accumulate(state.shared_gradients, shared),
            output=(losses, _placed(outputs, *aux, index, last)) if self.has_aux else losses,
            gradients=jax.vmap(self.constrain)(gradients),
        )

    def embed_backward(self, zero: jax.Array, state: EndState, dx: Tree, row: TickRow) -> EndState:
        """The gradients of the embedding, where the first stage completes a microbatch's backward with gradient `dx`."""
        if not jax.tree.leaves(state.shared_gradients):
            return state
        complete = row.backward.part == row.backward.parts - 1
        first = (row.backward.on == 1) & complete & (row.backward.first == 1)
        inputs = choose(first, dx, 0), self.microbatch(row.embed_backward.microbatch)
        cotangent, microbatch = prevent_hoisting(zero, inputs)
        trained, frozen = split(self.shared, self.trained)

        def backward(trained, frozen, microbatch, cotangent):
            embed = lambda trained: self.functions.embed(merge(trained, frozen), microbatch)  # noqa: E731
            return jax.vjp(embed, trained)[1](cotangent)[0], ()

        arguments = trained, frozen, microbatch, cotangent
        shared, _ = fp32_gradients(backward, *arguments) if self.in_place else backward(*arguments)
        return state._replace(shared_gradients=_accumulate(state.shared_gradients, shared))


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


def _placed(whole: Tree, new: Tree, index: jax.Array, last: jax.Array) -> Tree:
    """`whole`, leaves [microbatches, ...], with the results of a microbatch where they are the last stage's."""
    place = lambda whole, new: whole.at[index].set(jnp.where(last, new, whole[index]))  # noqa: E731
    return jax.tree.map(place, whole, vary(new))


def _accumulate(total: Tree, new: Tree) -> Tree:
    def add(total: jax.Array, new: jax.Array | Addend) -> jax.Array:
        return new.added_to(total[None], 0)[0] if isinstance(new, Addend) else total + new.astype(total.dtype)

    return jax.tree.map(add, total, new)
