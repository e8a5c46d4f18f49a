"""Layouts that the time model cannot tell apart: those within its error bar of the fastest, the simplest first."""

from collections.abc import Sequence

from megajax.estimate.error_bars import comparison_bar
from megajax.plan.search import Candidate
from megajax.schedules.registry import search_order

__all__ = ["is_tie", "simplest_first"]


def is_tie(one: Candidate, fastest: Candidate) -> bool:
    """Whether `one` is slower than `fastest` by no more than comparisons of two layouts are off by."""
    bar = comparison_bar(one.run.parallel, fastest.run.parallel)
    return one.time.total <= (1 + bar) * fastest.time.total


def simplest_first(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Timed candidates in the order of `search`, with the ties of the fastest sorted by simplicity."""
    if not fitting:
        return []
    ties = [one for one in fitting if is_tie(one, fitting[0])]
    rest = [one for one in fitting if not is_tie(one, fitting[0])]
    return sorted(ties, key=_complexity) + rest


def _complexity(one: Candidate) -> tuple:
    """How many kinds of parallelism and other features a layout uses, its schedule's place, its chunks; then its time."""
    parallel = one.run.parallel
    axes = (parallel.pipe, parallel.tensor, parallel.context, parallel.expert)
    used = (*(size > 1 for size in axes), parallel.zero > 0, parallel.chunks > 1)
    order = search_order()
    schedule = order.index(parallel.schedule) if parallel.schedule in order else len(order)
    return sum(used), schedule if parallel.pipe > 1 else 0, parallel.chunks, one.time.total
