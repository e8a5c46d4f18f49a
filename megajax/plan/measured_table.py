"""The table [measured] of a cluster's file, which `--calibrate` writes and `--cluster` reads.

docs/planning.md has an example. A collective has microseconds and the GB/s that a GPU sends, in [measured.host] between GPUs
of a host and in [measured.network] between GPUs that are each in another host. [measured.versions] has what the rates were
measured on and with, as texts, which nothing reads.
"""

from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError, near
from megajax.estimate.gpus import DTYPES
from megajax.estimate.measured import COLLECTIVES, Link, Links, Measured, rates_by_size
from megajax.schedules.errors import shown

FIELDS = ("precision", "matmuls", "copy_gbytes", "attention_teraflops", "host", "network", "versions")
GIGA, TERA, MICRO = 1e9, 1e12, 1e-6


def measured_of(table: Any) -> Measured:
    """The rates of the table [measured]; raises ConfigError if a field is unknown or not legal: which, and what is."""
    _check_table("measured", table, FIELDS)
    precision = table.get("precision", "bf16")
    if precision not in DTYPES:
        raise ConfigError(f"measured.precision = {shown(precision)} must be one of {', '.join(DTYPES)}.")
    products = table.get("matmuls", [])
    if not isinstance(products, list):
        raise ConfigError(f"measured.matmuls = {shown(products)} must be a list of lists.")
    rates = []
    for product in products:
        rows, inner, columns, rate = _numbers("matmuls", product, "rows, inner, columns, TFLOP/s")
        rates.append((2.0 * rows * inner * columns, rate * TERA))
    _check_table("measured.versions", table.get("versions", {}), None)
    copy, attention = table.get("copy_gbytes"), table.get("attention_teraflops")
    if copy is not None:
        copy = _numbers("copy_gbytes", [copy], "GB/s")[0] * GIGA
    if attention is not None:
        what = "TFLOP/s of the forward, TFLOP/s of the backward"
        forward, backward = _numbers("attention_teraflops", attention, what)
        attention = (forward * TERA, backward * TERA)
    links = (_links(name, table.get(name, {})) for name in ("host", "network"))
    return Measured(precision, rates_by_size(rates), copy, attention, *links)


def measured_text(
    measured: Measured, products: Mapping[tuple[int, int, int], float], versions: Mapping[str, str]
) -> str:
    """The table as TOML.

    Args:
      measured: the rates; of `matmuls` the products are written instead.
      products: FLOP/s by (rows, inner, columns).
      versions: what it was measured on and with.
    """
    lines = ["[measured]", f'precision = "{measured.precision}"']
    if products:
        rows = ",\n".join(f"    [{', '.join(map(str, shape))}, {rate / TERA:.4g}]" for shape, rate in products.items())
        lines += ["# rows, inner and columns of a product; TFLOP/s", f"matmuls = [\n{rows},\n]"]
    if measured.memory:
        lines.append(f"copy_gbytes = {measured.memory / GIGA:.5g}  # read and written")
    if measured.attention:
        both = ", ".join(f"{rate / TERA:.4g}" for rate in measured.attention)
        lines.append(f"attention_teraflops = [{both}]  # causal forward, backward; of the scores that are computed")
    for name, links in (("host", measured.host), ("network", measured.network)):
        if links == Links():
            continue
        lines += ["", f"[measured.{name}]  # microseconds, GB/s that a device sends"]
        lines += [
            f"{field} = [{link.latency / MICRO:.4g}, {link.bandwidth / GIGA:.4g}]"
            for field, link in zip(Links._fields, links, strict=True)
            if link is not None
        ]
    lines += ["", "[measured.versions]", *(f'{name} = "{_escaped(text)}"' for name, text in versions.items())]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable()).replace("\\", "\\\\").replace('"', '\\"')


def _links(name: str, table: Any) -> Links:
    _check_table(f"measured.{name}", table, COLLECTIVES)
    found = {}
    for field, value in table.items():
        latency, bandwidth = _numbers(f"{name}.{field}", value, "microseconds, GB/s", low=0.0)
        if not bandwidth:
            raise ConfigError(f"measured.{name}.{field} = {shown(value)} must have more than 0 GB/s.")
        found[field] = Link(latency * MICRO, bandwidth * GIGA)
    return Links(**found)


def _numbers(name: str, value: Any, what: str, low: float | None = None) -> list[float]:
    """The numbers of a list, which must be as many as `what` names, and above 0, or at least `low`."""
    count = len(what.split(", "))
    legal = isinstance(value, list) and len(value) == count
    legal = legal and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value)
    least = "at least 0" if low is not None else "above 0"
    if not legal or not all((one > 0 or one == low) and one < 1e15 for one in value):
        single = value[0] if count == 1 else value
        each = f"{what}, each a number {least}" if count > 1 else f"a number {least}"
        raise ConfigError(f"measured.{name} = {shown(single)} must be {each}.")
    return [float(one) for one in value]


def _check_table(name: str, table: Any, known: Any) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{name} = {shown(table)} must be a table: write [{name}] and its fields.")
    for field in table:
        if known is not None and field not in known:
            raise ConfigError(f"{name}.{field} is not a field: {near(field, known)}")
