"""Which parameters a run trains. The others are frozen: they have no gradient, no accumulator and no optimizer state.

A mask is a tree of bools like the parameters, nested dictionaries. Gradients and optimizer state are like the parameters
without the leaves that are frozen; dictionaries stay, empty ones too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from megajax.config import ConfigError
from megajax.ops.optimizers.groups import check_patterns, matches

__all__ = ["merge", "only_trained", "overlaid", "split", "trained_mask"]

Tree = Any


def split(tree: Tree, trained: Tree | None) -> tuple[Tree, Tree]:
    """(the leaves that are trained, those that are frozen) of a tree like the parameters; no mask: all are trained.

    Leaves of the mask say it of whole subtrees of `tree` too.
    """
    if trained is None or trained is True:
        return tree, {}
    if trained is False:
        return {}, tree
    parts = {name: split(tree[name], below) for name, below in trained.items()}
    own = {name: part for name, (part, _) in parts.items() if trained[name] is not False}
    return own, {name: part for name, (_, part) in parts.items() if trained[name] is not True}


def only_trained(tree: Tree, trained: Tree | None) -> Tree:
    """The leaves that are trained of a tree like the parameters."""
    return split(tree, trained)[0]


def merge(trained: Tree, frozen: Tree) -> Tree:
    """The inverse of `split`."""
    if not isinstance(frozen, Mapping) or not frozen:
        return trained
    if not isinstance(trained, Mapping):
        return frozen
    both = {name: merge(trained[name], frozen[name]) for name in trained.keys() & frozen.keys()}
    return {**trained, **frozen, **both}


def overlaid(tree: Tree, own: Tree) -> Tree:
    """A tree of nested dictionaries with the leaves of `own`, a part of it, in place of its own."""
    if not isinstance(own, Mapping):
        return own
    return {name: overlaid(below, own[name]) if name in own else below for name, below in tree.items()}


def trained_mask(model: Any, freeze: Sequence[str] = ()) -> Tree | None:
    """The parameters that a run of the model trains; None: all.

    Args:
      model: has `trainable_mask()`, as `PipelineModel`.
      freeze: patterns of further parameters that are frozen (`ops/optimizers/groups.py`).

    Raises:
      ConfigError: a pattern is that of no parameter, or nothing is left to train.
    """
    mask = model.trainable_mask()
    paths = check_patterns(freeze, mask, "freeze")
    frozen = [any(matches(pattern, path) for pattern in freeze) for path in paths]
    leaves = [flag and not own for own, flag in zip(frozen, jax.tree.leaves(mask), strict=True)]
    if all(leaves):
        return None
    if not any(leaves):
        given = f"freeze = {', '.join(freeze)}" if freeze else f"trainable_mask() of {type(model).__name__}"
        raise ConfigError(f"{given} leaves no parameter to train: freeze fewer of {', '.join(paths)}.")
    return jax.tree.unflatten(jax.tree.structure(mask), leaves)
