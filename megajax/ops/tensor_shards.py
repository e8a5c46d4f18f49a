"""Kernels on each tensor rank's shards.

XLA cannot partition a custom call, and jax cannot differentiate one through a nested `shard_map`. So the
forward and the backward of a `jax.custom_vjp` around a kernel each call `on_tensor_shards`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.runtime.compat import vary_over, varying_axes

__all__ = ["TENSOR", "Shard", "on_numbered_shards", "on_tensor_shards"]

TENSOR = "tensor"


def on_tensor_shards(local: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`local` on each tensor rank's shards; its results vary over the manual mesh axes over which any argument does.

    Inside, jax does not check over which axes values vary: Pallas's interpreter and Mosaic's kernels would not pass. The
    derivative, which the check is for, is the caller's.
    """
    run = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR}, check_vma=False)

    def with_axes(*arguments):
        axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arguments)))
        return jax.tree.map(lambda x: vary_over(x, axes), run(*arguments))

    return with_axes


class Shard(NamedTuple):
    """How tensor ranks have an array: its partition, and the axis of their numbers, which a rank does not see."""

    spec: PartitionSpec
    number: int | None = None

    def without_number(self, x: Any) -> Any:
        """A rank's shard, a pytree, as it sees it."""
        return x if self.number is None else jax.tree.map(lambda leaf: jnp.squeeze(leaf, self.number), x)

    def with_number(self, x: jax.Array) -> jax.Array:
        """The reverse."""
        return x if self.number is None else jnp.expand_dims(x, self.number)


def on_numbered_shards(local: Callable, given: tuple[Shard, ...], result: Any) -> Callable:
    """`on_tensor_shards` for arrays of which some have the tensor ranks' numbers as an axis.

    Args:
      local: of a rank's shards.
      given: of its arguments, each a pytree of arrays that are split alike.
      result: of what it returns, a pytree of `Shard`.
    """
    is_shard = lambda one: isinstance(one, Shard)  # noqa: E731

    def own(*arrays):
        found = local(*(shard.without_number(array) for shard, array in zip(given, arrays, strict=True)))
        return jax.tree.map(Shard.with_number, result, found, is_leaf=is_shard)

    specs = jax.tree.map(lambda one: one.spec, result, is_leaf=is_shard)
    return on_tensor_shards(own, tuple(one.spec for one in given), specs)
