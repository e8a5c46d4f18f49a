"""Groups of parameters: the values of options such as `--lr-multiplier` by the patterns that match a parameter's path.

`--freeze` (`pipeline/trained.py`) reads patterns by the same rule.
"""

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

from megajax.config import ConfigError, option

__all__ = ["check_patterns", "decay_mask", "matches", "rate_multipliers"]

Tree = Any


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a parameter's path, "blocks/attention/qkv/kernel", or one of the folders that it is in.

    `*` stands for any characters, slashes too, `?` for one, `[ab]` for one of these (`fnmatch`).
    """
    parts = path.split("/")
    return any(fnmatch.fnmatchcase("/".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def rate_multipliers(pairs: Sequence[tuple[str, float]], params: Tree) -> Tree:
    """A tree like `params` of floats: of each parameter the factor of the last pattern that matches it, else 1.

    Args:
      pairs: patterns and factors (`TrainConfig.rate_multipliers`).
      params: a tree like the parameters.

    Raises:
      ConfigError: a pattern matches no parameter; the message lists their paths.
    """
    check_patterns([pattern for pattern, _ in pairs], params, "lr_multiplier")
    factor = lambda path: next((number for pattern, number in reversed(pairs) if matches(pattern, path)), 1.0)  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, _: factor(_name(path)), params)


def decay_mask(patterns: Sequence[str], mask: Tree) -> Tree:
    """The decay mask of a model, False too where one of the patterns matches; raises as `rate_multipliers`."""
    check_patterns(patterns, mask, "no_weight_decay")
    decayed = lambda path: not any(matches(pattern, path) for pattern in patterns)  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, own: own and decayed(_name(path)), mask)


def _name(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def check_patterns(patterns: Sequence[str], params: Tree, field: str) -> list[str]:
    """The paths of all parameters of a tree.

    Raises:
      ConfigError: one of the patterns of the option `field` matches none of them; the message lists them.
    """
    names = [_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise ConfigError(
                f"{field} = {pattern} matches no parameter: pass {option(field)} with a pattern of one of "
                f"{', '.join(names)}."
            )
    return names
