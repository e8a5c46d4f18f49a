"""Rates that were measured on a cluster's own GPUs (`python -m megajax.plan --calibrate`).

Where a cluster's file has them, the time model and the account of a compiled program take them in place of shares of the
published peaks: of matmuls by size, of copies, of fused attention, and of collectives a latency and a bandwidth each.
"""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

# Fields of `Links`, and XLA's names for them.
COLLECTIVES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "ppermute": "collective-permute",
}


class Link(NamedTuple):
    """A collective takes `latency` seconds and what each device sends over `bandwidth` bytes/s."""

    latency: float
    bandwidth: float

    def seconds(self, sent: float) -> float:
        """Seconds in which each device sends `sent` bytes."""
        return self.latency + sent / self.bandwidth


class Links(NamedTuple):
    """The collectives of one kind of link; None: not measured."""

    all_gather: Link | None = None
    reduce_scatter: Link | None = None
    all_reduce: Link | None = None
    ppermute: Link | None = None


class Measured(NamedTuple):
    """What was measured; a field that is empty or None was not.

    Attributes:
      precision: of the matmuls and of attention, "bf16", "fp16" or "fp32".
      matmuls: (FLOPs of a product, FLOP/s), in order of FLOPs (`rates_by_size`).
      memory: bytes/s of a copy, read and written.
      attention: FLOP/s of a causal forward and of its backward, of the scores that are computed.
      host: collectives among the GPUs of a host, on all hosts at once.
      network: collectives of GPUs that are each in another host, of all GPUs of the hosts at once.
    """

    precision: str = "bf16"
    matmuls: tuple[tuple[float, float], ...] = ()
    memory: float | None = None
    attention: tuple[float, float] | None = None
    host: Links = Links()
    network: Links = Links()

    @property
    def links(self) -> dict[str, tuple[Link | None, Link | None]]:
        """(within a host, between hosts) by XLA's kind of collective; {} if none was measured."""
        pairs = {name: (getattr(self.host, field), getattr(self.network, field)) for field, name in COLLECTIVES.items()}
        return {name: pair for name, pair in pairs.items() if pair != (None, None)}


def fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """The latency and the bandwidth that fit (bytes sent by a device, seconds) best.

    Least squares of relative errors: minimizes the sum of ((latency + sent / bandwidth) / seconds - 1)^2, so that short
    collectives, of which the latency is found, count as much as long ones. Where the best latency is below zero, or times do
    not grow with the size, the latency is zero and the bandwidth alone is fitted.

    Raises:
      ValueError: fewer than two sizes.
    """
    if len({sent for sent, _ in points}) < 2:
        raise ValueError("a latency and a bandwidth need at least two sizes")
    ones, sizes = ([1 / seconds for _, seconds in points], [sent / seconds for sent, seconds in points])
    pairs = ((ones, ones), (ones, sizes), (sizes, sizes))
    aa, ab, bb = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in pairs)
    determinant = aa * bb - ab * ab
    latency = (sum(ones) * bb - sum(sizes) * ab) / determinant
    each = (sum(sizes) * aa - sum(ones) * ab) / determinant
    return Link(latency, 1 / each) if latency >= 0 and each > 0 else Link(0.0, bb / sum(sizes))


def rates_by_size(products: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """(FLOPs, FLOP/s) in order of FLOPs; products of equal FLOPs, as of two shapes, count as one with their mean time."""
    found: dict[float, list[float]] = {}
    for flops, rate in products:
        found.setdefault(flops, []).append(1 / rate)
    return tuple((flops, len(found[flops]) / sum(found[flops])) for flops in sorted(found))


def rate_at(rates: Sequence[tuple[float, float]], flops: float) -> float:
    """FLOP/s of a product of this size: between two measured sizes linear in the logarithm of FLOPs, beyond them theirs."""
    place = bisect.bisect_left(rates, (flops, 0.0))
    if place == 0 or place == len(rates):
        return rates[min(place, len(rates) - 1)][1]
    (low, below), (high, above) = rates[place - 1], rates[place]
    return below + (above - below) * math.log(flops / low) / math.log(high / low)
