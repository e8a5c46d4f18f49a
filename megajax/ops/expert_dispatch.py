"""How tokens get to the members that have their experts, and the results back: by all-gather, or by all-to-all.

Shapes: N replicas of a group, each with b samples of s tokens and E / N experts; h = hidden, k choices of a token. Where
each tensor rank is a member, there are N of these, and of what is here one has [T, ...] (`ExpertGroup.of_members`).

    gather        [b, s, h] -> all-gather -> [N b, s, h] -> experts -> reduce-scatter -> [b, s, h]
    all_to_all    [b, s, h] -> all-to-all -> [N, c, h]   -> experts -> all-to-all, sum -> [b, s, h]

With `all_to_all` a token is sent once to each replica that has any of its experts, `Choice.destinations` at most, and comes
back once from each, as the sum over that replica's experts (Megatron-LM's dispatcher "alltoall" sends it once for each
expert). A replica has c places for the tokens of each other one: all that could choose its experts. Tokens take the first
of them, in their order; nothing chooses an expert for the places that are left. So results add up in the same order as with
`gather`, and but for several samples with a split sequence (below) an expert's rows have the same order too.

Without capacity as many rows are sent as were routed, by `lax.ragged_all_to_all`, where XLA has it: not on CPUs (jax
0.12). There, and where capacity makes c smaller than b s, all c places are sent.

Tokens, and gradients of results, are sent in 8 bits if the group says so (`fp8_rows.py`).

With sequence parallelism each tensor rank sends the tokens of its own part of the sequence, into its own part of the
places. Each device knows who sends how much: the group gathers all its choices, k integers of a token, in any case.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.ops.expert_choice import Choice
from megajax.ops.expert_group import ExpertGroup, per_shard
from megajax.ops.fp8_rows import in_8_bits
from megajax.ops.group_order import combine, dispatch, rows_at, sort_by_group
from megajax.runtime.compat import vary_over, varying_axes

__all__ = ["AllToAll", "Gather", "all_to_all"]


@dataclasses.dataclass(frozen=True)
class Gather:
    """Each replica has the tokens of all."""

    group: ExpertGroup

    def send(self, y: jax.Array) -> jax.Array:
        """The tokens that are here, from each replica's y [b, s, h]: [N b, s, h]; both sharded over tensor as residuals."""
        return self.group.gather(y)

    def collect(self, out: jax.Array) -> jax.Array:
        """The transpose of `send`: the sum of what all replicas have computed for the tokens of this one."""
        return self.group.sum_scatter(out)

    def choices(self, x: jax.Array) -> jax.Array:
        """What all replicas have of each choice, [N b, s, k], for the tokens that are here: [tokens, k]."""
        if not self.group.over_tensor:
            return x.reshape(-1, x.shape[-1])
        return jax.vmap(partial(_by_shard, replicas=self.group.replicas, shards=self.group.shards))(x)


class Plan(NamedTuple):
    """Which tokens of this replica go where, and how many come: int32, on the shards of the sequence.

    Attributes:
      order, places: [shards, rows], of `sort_by_group` for (token, destination) pairs sorted by destination.
      sent: [shards, N], rows for each replica.
      received: [shards, N], rows of each replica.
      starts: [shards, N], which of each replica's sorted rows is the first that is sent here.
    """

    order: jax.Array
    places: jax.Array
    sent: jax.Array
    received: jax.Array
    starts: jax.Array


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The static properties of an exchange.

    Attributes:
      group: of the members.
      samples: b.
      tokens: of one replica and one shard of the sequence, b s / shards.
      room: c / shards, places for them on each member.
      ragged: whether only the rows that were routed are sent.
    """

    group: ExpertGroup
    samples: int
    tokens: int
    room: int
    ragged: bool

    def per_shard(self, run: Callable, local: Callable) -> Callable:
        """`local`, of an array and a shard's plan, on each device's shards; `run`: the group's `to_members` or the other."""
        squeezed = lambda x, plan: local(x, jax.tree.map(lambda leaf: leaf[0], plan))  # noqa: E731
        return run(squeezed, P(_sequence_axis(self.group.residual)))

    def by_shard(self, x: jax.Array) -> jax.Array:
        """As `_by_shard`."""
        return _by_shard(x, self.group.replicas, self.group.shards)


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Each replica has the tokens that chose its experts; see `all_to_all`.

    Attributes:
      plan: of the tokens.
      buffers: where they are sent.
      order, places: as of `sort_by_group`: which of the group's tokens has which place here, int32 [places] and [tokens].
    """

    plan: Plan
    buffers: Buffers
    order: jax.Array
    places: jax.Array

    def send(self, y: jax.Array) -> jax.Array:
        """The tokens that are here, from each replica's y [b, s, h]: [N, places, h]; both sharded over tensor as residuals.

        Places that no token has are 0.
        """
        return _send(y, self.plan, self.buffers)

    def collect(self, out: jax.Array) -> jax.Array:
        """The transpose of `send`: sums, in fp32, what all replicas have computed for the tokens of this one."""
        return _collect(out, self.plan, self.buffers)

    def choices(self, x: jax.Array) -> jax.Array:
        """What all replicas have of each choice, [N b, s, k], for each place here: [N places, k]."""
        run = lambda x, order, places: dispatch(self.buffers.by_shard(x), order, places)  # noqa: E731
        return self.buffers.group.each(run)(x, self.order, self.places)


def all_to_all(
    group: ExpertGroup, experts: jax.Array, choice: Choice, most: int, room: int | None = None
) -> AllToAll | Gather:
    """The exchange of tokens with these choices; with a room for all tokens an all-gather, which sends as much.

    Args:
      group: of N replicas.
      experts: int32 [N b, s, k], all replicas' choices, as of `ExpertGroup.of_members`; E: a choice that is dropped.
      choice: of k of E experts, which all of them are.
      most: tokens of a sample that one replica's experts take.
      room: tokens of a replica's shard that choose experts of another one, no more of which are sent; None: all that could.
    """
    samples, length = experts.shape[-3] // group.replicas, experts.shape[-2] // group.shards
    if room == samples * length:
        return Gather(group)
    ragged = group.ragged and room is None and most >= length
    room = samples * min(length, most) if room is None else room
    buffers = Buffers(group, samples, samples * length, room, ragged)
    owners, member = lax.div(experts, choice.count // group.size), group.member
    plan_of = partial(_plan, group.size, choice.destinations(group.size))
    if group.over_tensor:
        plan = jax.vmap(lambda member, owners: plan_of(member, buffers.by_shard(owners)))(member, owners)
    else:
        sequence = _sequence_axis(group.residual)
        numbered = lambda owners: jax.tree.map(lambda x: x[None], plan_of(lax.axis_index(group.axes), owners))  # noqa: E731
        plan = per_shard(numbered, P(None, sequence), P(sequence))(owners)

    def places(member, owners):
        return _first_places((buffers.by_shard(owners) == member).any(-1).reshape(-1, buffers.tokens), room)

    return AllToAll(plan, buffers, *group.each(places)(member, owners))


def _sequence_axis(residual: P) -> str | None:
    """The mesh axis that splits the sequence of an array [b, s, h]."""
    return residual[1] if len(residual) > 1 else None


def _by_shard(x: jax.Array, replicas: int, shards: int) -> jax.Array:
    """From [replicas b, s, k] to [replicas shards tokens, k]: each replica's tokens in the order of its shards of them."""
    split = x.reshape(replicas, -1, shards, x.shape[1] // shards, x.shape[2])
    return split.swapaxes(1, 2).reshape(-1, x.shape[2])


def _first_places(here: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """(order [parts * room], places [parts * tokens]) of tokens bool [parts, tokens], of which some are here, in parts.

    Those that are here come first in the places of their part, and no more than `room` are; all others come after them,
    or have no place, which is a number that is too large.
    """
    parts, tokens = here.shape
    order, places = sort_by_group((2 * jnp.arange(parts, dtype=jnp.int32)[:, None] + ~here).reshape(-1))
    part, place = lax.div(places, tokens), lax.rem(places, tokens)
    places = jnp.where(place < room, part * room + place, parts * room)
    return order.reshape(parts, tokens)[:, :room].reshape(-1), places


def _plan(size: int, destinations: int, here: jax.Array, owners: jax.Array) -> Plan:
    """The plan of one shard, without its number.

    Args:
      size: N.
      destinations: of a token, at most.
      here: the number of this member.
      owners: int32 [N b, s, k], the member that each choice of those that have such shards is sent to; N: none.
    """
    # A token's destinations in order, each once; N for the rest.
    chosen = jnp.sort(owners.reshape(size, -1, owners.shape[-1]), axis=-1)
    again = jnp.pad(chosen[..., 1:] == chosen[..., :-1], ((0, 0), (0, 0), (1, 0)))
    to = jnp.sort(jnp.where(again, size, chosen), axis=-1)[..., :destinations]
    own = lax.dynamic_index_in_dim(to, here, keepdims=False).reshape(-1)
    rows = lambda found: found.sum((1, 2), dtype=jnp.int32)  # noqa: E731
    sent = (own[:, None] == jnp.arange(size)).sum(0, dtype=jnp.int32)
    return Plan(*sort_by_group(own), sent, rows(to == here), rows(to < here))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _send(y: jax.Array, plan: Plan, buffers: Buffers) -> jax.Array:
    return _sent(y, plan, buffers)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _collect(out: jax.Array, plan: Plan, buffers: Buffers) -> jax.Array:
    return _collected(out, plan, buffers)


_send.defvjp(
    lambda y, plan, buffers: (_sent(y, plan, buffers), plan),
    lambda buffers, plan, gradient: (_collected(gradient, plan, buffers), None),
)
_collect.defvjp(
    lambda out, plan, buffers: (_collected(out, plan, buffers), plan),
    lambda buffers, plan, gradient: (_sent(gradient, plan, buffers), None),
)


def _sent(y: jax.Array, plan: Plan, buffers: Buffers) -> jax.Array:
    def local(y, plan):
        def send(tokens):
            rows = dispatch(tokens, plan.order, plan.places)
            return (_ragged_out if buffers.ragged else _padded_out)(rows, plan, buffers)

        tokens = y.reshape(-1, y.shape[-1])
        return in_8_bits(tokens, send) if buffers.group.fp8 else send(tokens)

    return buffers.per_shard(buffers.group.to_members, local)(y, plan)


def _collected(out: jax.Array, plan: Plan, buffers: Buffers) -> jax.Array:
    def local(out, plan):
        rows = (_ragged_back if buffers.ragged else _padded_back)(out, plan, buffers)
        summed = combine(rows, plan.order, plan.places, buffers.tokens)
        return summed.reshape(buffers.samples, -1, out.shape[-1])

    return buffers.per_shard(buffers.group.from_members, local)(out, plan)


def _padded_out(rows: jax.Array, plan: Plan, buffers: Buffers) -> jax.Array:
    """Sorted rows [rows, h] to all their destinations' places: [N, room, h]."""
    place = jnp.arange(buffers.room)
    index = jnp.where(place < plan.sent[:, None], _starts(plan.sent)[:, None] + place, len(rows))
    return lax.all_to_all(rows_at(rows, index, fill=True), buffers.group.axes, 0, 0, tiled=True)


def _padded_back(out: jax.Array, plan: Plan, buffers: Buffers) -> jax.Array:
    """The transpose of `_padded_out`: [N, room, h] to sorted rows; 0 for rows that were sent to no one."""
    parts, row = lax.all_to_all(out, buffers.group.axes, 0, 0, tiled=True), jnp.arange(plan.order.size)
    to, room = (row[:, None] >= jnp.cumsum(plan.sent)).sum(1), buffers.room
    index = to * room + row - rows_at(_starts(plan.sent), to)
    index = jnp.where(to < len(parts), index, len(parts) * room)
    return rows_at(parts.reshape(-1, parts.shape[-1]), index, fill=True)


def _ragged_out(rows: jax.Array, plan: Plan, buffers: Buffers) -> jax.Array:
    """As `_padded_out`; sends the rows alone."""
    axes, room = buffers.group.axes, buffers.room
    first = jnp.full_like(plan.sent, room) * lax.axis_index(axes)
    places = _zeros(rows, plan.sent.size * room)
    out = lax.ragged_all_to_all(rows, places, _starts(plan.sent), plan.sent, first, plan.received, axis_name=axes)
    return out.reshape(-1, room, rows.shape[-1])


def _ragged_back(out: jax.Array, plan: Plan, buffers: Buffers) -> jax.Array:
    """As `_padded_back`; sends the rows alone."""
    places, rows = out.reshape(-1, out.shape[-1]), _zeros(out, plan.order.size)
    first = buffers.room * jnp.arange(len(out), dtype=jnp.int32)
    axes = buffers.group.axes
    return lax.ragged_all_to_all(places, rows, first, plan.received, plan.starts, plan.sent, axis_name=axes)


def _zeros(like: jax.Array, rows: int) -> jax.Array:
    return vary_over(jnp.zeros((rows, like.shape[-1]), like.dtype), varying_axes(like))


def _starts(sizes: jax.Array) -> jax.Array:
    """Where each of consecutive groups of these sizes starts."""
    return jnp.cumsum(sizes) - sizes
