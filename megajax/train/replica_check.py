"""Finds silent data corruption: compares the devices that hold copies of the same part of the training state.

Copies are equal bit for bit as long as all devices compute correctly: each applies the same update to the same values. A
flipped bit stays in one device's copy, so a comparison every N steps finds it at most N steps later.

Each device computes a checksum of its shard of every array,

    sum over i of  bits[i] * weight(i)  mod 2**32,    weight(i) odd and different for nearly all positions i,

in exact integer arithmetic. One changed bit adds +-2**k times an odd number, which is never 0 mod 2**32; other changes stay
unnoticed with probability 2**-32. One all-gather of a number per array and device makes the table of checksums known to
every process.

What is compared is what two devices hold: with ZeRO-0 all weights and moments over `data`; with ZeRO-1 and ZeRO-3 only the
arrays that the replicas do not divide, and those replicated over `pipe` or `tensor`. `ReplicaCheck.describe` says how much
that is.
"""

import dataclasses
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import layout
from megajax.runtime.exchange import put, read
from megajax.train.stragglers import Stragglers

Tree = Any
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class ReplicasDiffer(RuntimeError):
    """Copies of one array differ: at least one device's memory or arithmetic is faulty. The run can be resumed."""


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Bytes of the state without copies, in all and of those that two or more devices hold; and the same of weights."""

    total: int
    compared: int
    weights: int
    compared_weights: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """An array with copies that differ.

    Attributes:
      name: of the array.
      suspects: the devices whose copy differs from the majority's; all that hold a copy if there is no majority.
      majority: whether there is one.
    """

    name: str
    suspects: tuple[jax.Device, ...]
    majority: bool


class ReplicaCheck:
    """Compares the replicas of a training state on a mesh.

    Attributes:
      mesh: the mesh of the state.
      names: the arrays that are compared.
      coverage: how much of the state has copies that can be compared.
    """

    def __init__(self, target: layout.StateLayout):
        """Prepares the program; it is compiled at the first check.

        Args:
          target: the layout of the state. Leaves that it does not have are not compared.
        """
        shapes, shardings = layout.named(target.shapes), layout.named(target.shardings)
        self.mesh: Mesh = next(iter(shardings.values())).mesh
        self._replicated = {name: _replicated_axes(sharding) for name, sharding in shardings.items()}
        self.names = [name for name, axes in self._replicated.items() if axes]
        specs = [shardings[name].spec for name in self.names]
        self._program = jax.jit(
            partial(_checksum_table, mesh=self.mesh, specs=specs), out_shardings=NamedSharding(self.mesh, P())
        )
        size = {name: leaf.size * leaf.dtype.itemsize for name, leaf in shapes.items()}
        compared, weights = set(self.names), [name for name in size if name.startswith("params/")]
        self.coverage = Coverage(
            total=sum(size.values()),
            compared=sum(size[name] for name in compared),
            weights=sum(size[name] for name in weights),
            compared_weights=sum(size[name] for name in weights if name in compared),
        )
        put("host", socket.gethostname())

    def describe(self) -> str:
        """What the comparison covers, for the start of the log."""
        size = self.coverage
        if not self.names:
            return "no two devices hold the same part of the state: there are no copies to compare"
        share, weights = size.compared / size.total, size.compared_weights / size.weights
        return (
            f"copies on different devices are compared: {share:.1%} of the state, {weights:.1%} of the weights (the rest "
            "has no copy)"
        )

    def differences(self, state: Tree) -> list[Difference]:
        """The arrays whose copies differ. All processes must call it, and get the same result.

        Args:
          state: of the layout given to the constructor.
        """
        if not self.names:
            return []
        leaves = layout.named(state, only=self.names)
        with jax.set_mesh(self.mesh):
            table = np.asarray(self._program([leaves[name] for name in self.names]))
        devices = self.mesh.devices.flatten()
        table = (table - np.arange(len(devices), dtype=np.uint32)[:, None]).reshape(*self.mesh.devices.shape, -1)
        found = []
        for column, name in enumerate(self.names):
            found += self._compare(name, table[..., column])
        return found

    def _compare(self, name: str, checksums: np.ndarray) -> list[Difference]:
        """The differences of one array, from its checksums [data, pipe, tensor]."""
        axes = [self.mesh.axis_names.index(axis) for axis in self._replicated[name]]
        copies = int(np.prod([checksums.shape[axis] for axis in axes]))
        ends = range(-len(axes), 0)  # one row for each shard, one column for each copy
        sums = np.moveaxis(checksums, axes, ends).reshape(-1, copies)
        holders = np.moveaxis(self.mesh.devices, axes, ends).reshape(-1, copies)
        found = []
        for values, devices in zip(sums, holders, strict=True):
            distinct, counts = np.unique(values, return_counts=True)
            if len(distinct) == 1:
                continue
            majority = bool(2 * counts.max() > copies)
            suspects = devices[values != distinct[counts.argmax()]] if majority else devices
            found.append(Difference(name, tuple(suspects), majority))
        return found

    def check(self, state: Tree, step: int) -> None:
        """Compares all copies; all processes must call it.

        Raises:
          ReplicasDiffer: on all processes, with a message that names array, device, process and host.
        """
        if found := self.differences(state):
            raise ReplicasDiffer(describe(found, step, read("host")))


def describe(found: list[Difference], step: int, hosts: Mapping[int, str]) -> str:
    """One line that names the first array that differs and the devices at fault.

    Args:
      found: at least one difference.
      hosts: host names by process.
    """
    first = found[0]
    names = ", ".join(_device_name(device, hosts) for device in first.suspects)
    others = len({difference.name for difference in found}) - 1
    more = f" (and {others} more arrays)" if others else ""
    blame = f"{names} differs from the other copies"
    if not first.majority:
        blame = f"{names} differ from one another, and there is no majority that shows which is right"
    return (
        f"step {step}: silent data corruption: {first.name}{more}: {blame}: check the memory of that hardware. Training "
        "stops without saving; --resume auto resumes from the last state whose copies agreed"
    )


def _device_name(device: jax.Device, hosts: Mapping[int, str]) -> str:
    host = hosts.get(device.process_index, socket.gethostname() if jax.process_count() == 1 else "an unknown host")
    return f"device {device.id} ({device.device_kind}) of process {device.process_index} on {host}"


def _replicated_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """The mesh axes of more than one device over which an array is replicated."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    used = {axis for entry in entries for axis in entry}
    return tuple(axis for axis in sharding.mesh.axis_names if sharding.mesh.shape[axis] > 1 and axis not in used)


class Checks:
    """The checks of `--check-every` between two steps.

    Attributes:
      every: steps from one check to the next.
      stragglers: receives the host's times of each step.
    """

    def __init__(self, every: int, target: layout.StateLayout):
        """`target`: the layout of the state."""
        self.every, self._replicas = every, ReplicaCheck(target)
        here = [device for device in self._replicas.mesh.devices.flat if device.process_index == jax.process_index()]
        self.stragglers = Stragglers(here, socket.gethostname())

    def describe(self) -> str:
        """One line for the start of the log."""
        return f"check     every {self.every} steps: {self._replicas.describe()}"

    def run(self, state: Tree, step: int) -> list[str]:
        """Compares the replicas and, at a multiple of `every`, times this process; returns messages.

        All processes must call it.

        Raises:
          ReplicasDiffer: see `ReplicaCheck.check`.
        """
        self._replicas.check(state, step)
        return [] if step % self.every else self.stragglers.measure(step)


# The functions below are traced.


def _checksum_table(leaves: list[jax.Array], mesh: Mesh, specs: list[P]) -> jax.Array:
    """uint32 [devices, leaves]: each device's checksum of its shard, plus its place in the mesh.

    The place makes every row depend on the device: XLA must not replace a row by another's because the arrays are declared
    equal.
    """
    axes = mesh.axis_names

    def rows(*shards):
        place = jnp.uint32(0)
        for axis in axes:
            place = place * jnp.uint32(mesh.shape[axis]) + jax.lax.axis_index(axis).astype(jnp.uint32)
        return jnp.stack([checksum(shard) + place for shard in shards])[None]

    return jax.shard_map(rows, mesh=mesh, in_specs=tuple(specs), out_specs=P(axes), check_vma=False)(*leaves)


def checksum(x: jax.Array) -> jax.Array:
    """uint32 scalar: the sum of the elements' bits times an odd number that depends on the position, mod 2**32."""
    bits = x.astype(jnp.uint32) if x.dtype == bool else jax.lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize])
    position = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape)
    # The finalizer of MurmurHash3, a bijection: weights of neighbours are unrelated, so swapped values are noticed.
    weight = (position ^ (position >> 16)) * jnp.uint32(0x85EBCA6B)
    weight = (weight ^ (weight >> 13)) * jnp.uint32(0xC2B2AE35)
    weight = (weight ^ (weight >> 16)) | jnp.uint32(1)
    return jnp.sum(bits.astype(jnp.uint32) * weight, dtype=jnp.uint32)
