"""A cluster from a TOML file: its GPU, hosts, links, price and power; and what a run on it costs.

    gpu = "h100-80gb"
    gpus = 1024
    price = 2.5

`FIELDS` has all fields; docs/planning.md has a whole file. A table [gpu] describes a GPU of one's own (`gpu_table.py`). The
table [measured] has the rates of its own GPUs, which --calibrate writes.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from megajax.config import ConfigError, near
from megajax.config.toml_file import read_toml
from megajax.estimate.gpus import DTYPES, GIGA, TERA, Gpu, find_gpu
from megajax.estimate.measured import COLLECTIVES, Link, Links, Measured, rates_by_size
from megajax.plan.gpu_table import gpu_of_table
from megajax.schedules.errors import shown

# Fields of the file: their type, the smallest and the largest legal value (texts have neither). All but the GPU's name are
# optional, by default the GPU's.
FIELDS: dict[str, tuple[type, float, float]] = {
    "name": (str, 0, 0),
    "gpu": (str, 0, 0),  # of `megajax.estimate.gpus.GPUS`
    "gpus": (int, 1, 10**6),  # in place of --gpus
    "host_size": (int, 1, 10**4),  # GPUs that share NVLink
    "host_gbytes": (float, 1e-3, 1e5),  # GB/s of a GPU to the others of its host, one direction
    "rails": (int, 1, 10**4),  # network adapters of a host
    "rail_gbits": (float, 1e-3, 1e5),  # Gb/s of each
    "network_share": (float, 1e-3, 1),  # of that, what collectives reach with all GPUs
    "oversubscription": (float, 1, 1000),  # of the network beyond the first switches: 2 is half the bandwidth
    "memory_gbytes": (float, 1, 1e5),  # 1e9 bytes of a GPU
    "price": (float, 0, 1e6),  # of a GPU for an hour
    "currency": (str, 0, 0),
    "watts": (float, 0, 1e5),  # of a GPU with its share of host and network; by default the board's
    "pue": (float, 1, 10),  # power of the building over that of its computers; by default 1
}
# Of the table [measured]. A collective has microseconds and the GB/s that a GPU sends, in [measured.host] between GPUs of a
# host and in [measured.network] between GPUs that are each in another host. [measured.versions] has what the rates were
# measured on and with, as texts, which nothing reads.
MEASURED = ("precision", "matmuls", "copy_gbytes", "attention_teraflops", "host", "network", "versions")
MICRO = 1e-6


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run costs: money in the cluster's currency, None without a price; energy with the building's."""

    hours: float
    gpu_hours: float
    money: float | None
    megawatt_hours: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """GPUs with their links (`Gpu`), how many there are, price and power.

    The fields are `FIELDS`, but for those that are in the GPU; `gpus` and `price` are None if they are not said.
    """

    name: str
    gpu: Gpu
    gpus: int | None = None
    price: float | None = None
    currency: str = "USD"
    watts: float = 0.0
    pue: float = 1.0

    @classmethod
    def of_gpu(cls, gpu: Gpu) -> "Cluster":
        """The GPU in the machines that its vendor builds, without a price."""
        return cls(gpu.name, gpu, watts=gpu.watts)

    def cost(self, gpus: int, days: float) -> Cost:
        """The cost of a run that occupies `gpus` for `days`."""
        gpu_hours = 24 * days * gpus
        money = None if self.price is None else gpu_hours * self.price
        return Cost(24 * days, gpu_hours, money, gpu_hours * self.watts * self.pue / 1e6)

    def describe(self, cost: Cost) -> str:
        """A cost in words."""
        money = "" if cost.money is None else f", {cost.money:,.0f} {self.currency}"
        return f"{cost.gpu_hours:,.0f} GPU hours{money}, {cost.megawatt_hours:,.1f} MWh"


def load_cluster(path: str) -> Cluster:
    """Reads a cluster's file.

    Raises:
      ConfigError: it cannot be read, or a field is unknown, of a wrong type or out of range: which, and what is legal.
    """
    try:
        fields = read_toml(path)
    except OSError as error:
        raise ConfigError(
            f"cluster = {path} cannot be read: {error.strerror}; pass --cluster FILE.toml (docs/planning.md has one)."
        ) from error
    except ValueError as error:
        raise ConfigError(f"cluster = {path} is not a TOML file: {error}.") from error
    with _naming(path):
        measured = measured_of(fields.pop("measured")) if "measured" in fields else None
        own = gpu_of_table(fields.pop("gpu")) if isinstance(fields.get("gpu"), dict) else None
        for name, value in fields.items():
            _check(name, value)
    if "gpu" not in fields and own is None:
        raise ConfigError(f'cluster = {path} has no gpu: write a line such as gpu = "h100-80gb".')
    if ("rails" in fields) != ("rail_gbits" in fields):
        raise ConfigError(
            f"cluster = {path} has one of rails and rail_gbits: write both, as rails = 8, rail_gbits = 400."
        )
    with _naming(path):
        gpu = _with_links(own or find_gpu(fields["gpu"]), fields)
    if measured is not None and gpu.measured is not None:
        raise ConfigError(f"cluster = {path} has gpu.efficiency, and [measured] which replaces it: omit one of them.")
    gpu = dataclasses.replace(gpu, measured=measured or gpu.measured)
    given = {name: fields[name] for name in ("gpus", "price", "currency", "pue") if name in fields}
    return Cluster(fields.get("name", pathlib.Path(path).stem), gpu, watts=fields.get("watts", gpu.watts), **given)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors about what is in the file begin with its name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"cluster = {path}: {error}") from None


def _with_links(gpu: Gpu, fields: dict[str, Any]) -> Gpu:
    """The GPU with the file's memory and links."""
    host = fields.get("host_size", gpu.host_size)
    network = gpu.network_bandwidth
    if "rails" in fields:
        network = fields["rails"] * fields["rail_gbits"] / 8 * GIGA / host
    return dataclasses.replace(
        gpu,
        memory=int(fields["memory_gbytes"] * GIGA) if "memory_gbytes" in fields else gpu.memory,
        host_size=host,
        host_bandwidth=fields["host_gbytes"] * GIGA if "host_gbytes" in fields else gpu.host_bandwidth,
        network_bandwidth=network,
        network_share=fields.get("network_share", gpu.network_share) / fields.get("oversubscription", 1),
    )


def _check(name: str, value: Any) -> None:
    """Raises ConfigError if a field is not legal."""
    if name not in FIELDS:
        raise ConfigError(f"{name} is not a field: {near(name, [*FIELDS, 'measured'])}")
    kind, low, high = FIELDS[name]
    if kind is str:
        legal = isinstance(value, str) and value.strip() and value.isprintable()
        what = "a text that is not empty"
    else:
        legal = isinstance(value, (int, kind)) and not isinstance(value, bool) and low <= value <= high
        what = f"a {'whole number' if kind is int else 'number'} from {low:g} to {high:g}"
    if not legal:
        raise ConfigError(f"{name} = {shown(value)} must be {what}.")


def measured_of(table: Any) -> Measured:
    """The rates of the table [measured]; raises ConfigError if a field is unknown or not legal: which, and what is."""
    _check_table("measured", table, MEASURED)
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
