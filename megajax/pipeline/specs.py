"""How params and gradients lie over the mesh axes that the executor is manual over, and the sums that bring them there."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.runtime.compat import varying_axes
from megajax.sharding.rules import only
from megajax.sharding.zero import ZeroSharding

Tree = Any
MANUAL = ("data", "pipe")
BLOCKS = P(None, "pipe")


class Specs(NamedTuple):
    """How params and gradients lie on the mesh: two trees of PartitionSpec, like params or a prefix of that.

    A gradient is summed over the axes that its weight is not split over, and comes out split as its own spec says: by a
    reduce-scatter where that has an axis which the weight's has not (ZeRO-1).
    """

    weights: Tree
    gradients: Tree

    @property
    def manual(self) -> "Specs":
        """The same over the axes that the executor is manual over."""
        return Specs(*(jax.tree.map(lambda spec: only(spec, MANUAL), specs, is_leaf=is_spec) for specs in self))


def is_spec(node) -> bool:
    """Whether a node of a tree is a PartitionSpec, which is its leaf."""
    return isinstance(node, P)


WHOLE = Specs({"blocks": BLOCKS, "shared": P()}, {"blocks": BLOCKS, "shared": P()})


def vary(tree: Tree) -> Tree:
    """Marks values as differing between ranks and replicas.

    Without it `jax.vjp` of something replicated would sum its gradient over the mesh inside the tick loop.
    """

    def mark(leaf):
        missing = tuple(axis for axis in MANUAL if axis not in varying_axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def added(x: Tree, axes: tuple[str, ...]) -> Tree:
    """The sum over manual axes.

    On one rank and one replica that is x; but XLA refuses a sum there beside a tensor axis that it splits itself, "Cross-
    partition allreduce must be in (partial) manual partitioning mode" (jax 0.10.2), so it is written as a gather.
    """
    if all(lax.axis_size(axis) == 1 for axis in MANUAL):
        return jax.tree.map(lambda a: lax.all_gather(a[None], axes, axis=0, tiled=True, to="invarying")[0], x)
    return lax.psum(x, axes)


def summed(totals: Tree, specs: Specs) -> Tree:
    """Each rank's totals, shaped like its part of the weights, to the gradients as they are to lie."""

    def one(total, weight: P, gradient: P):
        over = [axis for axis in MANUAL if axis not in only(weight, MANUAL)]
        cut = ZeroSharding.from_spec(gradient)
        if "data" in over and cut.axis is not None:
            total = cut.scatter(total)
            over.remove("data")
        return added(total, tuple(over)) if over else total

    return jax.tree.map(one, totals, *(full_specs(spec, totals) for spec in specs))


def full_specs(specs: Tree, like: Tree) -> Tree:
    """A prefix of a tree of PartitionSpec, as the whole tree."""
    return jax.tree.map(lambda spec, below: jax.tree.map(lambda _: spec, below), specs, like, is_leaf=is_spec)
