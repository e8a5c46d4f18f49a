"""Kernels on each tensor rank's shards.

XLA cannot partition a custom call, and jax cannot differentiate one through a nested `shard_map`. So the
forward and the backward of a `jax.custom_vjp` around a kernel each call `on_tensor_shards`.
"""

from collections.abc import Callable
from typing import Any

import jax

from megajax.runtime.compat import vary_over, varying_axes

__all__ = ["TENSOR", "on_tensor_shards"]

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
