"""How parameters, batches and gradients are arranged and sharded for the pipeline.

Canonical layout, in checkpoints and in models: each leaf of `blocks` is [layers, ...], in the order of the model's
layers. Pipeline layout, on devices: [chunks, ranks, slots of a stage, ...] with axis 1 sharded over the mesh axis
`pipe`, so that each rank stores only the layers that it runs. For 8 layers on 2 ranks with 2 chunks each:

    loop       rank 0    rank 1        wave       rank 0    rank 1
    chunk 0    0 1       2 3           chunk 0    0 1       2 3
    chunk 1    4 5       6 7           chunk 1    6 7       4 5

In a loop the two layouts differ by a reshape alone; in another placement (`schedules/stages.py`) stages are permuted too, in
a wave those of every second chunk reversed. If stages have unequal numbers of layers, the last slots of some of them are
empty: zero in parameters and everything made like them, and no canonical layout has them.

If the layers are of several kinds, with different parameters, `blocks` has a tree for each kind, {kind: leaves}. A leaf is
[layers of the kind, ...], and on devices every stage has as many slots as the most layers of the kind on any stage, which
the first of its slots hold.

The executor is a `jax.shard_map` that is manual over the mesh axes `data`, `pipe` and, if the mesh has it, `expert`
(`MANUAL_AXES`); the axis `tensor` is left to XLA's partitioner.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.pipeline.trained import only_trained
from megajax.runtime.compat import manual_axes, vary_over
from megajax.schedules.stages import StageLayers
from megajax.sharding.rules import only
from megajax.sharding.zero import ZeroSharding

Tree = Any
REPLICAS = ("data", "expert")  # devices along them have other samples
MANUAL_AXES = (*REPLICAS, "pipe")


def leading_sizes(batch: Tree) -> tuple[int, int]:
    """Microbatches, and samples in one of them over all replicas."""
    return jax.tree.leaves(batch)[0].shape[:2]


def batch_spec(mesh: Mesh) -> P:
    """The PartitionSpec of a batch's leaves, [microbatches, samples, ...]."""
    return only(P(None, REPLICAS), mesh.axis_names)


def manual_axes_of(mesh: Mesh) -> tuple[str, ...]:
    """Those of `MANUAL_AXES` that the mesh has."""
    return tuple(axis for axis in MANUAL_AXES if axis in mesh.axis_names)


def to_pipeline_layout(blocks: Tree, where: StageLayers) -> Tree:
    """Leaves [layers, ...] as [chunks, ranks, slots of a stage, ...], with zeros in empty slots.

    Args:
      blocks: pytree in canonical layout.
      where: the layers of each stage.
    """

    def arrange(where: StageLayers, blocks: Tree) -> Tree:
        shape, order = (where.chunks, where.ranks, where.slots), list(itertools.chain(*where.placement.stage_of))
        return jax.tree.map(
            lambda a: _in_order(_with_empty_slots(a, where), order, where.slots).reshape(*shape, *a.shape[1:]), blocks
        )

    return map_kinds(arrange, where, blocks)


def from_pipeline_layout(blocks: Tree, where: StageLayers) -> Tree:
    """The inverse of `to_pipeline_layout`: leaves [chunks, ranks, slots of a stage, ...] to [layers, ...]."""

    def canonical(where: StageLayers, blocks: Tree) -> Tree:
        order = [chunk * where.ranks + rank for chunk, rank in where.placement.homes]

        def one(leaf):
            return _without_empty_slots(_in_order(leaf.reshape(-1, *leaf.shape[3:]), order, where.slots), where)

        return jax.tree.map(one, blocks)

    return map_kinds(canonical, where, blocks)


def map_kinds(function: Callable, where: StageLayers, *blocks: Tree) -> Tree:
    """`function(where, *blocks)`, of a model with kinds of layers for each kind: {kind: its result}."""
    if where.kinds is None:
        return function(where, *blocks)
    return {kind: function(where.of(kind), *(tree[kind] for tree in blocks)) for kind in where.kind_names}


def of_all_layers(measured: Tree, where: StageLayers, kind: str | None) -> Tree:
    """Values of layers, leaves [chunks, ranks, slots of a stage, ...] by name, as [layers, ...] with NaN for other layers.

    Values are of the layers of one `kind`; None: of all layers, or, of a model with kinds, {kind: leaf}.
    """
    if where.kinds is None:
        return from_pipeline_layout(measured, where)

    def one(values):
        values, out = values if kind is None else {kind: values}, None
        for name, leaf in values.items():
            own = where.of(name)
            leaf = from_pipeline_layout(leaf, own)
            out = jnp.full((where.layers, *leaf.shape[1:]), jnp.nan, leaf.dtype) if out is None else out
            out = out.at[np.array(own.numbers)].set(leaf)
        return out

    return {name: one(values) for name, values in measured.items()}


def _with_empty_slots(leaf, where: StageLayers):
    """[layers, ...] to [stages * slots, ...]: one pad for each run of stages with equal numbers of layers."""
    if not where.idle:
        return leaf
    parts, done = [], 0
    for count, stages in _runs(where):
        part = leaf[done : done + stages * count].reshape(stages, count, *leaf.shape[1:])
        done += stages * count
        parts.append(jnp.pad(part, [(0, 0), (0, where.slots - count), *[(0, 0)] * (leaf.ndim - 1)]))
    return jnp.concatenate(parts).reshape(-1, *leaf.shape[1:])


def _without_empty_slots(leaf, where: StageLayers):
    """The inverse of `_with_empty_slots`."""
    if not where.idle:
        return leaf
    slots, parts, done = leaf.reshape(-1, where.slots, *leaf.shape[1:]), [], 0
    for count, stages in _runs(where):
        parts.append(slots[done : done + stages, :count].reshape(-1, *leaf.shape[1:]))
        done += stages
    return jnp.concatenate(parts)


def _runs(where: StageLayers) -> list[tuple[int, int]]:
    """(layers of each, number of stages) of the runs of stages with equal numbers of layers."""
    return [(count, len(list(stages))) for count, stages in itertools.groupby(where.counts)]


def _in_order(leaf, order: list[int], slots: int):
    """[stages * slots, ...] with the stages in another order: a slice for each run of it that ascends or descends."""
    if order == list(range(len(order))):
        return leaf
    stages, parts, start = leaf.reshape(-1, slots, *leaf.shape[1:]), [], 0
    while start < len(order):
        stop, step = start + 1, 0
        while stop < len(order) and order[stop] - order[stop - 1] == (step or order[stop] - order[start]) in (-1, 1):
            step, stop = order[stop] - order[stop - 1], stop + 1
        low, high = sorted((order[start], order[stop - 1]))
        run = stages[low : high + 1]
        parts.append(jnp.flip(run, axis=0) if step < 0 else run)
        start = stop
    return jnp.concatenate(parts).reshape(leaf.shape)


def pipeline_spec(spec: P) -> P:
    """The PartitionSpec of a leaf in pipeline layout, from that of the canonical leaf (layers, axis 0, not sharded).

    P(None, None, "tensor") for [layers, hidden, heads] gives P(None, "pipe", None, None, "tensor").
    """
    return P(None, "pipe", None, *spec[1:])


class Specs(NamedTuple):
    """Shardings of parameters and gradients: two pytrees of PartitionSpec, each like params or a prefix of it.

    A gradient is summed over the manual axes that its weight is not sharded over: that of an expert which one replica of
    a group has, over `data` alone. Where the gradient's spec has `data` and the weight's has not (ZeRO-1), that sum is a
    reduce-scatter.

    Attributes:
      weights: of {"blocks": ..., "shared": ...}; blocks in pipeline layout.
      gradients: of the gradients that the executor returns.
    """

    weights: Tree
    gradients: Tree

    def of_trained(self, trained: Tree | None) -> "Specs":
        """Those of the parameters that are trained, by a mask like them (`trained.py`); None: all are."""
        return Specs(*(only_trained(specs, trained) for specs in self))

    @property
    def manual(self) -> "Specs":
        """These specs restricted to the manual axes, for `in_specs` and `out_specs` of the executor's `shard_map`."""
        return Specs(*(jax.tree.map(lambda spec: only(spec, MANUAL_AXES), specs, is_leaf=is_spec) for specs in self))


BLOCKS_SPEC = P(None, "pipe")
DEFAULT_SPECS = Specs({"blocks": BLOCKS_SPEC, "shared": P()}, {"blocks": BLOCKS_SPEC, "shared": P()})


def is_spec(node) -> bool:
    """Whether a node of a pytree is a PartitionSpec; the `is_leaf` of a tree of specs."""
    return isinstance(node, P)


def full_specs(specs: Tree, like: Tree) -> Tree:
    """Broadcasts a prefix of a tree of PartitionSpec to the structure of `like`."""
    return jax.tree.map(lambda spec, below: jax.tree.map(lambda _: spec, below), specs, like, is_leaf=is_spec)


def vary(tree: Tree) -> Tree:
    """Marks every leaf as varying over the executor's manual axes (`lax.pcast(..., to="varying")`).

    `jax.vjp` inserts a psum over each manual axis over which an argument is replicated. Without this call that psum
    would run in every tick instead of once per step.
    """
    return jax.tree.map(lambda leaf: vary_over(leaf, manual_axes()), tree)


def fp32_zeros(tree: Tree) -> Tree:
    """Zeros of the shapes in `tree`, in fp32."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), tree)


def in_row_major(tree: Tree) -> Tree:
    """The same arrays, in memory with the last axis contiguous, then the one before it, and so on.

    XLA chooses the order in memory so that a collective's axis comes first. With ZeRO, stacked weights and gradients would
    have the layers' axis inside another one, and no block's part of them would be contiguous.
    """
    return jax.tree.map(lambda a: with_layout_constraint(a, Layout(tuple(range(a.ndim)))), tree)


def sum_over(tree: Tree, axes: tuple[str, ...]) -> Tree:
    """The sum of each leaf over manual mesh axes.

    If all manual axes have size 1 the sum is the leaf itself. It is then written as an all-gather, because XLA
    rejects a psum next to a `tensor` axis that it partitions itself: "Cross-partition allreduce must be in (partial)
    manual partitioning mode" (jax 0.10.2).
    """
    if all(lax.axis_size(axis) == 1 for axis in manual_axes()):
        return jax.tree.map(lambda a: lax.all_gather(a[None], axes, axis=0, tiled=True, to="invarying")[0], tree)
    return lax.psum(tree, axes)


def reduce_gradients(gradients: Tree, specs: Specs) -> Tree:
    """Sums each rank's gradients over the manual axes, into the sharding `specs.gradients`.

    Args:
      gradients: pytree like params; each leaf has the shape of this rank's shard of the weight.
    """

    def reduce(gradient, weight_spec: P, gradient_spec: P):
        sharded = jax.tree.leaves(tuple(weight_spec))
        axes = [axis for axis in manual_axes() if axis not in sharded]
        cut = ZeroSharding.from_spec(gradient_spec)
        if "data" in axes and cut.axis is not None:
            gradient = cut.scatter(gradient)
            axes = [axis for axis in axes if axis not in cut.over]
        return sum_over(gradient, tuple(axes)) if axes else gradient

    return jax.tree.map(reduce, gradients, *(full_specs(spec, gradients) for spec in specs))
