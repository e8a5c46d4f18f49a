"""Reads gpu_day.json: its cases, rows and numbers, of which any may be missing or null; and numbers as text.

A run can end at any case, so the page and the verdict must work with whatever part of the file exists.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

PARTS = {
    "losses": "Losses",
    "kernels": "Kernels",
    "generation": "Generation",
    "checkpoint": "Checkpoint",
    "rates": "Rates",
    "steps": "Training steps",
    "compiled": "Compiled programs",
}
COMPILER = "compiler"  # the platform of devices that are only compiled for
SLOW_FACTOR = 2.0  # a step that takes more than this times its prediction is slow

Record = dict[str, Any]


def records(value: Any) -> list[Record]:
    """The dictionaries of a list; [] for null or anything else."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def record(value: Any) -> Record:
    """A dictionary; {} for null or anything else."""
    return value if isinstance(value, dict) else {}


class Case:
    """A case of gpu_day.json.

    Attributes:
      name, part, status, reason: texts; a case without a status has not run.
      seconds: that it took.
      result: what its function returned, or {}.
      rows: of the result, all with a "label" and an "implementation".
      ratio: the result's difference relative to its limit; None without one.
    """

    def __init__(self, value: Record):
        self.name, self.part = str(value.get("name") or "unnamed case"), str(value.get("part"))
        self.status, self.reason = str(value.get("status") or "not run"), str(value.get("reason") or "")
        self.seconds, self.result = value.get("seconds"), record(value.get("result"))
        named = lambda row: {key: str(row.get(key) or "unnamed") for key in ("label", "implementation")}  # noqa: E731
        self.rows = [row | named(row) for row in records(self.result.get("rows"))]
        self.ratio = relative(self.result.get("difference"), self.result.get("limit"))


def cases(results: Record) -> list[Case]:
    """All cases."""
    return [Case(one) for one in records(results.get("cases"))]


def by_part(everything: Sequence[Case]) -> dict[str, list[Case]]:
    """The cases of each part that has some: the known parts in their order, then others."""
    found = dict.fromkeys(one.part for one in everything)
    ordered = dict.fromkeys([*(part for part in PARTS if part in found), *found])
    return {part: [one for one in everything if one.part == part] for part in ordered}


def device(results: Record) -> str:
    """The kind of device that ran the cases."""
    return str(record(results.get("device")).get("kind") or "an unknown device")


def number(value: Any) -> float | None:
    """A number, which may be NaN or infinite; None for null, booleans and text."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def positive(value: Any) -> float | None:
    """A number that is finite and greater than 0, such as a time or a rate; else None."""
    found = number(value)
    return found if found is not None and math.isfinite(found) and found > 0 else None


def numbers(value: Any) -> list[float]:
    """The numbers of a list; null becomes NaN, so that positions are kept."""
    found = [number(one) for one in value] if isinstance(value, list) else []
    return [math.nan if one is None else one for one in found]


def relative(difference: Any, limit: Any) -> float | None:
    """A difference divided by its limit: the limit is exceeded above 1. NaN counts as infinitely large."""
    difference, limit = number(difference), number(limit)
    if difference is None or limit is None:
        return None
    if math.isnan(difference) or math.isnan(limit):
        return math.inf
    return difference / limit if limit > 0 else 0.0 if difference == 0 else math.inf


def largest(ratios: Iterable[float | None]) -> float | None:
    """The largest of those that exist."""
    return max((one for one in ratios if one is not None), default=None)


def kernel_ratio(row: Record) -> float | None:
    """The larger error of a kernel's output and gradients, relative to the limit."""
    return largest(relative(row.get(key), row.get("limit")) for key in ("output", "gradients"))


def prediction_error(row: Record, measured: str, predicted: str) -> float | None:
    """(predicted - measured) / measured of two keys of a row."""
    actual, expected = positive(row.get(measured)), positive(row.get(predicted))
    return None if actual is None or expected is None else (expected - actual) / actual


def is_measured(row: Record) -> bool:
    """Whether a row of steps has a time or a throughput."""
    return any(positive(row.get(key)) for key in ("milliseconds", "tokens_per_second"))


def is_slow(row: Record) -> bool:
    """Whether a step took more than `SLOW_FACTOR` times its prediction."""
    actual, expected = positive(row.get("milliseconds")), positive(row.get("predicted_milliseconds"))
    return actual is not None and expected is not None and actual > SLOW_FACTOR * expected


def speedup(row: Record, other: Record) -> float | None:
    """The throughput of a step relative to another's, from tokens per second or else from step times."""
    rate, other_rate = positive(row.get("tokens_per_second")), positive(other.get("tokens_per_second"))
    if rate and other_rate:
        return rate / other_rate
    time, other_time = positive(row.get("milliseconds")), positive(other.get("milliseconds"))
    return other_time / time if time and other_time else None


def decimal(value: Any, digits: int = 4) -> str:
    """83,538, 784.5, 0.031, 1.2e-5; "" for null."""
    found = number(value)
    if found is None:
        return ""
    if not math.isfinite(found):
        return str(found).replace("nan", "NaN")
    if found and not 1e-3 <= abs(found) < 1e9:
        return scientific(found, digits)
    return f"{found:,.0f}" if abs(found) >= 10 ** (digits - 1) else f"{found:.{digits}g}"


def scientific(value: Any, digits: int = 3) -> str:
    """1.25e-5, 1e-4, 0; "" for null."""
    found = number(value)
    if found is None or not found or not math.isfinite(found):
        return "0" if found == 0 else decimal(found)
    mantissa, _, exponent = f"{found:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def share(value: Any) -> str:
    """54.8%; "" for null."""
    found = number(value)
    return "" if found is None else f"{found:.1%}" if math.isfinite(found) else decimal(found)
