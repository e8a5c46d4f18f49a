"""Distances between the records of a step on two layouts, in the order in which a step computes, and their tolerances.

A distance is relative: the estimated norm of the difference (`sketch.distance`) over the norm of the tensor; for inputs,
outputs and gradients of a block, of one sample's part over the root mean square of all samples' parts.

Tolerance. Two layouts add the same numbers in another order. By backward error analysis (Higham, Accuracy and Stability of
Numerical Algorithms, sections 3.1 and 4.2) a sum in floating point is the exact sum of terms each of which has a relative
error of about eps. So the reference layout runs each step again with such an error, 1 + eps or 1 - eps, in every weight
(`Replay.perturbed_step`), for TRIALS choices of signs. How far the result of each tensor moves is its sensitivity to
rounding, in this model, at this step. The tolerance is FACTOR times the larger of that and eps:

    tolerance = FACTOR * max(eps of fp32, max over trials of the distance to the perturbed run)

The update of a parameter is recorded as new - old, where new = old + update was rounded: it is up to eps |old| / 2 off,
which is much where the update is small next to the parameter (the scale of a norm). This changes only where a sum lies next
to the middle of two numbers, so the trials may miss it. Two equal updates can be recorded eps |parameter| apart, and so the
tolerance of an update is at least ROUNDINGS * eps |parameter| / |update|.

eps of the perturbation is that of the number format of weights and activations: 2^-23 in fp32, 2^-10 in fp16, 2^-7 in bf16.
It follows that in bf16 only differences of some percent are found. The tolerance grows with the step, as the distance of
two runs that differ by rounding does. With `exact` every statistic, and so every bit, must be equal.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megajax.verify.replay import StepRecord
from megajax.verify.sketch import distance, size

FACTOR = 32.0
TRIALS = 2
ROUNDINGS = 2.0  # the bound is 1; a sketch's estimate of the difference can be above it
EPSILON = float(np.finfo(np.float32).eps)
# Columns of the table, in the order in which a step computes them.
PARTS = ("data", "outputs", "loss", "backward", "gradients", "update", "replicas")
METRICS = {"tokens": "loss", "loss": "loss", "grad_norm": "gradients", "skipped": "gradients"}  # the others: "update"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One distance.

    Attributes:
      key: equal for the same tensor on any layout: "output/3", "gradient/blocks/attention/qkv/kernel/3".
      part: one of PARTS.
      text: the tensor in words.
      distance: the largest of its samples', or of the tensor.
      layer: its layer; None: it is not one of a block.
      samples: each sample's distance, where the tensor has samples.
    """

    key: str
    part: str
    text: str
    distance: float
    layer: int | None = None
    samples: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first entry of a step that exceeds its tolerance.

    Attributes:
      step: its number; 0: before the first step.
      entry: the distance and what it is of.
      tolerance: of the entry.
      others: entries of the same part that exceed theirs too.
    """

    step: int
    entry: Entry
    tolerance: float
    others: int

    @property
    def exceeding(self) -> list[int]:
        """The samples that exceed the tolerance."""
        return [] if self.entry.samples is None else np.flatnonzero(self.entry.samples > self.tolerance).tolist()


def first_difference(step: int, entries: Sequence[Entry], tolerances: Mapping[str, float]) -> Difference | None:
    """The first entry above its tolerance; tensors without one have the smallest."""
    tolerance = lambda entry: tolerances.get(entry.key, tolerances[""])  # noqa: E731
    over = [entry for entry in entries if not entry.distance <= tolerance(entry)]
    if not over:
        return None
    first = over[0]
    return Difference(step, first, tolerance(first), sum(entry.part == first.part for entry in over) - 1)


def tolerances_of(
    perturbed: Sequence[Sequence[Entry]], rounding: Mapping[str, float] | None = None
) -> dict[str, float]:
    """By key, from the entries of the reference against its perturbed runs; "" is that of all other keys.

    Args:
      perturbed: the entries of each trial.
      rounding: by key, the least tolerance of the updates (`rounding_of_updates`). None: that of all other keys.
    """
    found = {"": FACTOR * EPSILON}
    measured = [
        (e.key, FACTOR * e.distance) for entries in perturbed for e in entries if e.part not in ("data", "replicas")
    ]
    for key, tolerance in (*measured, *(rounding or {}).items()):
        found[key] = max(found.get(key, found[""]), tolerance)
    return found


def rounding_of_updates(record: StepRecord, after: Mapping[str, np.ndarray]) -> dict[str, float]:
    """By key, the distance of two equal updates that the rounding of the sum of parameter and update can make.

    Args:
      record: of the step.
      after: the sketches of the state after it (`Replay.sketch_state`).
    """
    found = {}
    for name, update in record.tensors["update"].items():
        with np.errstate(divide="ignore", invalid="ignore"):
            bounds = ROUNDINGS * EPSILON * size(after[f"params/{name}"]) / size(update)
        keys = _keys("update", name, len(bounds))
        found |= {key: float(bound) for key, bound in zip(keys, bounds, strict=True) if math.isfinite(bound)}
    return found


EXACT = {"": 0.0}


def largest(entries: Sequence[Entry], tolerances: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """By part, (distance, tolerance) of the entry with the largest quotient of the two."""
    found: dict[str, tuple[float, float]] = {}
    for entry in entries:
        allowed = tolerances.get(entry.key, tolerances[""])
        best = found.get(entry.part)
        if best is None or quotient(entry.distance, allowed) > quotient(*best):
            found[entry.part] = (entry.distance, allowed)
    return found


def quotient(distance: float, tolerance: float) -> float:
    """How many times its tolerance a distance is; infinite if that is 0 and the distance is not."""
    return 0.0 if distance == 0 else math.inf if tolerance == 0 else distance / tolerance


def entries_of_start(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[Entry]:
    """The state before the first step: parameters, optimizer state, loss scale."""
    return [
        dataclasses.replace(entry, text=f"{entry.text} before the first step")
        for entry in _tensors("state", a, b, "update")
    ]


def entries_of_step(a: StepRecord, b: StepRecord) -> list[Entry]:
    """All distances of b from a, in the order of the computation.

    First the batch; then forward from the embedding to the loss; then backward from the loss to the embedding, at each layer
    the gradients of its output, of its input and of its weights; last the updated state.
    """
    layers = len(a.blocks["input"]) * a.group
    entries = list(_batch(a, b))
    for layer in range(layers):
        entries += _activations(a, b, layer, ("input", "output"), "outputs")
    metrics = [_metric(a, b, name) for name in a.metrics if name in b.metrics]
    entries += [entry for entry in metrics if entry.key == "metric/tokens"]
    entries += [*_losses(a, b), *(entry for entry in metrics if entry.key == "metric/loss")]
    weights = list(_tensors("gradient", a.tensors["gradient"], b.tensors["gradient"], "gradients"))
    for layer in reversed(range(layers)):
        entries += _activations(a, b, layer, ("output_gradient", "input_gradient"), "backward")
        entries += [entry for entry in weights if entry.layer == layer]
    entries += [entry for entry in weights if entry.layer is None]
    entries += [entry for entry in metrics if entry.part != "loss"]
    for kind in ("update", "optimizer_state"):
        entries += _tensors(kind, a.tensors[kind], b.tensors[kind], "update")
    for record, of in ((a, "a"), (b, "b")):
        entries += [Entry("replicas", "replicas", f"in layout {of} {text}", math.inf) for text in record.replicas]
    return entries


def _batch(a: StepRecord, b: StepRecord) -> Iterator[Entry]:
    count = min(a.samples, b.samples)
    if a.samples != b.samples:
        yield Entry("batch", "data", f"the batch, {a.samples} samples in a and {b.samples} in b", math.inf)
    for name in a.batch.keys() & b.batch.keys():
        unequal = a.batch[name][:count] != b.batch[name][:count]
        samples = np.where(unequal, np.inf, 0.0)
        yield Entry(f"batch/{name}", "data", f"the batch's {name!r}", float(samples.max(initial=0)), samples=samples)


WORDS = {
    "input": "the input of layer {}",
    "output": "the output of layer {}",
    "output_gradient": "the gradient of the output of layer {}",
    "input_gradient": "the gradient of the input of layer {}",
}


def _activations(a: StepRecord, b: StepRecord, layer: int, names: Sequence[str], part: str) -> Iterator[Entry]:
    """Those of `names` that both layouts record at this layer."""
    for name in names:
        at = layer if name.startswith("input") else layer + 1  # blocks before the recorded boundary
        if at % a.group or at % b.group:
            continue
        group = lambda record: record.blocks[name][at // record.group - (not name.startswith("input"))]  # noqa: B023, E731
        count = min(a.samples, b.samples)
        one, other = group(a)[:count], group(b)[:count]
        scale = np.sqrt(np.square(size(one)).mean())
        samples = distance(one, other, scale)
        text = WORDS[name].format(layer)
        if name == "input" and layer == 0:
            text = "the embedding's output"
        yield Entry(f"{name}/{layer}", part, text, float(samples.max()), layer, samples)


def _losses(a: StepRecord, b: StepRecord) -> Iterator[Entry]:
    """The summed loss of the smallest groups of samples that are whole microbatches in both."""
    totals = [len(next(iter(record.batch.values()))) for record in (a, b)]
    each = math.lcm(*(total // len(record.losses) for record, total in zip((a, b), totals, strict=True)))
    count = min(totals) if all(total % each == 0 for total in totals) else each
    sums = [
        record.losses[: count * len(record.losses) // total].reshape(count // each, -1).sum(1)
        if total % each == 0
        else record.losses.sum(keepdims=True)
        for record, total in zip((a, b), totals, strict=True)
    ]
    scale = np.abs(sums[0]).mean()
    samples = np.repeat([_relative(x, y, scale) for x, y in zip(*sums, strict=True)], each)[: min(a.samples, b.samples)]
    yield Entry("losses", "loss", "the loss", float(np.max(samples)), samples=samples)


def _metric(a: StepRecord, b: StepRecord, name: str) -> Entry:
    apart = _relative(a.metrics[name], b.metrics[name], abs(a.metrics[name]))
    return Entry(f"metric/{name}", METRICS.get(name, "update"), f"{name} of the step", apart)


def _relative(x: float, y: float, scale: float) -> float:
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    apart = abs(float(x) - float(y)) / float(scale) if scale else math.inf
    return apart if math.isfinite(apart) else math.inf


def _tensors(kind: str, a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], part: str) -> Iterator[Entry]:
    """Each tensor, layer by layer; one that only one layout has is infinitely far."""
    for name in a.keys() ^ b.keys():
        yield Entry(
            f"{kind}/{name}", part, f"{kind} {name}, which only layout {'a' if name in a else 'b'} has,", math.inf
        )
    for name in (name for name in a if name in b):
        apart = distance(a[name], b[name], size(a[name]))
        for layer, (key, value) in enumerate(zip(_keys(kind, name, len(apart)), apart, strict=True)):
            if len(apart) == 1:
                yield Entry(key, part, _of(kind, name), float(value))
            else:
                yield Entry(key, part, f"{_of(kind, name)} of layer {layer}", float(value), layer)


def _keys(kind: str, name: str, layers: int) -> list[str]:
    """The keys of a tensor's entries: one of each layer."""
    return [f"{kind}/{name}"] if layers == 1 else [f"{kind}/{name}/{layer}" for layer in range(layers)]


def _of(kind: str, name: str) -> str:
    short = name.replace("blocks/", "").replace("shared/", "").removeprefix("params/")
    return {"gradient": f"the gradient of {short}", "update": f"the update of {short}"}.get(kind, short)
