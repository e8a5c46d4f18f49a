"""Which attention a run gets on a card that is not here."""

import dataclasses
from types import SimpleNamespace

from megajax.config import ParallelConfig, RunConfig
from megajax.estimate.gpus import Card
from megajax.ops.attention import choose_attention

__all__ = ["is_fused", "with_attention"]


def with_attention(run: RunConfig, card: Card) -> RunConfig:
    """The run with `attention` "xla" or "cudnn", as the program chooses on `card`s that have the cuDNN library.

    Raises:
      ConfigError: cudnn was asked for and cannot run there.
    """
    device = SimpleNamespace(
        platform="gpu",
        device_kind=card.device_kind,
        compute_capability=".".join(map(str, card.compute_capability)),
    )
    choice = choose_attention(
        run.parallel.attention,
        head_size=run.model.head_size,
        dropout=run.model.dropout,
        precision=run.train.precision,
        device=device,
        cudnn=True,
    )
    return dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, attention=choice.name))


def is_fused(parallel: ParallelConfig) -> bool:
    """Whether blocks keep no scores: under cuDNN's attention, and a ring's. "auto" counts as xla: see `with_attention`."""
    return parallel.attention == "cudnn" or parallel.context > 1
