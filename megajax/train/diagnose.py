"""Explains a step that is not finite: the first microbatch and sample, and the first parameter or layer, that are not.

Called after a step was skipped, with the parameters that it had; no part of it runs in other steps. The sample is found by
bisection: a batch filled with copies of half of the samples runs through the step's own program, so a batch of n takes
log2(n) passes. The layer likewise, by forward passes in which the blocks from some layer on are the identity.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import layers_of, named
from megajax.data.loader import PADDING
from megajax.pipeline import layout
from megajax.schedules.stages import StageLayers
from megajax.train.step import Training

Tree = Any


def explain(training: Training, params: Tree, batch: Tree, scale: float = 1.0) -> str:
    """One sentence on why the loss or gradients of `batch` at `params` are not finite.

    Args:
      batch: of numpy arrays, [microbatches, samples, ...]; "sample" and "weights" are read if it has them.
      scale: the loss scale, which may be what makes gradients overflow.
    """
    broken = not_finite(training, params)
    if broken:
        return f"the weights themselves are not finite: {broken[0]}{_more(broken)}"

    def bad(samples: np.ndarray) -> bool:
        return bool(_broken_by(training, params, _copies(batch, samples), scale))

    microbatches, each = layout.leading_sizes(batch)
    numbers = np.asarray(batch.get("sample", np.arange(microbatches * each))).reshape(-1)
    count = int((numbers != PADDING).sum())
    if not bad(np.arange(count)):
        return "the same step, run again, is finite: check the hardware"
    sample = _first(np.arange(count), bad)
    if sample is None:
        return "no single sample causes it: the sum of their gradients overflows"
    of = "the run" if "sample" in batch else "the batch"
    where = f"microbatch {sample // each + 1} of {count // each}, sample {numbers[sample]} of {of}: "
    only = _copies(batch, np.array([sample]))
    return where + _forward_or_backward(training, params, only, scale)


def _forward_or_backward(training: Training, params: Tree, batch: Tree, scale: float) -> str:
    """The first layer whose output is not finite, or the first gradient of the backward pass."""
    layers = training.run.model.layers
    if "weights" in batch and not np.isfinite(np.asarray(batch["weights"])).all():
        return "the loss weights in the data are not finite"
    finite = stream_is_finite(training, params, batch)
    if not finite(0):
        return "the embedding is not finite"
    if not finite(layers):
        low, high = 0, layers  # finite after `low` blocks, not after `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if finite(middle) else (low, middle)
        return f"the output of layer {high - 1} is not finite; its input and its weights are"
    broken = _broken_by(training, params, batch, scale)
    if broken == ["loss"]:
        return "every layer's output is finite, the loss is not"
    broken = [name for name in broken if name != "loss"]
    return f"the forward is finite, the gradient of {broken[0]} is not{_more(broken)}"


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _copies(batch: Tree, samples: np.ndarray) -> Tree:
    """A batch of the same shape filled with copies of some samples, repeated in order."""
    count = np.prod(layout.leading_sizes(batch))
    chosen = np.resize(samples, count)
    flat = {name: a.reshape(count, *a.shape[2:])[chosen] for name, a in batch.items()}
    return {name: flat[name].reshape(a.shape) for name, a in batch.items()}


def _first(samples: np.ndarray, bad: Callable[[np.ndarray], bool]) -> int | None:
    """The first sample that is bad alone, given that `samples` together are; None if it takes several."""
    while len(samples) > 1:
        half = len(samples) // 2
        samples = samples[:half] if bad(samples[:half]) else samples[half:]
    return int(samples[0]) if bad(samples) else None


def _broken_by(training: Training, params: Tree, batch: Tree, scale: float) -> list[str]:
    """The names of what is not finite: "loss", and gradients in the order of the backward pass."""
    if "weights" in batch and not np.asarray(batch["weights"]).any():
        return []  # all tokens have weight 0: the mean loss is 0 / 0
    loss, gradients = training.loss_and_gradients(params, batch, scale=scale)
    return ([] if np.isfinite(float(loss)) else ["loss"]) + not_finite(training, gradients)


def not_finite(training: Training, tree: Tree) -> list[str]:
    """The leaves of a tree like the parameters with an element that is not finite: head, last layer to first, rest.

    A leaf of blocks is named once for each layer: "layer 3, attention/qkv/kernel".
    """
    sharding = NamedSharding(training.mesh, P())
    with jax.set_mesh(training.mesh):
        flags = jax.tree.map(
            np.asarray, jax.jit(_flags, static_argnums=1, out_shardings=sharding)(named(tree), training.where)
        )
    found = []
    for name, finite in flags.items():
        if own := layers_of(name, training.where):
            short = name.split("blocks/")[1].partition("/")[2] if training.where.kinds else name.split("blocks/")[1]
            found += [(1, -layer, f"layer {layer}, {short}") for layer in np.array(own.numbers)[~finite]]
        elif not finite:
            found.append((0 if "head" in name else 2, 0, name))
    return [text for _, _, text in sorted(found)]


def _flags(leaves: dict[str, jax.Array], where: StageLayers) -> dict[str, jax.Array]:
    """Whether each leaf is finite: a bool, for blocks [layers]."""

    def finite(name, leaf):
        own = layers_of(name, where)
        if own is None:
            return jnp.isfinite(leaf).all()
        each = jnp.isfinite(leaf).all(tuple(range(3, leaf.ndim)))
        return layout.from_pipeline_layout(each, own)

    return {name: finite(name, leaf) for name, leaf in leaves.items()}


def stream_is_finite(training: Training, params: Tree, batch: Tree) -> Callable[[int], bool]:
    """Returns a function of n: whether the residual stream of a whole batch is finite after the first n blocks."""
    functions, group = training.functions, training.run.parallel.recompute_blocks

    def block(weights, x, microbatch, layer):
        return jnp.where(layer * group < microbatch["blocks"][0], functions.block(weights, x, microbatch, layer), x)

    def collect(shared, y, microbatch):
        return jnp.isfinite(y).all(tuple(range(1, y.ndim))).astype(jnp.int32)

    def finite(params, batch):
        return training.forward(dataclasses.replace(functions, block=block), collect, params, batch).all()

    program = jax.jit(finite, out_shardings=NamedSharding(training.mesh, P()))

    def after(blocks: int) -> bool:
        marked = batch | {"blocks": np.full(layout.leading_sizes(batch), blocks, np.int32)}
        with jax.set_mesh(training.mesh):
            return bool(program(params, training.place(marked)))

    return after
