"""The table [measured] of a cluster's file, which `--calibrate` writes and `--cluster` reads.

[measured]
precision = "bf16"                     # of matmuls and attention
matmuls = [[2048, 4096, 4096, 600.0]]  # rows, inner and columns of a product, TFLOP/s; by size, others are in between
copy_gbytes = 2900.0                   # GB/s, read and written
attention_teraflops = [450.0, 420.0]   # causal forward and backward, of the scores that are computed

[measured.host]                        # between GPUs of a host: microseconds, and GB/s that a GPU sends
all_gather = [20.0, 360.0]             # likewise reduce_scatter, all_reduce, ppermute

[measured.network]                     # between GPUs that are each in another host
all_gather = [30.0, 40.0]

[measured.versions]                    # what it was measured on and with, as texts
jax = "0.12.0"
"""

from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError, near
from megajax.estimate.gpus import DTYPES
from megajax.estimate.measured import COLLECTIVES, Link, Links, Measured, rates_by_size
from megajax.schedules.errors import shown

__all__ = ["measured_of", "measured_text"]

FIELDS = ("precision", "matmuls", "copy_gbytes", "attention_teraflops", "host", "network", "versions")
GIGA, TERA, MICRO = 1e9, 1e12, 1e-6


def measured_of(path: str, table: Any) -> Measured:
    """The rates of the table [measured] of the file `path`.

    Raises:
      ConfigError: a field is unknown or not legal: which, and what is legal.
    """
    _check_table(path, "measured", table, FIELDS)
    precision = table.get("precision", "bf16")
    if precision not in DTYPES:
        raise ConfigError(
            f"cluster = {path}: measured.precision = {shown(precision)} must be one of {', '.join(DTYPES)}."
        )
    products = table.get("matmuls", [])
    if not isinstance(products, list):
        raise ConfigError(f"cluster = {path}: measured.matmuls = {shown(products)} must be a list of lists.")
    rates = []
    for product in products:
        rows, inner, columns, rate = _numbers(path, "matmuls", product, "rows, inner, columns, TFLOP/s")
        rates.append((2.0 * rows * inner * columns, rate * TERA))
    _check_table(path, "measured.versions", table.get("versions", {}), None)
    copy, attention = table.get("copy_gbytes"), table.get("attention_teraflops")
    if copy is not None:
        copy = _numbers(path, "copy_gbytes", [copy], "GB/s")[0] * GIGA
    if attention is not None:
        forward, backward = _numbers(
            path, "attention_teraflops", attention, "TFLOP/s of the forward, TFLOP/s of the backward"
        )
        attention = (forward * TERA, backward * TERA)
    links = (_links(path, name, table.get(name, {})) for name in ("host", "network"))
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


def _links(path: str, name: str, table: Any) -> Links:
    _check_table(path, f"measured.{name}", table, COLLECTIVES)
    found = {}
    for field, value in table.items():
        latency, bandwidth = _numbers(path, f"{name}.{field}", value, "microseconds, GB/s", low=0.0)
        if not bandwidth:
            raise ConfigError(f"cluster = {path}: measured.{name}.{field} = {shown(value)} must have more than 0 GB/s.")
        found[field] = Link(latency * MICRO, bandwidth * GIGA)
    return Links(**found)


def _numbers(path: str, name: str, value: Any, what: str, low: float | None = None) -> list[float]:
    """The numbers of a list, which must be as many as `what` names, and above 0, or at least `low`."""
    count = len(what.split(", "))
    legal = isinstance(value, list) and len(value) == count
    legal = legal and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value)
    least = "at least 0" if low is not None else "above 0"
    if not legal or not all((one > 0 or one == low) and one < 1e15 for one in value):
        single = value[0] if count == 1 else value
        each = f"{what}, each a number {least}" if count > 1 else f"a number {least}"
        raise ConfigError(f"cluster = {path}: measured.{name} = {shown(single)} must be {each}.")
    return [float(one) for one in value]


def _check_table(path: str, name: str, table: Any, known: Any) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"cluster = {path}: {name} = {shown(table)} must be a table: write [{name}] and its fields.")
    for field in table:
        if known is not None and field not in known:
            raise ConfigError(f"cluster = {path}: {name}.{field} is not a field: {near(field, known)}")
