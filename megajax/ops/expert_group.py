"""Expert parallelism: N replicas, neighbours on the mesh axis `expert`, have E / N of a layer's E experts each.

A token's experts may be on any of them. One way is that each replica all-gathers the tokens of the group, passes those that
chose one of its experts through it, and a reduce-scatter adds up what the replicas have computed for a token (Megatron-LM's
dispatcher "allgather"). Both have static shapes and drop no token, whatever the router chose. `expert_dispatch.py` has this
and the other way, by all-to-all.

    tokens [b, s, h] -> gather [N b, s, h] -> the replica's experts -> sum_scatter [b, s, h]

Each direction sends (N - 1) b s h elements from a device, of its part of the sequence if tensor splits it. Tokens, and the
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

__all__ = ["AXIS", "WHOLE_GROUP", "ExpertGroup", "per_shard"]

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """The replicas that split the experts of a layer.

    Its functions are called inside a `shard_map` that is manual over `expert`, and not over tensor. With one replica they
    return their argument.

    Attributes:
      size: N, replicas.
      residual: the partition over tensor of the residual stream [b, s, h].
      shards: parts in which that has the sequence.
      dispatch: how tokens get to their experts: "gather", "all_to_all" (`expert_dispatch.py`) or "bucketed"
        (`expert_rounds.py`).
      ragged: whether the devices can send arrays whose sizes are known at run time only (`lax.ragged_all_to_all`).
      fp8: whether tokens and gradients of results are sent in 8 bits. They are rounded likewise where nothing is sent, so
        that results do not depend on N.
    """

    size: int = 1
    residual: PartitionSpec = PartitionSpec()
    shards: int = 1
    dispatch: str = "gather"
    ragged: bool = False
    fp8: bool = False

    def gather(self, x: jax.Array) -> jax.Array:
        """All replicas' x of [b, s, h], sharded as `residual`: [N b, s, h]. The gradient is `sum_scatter`'s."""
        return x if self.size == 1 and not self.fp8 else _gather(x, self)

    def gather_choices(self, x: jax.Array) -> jax.Array:
        """`gather` of a small array, replicated over tensor; of integers, too."""
        if self.size == 1:
            return x
        whole = dataclasses.replace(self, residual=PartitionSpec(), fp8=False)
        return _gather(x, whole) if jnp.issubdtype(x.dtype, jnp.floating) else _gathered(x, whole)

    def sum_scatter(self, x: jax.Array) -> jax.Array:
        """From [N b, s, h], sharded as `residual`, to the sum over the replicas of this one's part: [b, s, h]."""
        return x if self.size == 1 and not self.fp8 else _sum_scatter(x, self)

    def local_experts(self, experts: jax.Array, count: int) -> tuple[jax.Array, int]:
        """(the numbers among this replica's experts of those in `experts`, how many it has); other experts: that number.

        Args:
          experts: int32, 0 to count - 1.
          count: of all experts.
        """
        if self.size == 1:
            return experts, count
        here = count // self.size
        local = experts - lax.axis_index(AXIS) * here
        return jnp.where((local >= 0) & (local < here), local, here), here


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
    gather = partial(lax.all_gather, axis_name=AXIS, axis=0, tiled=True)
    local = partial(in_8_bits, send=gather) if group.fp8 else gather
    return per_shard(local, group.residual, group.residual)(x)


def _summed(x: jax.Array, group: ExpertGroup) -> jax.Array:
    """Reduce-scatter along axis 0, in fp32 whatever is sent: each part is sent as it is, and added where it arrives.

    It sends as many bytes as `lax.psum_scatter`, which rounds N - 1 times in 16 bits, and aborts XLA's CPU compiler there.
    """

    def local(x):
        parts = lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)
        parts = parts.reshape(lax.axis_size(AXIS), -1, *x.shape[1:])
        return parts.astype(jnp.float32).sum(0).astype(x.dtype)

    return x if group.size == 1 else per_shard(local, group.residual, group.residual)(x)


def per_shard(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on each tensor rank's shards of its arguments.

    XLA's partitioner could gather the operand of a collective over tensor first (jax 0.10.2).
    """
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={"tensor"})
