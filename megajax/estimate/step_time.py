"""Time of a step: the sum of matmuls by shape, memory traffic, collectives and the pipeline's bubble.

Two kinds of programs are priced: megajax's own, kernel by kernel as XLA compiles it (`program_time.py`), and published ones,
to validate what both share, in this file.

It follows from the run, the model's costs, the GPU (`gpus.py`) and the constants in `op_costs.py`, each with its source.
Four are fitted, on seven rows of published tables that `python -m megajax.estimate.validate` marks; no other number was
chosen to fit. With m microbatches, p ranks and v chunks a rank,

    step = m (a rank's blocks + head) + bubble of the schedule + exposed sends + gradient sum + optimizer

What is left out: loading data, stragglers, contention between communication and compute; of published programs also
launching kernels.
"""

import dataclasses
import operator

from megajax.config import ParallelConfig, RunConfig
from megajax.estimate import model_costs
from megajax.estimate.exchange_time import gathers_time, reduction_time, sends_time
from megajax.estimate.expert_time import expert_times
from megajax.estimate.gpus import Gpu, is_fused
from megajax.estimate.kinds import layers_of_kinds, stage_layer_counts
from megajax.estimate.memory import (
    ITEMSIZE,
    Sharding,
    kept_of_block,
    rank_parameters,
    rows_of,
    sharded_parameters,
)
from megajax.estimate.op_costs import FITTED, MEGAJAX, PALLAS_BACKWARD, Fitted, OpCosts, Software, spread
from megajax.estimate.program_time import Program
from megajax.models.costs import ModelCosts
from megajax.pipeline.program import StepProgram
from megajax.schedules.simulate import Costs


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Seconds of one block's forward or backward, or of several blocks', for one microbatch on one device.

    `tensor`, `context` and `expert` are exposed communication, within tensor groups, round the rings of context parallelism
    and within the groups that split experts.
    """

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: "LayerTime") -> "LayerTime":
        return LayerTime(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: float) -> "LayerTime":
        return LayerTime(*(times * value for value in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, part by part; they add up to `total`.

    Attributes:
      blocks: matmuls, attention and memory traffic of a rank's blocks, all microbatches.
      head: logits and loss on the last rank, while the other ranks idle.
      tensor: exposed communication within tensor groups.
      bubble: idle while the pipeline fills and drains, and in lockstep during the longer op of a tick.
      sends: exposed communication between stages.
      data: exposed gradient reduction over replicas, and gathering of weights.
      optimizer: reading gradients, moments and weights, and writing them.
      context: exposed sends of keys and values round the rings of context parallelism.
      offload: moving stashed activations to host memory and back.
      ends: exposed communication over `pipe` of embedding and head, where all stages share them.
      gaps: between kernels, which take time to launch.
      waits: for the host, which reads conditions that are known at run time only.
      expert: exposed communication within the groups of replicas that split experts.
    """

    blocks: float
    head: float
    tensor: float
    bubble: float
    sends: float
    data: float
    optimizer: float
    context: float = 0.0
    offload: float = 0.0
    ends: float = 0.0
    gaps: float = 0.0
    waits: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        return self.tensor + self.context + self.expert + self.sends + self.data + self.ends


def layer_times(model: ModelCosts, parallel: ParallelConfig, ops: OpCosts) -> tuple[LayerTime, LayerTime]:
    """(forward, backward) of one block for one microbatch; the backward includes what it recomputes."""
    rows, item, software = rows_of(model, parallel), ops.itemsize, ops.software
    tensor, mode = parallel.tensor, parallel.recompute
    shapes = [one.on_device(tensor) for one in model.matmuls]
    matmul = sum(ops.matmul(rows, k, n) for k, n in shapes)
    matmul_backward = sum(ops.matmul(rows, n, k) + ops.matmul(k, rows, n) for k, n in shapes)
    attention, attention_backward, again = _attention_times(model, parallel, ops)

    # Outside the matmuls. A backward also reads the gradient: half as much traffic again.
    sizes = {"itemsize": item, "tensor": tensor, "sequence_parallel": parallel.sequence_parallel}
    elementwise = ops.traffic(model.elementwise_bytes(rows, dropout=software.dropout, **sizes))

    # Each pair of matmuls is gathered before and summed after, as an all-reduce is both (1909.08053, 2205.05198 4.2).
    whole = rows * model.hidden * item
    one = ops.collective(whole, tensor, spread(parallel, "tensor"))
    exchange = 2 * model.matmul_pairs * one * (1 - software.tensor_overlap)
    kept_split = parallel.sequence_parallel and mode != "full"  # full gathers while it recomputes
    exchange_again = software.gathers_again * one if kept_split and model.matmul_pairs else 0.0
    rings = [_ring_time(model, parallel, ops, *ring) for ring in ((0, attention), (1, attention_backward))]
    forward = LayerTime(matmul, attention, elementwise, exchange, rings[0])
    backward = LayerTime(matmul_backward, attention_backward, 1.5 * elementwise, exchange + exchange_again, rings[1])
    forward, backward = (
        one + LayerTime(elementwise=more.traffic, expert=more.communication)
        for one, more in zip((forward, backward), expert_times(model, parallel, ops), strict=True)
    )
    if mode == "full":
        return forward, backward + forward
    several = zip(model.matmuls, shapes, strict=True)
    matmul_again = sum(ops.matmul(rows, k, n) for one, (k, n) in several if mode in one.recomputed)
    return forward, backward + LayerTime(matmul=matmul_again, attention=again)


def _ring_time(model: ModelCosts, parallel: ParallelConfig, ops: OpCosts, gradients: int, attention: float) -> float:
    """Exposed sends of a rank's keys and values round a ring of C ranks (`ops/ring_attention.py`), in one block.

    They are sent C - 1 times in the forward and in the backward, and their gradients C times in the backward. Each send
    overlaps the products of the pieces received before, a C-th of `attention`, the time of the pass.
    """
    ranks = parallel.context
    if ranks == 1 or model.attention is None:
        return 0.0
    elements = 2 * rows_of(model, parallel) * model.attention.groups * model.attention.head_size / parallel.tensor
    one = ops.send(elements * ops.itemsize, spread(parallel, "data"))
    exposed = max(0.0, one - attention / ranks) if ops.software.context_overlap else one
    return exposed * (ranks - 1 + gradients * ranks)


def _attention_times(model: ModelCosts, parallel: ParallelConfig, ops: OpCosts) -> tuple[float, float, float]:
    """Seconds of attention's forward, of its backward, and of what the backward recomputes in modes short of full."""
    if model.attention is None:
        return 0.0, 0.0, 0.0
    item, software, head_size = ops.itemsize, ops.software, model.attention.head_size
    tokens, heads = model.sequence_length, parallel.microbatch_size * model.attention.heads / parallel.tensor
    queries = tokens // parallel.context  # of one device, an equal share of the work (2407.21783 section 3.3.2)
    scores = heads * queries * tokens
    if software.fused_attention or is_fused(parallel):
        forward = ops.fused_attention(8 * heads * model.attention.pairs(tokens) * head_size / parallel.context)
        # A fused backward always computes the scores again.
        return forward, (PALLAS_BACKWARD if parallel.attention == "pallas" else ops.fused_backward) * forward, 0.0
    products = 2 * ops.matmul(queries, head_size, tokens, heads)
    # softmax reads and writes the scores; dropout reads and writes them and a mask of one byte
    passes = 2 * item + (2 * item + 1 if software.dropout else 0)
    forward = products + ops.traffic(scores * passes)
    again = forward if parallel.recompute in model.attention.scores_recomputed else 0.0
    return forward, 2 * products + ops.traffic(scores * (passes + item)), again


def head_time(model: ModelCosts, parallel: ParallelConfig, ops: OpCosts, sharding: Sharding) -> float:
    """Seconds of the logits and the loss of one microbatch, forward and backward; 0 for a model without a vocabulary."""
    if not model.vocabulary:
        return 0.0
    parts = parallel.tensor * (parallel.pipe if sharding.vocabulary_over_pipe else 1)
    rows, columns = rows_of(model, parallel), model.vocabulary / parts
    products = 3 * ops.matmul(rows, model.hidden, columns)
    split = parallel.tensor if parallel.sequence_parallel else 1
    products += sum(3 * ops.matmul(rows / split, one.inputs, one.outputs) for one in model.head)
    passes = ops.traffic(rows * columns * ops.software.logit_bytes)
    one = ops.collective(rows * model.hidden * ops.itemsize, parallel.tensor, spread(parallel, "tensor"))
    return products + passes + 4 * one


def chunk_times(run: RunConfig, ops: OpCosts) -> tuple[LayerTime, LayerTime]:
    """(forward, backward) of the blocks of one chunk, of the slowest stage: the others wait for it, in each microbatch.

    Of a model with one kind of layers, what runs for a slot without a layer takes as long as a layer.
    """
    kinds = [layer_times(model_costs(kind.run.model), run.parallel, ops) for kind in layers_of_kinds(run)]
    stages = [
        tuple(sum((one[way] * count for one, count in zip(kinds, counts, strict=True)), LayerTime()) for way in (0, 1))
        for counts in stage_layer_counts(run)
    ]
    return max(stages, key=lambda stage: stage[0].total + stage[1].total)


def _exposed_head(run: RunConfig, ops: OpCosts, sharding: Sharding, layer: float) -> float:
    """Seconds of the head for which the other ranks wait: less those of the `layer` that an uneven last stage lacks."""
    model, parallel = model_costs(run.model), run.parallel
    stages = parallel.stage_layers(model.layers)
    short = 0 if ops.software.lockstep else stages.slots - stages.counts[-1]
    return max(0.0, head_time(model, parallel, ops, sharding) - short * layer)


def step_time(
    run: RunConfig,
    gpu: Gpu,
    software: Software = MEGAJAX,
    *,
    sharding: Sharding | None = None,
    fitted: Fitted = FITTED,
) -> StepTime:
    """Predicted time of one optimizer step of `run` on a cluster of this GPU; `make_mesh` places the mesh on hosts.

    Raises:
      ConfigError: the GPU has no peak for the run's precision.
    """
    sharding = sharding or Sharding.from_config(run)
    if software is MEGAJAX and not model_costs(run.model).experts:
        return _program_time(run, gpu, sharding)
    parallel, ops = run.parallel, OpCosts(gpu, run.train.precision, software, fitted)
    forward, backward = chunk_times(run, ops)
    both, chunks, batches = forward + backward, parallel.chunks, run.microbatches
    layer = both.total / parallel.stage_layers(run.model.layers).slots
    sums = sum(rank_parameters(run, sharding)) * software.accumulation_bytes
    bubble = StepProgram.of(run).bubble(_chunk_costs(run, forward, backward), software.lockstep)
    blocks = batches * chunks * both.total
    if sharding.zero == 3:
        data = gathers_time(run, ops, blocks, sharding.shards)
    else:
        data = reduction_time(run, ops, sharding, forward.total * chunks, backward.total * chunks)
    return StepTime(
        blocks=blocks - batches * chunks * (both.tensor + both.context + both.expert) + batches * ops.traffic(sums),
        head=batches * _exposed_head(run, ops, sharding, layer),
        tensor=batches * chunks * both.tensor,
        bubble=bubble,
        sends=sends_time(run, ops),
        data=data,
        optimizer=_optimizer_time(run, ops, sharding),
        context=batches * chunks * both.context,
        offload=_offload_time(run, ops) if parallel.offload_activations else 0.0,
        expert=batches * chunks * both.expert,
    )


def chunk_costs(run: RunConfig, gpu: Gpu) -> Costs:
    """Seconds of each operation on one chunk in megajax's program, of which `step_time` takes the bubble to consist.

    Raises:
      ConfigError: the GPU has no peak for the run's precision.
    """
    if not model_costs(run.model).experts:
        return Program(run, gpu).costs
    return _chunk_costs(run, *chunk_times(run, OpCosts(gpu, run.train.precision, MEGAJAX, FITTED)))


def _chunk_costs(run: RunConfig, forward: LayerTime, backward: LayerTime) -> Costs:
    """The same from the times of a chunk's blocks; the matmuls of the weights' gradients are half of its backward's."""
    weight = (backward.matmul - (forward.matmul if run.parallel.recompute == "full" else 0)) / 2
    return Costs(forward.total, backward.total, backward.total - weight, weight)


def _program_time(run: RunConfig, gpu: Gpu, sharding: Sharding) -> StepTime:
    """The time of megajax's own program (`program_time.py`), from the same parts as that of published ones."""
    program = Program(run, gpu, sharding)
    blocks, ends, ticks, once, whole = program.blocks, program.ends, program.ticks, program.once, program.parts
    compute = lambda work: work.matmul + work.attention + work.traffic  # noqa: E731
    return StepTime(
        blocks=compute(blocks) + compute(ticks),
        head=compute(ends),
        tensor=whole.tensor,
        bubble=program.program.bubble(program.costs, lockstep=True) if run.parallel.pipe > 1 else 0.0,
        sends=ticks.pipe,
        data=whole.data + once.pipe,
        optimizer=compute(once),
        context=whole.context,
        offload=whole.offload,
        ends=ends.pipe,
        gaps=whole.gaps,
        waits=whole.waits,
    )


def _offload_time(run: RunConfig, ops: OpCosts) -> float:
    """Moving what each block keeps to host memory and back; that the copies overlap kernels is not counted on."""
    kept = [kept_of_block(kind.run, ops.itemsize) for kind in layers_of_kinds(run)]
    of_chunk = max(sum(map(operator.mul, kept, counts)) for counts in stage_layer_counts(run))
    return 2 * run.microbatches * run.parallel.chunks * of_chunk / ops.gpu.pcie_bandwidth


def _optimizer_time(run: RunConfig, ops: OpCosts, sharding: Sharding) -> float:
    """Gradient (twice, once for its norm), weight and two moments are read, the last three and a 16-bit copy written.

    And the passes over the sums of gradients before that, which ZeRO 1 does not shard.
    """
    state = sharded_parameters(run, sharding, sharding.zero > 0)
    sums = sharded_parameters(run, sharding, sharding.zero == 3) * ops.software.buffer_bytes
    return ops.traffic(state * (5 * 4 + 3 * 4 + ITEMSIZE["bf16"]) + sums)
