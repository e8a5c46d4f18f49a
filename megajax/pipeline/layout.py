"""Where a model's layers are stored: canonical order outside, dealt over chunks and ranks inside the program.

Canonical: leaves [layers, ...]. Dealt: [chunks, ranks, layers per chunk, ...], axis 1 sharded over `pipe`, so that a rank's
memory holds its own chunks only. Stage chunk * ranks + rank is the run of layers it holds, so the two differ by a reshape.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

Tree = Any


def deal(blocks: Tree, *, stages: int, chunks: int) -> Tree:
    """[layers, ...] to [chunks, stages, layers / (stages * chunks), ...]."""
    return jax.tree.map(lambda a: a.reshape(chunks, stages, a.shape[0] // (stages * chunks), *a.shape[1:]), blocks)


def gather(blocks: Tree) -> Tree:
    """The inverse of `deal`, whatever the stages and chunks were."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), blocks)


def dealt_spec(spec: P) -> P:
    """The sharding of a dealt leaf, from that of the canonical one (whose first axis, layers, is not sharded)."""
    return P(None, "pipe", None, *spec[1:])
