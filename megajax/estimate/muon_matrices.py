"""The matrices that Muon orthogonalises on a device: their FLOPs, traffic and memory."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from megajax.config import RunConfig, TrainConfig
from megajax.estimate.kinds import layers_of_kinds
from megajax.models.interface import model_class
from megajax.ops.optimizers.context import OptimizerContext
from megajax.ops.optimizers.muon import STEPS, muon_matrices
from megajax.pipeline.trained import only_trained, trained_mask
from megajax.sharding.rules import DEFAULT_TABLE
from megajax.sharding.whole_layers import layer_counts

__all__ = ["Matrices", "bytes_of_update", "matrices_of"]

# Bytes that each step of Newton-Schulz moves outside of products, for an element of a matrix and of the square polynomial.
ELEMENT, SQUARE = 6, 6
COPIES = 4  # of the matrices during the update: 3.4 to 5.5 in programs compiled for H100s


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The matrices of one parameter of the blocks that a device orthogonalises.

    Attributes:
      rows, columns: of each, rows <= columns.
      whole, split: how many a device has whole; and how many are split over its tensor group.
      replicas, tensor: devices over which the parameter is split where it is stored.
      stored: its elements on a device.
    """

    rows: int
    columns: int
    whole: int
    split: int
    replicas: int
    tensor: int
    stored: float

    @property
    def share(self) -> float:
        """Matrices, those that are split by their part."""
        return self.whole + self.split / self.tensor

    @property
    def flops(self) -> float:
        """Of all steps: the Gram matrix, its square, and the product with the polynomial."""
        return STEPS * self.share * (4 * self.rows**2 * self.columns + 2 * self.rows**3)

    @property
    def traffic(self) -> float:
        """Bytes that the steps read and write outside of products, in 16 bits."""
        return STEPS * self.share * (ELEMENT * self.rows * self.columns + SQUARE * self.rows**2)


def matrices_of(run: RunConfig) -> Iterator[Matrices]:
    """Of each parameter that Muon orthogonalises, what a device does."""
    parallel = run.parallel
    for kind in layers_of_kinds(run):
        for rows, columns, experts, is_split in _shapes(kind.run.model, run.train.freeze):
            replicas = parallel.replicas // (parallel.expert_replicas if experts else 1)
            replicas = replicas if parallel.zero else 1
            shares, count = (parallel.expert_shares, experts // parallel.expert) if experts else (parallel.tensor, 1)
            tensor = shares if is_split else 1
            _, each, left = layer_counts(kind.rank_slots, replicas, tensor)
            stored = kind.rank_slots * count * rows * columns / (replicas * tensor)
            yield Matrices(rows, columns, each * count, left * count, replicas, tensor, stored)


@functools.lru_cache(maxsize=256)
def _shapes(model: Any, freeze: tuple[str, ...]) -> tuple[tuple[int, int, int, bool], ...]:
    """Rows, columns, experts (0: none) and whether tensor splits it, of each trained array of a layer that is a matrix."""
    build = model_class(model)(model)
    own = functools.partial(only_trained, trained=trained_mask(build, freeze))
    shapes, axes = own(jax.eval_shape(lambda: build.init(jax.random.key(0)))), own(build.logical_axes())
    unused = lambda samples: samples  # noqa: E731
    context = OptimizerContext(TrainConfig(), own(build.decay_mask()), axes, unused, unused, unused)
    leaf = lambda node: node is None or hasattr(node, "reduction_axis")  # noqa: E731
    found = []
    for sides, shape, names in zip(
        jax.tree.leaves(muon_matrices(context)["blocks"], is_leaf=leaf),
        jax.tree.leaves(shapes["blocks"]),
        jax.tree.leaves(axes["blocks"], is_leaf=lambda node: isinstance(node, tuple)),
        strict=True,
    ):
        if sides is None:
            continue
        size = lambda side: math.prod(shape.shape[1 + axis] for axis in side)  # noqa: B023, E731
        rows, columns = sorted((size(sides.reduction_axis), size(sides.output_axis)))
        experts = shape.shape[names.index("experts")] if "experts" in names else 0
        found.append((rows, columns, experts, any(DEFAULT_TABLE.get(name) == "tensor" for name in names)))
    return tuple(found)


def bytes_of_update(run: RunConfig, item: int) -> int:
    """Bytes of the update itself: of Muon the matrices that a device computes, of `item` bytes, and copies of them."""
    if run.train.optimizer != "muon":
        return 0
    elements = sum(one.share * one.rows * one.columns for one in matrices_of(run))
    return round(COPIES * item * elements)
