"""Where a run's parameters lie: as they are stored, as they are computed with, and inside the executor."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from megajax.config import RunConfig
from megajax.models import gpt
from megajax.pipeline import layout
from megajax.pipeline.layout import Specs, is_spec
from megajax.sharding.rules import AxisRules
from megajax.sharding.zero import cut_over_data

__all__ = ["ParameterSpecs", "axis_rules", "group_blocks", "initial_params", "parameter_specs", "share_ends"]

Tree = Any
BLOCK_AXES = 3  # of a stored block's leaf before its own: chunk, rank, layer in the chunk


@dataclasses.dataclass(frozen=True)
class ParameterSpecs:
    """Trees of PartitionSpec like params, blocks in dealt form.

    Attributes:
      stored: fp32 parameters, optimizer state and gradients. Over `data` too with ZeRO.
      computed: parameters in the type to compute with. Over `data` only with ZeRO-3, and only blocks.
    """

    stored: Tree
    computed: Tree

    def executor(self, group: int) -> Specs:
        """What the executor needs to know of parameters whose blocks `group_blocks` has grouped."""
        return Specs(_grouped(self.computed, group), _grouped(self.stored, group))


def parameter_specs(run: RunConfig) -> ParameterSpecs:
    """How the run's parameters lie on its mesh."""
    rules, parallel = axis_rules(run), run.parallel
    specs = jax.tree.map(rules.spec, gpt.logical_axes(run.model), is_leaf=lambda node: isinstance(node, tuple))
    whole = {**specs, "blocks": jax.tree.map(layout.pipeline_spec, specs["blocks"], is_leaf=is_spec)}
    replicas = parallel.data * parallel.context
    if parallel.zero == 0 or replicas == 1:
        return ParameterSpecs(whole, whole)
    shapes = jax.eval_shape(lambda: initial_params(run, jax.random.key(0)))

    def cut(part: str) -> Tree:
        first = BLOCK_AXES if part == "blocks" else 0
        one = lambda spec, leaf: cut_over_data(spec, leaf.shape, replicas, first)  # noqa: E731
        return jax.tree.map(one, whole[part], shapes[part], is_leaf=is_spec)

    stored = {part: cut(part) for part in whole}
    return ParameterSpecs(stored, {**whole, "blocks": stored["blocks"]} if parallel.zero == 3 else whole)


def initial_params(run: RunConfig, key: jax.Array, placement: str = "loop") -> Tree:
    """Fresh fp32 parameters, blocks dealt for a schedule's placement. Values depend on the key and the model alone."""
    params, parallel = gpt.init(run.model, key, run.parallel.vocabulary_shares), run.parallel
    blocks = layout.to_pipeline_layout(
        params["blocks"], stages=parallel.pipe, chunks=parallel.chunks, placement=placement
    )
    return {**params, "blocks": blocks}


def axis_rules(run: RunConfig) -> AxisRules:
    """How the run's arrays lie on its mesh."""
    return AxisRules(run.parallel.sequence_parallel, share_ends(run))


def share_ends(run: RunConfig) -> bool:
    """Whether all pipeline ranks share embedding and head."""
    return run.parallel.vocab_parallel == "pipe" and run.parallel.pipe > 1


def group_blocks(blocks: Tree, group: int) -> Tree:
    """[chunks, pipe, layers, ...] to [chunks, pipe, layers / group, group, ...]; as they are for groups of one."""
    if group == 1:
        return blocks
    return jax.tree.map(lambda a: a.reshape(*a.shape[:2], -1, group, *a.shape[3:]), blocks)


def _grouped(specs: Tree, group: int) -> Tree:
    if group == 1:
        return specs
    insert = lambda spec: P(*tuple(spec)[:BLOCK_AXES], None, *tuple(spec)[BLOCK_AXES:])  # noqa: E731
    return {**specs, "blocks": jax.tree.map(insert, specs["blocks"], is_leaf=is_spec)}
