"""The blocks of a forward's chunk beside those of a backward's, where both orders of kinds are known, as in `run_in_order`.

The forward's first block runs beside the backward's last one, its second beside the one before, and so on: a loop for each
run of pairs of the same kinds. What one chunk has more than the other comes after them. For a forward of a dense (d) and two
sparse layers (s) beside a backward of four sparse ones:

    forward     d0   s0  s1
    backward    s3   s2  s1   s0        1 pair (d, s), then 2 of (s, s), and one block alone

So do the blocks of one part of each, where a forward and a backward overlap in parts (`schedule.OVERLAP_PARTS`).
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from megajax.pipeline.chunk_work import ChunkWork, Pair
from megajax.pipeline.loops import run_one_of, which
from megajax.pipeline.options import MERGED
from megajax.schedules.schedule import BACKWARD, FORWARD

__all__ = ["of_kinds_or_counts"]

Tree = Any


def of_kinds_or_counts(
    stack: Any, inputs: tuple, works: tuple[ChunkWork, ChunkWork], gradients: Tree, pairs: Sequence, iterations
) -> tuple:
    """`Stack.forward_and_backward` where blocks are of several kinds, or stages have different numbers of blocks.

    There is a branch for each two chunks, orders and part that a rank has in one tick.

    Args:
      stack: the `Stack`.
      inputs: (x, dy).
      works, gradients, pairs, iterations: as there.
    """
    low, high = works[0].blocks
    always = isinstance(high, int)  # every rank has both, whole
    steps = (
        stack.steps(works[0], lambda own, work: own.forward_step(work), 1),
        stack.steps(works[1], lambda own, work: own.backward_step(inputs[1], work), 1, 2),
    )
    choices = stack.pairs(pairs, works[0].parts)

    def branch(pair: Pair, zero, state):
        first = tuple({kind: chunk * own.per_chunk for kind, own in stack.kinds.items()} for chunk in pair.chunks)
        blocks = slice(pair.start, pair.stop), slice(stack.per_chunk - pair.stop, stack.per_chunk - pair.start)
        return run_pairs(pair.orders, blocks, first, steps, zero, state)

    def holds(pair: Pair):
        same = [work.chunk == chunk for work, chunk in zip(works, pair.chunks, strict=True)]
        part = [] if always else [low == pair.start, high == pair.stop]
        return functools.reduce(operator.and_, [*same, *map(stack.has_order, works, pair.orders), *part])

    state = (*inputs, works[0].stash.buffer, gradients, works[0].records)
    branches = [functools.partial(branch, choice) for choice in choices]
    with jax.named_scope(MERGED):
        index = which(map(holds, choices))
        iterations, (*others, records) = run_one_of(iterations, index, branches, state, always=always)
    return *others, iterations, records


def run_pairs(
    orders: tuple[tuple[str, ...], tuple[str, ...]],
    blocks: tuple[slice, slice],
    first: tuple[dict[str, int], dict[str, int]],
    steps: tuple[dict[str, Callable], dict[str, Callable]],
    zero: jax.Array,
    state: tuple,
) -> tuple:
    """Runs blocks of two chunks, whose kinds are known.

    Args:
      orders: the kinds of the blocks of the forward's chunk, and of the backward's.
      blocks: which blocks of each.
      first: for each kind the place of these chunks' first blocks.
      steps: for each kind, of `BlockSteps.forward_step` and of `backward_step`.
      zero: passed to the steps.
      state: (x, dy, the stash's buffer, gradients, records).

    Returns:
      The final state.
    """
    done = {kind: orders[0][: blocks[0].start].count(kind) for kind in first[0]}
    left = {kind: orders[1][: blocks[1].stop].count(kind) for kind in first[1]}
    pairs = itertools.zip_longest(orders[0][blocks[0]], reversed(orders[1][blocks[1]]))
    for pair, group in itertools.groupby(pairs):
        count, (ahead, back) = len(list(group)), pair
        begin, end = done.get(ahead, 0), left.get(back, 0)

        def one(index, state, ahead=ahead, back=back, begin=begin, end=end):
            x, dy, buffer, gradients, records = state
            if back is not None:
                slot = end - 1 - index
                with jax.named_scope(BACKWARD):
                    given = dy, buffer, gradients, records
                    dy, buffer, gradients, records = steps[1][back](slot, first[1][back] + slot, zero, given)
            dy, buffer = lax.optimization_barrier((dy, buffer))  # as in `Stack.forward_and_backward`
            if ahead is not None:
                slot = begin + index
                with jax.named_scope(FORWARD):
                    given = x, buffer, records
                    x, buffer, records = steps[0][ahead](slot, first[0][ahead] + slot, zero, given)
            return x, dy, buffer, gradients, records

        state = one(0, state) if count == 1 else lax.fori_loop(0, count, one, state)
        if ahead is not None:
            done[ahead] += count
        if back is not None:
            left[back] -= count
    return state
