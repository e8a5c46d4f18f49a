"""Several validation sets in one option: `--valid-data-path books=PREFIX web=0.3 PREFIX 0.7 PREFIX`.

A word NAME=VALUE begins the set NAME, of VALUE and the words up to the next NAME=. Without any NAME= all words are one set,
the `DEFAULT_SET`. A name has letters, digits, "_", "." and "-", and a letter first: a path with "=" in a directory's name is
no name if it has a "/" before, as in ./lang=en/text.
"""

import re
from collections.abc import Sequence

from megajax.config.errors import ConfigError

DEFAULT_SET = "validation"
NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


def validation_sets(words: Sequence[str], option: str) -> dict[str, tuple[str, ...]]:
    """The words of each set, by its name.

    Raises:
      ConfigError: a name is given twice or to nothing, or only some of the words are in a named set.
    """
    if not any(map(NAMED.fullmatch, words)):
        return {DEFAULT_SET: tuple(words)}
    sets: dict[str, list[str]] = {}
    name = ""
    for word in words:
        found = NAMED.fullmatch(word)
        if found is None and not name:
            raise ConfigError(f"{option} {word} is in no set, and others are: pass {option} NAME={word}.")
        if found is None:
            sets[name].append(word)
            continue
        name, value = found.groups()
        if name in sets:
            raise ConfigError(f"{option} has two sets called {name}: give each a name of its own.")
        sets[name] = [value] if value else []
    for name, own in sets.items():
        if not own:
            raise ConfigError(f"{option} {name}= has nothing after it: pass {option} {name}=PATH, or omit that set.")
    return {name: tuple(own) for name, own in sets.items()}
