"""Text generation on a pipeline as one SPMD program: every rank works in every tick, on another group of samples.

p ranks take p groups of samples, each group with its own caches. A unit of work is one group and its next tokens: a chunk
of the prompt in `prefill`, one token in `decode`. Rank r runs its layers on unit t - r in tick t, and sends the result to
rank r + 1. What leaves the last rank passes the head; the token that is sampled from it is the group's input one tick
later. For 2 ranks, groups A and B, and 3 tokens of each:

    tick       0    1    2    3    4    5    6
    rank 0     A0   B0   A1   B1   A2   B2   .
    rank 1     .    A0   B0   A1   B1   A2   B2

n tokens of every sample take n p + p - 1 ticks, so a rank is idle in p - 1 ticks of the whole call: to fill and to drain
the pipeline. There is no other dependency to wait for, because a group's next unit enters when its last one has left.
Idle ranks run their layers too, so every trip count is known at compile time; what they compute is not stored. Nor is the
result of a layer used where a stage has none in a slot (`uneven.py`).

Prompts end together: sample i's tokens are in slots start_i to `length` - 1, and what precedes them is padding. So all
samples write the same slot in a tick, and a token's position in its sample is its slot - start_i.

The program is a `jax.shard_map`, manual over data and pipe as the executor's. It knows the model as an object with

    embed(shared, microbatch) -> x                               x: [b, n, ...]
    block_cached(weights, x, cache, microbatch, layer) -> (x, new entries of the cache)
    logits(shared, y) -> fp32 [b, n, vocabulary or more]
    cache_arrays(b, slots) -> CachedArray by name; optionally kind_cache_arrays(kind, b, slots), those of a kind of layers

Weights are {"blocks": one tree for each of a stage's layers, with leaves [pipe, ...], "shared": tree}; with several kinds
of layers "blocks" has such a list for each kind, and the order of kinds is a branch (as in `stage.py`). Each layer has its
own arrays, and its caches too: a slice of a stack would be copied before each matmul that reads it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.ops.cached_attention import PADDING_POSITION, Cache, CachedArray
from megajax.ops.order import wait_for
from megajax.pipeline.layout import MANUAL_AXES, batch_spec, full_specs, is_spec, manual_axes_of, sum_over, vary
from megajax.pipeline.loops import counted_loop, prevent_hoisting, serializes
from megajax.pipeline.uneven import StageBlocks
from megajax.schedules.stages import StageLayers
from megajax.sharding.rules import AxisRules, only

__all__ = ["DecodeProgram", "Rows"]

Tree = Any


class Rows(NamedTuple):
    """The samples of a batch, [groups, samples of a group over all replicas].

    Attributes:
      start: int32, the slot of the prompt's first token.
      number: uint32, the sample's number in the run, which seeds its draws.
      prompt: int32, tokens of the prompt.
    """

    start: jax.Array
    number: jax.Array
    prompt: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeProgram:
    """The two functions that generate text, to be traced under `jax.set_mesh(mesh)`.

    Attributes:
      model: see the module's docstring.
      sample: (logits fp32 [b, v], rows of the b samples, their tokens int32 [b, slots], int32 slot of the token to draw)
        -> tokens int32 [b]. The tokens are those in slots before `slot`; there are no slots if `reads_texts` is false.
      mesh: with the axes data, pipe and tensor.
      rules: logical axis -> mesh axes; its "vocabulary" says whether embedding and head are shared by all ranks.
      weight_specs: tree of PartitionSpec like the weights, or a prefix of it.
      slots: of each sample's cache.
      reads_texts: whether `sample` reads the tokens.
      layer_counts: layers of each stage, if these are not equal (`uneven.StageBlocks`). None: they are.
      stage_kinds: the layers of each stage, of a model with several kinds of them. None: there is one kind.
    """

    model: Any
    sample: Callable[[jax.Array, Rows, jax.Array, jax.Array], jax.Array]
    mesh: Mesh
    rules: AxisRules
    weight_specs: Tree
    slots: int
    reads_texts: bool = False
    layer_counts: tuple[int, ...] | None = None
    stage_kinds: StageLayers | None = None

    def stage_slots(self, weights: Tree) -> int:
        """Slots for layers of a stage."""
        return self.stage_kinds.slots if self.stage_kinds else len(weights["blocks"])

    def cached(self, layers: int, samples: int = 1) -> tuple[dict[str, CachedArray], ...]:
        """What each slot of a stage caches: of several kinds of layers, what those there on any stage do."""
        if not self.stage_kinds:
            return (dict(self.model.cache_arrays(samples, self.slots)),) * layers
        of_kind = getattr(self.model, "kind_cache_arrays", lambda kind, *sizes: self.model.cache_arrays(*sizes))
        found: list[dict[str, CachedArray]] = [{} for _ in range(layers)]
        for order in self.stage_kinds.stage_kinds:
            for own, kind in zip(found, order, strict=False):
                own |= of_kind(kind, samples, self.slots)
        return tuple(found)

    def cache_specs(self, layers: int) -> Tree:
        """PartitionSpecs of the cache of `layers` layers a stage: for each, arrays [pipe, groups, samples, ...] by name."""
        spec = lambda array: P("pipe", None, *self.rules.spec(array.axes))  # noqa: E731
        return tuple({name: spec(array) for name, array in own.items()} for own in self.cached(layers))

    def prefill(self, weights: Tree, tokens: jax.Array, rows: Rows, chunks: jax.Array, width: int) -> tuple:
        """Runs the prompts through the model.

        Args:
          weights: see the module's docstring.
          tokens: int32 [groups, samples, most chunks * width]; those of the prompts end at column chunks * width.
          rows: the samples.
          chunks: int32 scalar.
          width: tokens of a chunk.

        Returns:
          The caches, and the token that follows each prompt, int32 [groups, samples].
        """

        def run(weights, tokens, rows, chunks):
            rank = _Rank(self, weights, rows)
            groups, samples, _ = tokens.shape

            def chunk(group, turn, _):
                return lax.dynamic_slice(tokens, (group, 0, turn * width), (1, samples, width))[0]

            def keep_last(y, group, turn, works, last):
                return _set(last, y[:, -1:], (group,), works)

            y = jax.eval_shape(lambda: rank.embed(jnp.zeros((samples, width), jnp.int32), rows.start[0], 0))
            last = vary(jnp.zeros((groups, samples, 1, *y.shape[2:]), y.dtype))
            cache, last = rank.run(rank.empty_cache(), chunks, width, jnp.int32(0), chunk, keep_last, last)
            texts = tokens if self.reads_texts else tokens[..., :0]
            drawn = lax.map(lambda of: rank.draw(*of, chunks * width), (last, rank.rows, vary(texts)))
            return cache, rank.from_last(drawn)

        cache_specs = self.cache_specs(self.stage_slots(weights))
        of_rows = batch_spec(self.mesh)
        mapped = self._mapped(run, weights, (of_rows, of_rows, P()), (_manual(cache_specs), of_rows))
        return mapped(weights, tokens, rows, chunks)

    def decode(
        self, weights: Tree, cache: Tree, tokens: jax.Array, texts: jax.Array, rows: Rows, slot: jax.Array, count: int
    ) -> tuple:
        """Generates `count` tokens of every sample.

        Args:
          weights, cache: of `prefill`.
          tokens: int32 [groups, samples], the last ones, which are not in the cache yet.
          texts: int32 [groups, samples, slots], prompts and the tokens that followed, up to `slot`; no slots if `sample`
            does not read them.
          rows: the samples.
          slot: int32 scalar, the slot of `tokens`.
          count: tokens of each sample, at most the slots that are left.

        Returns:
          The caches, and the tokens that follow, int32 [count, groups, samples].
        """

        def run(weights, cache, tokens, texts, rows, slot):
            rank = _Rank(self, weights, rows)

            def last_token(group, turn, state):
                return state[0][group][:, None]

            def draw(y, group, turn, works, state):
                last, before, texts = state
                next_slot = slot + turn + 1
                here = jax.tree.map(lambda of: of[group], rank.rows)
                drawn = rank.draw(y, here, texts[group], next_slot)
                if self.reads_texts:
                    texts = _set(texts, drawn, (group, slice(None), next_slot), works)
                return _set(last, drawn, (group,), works), _set(before, drawn, (turn, group), works), texts

            state = vary((tokens, jnp.zeros((count, *tokens.shape), jnp.int32), texts))
            cache, (_, drawn, _) = rank.run(cache, count, 1, slot, last_token, draw, state)
            return cache, rank.from_last(drawn)

        cache_specs = _manual(self.cache_specs(self.stage_slots(weights)))
        of_rows = batch_spec(self.mesh)
        given = (cache_specs, of_rows, of_rows, of_rows, P())
        mapped = self._mapped(run, weights, given, (cache_specs, P(None, *of_rows)))
        return mapped(weights, cache, tokens, texts, rows, slot)

    def _mapped(self, run: Callable, weights: Tree, in_specs: tuple, out_specs: tuple) -> Callable:
        of_weights = _manual(full_specs(self.weight_specs, weights))
        axes = set(manual_axes_of(self.mesh))
        return jax.shard_map(
            run, mesh=self.mesh, in_specs=(of_weights, *in_specs), out_specs=out_specs, axis_names=axes
        )


class _Rank:
    """One rank's part of a call, inside the `shard_map`: its layers, caches and samples."""

    def __init__(self, program: DecodeProgram, weights: Tree, rows: Rows):
        self.program, self.model = program, program.model
        weights = vary(weights)
        self.shared, self.layers = weights["shared"], jax.tree.map(lambda leaf: leaf[0], weights["blocks"])
        self.rows = vary(rows)
        self.rank, self.ranks = lax.axis_index("pipe"), lax.axis_size("pipe")
        self.groups = rows.start.shape[0]
        self.slots = program.stage_slots(weights)
        self.blocks = StageBlocks(self.slots, program.layer_counts)

    def empty_cache(self) -> Tree:
        """The caches of this rank's layers: for each layer, arrays [1, groups, samples, ...] by name."""
        constrain = self.program.rules.constrain

        def empty(array):
            zeros = jnp.zeros((1, self.groups, *array.shape), array.dtype)
            return vary(constrain(zeros, None, None, *array.axes))

        each = self.program.cached(self.slots, self.rows.start.shape[1])
        return tuple({name: empty(array) for name, array in arrays.items()} for arrays in each)

    def run(self, cache: Tree, turns, width: int, slot: jax.Array, tokens: Callable, finish: Callable, state: Tree):
        """Runs `turns` units of every group through all ranks.

        Args:
          cache: of this rank.
          turns: int or int32 scalar; known at compile time, no tick waits for the host.
          width: tokens of a unit.
          slot: of the first unit's first token.
          tokens: (group, turn, state) -> int32 [b, width], a unit's tokens.
          finish: (y [b, width, ...], group, turn, works, state) -> state, run for the unit at the last rank. All ranks
            run it; y has a meaning on the last one alone, and nowhere unless `works`.
          state: carried through the ticks.

        Returns:
          (cache, state).
        """
        units = turns * self.groups

        def unit(number):
            """(whether there is one, its group, its turn)."""
            inside = jnp.clip(number, 0, units - 1)
            return (number >= 0) & (number < units), inside % self.groups, inside // self.groups

        def tick(number, carry):
            cache, x, state = carry
            _, group, turn = unit(number)
            first = self.embed(tokens(group, turn, state), self.rows.start[group], slot + turn * width)
            x = jnp.where(self.rank == 0, first, x)
            works, group, turn = unit(number - self.rank)
            with jax.named_scope("layers"):
                x, cache = self._layers(x, cache, tokens(group, turn, state), group, slot + turn * width, works)
            works, group, turn = unit(number - (self.ranks - 1))
            sent = lax.ppermute(x, "pipe", [(rank, rank + 1) for rank in range(self.ranks - 1)])
            if self.ranks > 1 and serializes(self.program.mesh):
                x = wait_for([sent], x)  # before the last rank's loop over its draw
            return cache, sent, finish(x, group, turn, works, state)

        like = jax.eval_shape(lambda: self.embed(tokens(0, 0, state), self.rows.start[0], slot))
        x = vary(jnp.zeros(like.shape, like.dtype))
        cache, _, state = lax.fori_loop(0, units + self.ranks - 1, tick, (cache, x, state))
        return cache, state

    def embed(self, tokens: jax.Array, start: jax.Array, slot: jax.Array) -> jax.Array:
        """The first stage's input for tokens [b, n] from a slot on."""
        x = self.model.embed(self.shared, self._microbatch(tokens, start, slot))
        return vary(x)

    def _microbatch(self, tokens: jax.Array, start: jax.Array, slot: jax.Array) -> dict[str, jax.Array]:
        return {"tokens": tokens, "positions": _positions(slot + jnp.arange(tokens.shape[1]), start)}

    def _layers(self, x, cache: Tree, tokens, group, slot, works):
        """This rank's layers on one unit: x for the next rank, and the caches with the unit's entries."""
        start, slots = self.rows.start[group], jnp.arange(self.program.slots)
        microbatch = self._microbatch(tokens, start, slot)
        positions = jnp.where(slots < slot, _positions(slots, start), PADDING_POSITION)

        def one(weights, x, arrays, number):
            """One layer: its result, and its cache."""
            own = Cache({name: array[0, group] for name, array in arrays.items()}, positions)
            y, entries = self.model.block_cached(weights, x, own, microbatch, number)
            entries = _after(y, entries)
            stored = {
                name: self._store(arrays[name], entry, name, group, slot, works) for name, entry in entries.items()
            }
            return y, arrays | stored

        if self.program.stage_kinds:
            return self._layers_of_kinds(one, x, cache)
        after = []
        for index, (weights, arrays) in enumerate(zip(self.layers, cache, strict=True)):
            y, stored = one(weights, x, arrays, self.blocks.number(self.rank, index))
            x = self.blocks.select(self.rank, index, y, x)
            after.append(stored)
        return x, tuple(after)

    def _layers_of_kinds(self, one: Callable, x, cache: Tree):
        """`_layers` with `one(weights, x, arrays, number)` for a layer, in a branch for each order of kinds of a stage."""
        where = self.program.stage_kinds
        first = jnp.array(where.firsts, jnp.int32)[self.rank]

        def branch(order, x, cache):
            after = list(cache)
            for index, kind in enumerate(order):
                weights = self.layers[kind][order[:index].count(kind)]
                x, after[index] = one(weights, x, cache[index], first + index)
            return x, tuple(after)

        branches = [functools.partial(branch, order) for order in where.orders]
        if len(branches) == 1:
            return branches[0](x, cache)
        numbers = jnp.array([where.orders.index(order) for order in where.stage_kinds], jnp.int32)
        return lax.switch(numbers[self.rank], branches, x, cache)

    def _store(self, array: jax.Array, entry: jax.Array, name: str, group, slot, works) -> jax.Array:
        """The cache [1, groups, b, ...] with a unit's entry [b, ...] in its slots, or in its place, if the unit `works`."""
        axis = self.program.model.cache_arrays(1, self.program.slots)[name].slot_axis
        at = [0, group, *[0] * entry.ndim]
        if axis is not None:
            at[2 + axis] = slot
        before = lax.dynamic_slice(array, at, (1, 1, *entry.shape))
        return lax.dynamic_update_slice(array, jnp.where(works, entry.astype(array.dtype)[None, None], before), at)

    def draw(self, y: jax.Array, rows: Rows, texts: jax.Array, slot: jax.Array) -> jax.Array:
        """The token at `slot` that follows the last stage's output y [b, 1, ...], int32 [b], the same on all ranks.

        With a vocabulary that is split over pipe all ranks compute their part of the logits, and draw the same token.
        Otherwise the last rank alone does it, in a loop that has no iteration on the others.
        """

        def pick(y):
            # Whole on each device, as it is sorted; before the padding is cut off, which of rows over tensor is a ppermute.
            logits = self.program.rules.constrain(self.model.logits(self.shared, y)[:, 0], "batch", None)
            return vary(self.program.sample(logits[:, : self.model.vocabulary], rows, texts, slot))

        if self.ranks == 1:
            return pick(y)
        if self.program.rules.vocabulary_over_pipe:
            return pick(self._of_last(y))
        none = vary(jnp.zeros(len(y), jnp.int32))
        step = lambda index, zero, drawn: pick(prevent_hoisting(zero, y))  # noqa: E731
        _, drawn = counted_loop(0, (self.rank == self.ranks - 1).astype(jnp.int32), step, none)
        return vary(self.from_last(drawn))

    def _of_last(self, x: jax.Array) -> jax.Array:
        """x on the last rank, zeros on the others."""
        return jnp.where(self.rank == self.ranks - 1, x, jnp.zeros_like(x))

    def from_last(self, x: jax.Array) -> jax.Array:
        """The last rank's x on all of them."""
        return sum_over(self._of_last(x), ("pipe",))


def _positions(slots: jax.Array, start: jax.Array) -> jax.Array:
    """The positions of slots [n] in samples that start at slots [b]: int32 [b, n]; before the start, PADDING_POSITION."""
    return jnp.maximum(slots - start[:, None], PADDING_POSITION)


def _after(x: jax.Array, values: Tree) -> Tree:
    """The values, in a form that XLA cannot compute before x.

    A block's caches must be read before its entries are stored, or XLA copies the whole of them in each tick. An
    `optimization_barrier` is removed too early for that on CPU devices (jax 0.10.2); XLA does not simplify 0 * x.
    """
    zero = (x[(0,) * x.ndim] * 0).astype(jnp.int32)
    return prevent_hoisting(zero, values)


def _set(array: jax.Array, value: jax.Array, at: tuple, works: jax.Array) -> jax.Array:
    """`array` with `value` at the index, if `works`."""
    return array.at[at].set(jnp.where(works, value, array[at]))


def _manual(specs: Tree) -> Tree:
    return jax.tree.map(functools.partial(only, axes=MANUAL_AXES), specs, is_leaf=is_spec)
