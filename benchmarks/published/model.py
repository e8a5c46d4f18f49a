"""Step time of published training programs: the sum of matmuls by shape, memory traffic, collectives and the bubble.

It follows from the run, the model's costs, the program (`software.py`) and the rates of `megajax.estimate.rates`. With m
microbatches, p ranks and v chunks a rank,

    step = (m (a rank's blocks + head) + bubble of the schedule + exposed sends + gradient sum + optimizer)
           (1 + waiting for the slowest GPU) / (1 - waiting for hosts)

What is left out: launching kernels, contention between communication and compute, and hosts where no source has their share.
megajax's own program is not priced here but kernel by kernel, as XLA compiles it (`megajax/estimate/program_time.py`).
"""

import operator
from functools import reduce
from typing import NamedTuple

from benchmarks.published.operations import FITTED, Fitted, Operations
from benchmarks.published.software import Software
from megajax.config import ParallelConfig, RunConfig, padded_vocabulary
from megajax.estimate import model_costs
from megajax.estimate.gpus import Gpu, is_fused
from megajax.estimate.kept import rows_of
from megajax.estimate.kinds import layers_of_kinds, stage_layer_counts
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.parameters import Sharding, rank_parameters, sharded_parameters
from megajax.estimate.program_kernels import Work
from megajax.estimate.rates import FUSED_BACKWARD, TOKAMAX_BACKWARD, waiting
from megajax.models.costs import ModelCosts
from megajax.pipeline.program import StepProgram
from megajax.schedules.simulate import Costs

__all__ = ["PublishedTime", "layer_times", "published_time"]


class PublishedTime(NamedTuple):
    """Seconds of one optimizer step: of a rank's blocks, of the parts of the formula above, waiting for GPUs and hosts."""

    blocks: Work
    accumulation: float
    head: float
    bubble: float
    sends: float
    data: float
    optimizer: float
    slowest: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.blocks.total + sum(self[1:])


def layer_times(model: ModelCosts, parallel: ParallelConfig, ops: Operations) -> tuple[Work, Work]:
    """(forward, backward) of one block for one microbatch on one device; the backward includes what it recomputes."""
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
    one = ops.collective(rows * model.hidden * item, tensor, "tensor")
    exchange = 2 * model.matmul_pairs * one * (1 - software.tensor_overlap)
    rings = [_ring_time(model, parallel, ops, *ring) for ring in ((0, attention), (1, attention_backward))]
    read, written, sent = _expert_times(model, parallel, ops)
    forward = Work(matmul, attention, elementwise + read, exchange, rings[0], sent)
    backward = Work(matmul_backward, attention_backward, 1.5 * elementwise + read + written, exchange, rings[1], sent)
    if mode == "full":  # which sends no results again
        return forward, backward + forward._replace(matmul=software.recomputed * matmul, expert=0.0)
    several = zip(model.matmuls, shapes, strict=True)
    matmul_again = sum(ops.matmul(rows, k, n) for one, (k, n) in several if mode in one.recomputed)
    return forward, backward + Work(matmul=matmul_again, attention=again)


def _ring_time(model: ModelCosts, parallel: ParallelConfig, ops: Operations, gradients: int, attention: float) -> float:
    """Exposed sends of a rank's keys and values round a ring of C ranks, in one block.

    They are sent C - 1 times in the forward and in the backward, and their gradients C times in the backward. Each send
    overlaps the products of the pieces received before, a C-th of `attention`, the time of the pass.
    """
    ranks = parallel.context
    if ranks == 1 or model.attention is None:
        return 0.0
    elements = 2 * rows_of(model, parallel) * model.attention.groups * model.attention.head_size / parallel.tensor
    one = ops.send(elements * ops.itemsize, "data")
    exposed = max(0.0, one - attention / ranks) if ops.software.context_overlap else one
    return exposed * (ranks - 1 + gradients * ranks)


def _attention_times(model: ModelCosts, parallel: ParallelConfig, ops: Operations) -> tuple[float, float, float]:
    """Seconds of attention's forward, of its backward, and of what the backward recomputes in modes short of full."""
    if model.attention is None:
        return 0.0, 0.0, 0.0
    item, software, head_size = ops.itemsize, ops.software, model.attention.head_size
    tokens, heads = model.sequence_length, parallel.microbatch_size * model.attention.heads / parallel.tensor
    queries = tokens // parallel.context  # of one device, an equal share of the work (2407.21783 section 3.3.2)
    scores = heads * queries * tokens
    if software.fused_attention or is_fused(parallel):
        pairs = model.attention.pairs(tokens)
        forward = ops.attention(4 * heads * pairs * head_size / parallel.context, pairs / tokens, head_size)
        # A fused backward always computes the scores again.
        return forward, (TOKAMAX_BACKWARD if parallel.attention == "tokamax" else FUSED_BACKWARD) * forward, 0.0
    products = 2 * ops.matmul(queries, head_size, tokens, heads)
    # softmax reads and writes the scores; dropout reads and writes them and a mask of one byte
    passes = 2 * item + (2 * item + 1 if software.dropout else 0)
    forward = products + ops.traffic(scores * passes)
    again = forward if parallel.recompute in model.attention.scores_recomputed else 0.0
    return forward, 2 * products + ops.traffic(scores * (passes + item)), again


def _expert_times(model: ModelCosts, parallel: ParallelConfig, ops: Operations) -> tuple[float, float, float]:
    """Seconds in which experts' weights are read and their gradients written, and of sending tokens there and back.

    The matmuls count the weights of the k experts of a token; a program reads those of all experts that a device has, and
    adds to as many fp32 gradients. Of tokens of other replicas only the routed ones are sent.
    """
    experts, tensor = model.experts, parallel.tensor
    if experts is None:
        return 0.0, 0.0, 0.0
    held = experts.on_device(tensor, parallel.expert)
    counted = experts.on_device(tensor, 1) * experts.choice.chosen / experts.choice.count
    tokens = rows_of(model, parallel) * model.hidden * ops.itemsize / parallel.sequence_shares
    sent = ops.collective(tokens * experts.choice.chosen, parallel.expert, "data")
    return (ops.traffic((held - counted) * ops.itemsize), ops.traffic(held * 8 - counted * ops.itemsize), 2 * sent)


def _head_time(model: ModelCosts, parallel: ParallelConfig, ops: Operations) -> float:
    """Seconds of the logits and the loss of one microbatch, forward and backward, on the last rank."""
    rows, columns = rows_of(model, parallel), model.vocabulary / parallel.tensor
    products = 3 * ops.matmul(rows, model.hidden, columns)
    products += sum(3 * ops.matmul(rows / parallel.sequence_shares, one.inputs, one.outputs) for one in model.head)
    passes = ops.traffic(rows * columns * ops.software.logit_bytes)
    return products + passes + 4 * ops.collective(rows * model.hidden * ops.itemsize, parallel.tensor, "tensor")


def _chunk_times(run: RunConfig, ops: Operations) -> tuple[Work, Work]:
    """(forward, backward) of the blocks of one chunk, of the slowest stage: the others wait for it, in each microbatch."""
    kinds = [layer_times(model_costs(kind.run.model), run.parallel, ops) for kind in layers_of_kinds(run)]
    stages = [
        tuple(reduce(operator.add, (one[way] * n for one, n in zip(kinds, counts, strict=True))) for way in (0, 1))
        for counts in stage_layer_counts(run)
    ]
    return max(stages, key=lambda stage: stage[0].total + stage[1].total)


def _sends_time(run: RunConfig, ops: Operations) -> float:
    """Exposed sends: one per operation and direction, or, where sends overlap the next chunk, those of fill and drain.

    Each tick of the fill waits for one: they are the forwards before the first backward of the first rank in Megatron-LM's
    order, and as many backwards at the end (2402.15627 section 3.2). Tensor ranks that each received a part of an activation
    gather it, unless sequence parallelism keeps it split.
    """
    model, parallel, software = model_costs(run.model), run.parallel, ops.software
    pipe, chunks, operations = parallel.pipe, parallel.chunks, run.microbatches * parallel.chunks
    if pipe == 1:
        return 0.0
    parts = software.scatter_gather and not parallel.sequence_parallel
    whole = rows_of(model, parallel) * model.hidden * ops.itemsize
    split = parallel.tensor if parallel.sequence_parallel or software.scatter_gather else 1
    one = ops.send(whole / split, "pipe") + (ops.collective(whole, parallel.tensor, "tensor") if parts else 0.0)
    ticks = operations + pipe - 1
    if software.send_overlap and chunks > 1:
        fill = 2 * (pipe - 1) + (chunks - 1) * pipe
        ticks = operations if run.microbatches == pipe else min(operations, fill)
    return 2 * one * ticks


def _reduction_time(run: RunConfig, ops: Operations, sharding: Sharding, forward: float, backward: float) -> float:
    """Exposed gradient reduction over replicas, once a step; `forward` and `backward` are those of one microbatch.

    With ZeRO-1 it is a reduce-scatter, and the new weights are gathered. Where the program overlaps them, gradients are
    reduced during the last backwards and weights gathered during the first forwards: those of one microbatch, or with
    several chunks, which finish one after the other, of a group of p microbatches, except the last (or first) chunk's. The
    token table overlaps nothing: its gradient is complete last, and its weights are needed first.
    """
    parallel, software = run.parallel, ops.software
    held = rank_parameters(run, sharding)
    gradients, weights = (
        _gather(held, run, ops, item, parallel.replicas) for item in (software.gradient_bytes, ops.itemsize)
    )
    tied = _tied_table_time(run, ops)
    if not software.data_overlap:
        return gradients + (weights if sharding.zero else gradients) + tied
    window = parallel.pipe * (parallel.chunks - 1) / parallel.chunks if parallel.chunks > 1 else 1.0
    table = lambda item: ops.collective(_table(run) * item, parallel.replicas, "data")  # noqa: E731
    if not sharding.zero:
        return max(2 * table(software.gradient_bytes), 2 * gradients - window * backward) + tied
    reduced = max(table(software.gradient_bytes), gradients - window * backward)
    return reduced + max(table(ops.itemsize), weights - window * forward) + tied


def _tied_table_time(run: RunConfig, ops: Operations) -> float:
    """All-reduce of the gradient of a token table that the first and the last stage both have (2104.04473 section 4)."""
    model, parallel = model_costs(run.model), run.parallel
    if parallel.pipe == 1 or model.vocabulary_width != model.hidden:
        return 0.0
    return 2 * ops.collective(_table(run) * ops.software.gradient_bytes, 2, "pipe", apart=parallel.pipe - 1)


def _table(run: RunConfig) -> int:
    """Parameters of one token table on one device."""
    model, tensor = model_costs(run.model), run.parallel.tensor
    return padded_vocabulary(model.vocabulary, tensor) // tensor * model.hidden


def _gathers_time(run: RunConfig, ops: Operations, blocks: float, shards: int | None) -> float:
    """Exposed part of ZeRO-3's communication (1910.02054 section 5.3, 2104.07857), all microbatches.

    A block's weights are gathered for its forward and for its backward, and by some programs once more for recomputing the
    forward; its gradients are scattered. Where the program gathers ahead, this overlaps the compute of the blocks, `blocks`
    seconds in all: for `gather_overlap` of the shorter of the two, or entirely. With fewer `shards` than replicas the
    shards' gradients are summed over the copies, once a step.
    """
    parallel, software = run.parallel, ops.software
    held = rank_parameters(run, Sharding(zero=3))
    shards = shards or parallel.replicas
    pieces = software.gathered_pieces * sum(kind.rank_slots for kind in layers_of_kinds(run))
    how = {"pieces": pieces, "zero_3": software.gathers_ahead or software.gathers_hidden}
    one = lambda item: _gather(held, run, ops, item, shards, **how)  # noqa: E731
    gathers = 3 if parallel.recompute == "full" and software.gathers_for_recompute else 2
    times = run.microbatches * (gathers * one(ops.itemsize) + one(software.gradient_bytes))
    overlap = ops.fitted.gather_overlap if software.gathers_ahead else float(software.gathers_hidden)
    bytes_each = held[0] / shards * software.gradient_bytes
    copies = 2 * ops.collective(bytes_each, parallel.replicas // shards, "data", apart=shards)
    return times - overlap * min(times, blocks) + copies


def _gather(held: tuple[int, int], run: RunConfig, ops: Operations, item: int, shards: int, **how) -> float:
    """A reduce-scatter or an all-gather of `rank_parameters`, `item` bytes each, over their replicas: of experts fewer."""
    (common, experts), parallel = held, run.parallel
    one = ops.collective(common * item, shards, "data", **how)
    if not experts:
        return one
    group = parallel.replicas // parallel.expert
    return one + ops.collective(experts * item, group, "data", apart=parallel.expert, **how)


def published_time(
    run: RunConfig, gpu: Gpu, software: Software, sharding: Sharding | None = None, fitted: Fitted = FITTED
) -> PublishedTime:
    """Predicted time of one optimizer step of `run` by a published program; `make_mesh` places the mesh on hosts.

    Raises ConfigError if the GPU has no peak for the run's precision.
    """
    sharding, parallel, model = sharding or Sharding(run.parallel.zero), run.parallel, model_costs(run.model)
    ops = Operations(run, gpu, software, fitted)
    forward, backward = _chunk_times(run, ops)
    both, batches = forward + backward, run.microbatches
    # The matmuls of the weights' gradients are half of a backward's.
    again = software.recomputed * forward.matmul if parallel.recompute == "full" else 0
    weight = (backward.matmul - again) / 2
    costs = Costs(forward.total, backward.total, backward.total - weight, weight)
    blocks = both * (batches * parallel.chunks)
    stages = parallel.stage_layers(model.layers)
    # While the head runs the other ranks wait, less the layers that an uneven last stage lacks.
    head = max(0.0, _head_time(model, parallel, ops) - (stages.slots - stages.counts[-1]) * both.total / stages.slots)
    if sharding.zero == 3:
        data = _gathers_time(run, ops, blocks.total, sharding.shards)
    else:
        data = _reduction_time(run, ops, sharding, forward.total * parallel.chunks, backward.total * parallel.chunks)
    # Gradient (twice, once for its norm), weight and two moments are read, the last three and a 16-bit copy written. And the
    # passes over the sums of gradients before that, which ZeRO 1 does not shard.
    held = rank_parameters(run, sharding)
    state, sums = (sharded_parameters(run, held, is_sharded) for is_sharded in (sharding.zero > 0, sharding.zero == 3))
    found = PublishedTime(
        blocks=blocks,
        accumulation=batches * ops.traffic(sum(held) * software.accumulation_bytes),
        head=batches * head,
        bubble=StepProgram.of(run).bubble(costs, lockstep=False),
        sends=_sends_time(run, ops),
        data=data,
        optimizer=ops.traffic(state * (5 * 4 + 3 * 4 + ITEMSIZE["bf16"]) + sums * software.buffer_bytes),
    )
    found = found._replace(slowest=found.total * waiting(gpu, parallel.devices))
    return found._replace(host=found.total * software.host_share / (1 - software.host_share))
