"""Seconds of a block of megajax's own program, each kernel at its roofline, without compiling it.

The kernels and collectives are those that XLA makes of the program for GPUs (jax 0.12), with the rates of `rates.py`,
which were read from compiled programs; `python -m benchmarks.compiled time` compares the two. XLA's decisions were read
from compiled programs as well, and are constants here: how many kernels a block launches, the memory that they move besides
the matmuls', and which collectives overlap which kernels.

    forward of a block    gather, matmuls, scatter for each pair of matmuls; what the backward reads is written to the stash
    backward of a block   gather, matmuls, scatter for each pair; the inputs are gathered again for the weights' gradients,
                          which matmuls add to the fp32 sums in place
    merged                both, of different microbatches, in one loop: collectives of one overlap matmuls of the other

`program_time.py` adds what a step has besides blocks.
"""

import functools
import operator
from collections.abc import Iterable
from typing import NamedTuple

from megajax.config import RunConfig
from megajax.estimate import model_costs
from megajax.estimate.gpus import Gpu, is_fused
from megajax.estimate.memory import (
    ITEMSIZE,
    Sharding,
    is_gated,
    kept_for_weights,
    kept_of_block,
    rows_of,
)
from megajax.estimate.merged_ticks import exposed_parts, has_latencies
from megajax.estimate.op_costs import FUSED_BACKWARD, PALLAS_BACKWARD, in_a_host, spread
from megajax.estimate.rates import rates_of
from megajax.pipeline.program import StepProgram

__all__ = ["Blocks", "Work"]

# Kernels of a block besides its matmuls: of its forward, its backward, and for each of the biases' gradients; of a W.
FORWARD, BACKWARD, BIAS, WEIGHT = 17, 24, 8, 15
MERGED = 8  # that a merged forward and backward share
# A backward's memory traffic relative to the forward's, with what it recomputes besides matmuls; and the share of it that
# overlaps its collectives.
BACKWARD_TRAFFIC, HIDING_SHARE = 2.07, 0.4
# Of a tensor group over several hosts, the share of a merged tick's collectives that outlasts the kernels beside each.
BETWEEN_HOSTS = 0.1
# Exposed collectives of ZeRO-3, relative to all: of a forward, of a backward, of both merged.
SHARDED_FORWARD, SHARDED_BACKWARD, SHARDED_MERGED = 0.33, 0.46, 0.16
# Bytes for each parameter of a block where nothing is done in place: its 16-bit slice, read and written, in each pass; its
# gradient, in 16 bits, added to the fp32 sum.
SLICE, ACCUMULATION = 4, 10
# fp8: bytes for each parameter of a block (the largest of each row, both layouts quantized, sums copied out and back),
# passes over each matmul's input and output, and kernels of a matmul.
FP8_WEIGHT, FP8_PASSES, FP8_KERNELS = 28, 7, 22
# Ring attention: passes over the queries for each step of the ring, and kernels, of a forward and of a backward.
RING_PASSES, RING_KERNELS = (8, 18), (8, 13)
# Collective matmuls: passes over inputs and outputs, without the rank's own part; kernels for each other part, and of a pass
# besides; of a ring's time what is exposed at least.
PART_PASSES, PART_KERNELS, RING_MATMUL, RING_EXPOSED = 3, 2, 7, 0.15
# Zero bubble: passes over what I keeps for W.
KEPT_PASSES = 4
# Of the collectives of activations, and of ZeRO's, half are of each of these kinds.
RING = ("all-gather", "reduce-scatter")


class Work(NamedTuple):
    """Seconds of a part of the program, by what they are spent on; a sum adds them, a product multiplies each.

    Attributes:
      matmul, attention: of these kernels.
      traffic: of all other kernels, which move memory.
      tensor, context, pipe, data: of exposed communication over these axes.
      offload: of transfers to host memory and back.
      gaps: between kernels.
      waits: of the device for the host, which reads a loop's condition or a branch's index.
    """

    matmul: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    pipe: float = 0.0
    data: float = 0.0
    offload: float = 0.0
    gaps: float = 0.0
    waits: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(operator.add, self, other))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * value for value in self))


class Blocks:
    """The blocks of a run's program: `forward`, `backward`, `input`, `weight` and `merged` are of one block.

    Attributes:
      rows: tokens of a microbatch on a device.
      program: what is compiled.
    """

    def __init__(self, run: RunConfig, gpu: Gpu, sharding: Sharding | None = None):
        """Raises ConfigError if the GPU has no peak for the run's precision."""
        self.run, self.gpu, self.parallel = run, gpu, run.parallel
        self.model, self.sharding = model_costs(run.model), sharding or Sharding.from_config(run)
        self.item, self.rates = ITEMSIZE[run.train.precision], rates_of(gpu, run.train.precision)
        parallel, model = self.parallel, self.model
        self.rows, self.split = rows_of(model, parallel), parallel.tensor if parallel.sequence_parallel else 1
        self.residual = self.rows // self.split * model.hidden * self.item  # bytes of the residual stream on a device
        self.program, self.fp8 = StepProgram.of(run), run.train.matmul_dtype == "fp8"
        self.shards = self.sharding.shards or parallel.data * parallel.context
        self.latencies = has_latencies(run, gpu, model)

    # Kernels and collectives.

    def kernels(self, count: float) -> Work:
        return Work(gaps=count * self.rates.gap)

    def traffic(self, count: float, kernels: float = 0) -> Work:
        """Bytes read or written by kernels without matmuls."""
        return Work(traffic=count / self.rates.memory, gaps=kernels * self.rates.gap)

    def matmul(self, rows: float, inner: float, columns: float, *, sums: bool = False) -> Work:
        """A product of [rows, inner] and [inner, columns]; `sums`: added to fp32 sums in memory."""
        return Work(matmul=self._seconds(rows, inner, columns, 1, sums), gaps=self.rates.gap)

    def _matmuls(self, sizes: Iterable[tuple[float, float, float]], *, sums: bool = False) -> Work:
        """The products of these sizes of a block, which with fp8 have twice the rate."""
        faster = 2 if self.fp8 else 1
        seconds = [self._seconds(*size, faster, sums) for size in sizes]
        return Work(matmul=sum(seconds), gaps=len(seconds) * self.rates.gap)

    def _seconds(self, rows: float, inner: float, columns: float, faster: int, sums: bool) -> float:
        moved = self.item * (rows * inner + inner * columns) + rows * columns * (8 if sums else self.item)
        flops = 2 * rows * inner * columns
        return max(flops / self.rates.matmul_rate(flops) / faster, moved / self.rates.memory)

    def ring(self, count: float, group: int, axis: str) -> float:
        """Seconds of an all-gather or a reduce-scatter of `count` bytes in all, their mean; an all-reduce is both."""
        if group == 1:
            return 0.0
        here = max(1, min(group, self.gpu.host_size // spread(self.parallel, axis)))
        sent = count * (group - 1) / group
        kinds = RING if self.rates.links else RING[:1]  # without measured links they are equal
        return sum(self.rates.collective(kind, sent, group, here) for kind in kinds) / len(kinds)

    def send(self, count: float, axis: str, ranks: int) -> float:
        """Seconds in which each rank sends `count` bytes to its neighbour on the mesh axis."""
        here = in_a_host(self.parallel, self.gpu, ranks, axis)
        return self.rates.collective("collective-permute", count, 2, 2 if here else 1)

    # One block.

    @functools.cached_property
    def _products(self) -> list[tuple[float, float, bool]]:
        """(inputs, outputs) of each weight on a device, and whether full recomputation repeats its product."""
        mode, tensor = self.parallel.recompute, self.parallel.tensor
        return [(*one.on_device(tensor), mode in one.recomputed) for one in self.model.matmuls]

    @functools.cached_property
    def _elementwise(self) -> float:
        """Bytes that a block's forward moves besides matmuls, attention and the stash."""
        return self.model.elementwise_bytes(
            self.rows,
            itemsize=self.item,
            tensor=self.parallel.tensor,
            sequence_parallel=self.parallel.sequence_parallel,
            dropout=self._drops,
        )

    @property
    def _drops(self) -> bool:
        return self.model.attention is not None and self.model.attention.dropout > 0

    @functools.cached_property
    def _stash(self) -> float:
        """Seconds of writing what a block keeps for its backward to the stash: read and written."""
        on_device = not (self.program.unrolls or self.parallel.offload_activations)
        return 2 * self._kept / self.rates.memory if on_device else 0.0

    @property
    def _transfer(self) -> float:
        """Seconds in which a block's part of the stash is sent to host memory, or back, which nothing overlaps."""
        return self._kept / self.rates.pcie if self.parallel.offload_activations else 0.0

    @functools.cached_property
    def _kept(self) -> int:
        return kept_of_block(self.run, self.item)

    @functools.cached_property
    def _attention(self) -> tuple[Work, Work, Work]:
        """Attention's forward, its backward, and what the backward recomputes in modes short of full."""
        attention, parallel = self.model.attention, self.parallel
        if attention is None:
            return Work(), Work(), Work()
        tokens, heads = self.model.sequence_length, parallel.microbatch_size * attention.heads / parallel.tensor
        queries = tokens // parallel.context
        if is_fused(parallel):
            flops = 4 * heads * attention.pairs(tokens) * attention.head_size / parallel.context
            factor = PALLAS_BACKWARD if parallel.attention == "pallas" else FUSED_BACKWARD
            forward, backward = (
                flops / self.rates.attention_rate(False),
                factor * flops / self.rates.attention_rate(True),
            )
            return Work(attention=forward, gaps=self.rates.gap), Work(attention=backward, gaps=self.rates.gap), Work()
        scores = heads * queries * tokens
        moved = 4 * scores * self.item  # for the maximum, for the sum, and the softmax's reads and writes
        flops = 2 * scores * attention.head_size
        product = max(flops / self.rates.matmul_rate(flops), scores * self.item / self.rates.memory)
        passes = self.traffic(moved + (scores * (2 * self.item + 1) if self._drops else 0), 4)
        forward = Work(matmul=2 * product, gaps=2 * self.rates.gap) + passes
        again = forward if parallel.recompute in attention.scores_recomputed else Work()
        backward = Work(matmul=4 * product, gaps=4 * self.rates.gap) + passes
        return forward, backward, again

    @functools.cached_property
    def _pairs(self) -> int:
        """Pairs of matmuls that communicate over `tensor`."""
        return self.model.matmul_pairs if self.parallel.tensor > 1 else 0

    @functools.cached_property
    def _collective(self) -> float:
        """Seconds of one gather or scatter of a block's activations over `tensor`."""
        return self.ring(self.rows * self.model.hidden * self.item, self.parallel.tensor, "tensor")

    @functools.cached_property
    def _forward_kernels(self) -> Work:
        """A forward without its communication and the stash."""
        products = self._matmuls((self.rows, k, n) for k, n, _ in self._products)
        return products + self._attention[0] + self.traffic(self._elementwise, FORWARD) + self._repeated(0)

    @functools.cached_property
    def _weight_kernels(self) -> Work:
        """The matmuls of the weights' gradients, added in place."""
        return self._matmuls(((k, self.rows, n) for k, n, _ in self._products), sums=True)

    @property
    def _parts(self) -> int:
        """Parts in which the matmuls of a tensor group run, so that their communication overlaps them."""
        return self.parallel.tensor if "tensor_overlap" in self.parallel.rings else 1

    def _exposed(self, hidden: float) -> float:
        """Exposed seconds of a pass's gathers and scatters, one for each matmul: all but `hidden`, or a ring's matmuls."""
        one = self._collective
        if self._parts == 1:
            return max(0.0, 2 * self._pairs * one - hidden)
        products = (self._matmuls([(self.rows, k, n)]).matmul for k, n, _ in self._products)
        return sum(max(RING_EXPOSED * one, one - (1 - 1 / self._parts) * product) for product in products)

    @functools.cached_property
    def _input_kernels(self) -> Work:
        """The gradient of a block's input and of its biases, with what is recomputed, but for the communication."""
        products = self._matmuls((self.rows, n, k) for k, n, _ in self._products)
        again = self._matmuls((self.rows, k, n) for k, n, repeated in self._products if repeated)
        # What a second forward computes besides these, the backward of other modes computes again, too.
        again += self._attention[0 if self.parallel.recompute == "full" else 2]
        count, moved = self._biases
        elementwise = self.traffic(BACKWARD_TRAFFIC * self._elementwise + moved, BACKWARD + count * BIAS)
        return products + again + self._attention[1] + elementwise + self._repeated(1)

    @functools.cached_property
    def _biases(self) -> tuple[int, float]:
        """How many biases a block has, and the bytes that their gradients are summed from."""
        if not getattr(self.run.model, "biases", False):
            return 0, 0.0
        columns = sum(
            n for one, (_, n, _) in zip(self.model.matmuls, self._products, strict=True) if one.split == "column"
        )
        return len(self._products), self.rows * columns * self.item + 2 * self.residual

    def _repeated(self, backward: int) -> Work:
        """The additional work of a forward (0) or backward (1) if weights are not in place, in fp8, and with rings."""
        work, weights = Work(), sum(k * n for k, n, _ in self._products)
        if not self.program.in_place:
            work += self.traffic(weights * (SLICE + backward * ACCUMULATION), 8)
        if self.fp8:
            values = sum(k + n for k, n, _ in self._products) * self.rows * self.item
            moved = (FP8_WEIGHT * weights + FP8_PASSES * values) / 3
            work += self.traffic((1 + backward) * moved, (1 + backward) / 3 * FP8_KERNELS * len(self._products))
        if self._parts > 1:
            times = 1 + backward * (2 if self.parallel.recompute == "full" else 1)  # matmuls of a weight in parts
            values = (1 - 1 / self._parts) * sum(k + n for k, n, _ in self._products) * self.rows * self.item
            sends = (2 * times - backward) * self._pairs * (self._parts - 1)
            work += self.traffic(PART_PASSES * times * values, RING_MATMUL + PART_KERNELS * sends)
        heads, steps = self.model.attention, self.parallel.context - 1
        if heads is not None and steps:
            queries = self.rows * heads.heads * heads.head_size / self.parallel.tensor * self.item
            work += self.traffic(steps * RING_PASSES[backward] * queries, steps * RING_KERNELS[backward])
        if self._pairs and self.split > 1 and self.parallel.microbatch_size > 1:
            # the sequence is gathered and scattered as the outer axis, and matmuls take samples as the outer one
            arrays = 2 * (1 + backward) * self._pairs
            if backward and self.parallel.recompute == "none":  # gathered values of the stash, too
                arrays += self._pairs
            work += self.traffic(2 * arrays * self.rows * self.model.hidden * self.item, arrays)
        if self.sharding.zero == 3 and backward:
            work += self.traffic(ACCUMULATION * weights / self.shards)
        return work

    @functools.cached_property
    def _sharded(self) -> float:
        """Seconds of gathering a block's weights over the replicas, with ZeRO-3; its gradients take twice as long."""
        if self.sharding.zero != 3:
            return 0.0
        local = self.model.block.on_device(self.parallel.tensor) * self.item
        return self.ring(local, self.shards, "data") + self.rates.gap * (len(self._products) - 1)

    @functools.cached_property
    def forward(self) -> Work:
        """Of each pair of matmuls the gather and the scatter are exposed, but the last scatter overlaps the stash."""
        exposed = self._exposed(min(self._collective * (1 if self.program.in_place else 2), self._stash + self._slices))
        communication = Work(tensor=exposed, context=self._around(0), data=SHARDED_FORWARD * self._sharded)
        offload = max(0.0, self._transfer - self._forward_kernels.total)
        return self._forward_kernels + Work(traffic=self._stash, offload=offload) + communication

    @functools.cached_property
    def input(self) -> Work:
        """The gather and the scatter of each pair, of which elementwise work hides a part."""
        exposed = self._exposed(min(2 * self._collective, HIDING_SHARE * self._input_kernels.traffic))
        if self.parallel.recompute == "full":
            exposed += self._exposed(0.0)
        ratio = 1 + 2 * 4 / self.item / 2  # the weights again, and fp32 gradients
        data = SHARDED_BACKWARD * ratio * self._sharded
        kept = self._kept_for_weights if self.program.spec.split else 0.0
        communication = Work(tensor=exposed, context=self._around(1), data=data, offload=self._transfer)
        return self._input_kernels + self.traffic(KEPT_PASSES * kept) + communication

    @functools.cached_property
    def weight(self) -> Work:
        """With sequence parallelism the inputs are gathered again, beside the matmuls."""
        again = self._pairs * self._collective if self.parallel.sequence_parallel else 0.0
        kernels = self._weight_kernels + self.kernels(WEIGHT if self.program.spec.split else 0)
        return kernels + Work(tensor=max(0.0, again - kernels.total) if self._parts == 1 else RING_EXPOSED * again)

    @functools.cached_property
    def backward(self) -> Work:
        """Matmuls of weights' gradients hide a collective of each pair; those of a block with a gated MLP come too late."""
        early = self.latencies and not (self.program.spec.split or is_gated(self.model))
        hidden = min(self.input.tensor, early * self._pairs * self._collective)
        return self.input + self.weight + Work(tensor=-hidden)

    @functools.cached_property
    def merged(self) -> Work:
        """Most collectives overlap the other pass's matmuls."""
        kernels = self._forward_kernels + self._input_kernels + self._weight_kernels + self.kernels(-MERGED)
        ratio = 1 + 1 + 4 / self.item
        data = SHARDED_MERGED * ratio * self._sharded
        return kernels + Work(traffic=self._stash, tensor=self._merged_exposed(kernels), data=data)

    def _merged_exposed(self, kernels: Work) -> float:
        """Seconds of a merged block's collectives that nothing overlaps, of two pairs of matmuls as of any number.

        They are at least what all of its matmuls and attention leave, which matters where a tensor group spans hosts.
        """
        one, widest, exposed = self._collective, self.rows * max(n for _, n, _ in self._products) * self.item, 0.0
        second = self._matmuls([(self.rows, *self._products[-1][:2])])
        for part in exposed_parts(is_gated(self.model), self.parallel.recompute == "full", self.latencies):
            beside = self.traffic(part.residuals * self.residual + part.widest * widest, part.kernels).total
            exposed += max(0.0, part.collectives * one - beside - part.products * second.total)
        all_of_them = (5 if self.parallel.sequence_parallel else 4) * self._pairs * one
        exposed = max(self._pairs / 2 * exposed, all_of_them - kernels.matmul - kernels.attention)
        here = in_a_host(self.parallel, self.gpu, self.parallel.tensor, "tensor")
        return exposed + (0.0 if here else BETWEEN_HOSTS * all_of_them)

    @property
    def _slices(self) -> float:
        """Seconds in which the weights are copied out of the stack, where they are not read in place."""
        return 0.0 if self.program.in_place else SLICE * sum(k * n for k, n, _ in self._products) / self.rates.memory

    @functools.cached_property
    def _kept_for_weights(self) -> float:
        """Bytes that a block's I keeps for its W."""
        return kept_for_weights(self.run, self.item)

    def _around(self, backward: int) -> float:
        """Seconds of exposed sends of keys and values round a ring of C ranks (`ops/ring_attention.py`), in one block.

        XLA starts all of them before the first product, and so hides only the last of a forward; in a backward, which sends
        gradients too, about as many are exposed.
        """
        ranks, heads = self.parallel.context, self.model.attention
        if ranks == 1 or heads is None:
            return 0.0
        count = self.rows * heads.groups * heads.head_size / self.parallel.tensor * self.item
        return (2 * (ranks - 1) - (1 - backward)) * self.send(count, "data", ranks)
