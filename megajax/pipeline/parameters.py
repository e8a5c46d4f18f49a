"""Shardings of a run's parameters: stored, in computations, and inside the executor."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from megajax.config import ParallelConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.pipeline import layout
from megajax.pipeline.layout import Specs, is_spec
from megajax.pipeline.trained import merge, only_trained, split
from megajax.schedules.stages import Placement, StageLayers
from megajax.sharding.rules import AxisRules
from megajax.sharding.zero import shard_over_data

__all__ = ["ParameterSpecs", "group_blocks", "initial_params", "parameter_specs"]

Tree = Any
BLOCK_AXES = 3  # leading axes of a stored block's leaf: chunk, rank, slot in the chunk


@dataclasses.dataclass(frozen=True)
class ParameterSpecs:
    """Trees of PartitionSpec like params, blocks in pipeline layout [chunks, pipe, slots of a stage, ...].

    Attributes:
      stored: fp32 parameters, optimizer state and gradients. Sharded over replicas too with ZeRO, with ZeRO-1 by layer if
        they divide a stage's; frozen parameters are stored as they are computed with.
      computed: parameters in the type to compute with. Sharded over replicas only with ZeRO-3, and only blocks; experts
        over `expert` in any case.
    """

    stored: Tree
    computed: Tree

    def executor(self, group: int) -> Specs:
        """For the executor, of parameters whose blocks `group_blocks` has grouped."""
        return Specs(_grouped(self.computed, group), _grouped(self.stored, group))

    def gathered(self, params: Tree) -> list[jax.Array]:
        """Those of the parameters to compute with that ZeRO gathers before the executor gets them."""
        specs = (jax.tree.leaves(tree, is_leaf=is_spec) for tree in (self.stored, self.computed))
        return [leaf for leaf, stored, own in zip(jax.tree.leaves(params), *specs, strict=True) if own != stored]


def parameter_specs(model, parallel: ParallelConfig, rules: AxisRules, trained: Tree | None = None) -> ParameterSpecs:
    """The sharding of a model's parameters.

    Args:
      model: has `logical_axes()`, `init(key)` and `config`.
      parallel: the mesh's sizes, chunks and the ZeRO level.
      rules: logical axis -> mesh axes.
      trained: mask of the parameters that are trained; None: all. The others are stored as they are computed with.
    """
    specs = jax.tree.map(rules.spec, model.logical_axes(), is_leaf=lambda node: isinstance(node, tuple))
    whole = {**specs, "blocks": jax.tree.map(layout.pipeline_spec, specs["blocks"], is_leaf=is_spec)}
    replicas = parallel.replica_sizes
    if parallel.zero == 0 or parallel.replicas == 1:
        return ParameterSpecs(whole, whole)
    shapes = jax.eval_shape(lambda: initial_params(model, parallel, jax.random.key(0)))

    def of_block(spec: P, leaf) -> P:
        """With ZeRO-1 a replica has whole layers if it can: gathers and reduce-scatters then copy nothing in memory."""
        *stack, slots = leaf.shape[:BLOCK_AXES]
        layers = (*stack, slots // parallel.recompute_blocks, *[1] * len(leaf.shape[BLOCK_AXES:]))
        by_layer = shard_over_data(spec, layers, replicas, BLOCK_AXES - 1) if parallel.zero == 1 else spec
        return shard_over_data(spec, leaf.shape, replicas, BLOCK_AXES) if by_layer == spec else by_layer

    def sharded(part: str) -> Tree:
        one = of_block if part == "blocks" else lambda spec, leaf: shard_over_data(spec, leaf.shape, replicas)
        return jax.tree.map(one, whole[part], shapes[part], is_leaf=is_spec)

    stored = {part: sharded(part) for part in whole}
    computed = {**whole, "blocks": stored["blocks"]} if parallel.zero == 3 else whole
    return ParameterSpecs(merge(only_trained(stored, trained), split(computed, trained)[1]), computed)


def initial_params(
    model,
    parallel: ParallelConfig,
    key: jax.Array,
    placement: Placement | None = None,
    arrange: Callable[[Tree, StageLayers], Tree] = layout.to_pipeline_layout,
) -> Tree:
    """Fresh fp32 parameters, blocks in the pipeline layout of a schedule's placement. Values do not depend on the layout.

    `arrange` is a `layout.to_pipeline_layout` that also shards.
    """
    params = model.init(key)
    where = parallel.stage_layers(model.config.layers, placement, layer_kinds(model.config))
    return {**params, "blocks": arrange(params["blocks"], where)}


def group_blocks(blocks: Tree, group: int) -> Tree:
    """[chunks, pipe, layers, ...] to [chunks, pipe, layers / group, group, ...]; unchanged for groups of one."""
    if group == 1:
        return blocks
    return jax.tree.map(lambda a: a.reshape(*a.shape[:2], -1, group, *a.shape[3:]), blocks)


def _grouped(specs: Tree, group: int) -> Tree:
    if group == 1:
        return specs
    insert = lambda spec: P(*tuple(spec)[:BLOCK_AXES], None, *tuple(spec)[BLOCK_AXES:])  # noqa: E731
    return {**specs, "blocks": jax.tree.map(insert, specs["blocks"], is_leaf=is_spec)}
