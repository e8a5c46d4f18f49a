"""What can be said of a difference beyond its tensor: the layer's rank, the samples' microbatch and rank, the devices."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.layout import layers_of, named
from megajax.pipeline import layout
from megajax.verify.compare import Difference
from megajax.verify.replay import Replay, Results
from megajax.verify.sketch import distance, size, tensor_sketches

Tree = Any
MOST_GROUPS = 64  # the step is run again for each group of samples
DEVICE_FACTOR = 10.0  # a device's part of a tensor is blamed at this many tolerances
UPDATE_DISTANCE = 0.1  # and of an update at this distance: its ill-conditioned elements are not damped there


@dataclasses.dataclass(frozen=True)
class Side:
    """One layout's latest step: its programs, its arrays (None before the first step), its batch."""

    replay: Replay
    results: Results | None
    batch: dict[str, np.ndarray]


def locate(difference: Difference, reference: Side | None, side: Side) -> list[str]:
    """Lines on where the layout under test computed the tensor that differs.

    Args:
      difference: the first one.
      reference: None if its arrays are not on these devices: it was read from a file, or there was no step yet.
      side: the layout under test.
    """
    entry, locations, lines = difference.entry, side.replay.locations, []
    if entry.layer is not None and (place := locations.layer(entry.layer)):
        lines.append(f"layer {entry.layer} is on {place}")
    if numbers := difference.exceeding:
        lines.append(_of_samples(numbers, len(entry.samples), side))
    if reference is None or reference.results is None or side.results is None:
        return lines
    kind, _, key = entry.key.partition("/")
    name = key if entry.layer is None else key.rpartition("/")[0]
    if kind == "gradient":
        lines += _microbatches(difference, name, reference, side)
    if kind in ("gradient", "update", "optimizer_state"):
        lines += _devices(difference, kind, name, reference, side)
    return lines


def _of_samples(numbers: Sequence[int], count: int, side: Side) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (" and others" if len(numbers) > 8 else "")
    which = "all samples" if len(numbers) == count else f"{len(numbers)} of {count} samples of the batch: {shown}"
    where = side.replay.locations.samples(numbers)
    return f"{which} ({where})" if where else which


def _microbatches(difference: Difference, name: str, reference: Side, side: Side) -> list[str]:
    """The microbatches whose gradients differ, found by running the step with the gradients of one group at a time."""
    each = [len(next(iter(of.batch.values()))[0]) for of in (reference, side)]
    total, group = each[1] * len(next(iter(side.batch.values()))), math.lcm(*each)
    if total % group or each[0] * len(next(iter(reference.batch.values()))) != total or total // group > MOST_GROUPS:
        return []
    layer, found = difference.entry.layer or 0, []
    for number in range(total // group):
        one, other = (
            _gradient_of(of, name, slice(number * group // size_, (number + 1) * group // size_))[layer]
            for of, size_ in zip((reference, side), each, strict=True)
        )
        if distance(one, other, size(one)) > difference.tolerance:
            found.append(number)
    numbers = [sample for number in found for sample in range(number * group, (number + 1) * group)]
    if not found:
        return ["the gradients of single microbatches agree: the difference is in their sum"]
    if len(found) == total // group:
        return [f"the gradients of every microbatch differ, of {total // group} computed one by one"]
    return [f"of the gradients of single microbatches those of {side.replay.locations.samples(numbers)} differ"]


def _gradient_of(side: Side, name: str, microbatches: slice) -> np.ndarray:
    """Sketches [layers or 1, WIDTH] of the gradient of some microbatches' loss."""
    factors = np.zeros(len(next(iter(side.batch.values()))), np.float32)
    factors[microbatches] = 1
    gradients = named(side.replay.execute(side.results.before, side.batch, factors).gradients)
    with jax.set_mesh(side.replay.training.mesh):
        return np.asarray(tensor_sketches({name: gradients[name]}, side.replay.training.where)[name])


def _devices(difference: Difference, kind: str, name: str, reference: Side, side: Side) -> list[str]:
    """The devices whose part of the tensor differs, where these are not all that have a part of it."""
    want = _canonical(reference, kind, name)
    own = layers_of(name, side.replay.training.where, _leaves(side, kind, name)[-1].shape)
    if own:
        want = np.asarray(layout.to_pipeline_layout(want, own))
    allowed = max(DEVICE_FACTOR * difference.tolerance, UPDATE_DISTANCE if kind == "update" else 0)
    holding, differing = [], []
    for device, index, part in _parts(side, kind, name):
        expected = _crop(want, part.shape, index)
        if own:
            chosen = _crop(side.replay.locations.numbers(own), part.shape[:3], index[:3]) == difference.entry.layer
            if not chosen.any():
                continue
            expected, part = expected[chosen], part[chosen]
        holding.append(device)
        apart, scale = np.linalg.norm(np.float64(part - expected)), np.linalg.norm(np.float64(expected))
        if apart > allowed * max(scale, 1e-30):
            differing.append(device)
    if not differing or len(differing) == len(holding):
        return []
    shown = "; ".join(side.replay.locations.device(device) for device in differing[:8])
    return [f"the parts of {len(differing)} of the {len(holding)} devices that hold it differ: {shown}"]


def _crop(whole: np.ndarray, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
    """The part of `whole` at `index`, zero where `whole` has fewer rows (the padding of the vocabulary)."""
    part = whole[index]
    return np.pad(part, [(0, size_ - had) for size_, had in zip(shape, part.shape, strict=True)])


def _leaves(side: Side, kind: str, name: str) -> tuple[jax.Array, ...]:
    """The arrays whose last one, less the first if there are two, is the tensor."""
    results = side.results
    if kind == "gradient":
        return (named(results.gradients)[name],)
    if kind == "update":
        return named(results.before.params)[name], named(results.after.params)[name]
    state = {name: getattr(results.after, name) for name in ("ema", "optimizer_state", "loss_scale")}
    return (named(state)[name],)


def _canonical(side: Side, kind: str, name: str) -> np.ndarray:
    """The tensor in the model's order of layers."""
    leaves = [np.asarray(leaf) for leaf in _leaves(side, kind, name)]
    whole = leaves[0] if len(leaves) == 1 else leaves[1] - leaves[0]
    own = layers_of(name, side.replay.training.where, whole.shape)
    return np.asarray(layout.from_pipeline_layout(whole, own)) if own else whole


def _parts(side: Side, kind: str, name: str):
    """(device, index, values) of each device's part of the tensor, in the layout's own order of layers."""
    leaves = _leaves(side, kind, name)
    for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
        values = [np.asarray(shard.data) for shard in shards]
        yield shards[0].device, shards[0].index, values[0] if len(values) == 1 else values[1] - values[0]
