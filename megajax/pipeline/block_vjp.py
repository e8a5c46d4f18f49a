"""What a block's VJP saves for its backward, and the VJP rebuilt from it.

The residuals of `jax.vjp` include arrays that the block is given besides the VJP's arguments: those of the microbatch that
it reads, such as positions, and weights that are not trained. The backward has them too, so they are not saved for each
block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.pipeline.layout import vary
from megajax.pipeline.loop_order import with_loops_in_order
from megajax.runtime.compat import rebuild_vjp, vjp_residuals

__all__ = ["VJPTemplate", "saved_residuals"]

Tree = Any


def saved_residuals(vjp: Any, given: Tree) -> list[jax.Array]:
    """The residuals of a function returned by `jax.vjp`, without the arguments and the arrays of `given`."""
    leaves = jax.tree.leaves(vjp_residuals(vjp))
    return [leaf for leaf, source in zip(leaves, _sources(vjp, given), strict=True) if source is None]


def _sources(vjp: Any, given: Tree) -> list[int | None]:
    """For each residual, which array of `given` it is."""
    arrays = jax.tree.leaves(given)
    return [
        next((index for index, array in enumerate(arrays) if array is leaf), None)
        for leaf in jax.tree.leaves(vjp_residuals(vjp))
    ]


class VJPTemplate(NamedTuple):
    """The VJP of a block with shapes for arrays. Every trace of the block gives the same.

    Attributes:
      vjp: as `jax.vjp` returned it.
      sources: for each residual, which array of `given` it is; None: the forward saves it.
      serial: whether loops and collectives run one after the other (`ExecutorOptions.serial_collectives`).
    """

    vjp: Any
    sources: tuple[int | None, ...]
    serial: bool

    @classmethod
    def of(cls, vjp_of: Callable, x: Tree, microbatch: Tree, serial: bool) -> "VJPTemplate":
        """That of `vjp_of(x, microbatch, layer) -> (vjp, given)`; only the types of the arguments are read.

        `given` has the arrays that both forward and backward have: the microbatch's, and the weights that are not trained.
        The layer's number varies over the mesh, as each rank's own: what a block computes from it would be of other types.
        """
        sources: list[int | None] = []

        def trace(x, microbatch, layer):
            vjp, given = vjp_of(x, microbatch, layer)
            sources.extend(_sources(vjp, given))
            return vjp

        vjp = jax.eval_shape(trace, x, microbatch, vary(jnp.zeros((), jnp.int32)))
        return cls(vjp, tuple(sources), serial)

    @property
    def saved(self) -> list:
        """Shapes and types of what `saved_residuals` returns."""
        leaves = jax.tree.leaves(vjp_residuals(self.vjp))
        return [leaf for leaf, source in zip(leaves, self.sources, strict=True) if source is None]

    def residuals(self, saved: list[jax.Array], given: Tree) -> Tree:
        """All residuals, from `saved_residuals` and what forward and backward both have."""
        values, arrays = iter(saved), jax.tree.leaves(given)
        leaves = [next(values) if source is None else arrays[source] for source in self.sources]
        return jax.tree.unflatten(jax.tree.structure(vjp_residuals(self.vjp)), leaves)

    def backward(self, residuals: Tree, weights: Tree, x: Tree, dy: Tree) -> tuple[Tree, Tree]:
        """The gradients of the weights that are trained, which `weights` are, and of x."""
        backward = lambda residuals, weights, x, dy: rebuild_vjp(self.vjp, residuals, (weights, x))(dy)  # noqa: E731
        return (with_loops_in_order(backward) if self.serial else backward)(residuals, weights, x, dy)
