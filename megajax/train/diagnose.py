"""Explains a step that is not finite: the first microbatch and sample, and the first parameter or layer, that are not.

Called after a step was skipped, with the parameters that it had; no part of it runs in other steps. The sample is found by
bisection: a batch filled with copies of half of the samples runs through the step's own program, so a batch of n takes
log2(n) passes. The layer likewise, by forward passes in which the blocks from some layer on are the identity.

No sample is to blame if others do the same alone; nor is the data if replicas disagree on one sample.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import layers_of, name_of, named
from megajax.data.loader import PADDING
from megajax.pipeline import layout
from megajax.schedules.stages import StageLayers
from megajax.train.step import Training

Tree = Any
EXPERTS = "experts"  # the logical axis


def explain(training: Training, params: Tree, batch: Tree, scale: float = 1.0) -> str:
    """One sentence on why the loss or gradients of `batch` at `params` are not finite.

    Args:
      batch: of numpy arrays, [microbatches, samples, ...]; "sample" and "weights" are read if it has them.
      scale: the loss scale, which may be what makes gradients overflow.
    """
    broken = not_finite(training, params)
    if broken:
        return f"the weights themselves are not finite: {broken[0]}{_more(broken)}"
    if training.loss_weight(batch) == 0:
        return "no label of this batch counts: all loss weights are 0, and the mean over them is 0 / 0; mend the data"

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
    only = _copies(batch, np.array([sample]))
    of = "the run" if "sample" in batch else "the batch"
    where = f"microbatch {sample // each + 1} of {count // each}, sample {numbers[sample]} of {of}: "
    if not np.isfinite(np.asarray(only.get("weights", 0.0))).all():
        return where + "the loss weights in the data are not finite"
    cause = _forward_or_backward(training, params, only, scale)
    if replicas := _replicas_that_differ(training, params, only):
        return f"{replicas} computes what others do not, of copies of one sample: check its hardware: {cause}"
    others = [int(other) for other in np.unique([0, count // 2, count - 1]) if other != sample]
    if others and all(bad(np.array([other])) for other in others):
        tried = ", ".join(str(numbers[other]) for other in sorted([sample, *others]))
        return f"no sample is to blame, each of samples {tried} of {of} does it alone: {cause}"
    return where + cause


def _replicas_that_differ(training: Training, params: Tree, batch: Tree) -> str:
    """The replicas whose last layer's output is not finite, if that of others is; of a batch of copies of one sample."""
    parallel = training.run.parallel
    flags = stream_is_finite(training, params, batch).each(training.run.model.layers)
    flags = flags.reshape(len(flags), parallel.data, -1).all((0, 2))
    broken = np.flatnonzero(~flags).tolist()
    return f"replica {', '.join(map(str, broken))} of {parallel.data}" if 0 < len(broken) < parallel.data else ""


def _forward_or_backward(training: Training, params: Tree, batch: Tree, scale: float) -> str:
    """The first layer whose output is not finite, or the first gradient of the backward pass."""
    layers = training.run.model.layers
    finite = stream_is_finite(training, params, batch)
    if not finite(0):
        return "the embedding is not finite"
    if not finite(layers):
        low, high = 0, layers  # finite after `low` blocks, not after `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if finite(middle) else (low, middle)
        return f"the output of layer {high - 1}{_rank(training, high - 1)} is not finite; its input and its weights are"
    broken = _broken_by(training, params, batch, scale)
    if broken == ["loss"]:
        return "every layer's output is finite, the loss is not"
    broken = [name for name in broken if name != "loss"]
    return f"the forward is finite, the gradient of {broken[0]} is not{_more(broken)}"


def _rank(training: Training, layer: int) -> str:
    """The rank of a layer, as " (pipeline rank R)"; "" if there is one."""
    where, schedule = training.where, training.schedule
    if schedule.stages == 1:
        return ""
    stage = int(np.searchsorted(where.firsts, layer, side="right")) - 1
    return f" (pipeline rank {schedule.home(stage)[1]})"


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
    if training.loss_weight(batch) == 0:
        return []  # the mean loss is 0 / 0
    loss, gradients = training.loss_and_gradients(params, batch, scale=scale)
    return ([] if np.isfinite(float(loss)) else ["loss"]) + not_finite(training, gradients)


def not_finite(training: Training, tree: Tree) -> list[str]:
    """The leaves of a tree like the parameters with an element that is not finite: head, last layer to first, rest.

    A leaf of blocks is named once for each layer, "layer 3, attention/qkv/kernel", and one of experts for each of them:
    "layer 3, feedforward/up, expert 5".
    """
    sharding, leaves = NamedSharding(training.mesh, P()), named(tree)
    every = jax.tree.leaves_with_path(training.model.logical_axes(), is_leaf=lambda axes: isinstance(axes, tuple))
    axes = [names for path, names in every if name_of(path) in leaves]  # gradients are of what is trained
    experts = tuple(names.index(EXPERTS) - 1 if EXPERTS in names else None for names in axes)  # the axis in a layer
    with jax.set_mesh(training.mesh):
        program = jax.jit(_flags, static_argnums=(1, 2), out_shardings=sharding)
        flags = jax.tree.map(np.asarray, program(leaves, training.where, experts))
    found = []
    for name, finite in flags.items():
        if own := layers_of(name, training.where, leaves[name].shape):
            short = name.split("blocks/")[1].partition("/")[2] if training.where.kinds else name.split("blocks/")[1]
            for place, *expert in np.argwhere(~finite).tolist():
                layer, which = own.numbers[place], "".join(f", expert {number}" for number in expert)
                found.append((1, -layer, f"layer {layer}, {short}{which}"))
        elif not finite:
            found.append((0 if "head" in name else 2, 0, name))
    return [text for _, _, text in sorted(found)]


def _flags(leaves: dict[str, jax.Array], where: StageLayers, experts: tuple[int | None, ...]) -> dict[str, jax.Array]:
    """Whether each leaf is finite: a bool, for blocks [layers], for experts [layers, experts].

    `experts` has of each leaf the axis of experts among those of a layer; None: it has none.
    """

    def finite(name, leaf, axis):
        own = layers_of(name, where, leaf.shape)
        if own is None:
            return jnp.isfinite(leaf).all()
        each = jnp.isfinite(leaf).all(tuple(n for n in range(3, leaf.ndim) if axis is None or n != 3 + axis))
        return layout.from_pipeline_layout(each, own)

    return {name: finite(name, leaf, axis) for (name, leaf), axis in zip(leaves.items(), experts, strict=True)}


class StreamIsFinite(NamedTuple):
    """A function of n: whether the residual stream of a whole batch is finite after the first n blocks.

    Attributes:
      each: the same of each sample, bool [microbatches, samples of all replicas and context ranks].
    """

    each: Callable[[int], np.ndarray]

    def __call__(self, blocks: int) -> bool:
        return bool(self.each(blocks).all())


def stream_is_finite(training: Training, params: Tree, batch: Tree) -> StreamIsFinite:
    """The function for a batch at these parameters."""
    functions, group = training.functions, training.run.parallel.recompute_blocks

    def block(weights, x, microbatch, layer):
        return jnp.where(layer * group < microbatch["blocks"][0], functions.block(weights, x, microbatch, layer), x)

    def collect(shared, y, microbatch):
        return jnp.isfinite(y).all(tuple(range(1, y.ndim))).astype(jnp.int32)

    def finite(params, batch):
        return training.forward(dataclasses.replace(functions, block=block), collect, params, batch)

    program = jax.jit(finite, out_shardings=NamedSharding(training.mesh, P()))

    def after(blocks: int) -> np.ndarray:
        marked = batch | {"blocks": np.full(layout.leading_sizes(batch), blocks, np.int32)}
        with jax.set_mesh(training.mesh):
            return np.asarray(program(params, training.place(marked))) == 1

    return StreamIsFinite(after)
