"""A cluster from a TOML file: its GPU, hosts, links, price and power; and what a run on it costs.

name = "ours"
gpu = "h100-80gb"       # of `megajax.estimate.gpus.GPUS`; everything else is optional, by default the GPU's
gpus = 1024             # in place of --gpus
host_size = 8           # GPUs that share NVLink
host_gbytes = 450       # GB/s of a GPU to the others of its host, one direction
rails = 8               # network adapters of a host
rail_gbits = 400        # Gb/s of each
network_share = 0.8     # of that, what collectives reach with all GPUs
oversubscription = 2    # of the network beyond the first switches: it has half the bandwidth
memory_gbytes = 80      # 1e9 bytes of a GPU
price = 2.5             # of a GPU for an hour
currency = "USD"
watts = 1300            # of a GPU with its share of host and network; by default the board's
pue = 1.2               # power of the building over that of its computers; by default 1

[measured]              # rates of its own GPUs, which --calibrate writes (`measured_table.py`)
"""

import dataclasses
import pathlib
from typing import Any

from megajax.config import ConfigError, near
from megajax.config.toml_file import read_toml
from megajax.estimate.gpus import GIGA, Gpu, find_gpu
from megajax.plan.measured_table import measured_of
from megajax.schedules.errors import shown

__all__ = ["Cluster", "Cost", "load_cluster"]

# Fields of the file: their type, the smallest and the largest legal value (texts have neither).
FIELDS: dict[str, tuple[type, float, float]] = {
    "name": (str, 0, 0),
    "gpu": (str, 0, 0),
    "gpus": (int, 1, 10**6),
    "host_size": (int, 1, 10**4),
    "host_gbytes": (float, 1e-3, 1e5),
    "rails": (int, 1, 10**4),
    "rail_gbits": (float, 1e-3, 1e5),
    "network_share": (float, 1e-3, 1),
    "oversubscription": (float, 1, 1000),
    "memory_gbytes": (float, 1, 1e5),
    "price": (float, 0, 1e6),
    "currency": (str, 0, 0),
    "watts": (float, 0, 1e5),
    "pue": (float, 1, 10),
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
    def of_gpu(cls, gpu: Gpu, gpus: int | None = None) -> "Cluster":
        """The GPU in the machines that its vendor builds, without a price."""
        return cls(gpu.name, gpu, gpus, watts=gpu.watts)

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
    measured = measured_of(path, fields.pop("measured")) if "measured" in fields else None
    for name, value in fields.items():
        _check(path, name, value)
    if "gpu" not in fields:
        raise ConfigError(f'cluster = {path} has no gpu: write a line such as gpu = "h100-80gb".')
    if ("rails" in fields) != ("rail_gbits" in fields):
        raise ConfigError(
            f"cluster = {path} has one of rails and rail_gbits: write both, as rails = 8, rail_gbits = 400."
        )
    gpu = dataclasses.replace(_gpu(path, fields), measured=measured)
    return Cluster(
        fields.get("name", pathlib.Path(path).stem),
        gpu,
        fields.get("gpus"),
        fields.get("price"),
        fields.get("currency", "USD"),
        fields.get("watts", gpu.watts),
        fields.get("pue", 1.0),
    )


def _gpu(path: str, fields: dict[str, Any]) -> Gpu:
    """The file's GPU with its links."""
    try:
        known = find_gpu(fields["gpu"])
    except ConfigError as error:
        raise ConfigError(f"cluster = {path}: {error}") from None
    host = fields.get("host_size", known.host_size)
    network = known.network_bandwidth
    if "rails" in fields:
        network = fields["rails"] * fields["rail_gbits"] / 8 * GIGA / host
    share = fields.get("network_share", known.network_share) / fields.get("oversubscription", 1)
    return dataclasses.replace(
        known,
        memory=int(fields["memory_gbytes"] * GIGA) if "memory_gbytes" in fields else known.memory,
        host_size=host,
        host_bandwidth=fields["host_gbytes"] * GIGA if "host_gbytes" in fields else known.host_bandwidth,
        network_bandwidth=network,
        network_share=share,
    )


def _check(path: str, name: str, value: Any) -> None:
    """Raises ConfigError if a field is not legal."""
    if name not in FIELDS:
        raise ConfigError(f"cluster = {path}: {name} is not a field: {near(name, [*FIELDS, 'measured'])}")
    kind, low, high = FIELDS[name]
    if kind is str:
        legal = isinstance(value, str) and value.strip() and value.isprintable()
        what = "a text that is not empty"
    else:
        legal = isinstance(value, (int, kind)) and not isinstance(value, bool) and low <= value <= high
        what = f"a {'whole number' if kind is int else 'number'} from {low:g} to {high:g}"
    if not legal:
        raise ConfigError(f"cluster = {path}: {name} = {shown(value)} must be {what}.")
