"""The parameters of a run that are trained, on one device: frozen ones have no gradients, no optimizer state, no fp32 copy.

Counted from the model's parameters, their logical axes and the run's mask (`pipeline/trained.py`), for models of which some
parameters are frozen; all others are counted by `models/costs.py`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax

from megajax.config import ConfigError, ModelConfig, RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.models.interface import model_class
from megajax.pipeline.trained import trained_mask
from megajax.sharding.rules import default_rules

__all__ = ["Trained", "trained_parameters"]

Tree = Any


@dataclasses.dataclass(frozen=True)
class Trained:
    """Trained parameters on a device, before ZeRO.

    Attributes:
      blocks: (outside of the experts, of the experts) of one block of each kind, in the order of `kinds.layers_of_kinds`.
      shared: outside the blocks.
      on_all_stages: of these, what all stages hold although the vocabulary may be split over pipe.
      matrices: share of the blocks' matrices that is trained, whose gradients are matmuls.
      tables: share of the token tables.
    """

    blocks: tuple[tuple[int, int], ...]
    shared: int
    on_all_stages: int
    matrices: float
    tables: float


def trained_parameters(run: RunConfig) -> Trained | None:
    """Those of a run; None: all are trained."""
    parallel = run.parallel
    sizes = ("tensor", parallel.tensor), ("pipe", parallel.pipe), ("expert", parallel.expert_replicas)
    how = parallel.vocabulary_over_pipe, parallel.experts_over_tensor
    return _counted(run.model, run.train.freeze, sizes, *how)


@functools.lru_cache(maxsize=256)
def _counted(
    model: Any, freeze: tuple[str, ...], sizes: tuple[tuple[str, int], ...], over_pipe: bool, over_tensor: bool
) -> Trained | None:
    if not freeze and isinstance(model, ModelConfig) and not model.lora:
        return None
    try:
        build = model_class(model)(model)
    except ConfigError:  # of a class that is registered for no type: its costs are given too
        return None
    mask = trained_mask(build, freeze)
    if mask is None:
        return None
    degrees = dict(sizes)
    rules = default_rules(
        vocabulary_over_pipe=over_pipe, expert_parallel=degrees["expert"] > 1, experts_over_tensor=over_tensor
    )
    shapes, axes = jax.eval_shape(build.init, jax.random.key(0)), build.logical_axes()

    def held(part: Tree, own: Tree, names: Tree, stacked: int, only: Any = None) -> int:
        """Elements on a device of the trained arrays, of one layer; `only(names)`: of which of them."""
        count = 0
        leaves = zip(
            jax.tree.leaves(part),
            jax.tree.leaves(own),
            jax.tree.leaves(names, is_leaf=lambda node: isinstance(node, tuple)),
            strict=True,
        )
        for leaf, flag, each in leaves:
            if flag and (only is None or only(each)):
                split = math.prod(
                    degrees[a] for name in each if name in rules.table for a in rules.mesh_axes(name) if a in degrees
                )
                count += math.prod(leaf.shape[stacked:]) // split
        return count

    kinds = layer_kinds(model)
    trees = [
        tuple(tree["blocks"] if kinds is None else tree["blocks"][kind] for tree in (shapes, mask, axes))
        for kind in ([None] if kinds is None else sorted(set(kinds)))
    ]
    is_expert, is_table = (lambda names: "experts" in names), (lambda names: "vocabulary" in names)
    blocks = tuple((held(*tree, 1, lambda names: not is_expert(names)), held(*tree, 1, is_expert)) for tree in trees)
    shared = tuple(tree["shared"] for tree in (shapes, mask, axes))
    rest = held(*shared, 0, lambda names: not is_table(names))
    every = held(*shared, 0)
    return Trained(blocks, every, rest if over_pipe else every, _share(trees, 1), _share([shared], 0, is_table))


def _share(trees: list, stacked: int, only: Any = None) -> float:
    """The share of the elements of matrices that is trained."""
    own = total = 0
    for shapes, mask, axes in trees:
        names = jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
        for leaf, flag, each in zip(jax.tree.leaves(shapes), jax.tree.leaves(mask), names, strict=True):
            if leaf.ndim - stacked > 1 and (only is None or only(each)):
                own, total = own + leaf.size * bool(flag), total + leaf.size
    return own / total if total else 1.0
