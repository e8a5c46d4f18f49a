"""A chunk's blocks in an order of kinds that is known at compile time, as in a branch of `stage.Stack`.

A loop for each run of blocks of one kind, and around them one over the periods of a periodic order. For every third layer
sparse (s), the others dense (d), and 6 layers in a chunk:

    s d d s d d        2 times (1 s, then 2 d)
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from megajax.config.layer_kinds import period_of

Tree = Any


def run_in_order(
    order: tuple[str, ...],
    blocks: tuple[int, int],
    first: dict[str, int],
    steps: dict[str, Callable],
    zero: jax.Array | int,
    state: tuple,
    *,
    backwards: bool,
    unrolled: bool,
) -> tuple:
    """Runs a range of a chunk's blocks, whose kinds are known: loops over runs of one kind, in one over periods.

    Args:
      order: the kinds of the chunk's blocks.
      blocks: the range.
      first: for each kind the place of the chunk's first block.
      steps: for each kind, see `BlockSteps`.
      zero, state: passed to the steps.
      backwards: last block first.
      unrolled: without a loop.
    """
    done = {kind: order[: blocks[0]].count(kind) for kind in steps}
    order = order[slice(*blocks)]
    if not order:
        return state
    period = period_of(order) if len(set(order)) > 1 else len(order)
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(order[:period])]
    starts = [sum(count for other, count in runs[:number] if other == kind) for number, (kind, _) in enumerate(runs)]
    of_range = lambda first, count, index: first + count - 1 - index if backwards else first + index  # noqa: E731

    def one_period(number, state):
        for (kind, count), start in list(zip(runs, starts, strict=True))[:: -1 if backwards else 1]:
            begin = done[kind] + start + number * order[:period].count(kind)

            def one(index, state, kind=kind, count=count, begin=begin):
                slot, place = (of_range(low, count, index) for low in (begin, first[kind] + begin))
                return steps[kind](slot, place, zero, state)

            if unrolled or (count == 1 and len(runs) > 1):
                state = functools.reduce(lambda state, index, one=one: one(index, state), range(count), state)
            else:
                state = lax.fori_loop(0, count, one, state)
        return state

    periods = len(order) // period
    if periods == 1:
        return one_period(0, state)
    return lax.fori_loop(0, periods, lambda index, state: one_period(of_range(0, periods, index), state), state)
