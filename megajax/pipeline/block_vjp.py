"""What a block's VJP saves for its backward, and the VJP rebuilt from it.

The residuals of `jax.vjp` include arrays of the microbatch that the block reads, such as positions. The backward has the
microbatch too, so they are not saved once for each block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.pipeline.layout import vary
from megajax.runtime.compat import rebuild_vjp, vjp_residuals

__all__ = ["VJPTemplate", "saved_residuals"]

Tree = Any


def saved_residuals(vjp: Any, microbatch: Tree) -> list[jax.Array]:
    """The residuals of a function returned by `jax.vjp`, without the arguments and the arrays of the microbatch."""
    leaves = jax.tree.leaves(vjp_residuals(vjp))
    return [leaf for leaf, source in zip(leaves, _sources(vjp, microbatch), strict=True) if source is None]


def _sources(vjp: Any, microbatch: Tree) -> list[int | None]:
    """For each residual, which array of the microbatch it is."""
    arrays = jax.tree.leaves(microbatch)
    return [
        next((index for index, array in enumerate(arrays) if array is leaf), None)
        for leaf in jax.tree.leaves(vjp_residuals(vjp))
    ]


class VJPTemplate(NamedTuple):
    """The VJP of a block with shapes for arrays. Every trace of the block gives the same.

    Attributes:
      vjp: as `jax.vjp` returned it.
      sources: for each residual, which of the microbatch's arrays it is; None: the forward saves it.
    """

    vjp: Any
    sources: tuple[int | None, ...]

    @classmethod
    def of(cls, vjp_of: Callable, x: Tree, microbatch: Tree) -> "VJPTemplate":
        """That of `vjp_of(x, microbatch, layer)`; only the types of the arguments are read.

        The layer's number varies over the mesh, as each rank's own: what a block computes from it would be of other types.
        """
        sources: list[int | None] = []

        def trace(x, microbatch, layer):
            vjp = vjp_of(x, microbatch, layer)
            sources.extend(_sources(vjp, microbatch))
            return vjp

        vjp = jax.eval_shape(trace, x, microbatch, vary(jnp.zeros((), jnp.int32)))
        return cls(vjp, tuple(sources))

    @property
    def saved(self) -> list:
        """Shapes and types of what `saved_residuals` returns."""
        leaves = jax.tree.leaves(vjp_residuals(self.vjp))
        return [leaf for leaf, source in zip(leaves, self.sources, strict=True) if source is None]

    def residuals(self, saved: list[jax.Array], microbatch: Tree) -> Tree:
        """All residuals, from `saved_residuals` and the microbatch."""
        values, arrays = iter(saved), jax.tree.leaves(microbatch)
        leaves = [next(values) if source is None else arrays[source] for source in self.sources]
        return jax.tree.unflatten(jax.tree.structure(vjp_residuals(self.vjp)), leaves)

    def backward(self, residuals: Tree, weights: Tree, x: Tree, dy: Tree) -> tuple[Tree, Tree]:
        """The gradients of the weights and of x."""
        return rebuild_vjp(self.vjp, residuals, (weights, x))(dy)
