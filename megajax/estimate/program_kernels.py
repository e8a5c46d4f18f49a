"""Seconds of the kernels and collectives that megajax's own program consists of, by the rates of `rates.py`."""

import functools
import operator
from typing import NamedTuple

from megajax.config import RunConfig
from megajax.estimate import model_costs
from megajax.estimate.communication import Sent
from megajax.estimate.gpus import Gpu
from megajax.estimate.kept import rows_of
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.parameters import Sharding
from megajax.estimate.rates import devices_here, in_a_host, rates_of
from megajax.ops.norm_kernel import PROGRAMS
from megajax.pipeline.program import StepProgram

__all__ = ["Kernels", "Product", "Work"]

# Of the collectives of activations half are of each of these kinds.
RING = ("all-gather", "reduce-scatter")
# Norms of a block whose kernels do more (`megajax.ops.norm_kernel`), by the model's `norm_placement`.
IN_ONE_PASS = {"pre": 2, "both": 2, "parallel": 1}


class Work(NamedTuple):
    """Seconds of a part of the program, by what they are spent on; a sum adds them, a product multiplies each.

    Attributes:
      matmul, attention: of these kernels.
      traffic: of all other kernels, which move memory.
      tensor, context, expert, pipe, data: of exposed communication over these axes.
      offload: of transfers to host memory and back.
      gaps: between kernels.
      waits: of the device for the host, which reads a loop's condition or a branch's index.
    """

    matmul: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipe: float = 0.0
    data: float = 0.0
    offload: float = 0.0
    gaps: float = 0.0
    waits: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def compute(self) -> float:
        """Seconds of all kernels."""
        return self.matmul + self.attention + self.traffic

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication, transfers to host memory included."""
        return self.tensor + self.context + self.expert + self.pipe + self.data + self.offload

    def __add__(self, other: "Work") -> "Work":
        return Work._make(map(operator.add, self, other))

    def __mul__(self, times: float) -> "Work":
        return Work._make([times * value for value in self])


class Product(NamedTuple):
    """A matmul of a block: elements of a token before and after it on a device; of experts, those of its k rows.

    Attributes:
      inputs, outputs: elements.
      repeated: full recomputation repeats it.
      experts: parameters of all experts on the device; 0 for a matmul with one weight.
    """

    inputs: float
    outputs: float
    repeated: bool
    experts: float = 0.0

    @property
    def weights(self) -> float:
        """Parameters of a weight that is not of experts."""
        return 0.0 if self.experts else self.inputs * self.outputs


class Kernels:
    """Seconds of the kernels and collectives of a run's program.

    Attributes:
      rows: tokens of a microbatch on a device.
      residual: bytes of their part of the residual stream.
      replicas: devices that have the same parameters outside experts.
      program: what is compiled.
    """

    def __init__(self, run: RunConfig, gpu: Gpu, program: StepProgram | None = None):
        """Raises ConfigError if the GPU has no peak for the run's precision."""
        self.run, self.gpu, self.parallel = run, gpu, run.parallel
        self.model, self.sharding = model_costs(run.model), Sharding.from_config(run)
        self.item, self.rates = ITEMSIZE[run.train.precision], rates_of(gpu, run.train.precision)
        parallel, model = self.parallel, self.model
        self.rows, self.split = rows_of(model, parallel), parallel.sequence_shares
        self.residual = self.rows // self.split * model.hidden * self.item
        self.program = program or StepProgram.of(run)
        self.replicas = parallel.replicas

    def kernels(self, count: float) -> Work:
        return Work(gaps=count * self.rates.gap)

    def traffic(self, count: float, kernels: float = 0) -> Work:
        """Bytes read or written by kernels without matmuls."""
        return Work(traffic=count / self.rates.memory, gaps=kernels * self.rates.gap)

    def matmul(self, rows: float, inner: float, columns: float, *, sums: bool = False) -> Work:
        """A product of [rows, inner] and [inner, columns]; `sums`: added to fp32 sums in memory."""
        return Work(matmul=self._seconds(rows, inner, columns, 1, sums), gaps=self.rates.gap)

    def _seconds(self, rows: float, inner: float, columns: float, faster: int, sums: bool) -> float:
        operands = self.item // faster  # bytes of an element, 1 of fp8's
        written = rows * columns * (4 if sums else self.item)
        moved = operands * (rows * inner + inner * columns) + written * (2 if sums else 1)
        return self.rates.product(2 * rows * inner * columns, written, moved, faster)

    def norms(self, *, backward: bool, early: bool | None = None) -> Work:
        """What kernels of norms do not read, write and launch (`StepProgram.norms_in_one_pass`): negative.

        The backward reads x and its gradient once, and sums the scale's in parts. The forward's kernel reads what x is the
        sum of, and writes x to the stash, if `early`: of the two, one is the block's input.
        """
        model = self.run.model
        count = IN_ONE_PASS.get(getattr(model, "norm_placement", ""), 0) * self.program.norms_in_one_pass
        count = min(count, getattr(model, "block_norms", count))
        if backward:
            parts = 2 * 4 * min(PROGRAMS, self.rows // self.split) * self.model.hidden
            return self.traffic(count * (parts - 2 * self.residual), -2 * count)
        if early is None:  # as in `pipeline.operations.Operations.forward`
            early = not self.program.merges or self.parallel.pipe == 1
        return self.traffic(-early * count * 1.5 * self.residual, -early * count)

    def ring(self, count: float, group: int, axis: str) -> float:
        """Seconds of an all-gather or a reduce-scatter of `count` bytes in all, their mean; an all-reduce is both."""
        if group == 1 or not count:
            return 0.0
        here = devices_here(self.parallel, self.gpu.host_size, group, axis)
        sent = count * (group - 1) / group
        kinds = RING if self.rates.links else RING[:1]  # without measured links they are equal
        return sum(self.rates.collective(kind, sent, group, here) for kind in kinds) / len(kinds)

    def all_reduce(self, count: float, group: int, axis: str) -> float:
        """Seconds of an all-reduce of `count` bytes."""
        here = devices_here(self.parallel, self.gpu.host_size, group, axis)
        sent = 2 * count * (group - 1) / group
        return self.rates.collective("all-reduce", sent, group, here) if group > 1 and count else 0.0

    def all_to_all(self, part: float, group: int, axis: str) -> float:
        """Seconds of an all-to-all in which a device sends `part` bytes to each other one of its group."""
        return self.rates.all_to_all(part, group, devices_here(self.parallel, self.gpu.host_size, group, axis))

    def seconds_of(self, one: Sent) -> float:
        """Of a collective over replicas or stages; over both its group has all devices with equal ranks on `tensor`."""
        parallel, host, (axis, *others) = self.parallel, self.gpu.host_size, one.axis.split(" and ")
        here = devices_here(parallel, host, one.devices, axis, one.apart)
        if others:
            here = max(1, min(one.devices, host // devices_here(parallel, host, parallel.tensor, "tensor")))
        return self.rates.collective(one.kind, one.each, one.devices, here)

    def send(self, count: float, axis: str, ranks: int) -> float:
        """Seconds in which each rank sends `count` bytes to its neighbour on the mesh axis."""
        here = in_a_host(self.parallel, self.gpu, ranks, axis)
        return self.rates.collective("collective-permute", count, 2, 2 if here else 1)

    @functools.cached_property
    def _collective(self) -> float:
        """Seconds of one gather or scatter of a block's activations over `tensor`."""
        return self.ring(self.rows * self.model.hidden * self.item, self.parallel.tensor, "tensor")
