"""A cluster from a TOML file: its GPU, hosts, links, price and power; and what a run on it costs.

    gpu = "h100-80gb"
    gpus = 1024
    price = 2.5

`FIELDS` has all fields; docs/planning.md has a whole file. The table [measured] has the rates of its own GPUs, which
--calibrate writes (`measured_table.py`).
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from megajax.config import ConfigError, near
from megajax.config.toml_file import read_toml
from megajax.estimate.gpus import GIGA, Gpu, find_gpu
from megajax.plan.measured_table import measured_of
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


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run costs.

    Attributes:
      hours: from start to end.
      gpu_hours: of all GPUs together.
      money: in the cluster's currency; None without a price.
      megawatt_hours: of energy, the building's included.
    """

    hours: float
    gpu_hours: float
    money: float | None
    megawatt_hours: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """GPUs with their links (`Gpu`), how many there are, price and power.

    Attributes:
      name: as printed.
      gpu: the GPU, with the cluster's host size and bandwidths.
      gpus: how many; None: not said.
      price: of a GPU for an hour, in `currency`; None: not said.
      watts: of a GPU with its share of the host and network, at full load.
      pue: power usage effectiveness: the building's power over that of its computers.
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
        for name, value in fields.items():
            _check(name, value)
    if "gpu" not in fields:
        raise ConfigError(f'cluster = {path} has no gpu: write a line such as gpu = "h100-80gb".')
    if ("rails" in fields) != ("rail_gbits" in fields):
        raise ConfigError(
            f"cluster = {path} has one of rails and rail_gbits: write both, as rails = 8, rail_gbits = 400."
        )
    with _naming(path):
        gpu = dataclasses.replace(_with_links(find_gpu(fields["gpu"]), fields), measured=measured)
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
