"""Where a model's layers are stored: canonical order outside, dealt over chunks and ranks inside the program.

Canonical: leaves [layers, ...]. Dealt: [chunks, ranks, layers per chunk, ...], axis 1 sharded over `pipe`, so that a rank's
memory holds its own chunks only. In "loop" placement stage chunk * ranks + rank is the run of layers held there, so the
two differ by a reshape; in "v" placement the second chunk's ranks are in reverse.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

Tree = Any


def deal(blocks: Tree, *, stages: int, chunks: int, placement: str = "loop") -> Tree:
    """[layers, ...] to [chunks, stages, layers / (stages * chunks), ...]."""
    shape = (chunks, stages, -1)
    return jax.tree.map(lambda a: _fold(a.reshape(*shape, *a.shape[1:]), placement), blocks)


def gather(blocks: Tree, *, placement: str = "loop") -> Tree:
    """The inverse of `deal`, whatever the stages and chunks were."""
    return jax.tree.map(lambda a: _fold(a, placement).reshape(-1, *a.shape[3:]), blocks)


def _fold(dealt, placement: str):
    """Turns the second chunk's ranks round, for "v" placement."""
    if placement == "loop":
        return dealt
    return jnp.stack([dealt[0], jnp.flip(dealt[1], axis=0)])


def dealt_spec(spec: P) -> P:
    """The sharding of a dealt leaf, from that of the canonical one (whose first axis, layers, is not sharded)."""
    return P(None, "pipe", None, *spec[1:])
