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
from collections.abc import Callable, Iterable, Sequence

from megajax.estimate.attention_kernels import CONTEXT_MERGED, AttentionKernels
from megajax.estimate.expert_dispatch import TENSOR_HIDDEN
from megajax.estimate.expert_kernels import SLICE, ExpertKernels
from megajax.estimate.kept import is_gated, kept_by_matmuls, kept_for_weights, kept_of_block
from megajax.estimate.merged_ticks import exposed_of_one_stage, exposed_parts, has_all_latencies, has_latencies
from megajax.estimate.parameters import block_arrays
from megajax.estimate.program_kernels import Product, Work
from megajax.estimate.rates import in_a_host
from megajax.estimate.sharded_blocks import (
    Passes,
    ShardedBlocks,
    backward_exposed,
    forward_exposed,
    merged_exposed,
)
from megajax.estimate.trained import trained_parameters
from megajax.runtime.xla_flags import collectives_in_flight

__all__ = ["Blocks"]

# Kernels of a block besides its matmuls: of its forward, its backward, and for each of the biases' gradients; of a W.
FORWARD, BACKWARD, BIAS, WEIGHT = 17, 24, 8, 15
MERGED = 8  # that a merged forward and backward share
# Without a loop over blocks XLA fuses more: their memory traffic and kernels relative to those above.
UNROLLED_TRAFFIC, UNROLLED_KERNELS = 0.82, 0.6
# A backward's memory traffic relative to the forward's, with what it recomputes besides matmuls; and the share of it that
# overlaps its collectives, but with full recomputation.
BACKWARD_TRAFFIC, HIDING_SHARE = 2.07, 0.4
# Where a merged tick's collectives take as long as its matmuls and attention, their share that outlasts the kernels beside
# each; nothing where they take half as long.
CROWDED = 0.1
# The collectives of a merged block with an MLP that is not gated that nothing overlaps at least, where XLA is not told the
# times of matmuls.
UNTOLD = 1.35
# Bytes for each parameter of a block where nothing is done in place: its 16-bit slice, read and written, in each pass; its
# gradient, in 16 bits, added to the fp32 sum.
ACCUMULATION = 10
# With ZeRO-3, bytes for each parameter of a shard: the scattered gradient and the fp32 sum, read, and the sum, written.
SHARDED_SUM = 12
# fp8: bytes for each parameter of a block (the largest of each row, both layouts quantized, sums copied out and back),
# passes over each matmul's input and output, and kernels of a matmul.
FP8_WEIGHT, FP8_PASSES, FP8_KERNELS = 28, 7, 22
# Collective matmuls: passes over inputs and outputs, without the rank's own part; kernels for each other part, and of a pass
# besides; of a ring's time what is exposed at least.
PART_PASSES, PART_KERNELS, RING_MATMUL, RING_EXPOSED = 3, 2, 7, 0.15
# Zero bubble: passes over what I keeps for W, of each; and those of W over a gated MLP's gates, whose product it computes.
KEPT_PASSES, GATED_PASSES = 2, 1.5


class Blocks(ExpertKernels, AttentionKernels, ShardedBlocks):
    """The blocks of a run's program: `forward`, `backward`, `input`, `weight` and `merged` are of one block.

    The layers of the run are of one kind (`kinds.layers_of_kinds`); `program` is that of all kinds.
    """

    @functools.cached_property
    def fp8(self) -> bool:
        """Whether matmuls run in 8 bits."""
        return self.run.train.matmul_dtype == "fp8"

    @functools.cached_property
    def latencies(self) -> bool:
        """Whether XLA is told the times of matmuls in place."""
        return has_latencies(self.run, self.gpu, self.model)

    @functools.cached_property
    def over_hosts(self) -> bool:
        """Whether a tensor group spans hosts, and XLA is told the times of all instructions for it."""
        here = in_a_host(self.parallel, self.gpu, self.parallel.tensor, "tensor")
        return not here and has_all_latencies(self.run, self.gpu, self.model)

    def _matmuls(self, products: Iterable[Product], of: str = "outputs") -> Work:
        """Products of a block that compute these: "outputs", or gradients of "inputs" or "weights", added to fp32 sums."""
        seconds = [self._product(one, of) for one in products]
        return Work(matmul=sum(seconds), gaps=len(seconds) * self.rates.gap)

    def _product(self, one: Product, of: str) -> float:
        """Seconds of one product. With fp8 it has twice the rate, of experts' those that run in 8 bits.

        In parts (`--tensor-overlap ring`), each reads the whole weight, and writes fp32 if it is summed over `tensor`.
        """
        rows, k, n = self.routed if one.experts else self.rows, one.inputs, one.outputs
        if one.experts:
            values = k + n + (self.model.experts.choice.chosen - 1) * self.model.hidden
            sums = (
                8 if self.program.experts_in_place else 4
            )  # bytes of a gradient's element: read and written, or written
            moved = self.item * self.room * rows * values + one.experts * (sums if of == "weights" else self.item)
            written = (
                one.experts * 4 if of == "weights" else self.item * self.room * rows * (k if of == "inputs" else n)
            )
            if (faster := self.rate_in_8_bits if of != "weights" else 1) > 1:
                moved -= (self.item - 1) * (self.room * rows * self.multiplied(one, of) + one.experts)
            return self.rates.product(2 * rows * k * n, written, moved, faster)
        faster = 2 if self.fp8 else 1
        if of == "weights":
            return self._seconds(k, rows, n, faster, sums=True)
        part, (inner, columns) = rows / self._parts, (k, n) if of == "outputs" else (n, k)
        summed = self._parts > 1 and columns == self.model.hidden
        written = part * columns * (4 - self.item) / self.rates.memory if summed else 0.0
        return self._parts * (self._seconds(part, inner, columns, faster, sums=False) + written)

    @functools.cached_property
    def _products(self) -> list[Product]:
        """The matmuls of a block with its weights."""
        parallel, model = self.parallel, self.model
        routed = {one: one.inputs * one.outputs for one in model.matmuls if one.name.startswith("experts")}
        parts = {one: self.held * size / sum(routed.values()) for one, size in routed.items()}
        return [
            Product(*self.on_device(one), parallel.recompute in one.recomputed, parts.get(one, 0.0))
            for one in model.matmuls
        ]

    @functools.cached_property
    def _elementwise(self) -> float:
        """Bytes that a block's forward moves besides matmuls, attention and the stash."""
        moved = self.model.without_experts_traffic.elementwise_bytes(
            self.rows,
            itemsize=self.item,
            tensor=self.parallel.tensor,
            sequence_parallel=self.parallel.sequence_parallel,
            dropout=self.drops,
        )
        return moved * (UNROLLED_TRAFFIC if self.program.unrolls else 1)

    @property
    def _fused(self) -> float:
        """Kernels of a block, relative to those in a loop over blocks."""
        return UNROLLED_KERNELS if self.program.unrolls else 1.0

    @functools.cached_property
    def _stash(self) -> float:
        """Seconds of writing what a block keeps for its backward to the stash: read and written.

        Where ticks of one stage merge, matmuls without a bias write there (`pipeline.early_stash`), and experts' always.
        """
        parallel = self.parallel
        if self.program.unrolls or parallel.offload_activations:
            return 0.0
        early = self.program.merges and parallel.pipe == 1 and parallel.zero < 3 and not self._biases[0]
        there = kept_by_matmuls(self.run, self.item) if early else self.stashed
        return 2 * (self.kept - there) / self.rates.memory

    @property
    def _transfer(self) -> float:
        """Seconds in which a block's part of the stash is sent to host memory, or back, which nothing overlaps."""
        return self.kept / self.rates.pcie if self.parallel.offload_activations else 0.0

    @functools.cached_property
    def kept(self) -> int:
        """Bytes that a block keeps for its backward."""
        return kept_of_block(self.run, self.item)

    @functools.cached_property
    def _pairs(self) -> int:
        """Pairs of matmuls that communicate over `tensor`, besides experts' of several replicas."""
        several = self.held > 0 and self.parallel.expert > 1
        return self.model.matmul_pairs - several if self.parallel.tensor > 1 else 0

    @functools.cached_property
    def _forward_kernels(self) -> Work:
        """A forward without its communication and the stash."""
        products, elementwise = self._matmuls(self._products), self.traffic(self._elementwise, self._fused * FORWARD)
        elementwise += self.norms(backward=False)
        return products + self.attention[0] + elementwise + self._repeated(0) + self.expert_traffic(0)

    @functools.cached_property
    def _weight_kernels(self) -> Work:
        """The matmuls of the weights' gradients, added in place."""
        trained, work = trained_parameters(self.program.run), self._matmuls(self._products, "weights")
        if trained is None:
            return work
        return Work(matmul=trained.matrices * work.matmul, gaps=trained.matrices * work.gaps)

    @property
    def _parts(self) -> int:
        """Parts in which the matmuls of a tensor group run, so that their communication overlaps them."""
        return self.parallel.tensor if "tensor_overlap" in self.parallel.rings else 1

    def _exposed(self, counts: Sequence[float], hidden: float) -> float:
        """Exposed seconds of a pass's collectives of `PAIRS`: all but `hidden`, or a ring's matmuls.

        Of those of experts over several replicas nothing is hidden.
        """
        pairs, dense, experts = self.over_tensor(counts)
        if self._parts == 1 or not dense:
            return max(0.0, pairs - hidden) + experts
        one, matmuls = self._collective, zip(self._products, self.model.matmuls, strict=True)
        products = [self._product(own, "outputs") for own, costs in matmuls if costs.split and not own.experts]
        rings = [max(RING_EXPOSED * one, one - (1 - 1 / self._parts) * product) for product in products]
        return dense / one * sum(rings) / len(rings) + pairs - dense + experts

    @functools.cached_property
    def _input_kernels(self) -> Work:
        """The gradient of a block's input and of its biases, with what is recomputed, but for the communication."""
        products = self._matmuls(self._products, "inputs")
        again = self._matmuls(one for one in self._products if one.repeated)
        # What a second forward computes besides these, the backward of other modes computes again, too.
        again += self.attention[0 if self.parallel.recompute == "full" else 2]
        count, moved = self._biases
        elementwise = self.traffic(
            BACKWARD_TRAFFIC * self._elementwise + moved, self._fused * (BACKWARD + count * BIAS)
        )
        elementwise += self.norms(backward=True)
        if self.program.gates_in_one_pass and is_gated(self.model) and not self.model.experts:
            elementwise += self.traffic(-self._gates, -1)
        return products + again + self.attention[1] + elementwise + self._repeated(1) + self.expert_traffic(1)

    @property
    def _gates(self) -> float:
        """Bytes of gate and gated value, which the backward reads once where it would read them twice."""
        values = [one for one in self.model.kept if one.name == "up"]
        return self.rows * self.item * sum(one.per_token for one in values) / self.parallel.tensor

    @functools.cached_property
    def _biases(self) -> tuple[int, float]:
        """How many biases a block has, and the bytes that their gradients are summed from."""
        if not getattr(self.run.model, "biases", False):
            return 0, 0.0
        products = zip(self.model.matmuls, self._products, strict=True)
        columns = sum(self.elements(size)[1] for one, size in products if one.split == "column")
        return len(self._products), self.rows * columns * self.item + 2 * self.residual

    def _repeated(self, backward: int) -> Work:
        """The additional work of a forward (0) or backward (1) if weights are not in place, in fp8, and with rings."""
        work, weights, full = Work(), sum(one.weights for one in self._products), self.parallel.recompute == "full"
        if not self.program.in_place:
            work += self.traffic(weights * (SLICE + backward * ACCUMULATION), 8)
        if self.fp8:
            values = sum(one.inputs + one.outputs for one in self._products if one.weights) * self.rows * self.item
            moved = (FP8_WEIGHT * weights + FP8_PASSES * values) / 3
            work += self.traffic((1 + backward) * moved, (1 + backward) / 3 * FP8_KERNELS * len(self._products))
        if self._parts > 1:
            times = 1 + backward * (2 if full else 1)  # matmuls of a weight in parts
            values = (1 - 1 / self._parts) * sum(sum(self.elements(one)) for one in self._products)
            values *= self.rows * self.item
            sends = (2 * times - backward) * self._pairs * (self._parts - 1)
            work += self.traffic(PART_PASSES * times * values, RING_MATMUL + PART_KERNELS * sends)
        if self.run.train.expert_matmul_dtype == "fp8":
            passes = ["inputs", *["outputs"] * full] if backward else ["outputs"]
            work += self.quantized((one, of) for of in passes for one in self._products if one.experts)
        work += self.between_ranks(backward)
        if self._pairs and self.split > 1 and self.parallel.microbatch_size > 1:
            # the sequence is gathered and scattered as the outer axis, and matmuls take samples as the outer one
            arrays = 2 * (1 + backward) * self._pairs
            if backward and self.parallel.recompute == "none":  # gathered values of the stash, too
                arrays += self._pairs
            work += self.traffic(2 * arrays * self.rows * self.model.hidden * self.item, arrays)
        if self.sharding.zero == 3:  # slices of the stacks' shards, and the scattered gradient added to its sum
            moved = (SLICE + backward * SHARDED_SUM) * weights / self.replicas
            work += self.traffic(moved, (1 + backward) * block_arrays(self.run)[0])
        return work

    @functools.cached_property
    def _passes(self) -> Passes | None:
        """What the exposed collectives of ZeRO-3 follow from; None without it."""
        if self.sharding.zero != 3:
            return None
        seconds = {of: [self._product(one, of) for one in self._products] for of in ("outputs", "inputs", "weights")}
        forward, backward, _ = self.attention
        traffic = self._forward_kernels.traffic - forward.traffic
        sent = self.sharded([(one.weights, one.experts) for one in self._products])
        sent |= {"ring": (self.round_ring(0), self.round_ring(1)), "exchange": (self.exchanges(0), self.exchanges(1))}
        sent["tensor"] = self._collective if self._pairs and self._parts == 1 else 0.0
        return Passes(**seconds, **sent, attention=(forward.total, backward.total), traffic=traffic)

    def _sharded_exposed(self, exposed: Callable[[Passes], float], sends: float) -> float:
        """Of ZeRO-3's exposed collectives in a pass those besides `sends`, of a context, or a tensor group's collectives."""
        one = self._passes
        anyway = exposed(one.alone) if one and one.tensor else sends
        return max(0.0, exposed(one) - anyway) if one else 0.0

    @functools.cached_property
    def forward(self) -> Work:
        """Of each pair of matmuls the gather and the scatter are exposed, but the last scatter overlaps the stash."""
        hidden = self._collective, self._stash
        if not self.program.in_place:  # and a gather the weights' copies out of the stack
            copies = SLICE * sum(one.weights for one in self._products) / self.rates.memory
            hidden = 2 * self._collective, self._stash + copies
        exposed = self._exposed(self.sends.forward, min(hidden))
        data = self._sharded_exposed(forward_exposed, self.around(0))
        communication = Work(tensor=exposed, context=self.around(0), expert=self.dispatched.forward, data=data)
        offload = max(0.0, self._transfer - self._forward_kernels.total)
        return self._forward_kernels + Work(traffic=self._stash, offload=offload) + communication

    @functools.cached_property
    def input(self) -> Work:
        """The gather and the scatter of each pair, of which elementwise work hides a part, and with full those repeated."""
        full = self.parallel.recompute == "full"
        hidden = HIDING_SHARE * (self._input_kernels.traffic - self.expert_traffic(1).traffic) * (not full)
        exposed = self._exposed(self.sends.gradients, min(2 * self._collective, hidden))
        if full:
            exposed += self._exposed(self.sends.again + self.sends.sums, 0.0)
        data = self._sharded_exposed(backward_exposed, self.around(1))
        expert = self.exposed_dispatch("backward", self._input_kernels)
        communication = Work(tensor=exposed, context=self.around(1), expert=expert, data=data, offload=self._transfer)
        return self._input_kernels + self.traffic(self._kept - self._late) + communication

    @functools.cached_property
    def _kept(self) -> float:
        """Bytes that I moves to keep them for W, and W to read them again."""
        return KEPT_PASSES * kept_for_weights(self.run, self.item) if self.program.splits else 0.0

    @property
    def _gates_of_w(self) -> float:
        """Bytes of a backward's elementwise work that W moves where backwards are split: over a gated MLP's gates."""
        return GATED_PASSES * self._gates if is_gated(self.model) and not self.model.experts else 0.0

    @property
    def _late(self) -> float:
        """Bytes of a backward's elementwise work that W moves."""
        return self._gates_of_w if self.program.splits else 0.0

    @functools.cached_property
    def weight(self) -> Work:
        """What is gathered again, beside the matmuls; with full recomputation the input's gradient has it."""
        again = self.sends.again * (self.parallel.recompute != "full") + self.sends.late * self.program.splits
        pairs, _, experts = self.over_tensor(again)
        kernels = self._weight_kernels + self.kernels(WEIGHT if self.program.splits else 0)
        kernels += self.traffic(self._kept + self._late)
        exposed = max(0.0, pairs - kernels.total) if self._parts == 1 else RING_EXPOSED * pairs
        return kernels + Work(tensor=exposed + experts)

    @functools.cached_property
    def backward(self) -> Work:
        """Matmuls of weights' gradients hide a collective of each pair; those of a block with a gated MLP come too late."""
        early = self.latencies and not (self.program.splits or is_gated(self.model))
        hidden = min(self.input.tensor, early * self._pairs * self._collective)
        return self.input + self.weight + Work(tensor=-hidden)

    @functools.cached_property
    def merged(self) -> Work:
        """Most collectives overlap the other pass's matmuls."""
        kernels = self._forward_kernels + self._input_kernels + self._weight_kernels + self.kernels(-MERGED)
        data = merged_exposed(self._passes) if self._passes else 0.0
        sends = self.sends
        all_of_them, _, experts = self.over_tensor(sends.forward + sends.gradients + sends.again + sends.sums)
        exposed = self._merged_exposed(kernels, all_of_them) + (1 - TENSOR_HIDDEN) * experts
        context = (1 if self.over_hosts else CONTEXT_MERGED) * (self.around(0) + self.around(1))
        expert = self.exposed_dispatch("merged", kernels)
        return kernels + Work(traffic=self._stash, tensor=exposed, context=context, expert=expert, data=data)

    def _merged_exposed(self, kernels: Work, all_of_them: float) -> float:
        """Seconds of a merged block's collectives that nothing overlaps, of two pairs of matmuls as of any number.

        They are at least what all of its matmuls and attention, fused or not, leave, which matters where a tensor group
        spans hosts, or where matmuls are small.
        """
        one, exposed = self._collective, 0.0
        gated, full = is_gated(self.model), self.parallel.recompute == "full"
        widest = self.rows * max(self.elements(product)[1] for product in self._products) * self.item
        if self.parallel.pipe == 1 and self.parallel.zero < 3:
            exposed += one / self.run.model.layers  # the backward's first gather of a pass, which is not ahead
            short = sum(self._product(own, "outputs") for own in self._products) < one * len(self._products)
            several = collectives_in_flight(self.parallel) > 1
            parts = exposed_of_one_stage(gated, full, self.latencies, several, short)
        else:
            parts = exposed_parts(gated, full, self.latencies, self.over_hosts)
        for part in parts:
            beside = self.traffic(part.residuals * self.residual + part.widest * widest, part.kernels).total
            beside += sum(self._matmuls([self._products[place]], of).total for place, of in part.products)
            exposed += max(0.0, part.collectives * one - beside)
        if not (self.latencies or gated or full):
            exposed = max(exposed, UNTOLD * one)
        attention = (self.attention[number] for number in (0, 1, 0 if full else 2))
        beside = kernels.matmul + kernels.attention + sum(one.traffic for one in attention)  # of a softmax of its own
        here = in_a_host(self.parallel, self.gpu, self.parallel.tensor, "tensor")
        listed = (here or self.over_hosts) and gated  # with every collective that is exposed where they take less time
        crowded = 0.0 if listed else min(all_of_them, max(0.0, 2 * all_of_them - beside))
        return max(self._pairs / 2 * exposed, all_of_them - beside) + CROWDED * crowded
