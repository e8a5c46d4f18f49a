"""A GPU of one's own in a cluster's file: the table [gpu].

    [gpu]
    name = "ours-96gb"
    like = "h100-80gb"
    peak_teraflops = [800.0, 400.0]
    memory_gbytes = 96.0
    memory_bandwidth_gbytes = 3000.0
    watts = 600.0
    efficiency = [[1e9, 0.25], [1e11, 0.6], [1e13, 0.75]]

`like` is the GPU of `--gpu` that it has all other fields of: architecture, caches and, if the cluster's file does not have
them, host and links. `efficiency` has the share of the 16-bit peak that a product of so many FLOPs reaches, in any order.
"""

import dataclasses
from typing import Any

from megajax.config import ConfigError, near
from megajax.estimate.gpus import GIGA, TERA, Gpu, find_gpu
from megajax.estimate.measured import Measured, rates_by_size
from megajax.schedules.errors import shown

__all__ = ["gpu_of_table"]

FIELDS = ("name", "like", "peak_teraflops", "memory_gbytes", "memory_bandwidth_gbytes", "watts", "efficiency")
LIMITS = {"memory_gbytes": (1, 1e5), "memory_bandwidth_gbytes": (1, 1e6), "watts": (0, 1e5)}


def gpu_of_table(table: dict[str, Any]) -> Gpu:
    """The GPU of the table [gpu]; raises ConfigError if a field is unknown, missing or not legal: which, and what is."""
    for field in table:
        if field not in FIELDS:
            raise ConfigError(f"gpu.{field} is not a field: {near(field, FIELDS)}")
    for field in ("name", "like"):
        if not (isinstance(table.get(field), str) and table[field].strip() and table[field].isprintable()):
            raise ConfigError(f"gpu.{field} = {shown(table.get(field))} must be a text that is not empty.")
    base = find_gpu(table["like"])
    number = {field: _number(field, table[field], *LIMITS[field]) for field in LIMITS if field in table}
    peaks = None
    if "peak_teraflops" in table:
        values = table["peak_teraflops"]
        if not isinstance(values, list) or len(values) != 2:
            raise ConfigError(
                f"gpu.peak_teraflops = {shown(values)} must be a list: of 16 bits, of fp32, as [800, 400]."
            )
        peaks = tuple(_number("peak_teraflops", value, 1e-3, 1e6) * TERA for value in values)
    gpu = dataclasses.replace(
        base,
        name=table["name"],
        like=base.name,
        peaks=peaks,
        memory=int(number["memory_gbytes"] * GIGA) if "memory_gbytes" in number else base.memory,
        memory_bandwidth=number.get("memory_bandwidth_gbytes", base.memory_bandwidth / GIGA) * GIGA,
        watts=number.get("watts", base.watts),
    )
    if "efficiency" in table:
        gpu = dataclasses.replace(gpu, measured=Measured(matmuls=_efficiency(table["efficiency"], gpu.peak("fp16"))))
    return gpu


def _efficiency(rows: Any, peak: float) -> tuple[tuple[float, float], ...]:
    """(FLOPs of a product, FLOP/s) of pairs of FLOPs and the share of the peak."""
    legal = isinstance(rows, list) and rows and all(isinstance(row, list) and len(row) == 2 for row in rows)
    if not legal:
        raise ConfigError(
            f"gpu.efficiency = {shown(rows)} must be a list of pairs: FLOPs of a product, share of the peak, as "
            "[[1e9, 0.25], [1e12, 0.7]]."
        )
    pairs = [(_number("efficiency", size, 1, 1e18), _number("efficiency", share, 1e-4, 1)) for size, share in rows]
    return rates_by_size([(size, share * peak) for size, share in pairs])


def _number(field: str, value: Any, low: float, high: float) -> float:
    legal = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not legal:
        raise ConfigError(f"gpu.{field} = {shown(value)} must be a number from {low:g} to {high:g}.")
    return float(value)
