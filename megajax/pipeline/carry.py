"""What one rank holds between ticks."""

from typing import Any, NamedTuple

import jax

from megajax.pipeline.embedding_and_head import EndState

Tree = Any


class Carry(NamedTuple):
    """The state of one rank between ticks. Shapes are those on one rank and replica."""

    stash: Tree  # written by forwards, read by their backwards; [slots, blocks per chunk, ...], or a tuple of them
    activations: Tree  # inbox of received activations, leaves [slots + 1, samples, ...]
    gradients: Tree  # inbox of received gradients, likewise
    pending: Tree  # gradient between the parts of a backward; in paired ticks, the one to send in the next tick
    unfinished: Tree  # activation between the parts of a forward; () if no forward has several
    kept: Tree  # written by I, read by W; [slots, blocks per chunk, ...]
    block_gradients: Tree  # fp32, [local layers, ...]
    shared_gradients: Tree  # fp32
    output: Tree  # [microbatches, ...]: each microbatch's loss, or the result of `collect`
    iterations: jax.Array  # int32, of all loops so far; see `Rank.mixed_tick`
    records: Tree  # `ExecutorOptions.statistics` of each block and microbatch; empty without
    embedded: Tree  # the embedding for the next tick's forward, leaves [samples, ...]; () in paired ticks

    @property
    def end_state(self) -> EndState:
        return EndState(*(getattr(self, name) for name in EndState._fields))
