"""Expert parallelism: N members, neighbours on the mesh axis `expert`, have E / N of a layer's E experts each.

A token's experts may be on any of them. One way is that each replica all-gathers the tokens of the group, passes those that
chose one of its experts through it, and a reduce-scatter adds up what the replicas have computed for a token (Megatron-LM's
dispatcher "allgather"). Both have static shapes and drop no token, whatever the router chose. `expert_dispatch.py` has this
and the other way, by all-to-all.

    tokens [b, s, h] -> gather [N b, s, h] -> the replica's experts -> sum_scatter [b, s, h]

Each direction sends (N - 1) b s h elements from a device, of its part of the sequence if tensor splits it. The members are
replicas, or with MoE parallel folding (2504.14960 section 3) the tensor ranks of replicas, which then have whole experts of
their own: an array of what a member has is one [T, ...] of all tensor ranks, split over tensor. Tokens, and the
gradients of results, may be sent in 8 bits (`fp8_rows.py`); results, and the gradients of tokens, are sums and are not
(DeepSeek-V3, 2412.19437 section 3.3.2). The replicas of a group are at the same pipeline stage, so all of them take the
same branch of a tick, in which these collectives are legal under every schedule.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from megajax.ops.fp8_rows import in_8_bits

__all__ = ["WHOLE_GROUP", "ExpertGroup", "per_shard"]

EXPERT, TENSOR = "expert", "tensor"  # mesh axes


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """The members that split the experts of a layer: replicas, or their tensor ranks.

    Its functions are called inside a `shard_map` that is manual over `expert`, and not over tensor. With one member they
    return their argument.

    Attributes:
      size: N, members.
      residual: the partition over tensor of the residual stream [b, s, h].
      shards: parts in which that has the sequence.
      dispatch: how tokens get to their experts: "gather", "all_to_all" (`expert_dispatch.py`) or "bucketed"
        (`expert_rounds.py`).
      ragged: whether the devices can send arrays whose sizes are known at run time only (`lax.ragged_all_to_all`).
      fp8: whether tokens and gradients of results are sent in 8 bits. They are rounded likewise where nothing is sent, so
        that results do not depend on N.
      axes: mesh axes along which the members are, outermost first: expert, expert and tensor, or tensor.
    """

    size: int = 1
    residual: PartitionSpec = PartitionSpec()
    shards: int = 1
    dispatch: str = "gather"
    ragged: bool = False
    fp8: bool = False
    axes: tuple[str, ...] = (EXPERT,)

    @property
    def over_tensor(self) -> bool:
        """Whether each tensor rank is a member."""
        return TENSOR in self.axes

    @property
    def replicas(self) -> int:
        """Of the group."""
        return self.size // self.shards if self.over_tensor else self.size

    @property
    def member(self) -> jax.Array:
        """This member's number, int32; [T] if each tensor rank is one."""
        replica = lax.axis_index(EXPERT) if EXPERT in self.axes else 0
        return self.of_members(replica * self.shards, jnp.arange(self.shards)) if self.over_tensor else replica

    def of_members(self, x: Any, added: Any = 0) -> jax.Array:
        """An array that all tensor ranks have, as one that the members have: [T, ...] if tensor ranks are members."""
        if not self.over_tensor:
            return x
        x = jnp.asarray(x)
        return lax.with_sharding_constraint(jnp.broadcast_to(x, (self.shards, *x.shape)) + added, PartitionSpec(TENSOR))

    def split(self, x: jax.Array) -> jax.Array:
        """A weight of all experts of a replica, [G, ...], as one of those of the members."""
        return x.reshape(self.shards, -1, *x.shape[1:]) if self.over_tensor else x

    def each(self, function: Callable) -> Callable:
        """`function` of what a member has, as one of what all tensor ranks have."""
        return jax.vmap(function) if self.over_tensor else function

    def gather(self, x: jax.Array) -> jax.Array:
        """All members' x of [b, s, h], sharded as `residual`: a member's [N b, s, h]. The gradient is `sum_scatter`'s."""
        return x if self.size == 1 and not self.fp8 else _gather(x, self)

    def gather_choices(self, x: jax.Array) -> jax.Array:
        """All replicas' x of [b, s, k], which is small and replicated over tensor, as the result is; of integers, too."""
        if self.replicas == 1:
            return x
        whole = dataclasses.replace(self, size=self.replicas, residual=PartitionSpec(), fp8=False, axes=(EXPERT,))
        return _gather(x, whole) if jnp.issubdtype(x.dtype, jnp.floating) else _gathered(x, whole)

    def sum_scatter(self, x: jax.Array) -> jax.Array:
        """From a member's [N b, s, h], as of `gather`, to the sum over the members of this one's part: [b, s, h]."""
        return x if self.size == 1 and not self.fp8 else _sum_scatter(x, self)

    def local_experts(self, experts: jax.Array, count: int) -> tuple[jax.Array, int]:
        """(the numbers among a member's experts of those in `experts`, how many it has); other experts: that number.

        Args:
          experts: int32, 0 to count - 1; as of `of_members`.
          count: of all experts.
        """
        if self.size == 1:
            return experts, count
        here = count // self.size

        def local(member, experts):
            own = experts - member * here
            return jnp.where((own >= 0) & (own < here), own, here)

        return self.each(local)(self.member, experts), here

    def to_members(self, local: Callable, *others: PartitionSpec) -> Callable:
        """(x [b, s, h], *others) -> what a member has, by `local` on each tensor rank's shards."""
        numbered = lambda *given: local(*given)[None] if self.over_tensor else local(*given)  # noqa: E731
        return per_shard(numbered, (self.residual, *others), self._partition)

    def from_members(self, local: Callable, *others: PartitionSpec) -> Callable:
        """(what a member has, *others) -> [b, s, h], likewise."""
        own = lambda x, *given: local(x[0] if self.over_tensor else x, *given)  # noqa: E731
        return per_shard(own, (self._partition, *others), self.residual)

    @property
    def _partition(self) -> PartitionSpec:
        """Of what a member has, [tokens.., h] as residuals, or [T, tokens.., h]."""
        return PartitionSpec(TENSOR) if self.over_tensor else self.residual


WHOLE_GROUP = ExpertGroup()


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, group: ExpertGroup) -> jax.Array:
    return _gathered(x, group)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_scatter(x: jax.Array, group: ExpertGroup) -> jax.Array:
    return _summed(x, group)


_gather.defvjp(
    lambda x, group: (_gathered(x, group), None),
    lambda group, _, gradient: (_summed(gradient, group),),
)
_sum_scatter.defvjp(
    lambda x, group: (_summed(x, group), None),
    lambda group, _, gradient: (_gathered(gradient, group),),
)


def _gathered(x: jax.Array, group: ExpertGroup) -> jax.Array:
    if group.size == 1:
        return in_8_bits(x)
    gather = partial(lax.all_gather, axis_name=group.axes, axis=0, tiled=True)
    return group.to_members(partial(in_8_bits, send=gather) if group.fp8 else gather)(x)


def _summed(x: jax.Array, group: ExpertGroup) -> jax.Array:
    """Reduce-scatter along axis 0, in fp32 whatever is sent: each part is sent as it is, and added where it arrives.

    It sends as many bytes as `lax.psum_scatter`, which rounds N - 1 times in 16 bits, and aborts XLA's CPU compiler there.
    """

    def local(x):
        parts = lax.all_to_all(x, group.axes, split_axis=0, concat_axis=0, tiled=True)
        parts = parts.reshape(group.size, -1, *x.shape[1:])
        return parts.astype(jnp.float32).sum(0).astype(x.dtype)

    return x if group.size == 1 else group.from_members(local)(x)


def per_shard(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on each tensor rank's shards of its arguments.

    XLA's partitioner could gather the operand of a collective over tensor first (jax 0.10.2).
    """
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR})
