"""Exposed communication of a published program between stages and over replicas."""

from benchmarks.published.operations import Operations
from megajax.config import RunConfig, padded_vocabulary
from megajax.estimate import model_costs
from megajax.estimate.kinds import layers_of_kinds
from megajax.estimate.memory import Sharding, rank_parameters, rows_of

__all__ = ["gathers_time", "reduction_time", "sends_time"]


def sends_time(run: RunConfig, ops: Operations) -> float:
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


def reduction_time(run: RunConfig, ops: Operations, sharding: Sharding, forward: float, backward: float) -> float:
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


def gathers_time(run: RunConfig, ops: Operations, blocks: float, shards: int | None) -> float:
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
