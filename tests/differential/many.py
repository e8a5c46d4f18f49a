"""Many random examples from a seed that is printed, so that a difference can be found again."""

import os
import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

__all__ = ["FEW", "many"]

SEED = "DIFFERENTIAL_SEED"
FEW = dict(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def many(compare: Callable[..., None], examples: int, capsys: Any, *strategies: Any) -> None:
    """Compares that many examples; hypothesis shrinks what differs."""
    number = int(os.environ.get(SEED, random.randrange(2**32)))
    with capsys.disabled():
        print(f"\n{examples} examples from {SEED}={number}")
    options = settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    seed(number)(options(given(*strategies)(compare)))()
