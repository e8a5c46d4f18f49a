"""Tokens to the replicas of their experts in exchanges of a fixed size, as many as the loads need: no choice is dropped.

An all-to-all of `expert_dispatch.py` has places for all tokens that could choose an expert of a replica, and its experts'
arrays have rows for all of them: up to N times those of balanced routing. Here the first exchange has places and rows for
`FIRST` times those of balanced routing. The choices that find none are left for rounds, each an exchange of its own with
`LATER` times as many rows; the group takes as many rounds as its largest load needs, none if the first exchange holds it.

    out [b, s, h] = first exchange                                     as of any dispatch: values kept, gradients in place
    for round in 1 .. the largest of all replicas' numbers:            a loop; nothing is kept, its backward repeats it
        out += exchange of the choices of this round

Each replica numbers its own choices: 0 for the first exchange, then the round. A choice is in the first exchange if its
token is among the first of those that the replica (its shard of the sequence) sends there, and if it is itself among the
first choices; so both numbers of places suffice for whatever the router chooses. All choices of a token that are left for
one replica are in the same round. The group gathers the numbers with the choices, from which each device takes the largest:
all members run the same number of rounds, and `estimate/collective_order.py` sees that in the compiled program.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.ops.expert_choice import Choice
from megajax.ops.expert_group import ExpertGroup, per_shard
from megajax.ops.grouped_matmul import Part
from megajax.ops.in_place import addend, of_part, whole
from megajax.runtime.compat import vary_over, varying_axes

__all__ = ["FIRST", "LATER", "ROUNDS", "Rounds", "add_rounds", "places_of_balanced", "rows_of_balanced"]

FIRST, LATER = 1.5, 0.5  # rows of an exchange, for each row that balanced routing has
ROUNDS = "rounds"  # the named scope of their loops
Tree = Any
# (y [b, s, h], weights [N b, s, k], experts [N b, s, k], small weights, kernels, places, rows) -> [b, s, h]
Mixture = Callable[..., jax.Array]


def places_of_balanced(choice: Choice, degree: int) -> float:
    """Places of the first exchange on another replica, for each token: `FIRST` times those of balanced routing, or all."""
    return min(1.0, FIRST * choice.balanced_share(degree))


def rows_of_balanced(choice: Choice, degree: int) -> float:
    """Rows of the first exchange for each row that balanced routing gives a device: `FIRST`, or all that could be there."""
    return min(FIRST, degree * choice.most(degree) / choice.chosen)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The static sizes of the exchanges, for T tokens of a replica's shard of the sequence.

    Attributes:
      group: of N replicas.
      choice: of k of E experts.
      tokens: T.
      room: tokens of a shard that the first exchange sends to a replica.
      choices: of these tokens, how many are computed.
      later: tokens of a shard that a round sends to a replica.
    """

    group: ExpertGroup
    choice: Choice
    tokens: int
    room: int
    choices: int
    later: int

    @classmethod
    def of(cls, group: ExpertGroup, choice: Choice, tokens: int) -> "Rounds":
        """Those for `tokens` tokens of a replica."""
        tokens //= group.shards
        most, each = choice.most(group.size), tokens * choice.chosen / group.size
        room = math.ceil(tokens * places_of_balanced(choice, group.size))
        choices = min(tokens * most, math.ceil(FIRST * each))
        return cls(group, choice, tokens, room, choices, min(tokens, math.ceil(LATER * each / most)))

    @property
    def most(self) -> int:
        """Choices of a token that are on one replica, at most."""
        return self.choice.most(self.group.size)

    @property
    def rows(self) -> int:
        """Rows of the first exchange, on a device."""
        return self.group.replicas * self.group.shards * self.choices

    @property
    def rows_of_round(self) -> int:
        """Those of a round."""
        return self.group.replicas * self.group.shards * self.later * self.most

    @property
    def suffices(self) -> bool:
        """Whether the first exchange has room for all that could be chosen."""
        return self.room == self.tokens and self.choices == self.tokens * self.most

    def numbered(self, experts: jax.Array) -> jax.Array:
        """A replica's choices int32 [b, s, k], 0 to E (none), plus E + 1 times the number of their exchange."""
        count, chosen = self.choice.count, self.choice.chosen
        split = experts.reshape(len(experts), self.group.shards, -1, chosen).swapaxes(0, 1)
        owner = lax.div(split.reshape(self.group.shards, self.tokens, chosen), count // self.group.size)
        to = owner[..., None] == jnp.arange(self.group.size)  # [shards, T, k, N]
        among = lambda found: jnp.where(to, found[:, :, None], 0).sum(-1)  # noqa: E731
        here = to.sum(2, dtype=jnp.int32)
        place = among(_before(here, 1)) + jnp.where(to, _before(to.astype(jnp.int32), 2), 0).sum(-1)
        left = (place >= self.choices) | (among(_before((here > 0).astype(jnp.int32), 1)) >= self.room)
        later = (to & left[..., None]).any(2).astype(jnp.int32)
        number = jnp.where(left, 1 + lax.div(among(_before(later, 1)), self.later), 0)
        number = number.reshape(self.group.shards, len(experts), -1, chosen).swapaxes(0, 1).reshape(experts.shape)
        return experts + (count + 1) * number

    def exchange(self, numbered: jax.Array, number: int | jax.Array) -> jax.Array:
        """The choices of one exchange; E for the others."""
        own, base = self.choice.count + 1, lax.stop_gradient(numbered)
        return jnp.where(lax.div(base, own) == number, lax.rem(base, own), self.choice.count)

    def last(self, numbered: jax.Array) -> jax.Array:
        """int32, the number of the last exchange of the group's gathered choices."""
        return per_shard(lambda x: lax.pmax(vary_over(x, ("tensor",)), "tensor"), P(), P())(
            lax.div(numbered, self.choice.count + 1).max()
        )


def _before(x: jax.Array, axis: int) -> jax.Array:
    """The sum of the elements before each."""
    return jnp.cumsum(x, axis, dtype=jnp.int32) - x


def add_rounds(
    out: jax.Array,
    y: jax.Array,
    weights: jax.Array,
    small: Tree,
    kernels: tuple[jax.Array, jax.Array],
    numbered: jax.Array,
    mixture: Mixture,
    rounds: Rounds,
) -> jax.Array:
    """`out` with the results of the rounds after the first exchange.

    Args:
      out: [b, s, h], of the first exchange.
      y: [b, s, h], the tokens.
      weights: fp32 [N b, s, k], of the group's choices.
      small: pytree of the experts' other weights.
      kernels: of the two matmuls, [G, ...] each.
      numbered: int32 [N b, s, k], gathered from `Rounds.numbered`.
      mixture: see `Mixture`; kernels may be `Part`s.
      rounds: their sizes.
    """
    if rounds.suffices:
        return out
    return _added(out, y, weights, small, kernels, numbered, rounds.last(numbered), _Loops(mixture, rounds))


@dataclasses.dataclass(frozen=True)
class _Loops:
    """The loops over rounds. `given` is (y, weights, small, numbered, gradient or out, number of the last round)."""

    mixture: Mixture
    rounds: Rounds

    def one(self, number, y, weights, small, numbered, kernels) -> jax.Array:
        """What a round adds."""
        experts = self.rounds.exchange(numbered, number)
        return self.mixture(y, weights, experts, small, kernels, self.rounds.later, self.rounds.rows_of_round)

    def results(self, given: tuple, *kernels: Part) -> jax.Array:
        """`out` with the results of all rounds."""
        *inputs, out, last = given
        return _repeat(last, lambda number, out: out + self.one(number, *inputs, kernels), out, given)

    def of_inputs(self, given: tuple, *kernels: Part) -> Tree:
        """The gradients of y, weights and small."""
        *inputs, numbered, gradient, last = given

        def step(number, sums):
            run = lambda *inputs: self.one(number, *inputs, numbered, kernels)  # noqa: E731
            return jax.tree.map(jnp.add, sums, jax.vjp(run, *inputs)[1](gradient))

        return _repeat(last, step, jax.tree.map(jnp.zeros_like, tuple(inputs)), given)

    def of_kernel(self, index: int, total: jax.Array, at: jax.Array, given: tuple, *kernels: Part) -> jax.Array:
        """`total`, fp32 [n, G, ...], with the gradient of one of the kernels added to total[at]."""
        *inputs, gradient, last = given

        def step(number, total):
            def run(total):
                own = kernels[index]._replace(total=total, at=at)
                return self.one(number, *inputs, (*kernels[:index], own, *kernels[index + 1 :]))

            return jax.vjp(run, total)[1](gradient)[0]

        return _repeat(last, step, total, given)

    def read(self, loop: Callable[..., Tree], kernels: tuple[jax.Array, ...], given: tuple) -> Tree:
        """`loop(given, *parts)`, with the kernels read where they are stored (`megajax.ops.in_place`)."""
        leaves, structure = jax.tree.flatten(given)

        def of_stacks(up, up_place, down, down_place, *leaves):
            return tuple(jax.tree.leaves(loop(structure.unflatten(leaves), Part(up, up_place), Part(down, down_place))))

        return of_part(of_stacks, *kernels, *leaves, parts=2)

    def gradient(self, index: int, kernels: tuple[jax.Array, ...], given: tuple) -> jax.Array:
        """A kernel's gradient, which can be added where its sum is."""
        leaves, structure = jax.tree.flatten(given)

        def add(total, at, up, up_place, down, down_place, *leaves):
            parts = Part(up, up_place), Part(down, down_place)
            return self.of_kernel(index, total, at, structure.unflatten(leaves), *parts)

        def plain(up, down, *leaves):
            zeros, at = jnp.zeros((1, *kernels[index].shape), jnp.float32), jnp.int32(0)
            return add(zeros, at, *whole((up, down)), *leaves)[0]

        return addend(plain, add, *kernels, *leaves, parts=2).astype(kernels[index].dtype)


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def _added(out, y, weights, small, kernels, numbered, last, loops: _Loops) -> jax.Array:
    return loops.read(loops.results, kernels, (y, weights, small, numbered, out, last))[0]


def _backward(loops: _Loops, saved: tuple, gradient: jax.Array) -> tuple:
    *inputs, kernels, numbered, last = saved
    given = *inputs, numbered, gradient, last
    of_inputs = jax.tree.unflatten(jax.tree.structure(tuple(inputs)), loops.read(loops.of_inputs, kernels, given))
    return gradient, *of_inputs, tuple(loops.gradient(index, kernels, given) for index in range(2)), None, None


_added.defvjp(lambda out, *given: (_added(out, *given), given[:-1]), _backward)


def _repeat(last: jax.Array, step: Callable, state: Tree, like: Tree) -> Tree:
    """`state` after step(number, state) for 1 to `last`; it varies over the mesh axes over which any of `like` does."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(like)))
    vary = lambda tree: jax.tree.map(lambda x: vary_over(x, axes), tree)  # noqa: E731
    with jax.named_scope(ROUNDS):
        return lax.fori_loop(1, last + 1, lambda number, state: vary(step(number, state)), vary(state))
