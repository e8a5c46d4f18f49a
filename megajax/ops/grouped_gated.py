"""The second matmul of experts with a gated activation, whose backward passes over the gate and the gated value once.

    out [n, h] = sums over an item's rows of (share * act(gate) * value) kernels,    up [R, 2, f] = (gate, value)

As in `gated_down.py`, XLA's GPU compiler makes two kernels of what the backward computes between the matmuls, and each reads
gate and value. One kernel of Pallas (Triton) computes the gradients of gate, value and share and the activation again, and
reads `up` where the forward saved it. It leaves out the places that no row has: with expert parallelism a device has room
for more rows than balanced routing gives it. There the results are undefined, which no matmul of a group reads.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.ops.gated_down import gated_gradients
from megajax.ops.grouped_matmul import GroupedMatmuls, Part, Routing
from megajax.ops.in_place import of_part
from megajax.ops.tensor_shards import Shard

__all__ = ["gated_row"]


@dataclasses.dataclass(frozen=True)
class RowGradients:
    """The function of `of_part` that computes the gradients of (gate, value) and of the shares, and the activation.

    Attributes:
      activation, how: see `gated_row`.
    """

    activation: Callable[[jax.Array], jax.Array]
    how: GroupedMatmuls

    def __call__(self, stack, place, slopes, shares, count) -> tuple[jax.Array, ...]:
        """See `gated_gradients`, on each tensor rank's shards."""
        local = partial(gated_gradients, activation=self.activation, interpret=self.how.kernel.interpreted)
        whole, rows, up = map(self.how.of_rows, (None, 1, 2))
        given = self.how.of_rows(2, stacked=True), Shard(P()), rows, whole, whole
        return self.how.on_shards(local, given, (up, rows, rows))(stack, place, slopes, shares, count)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def gated_row(
    up: jax.Array,
    shares: jax.Array,
    kernels: jax.Array | Part,
    routing: Routing,
    activation: Callable[[jax.Array], jax.Array],
    how: GroupedMatmuls,
    count: int,
) -> jax.Array:
    """From up [R, 2, f], split over tensor, to the sums [n, h], see above; computed in fp32 between the matmuls.

    Args:
      up: of any float type, which the result has too.
      shares: fp32 [R].
      kernels: [G, f, h].
      routing: of the rows.
      activation: elementwise, of the gate.
      how: with kernels of Pallas; with `over_groups` all arrays but the kernels have a first axis more.
      count: n.
    """
    return _forward(up, shares, kernels, routing, activation, how, count)[0]


def _forward(up, shares, kernels, routing, activation, how, count):
    wide = up.astype(jnp.float32)
    active = (activation(wide[..., 0, :]) * wide[..., 1, :] * shares[..., None]).astype(up.dtype)
    return how.row(active, kernels, routing, count), (up, shares, kernels, routing)


def _backward(activation, how, count, saved, gradient):
    up, shares, kernels, routing = saved
    slopes, of_rows = how.row_slopes(kernels, routing, gradient)
    stop = routing.sizes.sum(-1, dtype=jnp.int32)
    of_up, active, sums = of_part(RowGradients(activation, how), up, of_rows, shares, stop)
    of_shares = jnp.where(jnp.arange(shares.shape[-1]) < stop[..., None], sums.sum(-1), 0)
    return of_up, of_shares, how.row_gradient(kernels, routing, active, slopes), None


gated_row.defvjp(_forward, _backward)
