"""The state of a training, and the exponential moving average of its weights (`--ema-decay`).

The average is fp32, and sharded as the weights are stored. After each update that is not skipped it is
decay * average + (1 - decay) * weights, `optax.incremental_update`. It starts from the weights before the first update: the
initial ones, those of `--init-from`, or those of a checkpoint without an average. Weights that are frozen have no average:
they are their own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megajax.config import TrainConfig
from megajax.pipeline.trained import overlaid
from megajax.train.precision import LossScale

__all__ = ["TrainState", "average_of", "averaged", "evaluated_params", "started"]

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training carries from step to step."""

    params: Tree  # fp32, frozen ones in the compute dtype; blocks in pipeline layout (pipeline/layout.py)
    optimizer_state: Tree  # of the parameters that are trained
    loss_scale: LossScale
    in_flight: Tree = ()  # microbatches of a pipeline that is not drained between steps (pipeline/pipedream_2bw.py)
    ema: Tree = ()  # the average of the parameters that are trained; without `ema_decay` there is none


def average_of(train: TrainConfig, own: Tree) -> Tree:
    """What the state has for the averages of what is trained: a tree like `own`, or without `ema_decay` ()."""
    return () if train.ema_decay is None else own


def averaged(train: TrainConfig, average: Tree, params: Tree) -> Tree:
    """The average after an update to `params`, those trained; without `ema_decay` what is given, (). To be traced."""
    return average if train.ema_decay is None else optax.incremental_update(params, average, 1 - train.ema_decay)


def started(train: TrainConfig, state: TrainState, own: Tree | None = None) -> TrainState:
    """The state, with the average that it lacks: a copy of `own`, its weights that are trained; None: all are."""
    if train.ema_decay is None or jax.tree.leaves(state.ema):
        return state
    return dataclasses.replace(state, ema=jax.tree.map(jnp.copy, state.params if own is None else own))


def evaluated_params(train: TrainConfig, state: TrainState) -> Tree:
    """The weights that validation and evaluations during the training measure: with `ema_validation` the average."""
    return overlaid(state.params, state.ema) if train.ema_validation else state.params
