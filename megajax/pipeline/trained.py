"""Which parameters a run trains. The others are frozen: they have no gradient, no accumulator and no optimizer state.

A mask is a tree of bools like the parameters, nested dictionaries. Gradients and optimizer state are like the parameters
without the leaves that are frozen; dictionaries stay, empty ones too.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from megajax.config import ConfigError

__all__ = ["matches", "merge", "only_trained", "split", "trained_mask"]

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


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a parameter's path, "blocks/attention/qkv/kernel", or one of the folders that it is in.

    `*` stands for any characters, slashes too, `?` for one, `[ab]` for one of these (`fnmatch`).
    """
    parts = path.split("/")
    return any(fnmatch.fnmatchcase("/".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def trained_mask(model: Any, freeze: Sequence[str] = ()) -> Tree | None:
    """The parameters that a run of the model trains; None: all.

    Args:
      model: has `trainable_mask()`, as `PipelineModel`.
      freeze: patterns of further parameters that are frozen (`matches`).

    Raises:
      ConfigError: a pattern is that of no parameter, or nothing is left to train.
    """
    mask = model.trainable_mask()
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(mask)]
    for pattern in freeze:
        if not any(matches(pattern, path) for path in paths):
            raise ConfigError(
                f"freeze = {pattern} matches no parameter: pass --freeze with a pattern of one of {', '.join(paths)}."
            )
    frozen = [any(matches(pattern, path) for pattern in freeze) for path in paths]
    leaves = [flag and not own for own, flag in zip(frozen, jax.tree.leaves(mask), strict=True)]
    if all(leaves):
        return None
    if not any(leaves):
        given = f"freeze = {', '.join(freeze)}" if freeze else f"trainable_mask() of {type(model).__name__}"
        raise ConfigError(f"{given} leaves no parameter to train: freeze fewer of {', '.join(paths)}.")
    return jax.tree.unflatten(jax.tree.structure(mask), leaves)
