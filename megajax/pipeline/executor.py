"""Executes any schedule as one SPMD program: a `jax.shard_map` over (data, pipe) with one `lax.scan` per segment.

A `Schedule` is a table [tick, rank] of operations: F forward, B backward, or B split into I (gradient of the input)
and W (gradients of the weights). All ranks run the same program, tick by tick. At the end of a tick each rank sends
an activation to the rank of the next stage and a gradient to the rank of the previous stage (`lax.ppermute` over
`pipe`). There are two kinds of ticks (`Schedule.paired`); on GPUs some are merged.

Paired ticks: every rank runs one forward and then one backward. gpipe, eager_1f1b, interleaved_1f1b and looped_bfs
have them. For eager_1f1b on 2 ranks with 3 microbatches:

    tick       0       1        2        3        4
    rank 0     F0      F1       F2 B0    B1       B2
    rank 1     .       F0 B0    F1 B1    F2 B2    .

Forward sends overlap the backward pass, and vice versa. The activation of a tick's forward is sent during the same
tick's backward, and the gradient of a tick's backward during the next tick's forward:

    tick t     computes            sends at the same time
               F on microbatch i   gradient of the B of tick t - 1, to the previous stage
               B on microbatch j   activation of the F of tick t, to the next stage

Merged ticks (`ExecutorOptions.merged`): on GPUs the collectives of tensor parallelism in a block's forward have no matmul
of that forward to overlap, but all of another microbatch's backward. So backwards run one tick later, never in the tick of
their own forward, and where every rank has both, a tick is one loop over blocks that does a block of each. For 4
microbatches, merged in tick 3:

    tick       0       1        2        3        4        5        6
    rank 0     F0      F1       F2       F3+B0    B1       B2       B3
    rank 1     .       F0       F1 B0    F2+B1    F3 B2    B3       .

After the loop come the head, the embedding's backward and the embedding for the next tick (`embedding_and_head.py`), and
beside them both sends.

Mixed ticks: each rank runs one operation, F, B, I or W, or one part of a B that takes two ticks; then come the ends and the
sends, as in merged ticks. In dualpipe_v a rank may run a third of an F and of a B of another microbatch or chunk in a tick:
on GPUs these overlap, in one loop over blocks as in merged ticks.
1f1b and the zero-bubble schedules have them. For 1f1b on 2 ranks with 3 microbatches, and zb_h1:

    tick       0    1    2    3    4    5    6    7    8    9    10   11
    rank 0     F0   F1   .    .    B0   B0   F2   B1   B1   .    B2   B2
    rank 1     .    F0   B0   B0   F1   B1   B1   F2   B2   B2   .    .

    rank 0     F0   F1   .    I0   W0   F2   I1   W1   I2   W2
    rank 1     .    F0   I0   F1   I1   W0   F2   I2   W1   W2

The program of a mixed tick contains a loop over blocks for each kind of operation in its segment. A rank that does
not run an operation runs zero iterations of its loop (`loops.counted_loop`), and what it sends is masked. A
`lax.switch` would also do, but XLA copies the stash and the accumulators through a conditional, except on GPUs with jax
0.12: there a conditional chooses the chunk (`ExecutorOptions.in_place`). Consequently a block may contain only
collectives over the tensor or data axis, unless `compute_bubbles` makes all ranks run it. In segments of paired ticks
without bubbles the trip counts are known at compile time.

With one stage, schedules of paired ticks run a backward in the tick of its own forward. Where neither tensor parallelism
nor recomputing needs the loops over blocks, such a tick has none on GPUs, and no stash (`options.unrolls`).

Between ticks a rank holds (`rank.Carry`) the stash, which forwards write and backwards read; an inbox of received
activations and one of received gradients; and fp32 gradient accumulators. `slots.py` assigns the slots of all of them
ahead of time. Gradients are summed over `data` once, after the last tick.

Tensor parallelism is left to XLA's partitioner, which shards over the mesh axis `tensor` inside this program. Section
numbers refer to 2104.04473: the schedules are those of section 2.2, and section 4.1's scatter/gather follows from
activations that are sharded along their sequence.

The executor does not depend on a model. It is passed an object `functions` with

    prepare_microbatch(microbatch) -> microbatch          for the blocks, once for an operation on a chunk
    embed(shared, microbatch) -> x                        x: array or pytree of arrays, [samples, ...]
    block(weights, x, microbatch, layer) -> x             weights: those of one block; layer: int32 scalar
    head_loss(shared, y, microbatch) -> loss              scalar, summed over the samples; with `has_aux` (loss, outputs)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.pipeline.layout import batch_spec, manual_axes_of, reduce_gradients, sum_over, vary
from megajax.pipeline.options import DEFAULT_OPTIONS, ExecutorOptions, merged_schedule, on_devices
from megajax.pipeline.rank import Rank, local_rows, rows_after
from megajax.pipeline.records import records_spec
from megajax.pipeline.slots import TickRow, slot_tables
from megajax.pipeline.trained import only_trained
from megajax.pipeline.uneven import clear_empty_slots
from megajax.schedules.schedule import Schedule

__all__ = ["ExecutorOptions", "forward_function", "gradient_function"]

Tree = Any


def gradient_function(
    functions, schedule: Schedule, mesh: Mesh, options: ExecutorOptions = DEFAULT_OPTIONS
) -> Callable:
    """A function that computes losses and gradients of a whole batch by `schedule`.

    Args:
      functions: the model's; see the module's docstring.
      schedule: a valid schedule with as many stages as the mesh has pipeline ranks.
      mesh: with the axes data, pipe and tensor; it may have an axis expert.
      options: how arrays are sharded and blocks are run.

    Returns:
      `f(params, batch, cotangent, after=()) -> (losses, gradients, records)`, to be traced under `jax.set_mesh(mesh)`, with

      params: {"blocks": leaves [chunks, pipe, slots of a stage, ...], "shared": pytree}, sharded as `options.specs`.
      batch: pytree of [microbatches, data * samples, ...].
      cotangent: scalar, or [microbatches].
      after: pytree of arrays; with `options.serial_collectives` the ticks start after these are computed.
      losses: [microbatches], fp32; `head_loss` summed over the replicas. With `options.has_aux` (losses, outputs), with
        leaves [microbatches, data * samples, ...] of `head_loss`'s outputs.
      gradients: fp32, of (cotangent * losses).sum(), in the structure of `params`; only `options.trained` has them.
      records: with `options.statistics`, for each name in `records.RECORDED` fp32 [chunks, pipe, blocks per chunk,
        microbatches, data * samples, k]; else ().
    """

    def run(params: Tree, batch: Tree, cotangent: jax.Array, rows: TickRow):
        rank = Rank(functions, table, options, params, batch)
        cotangents = jnp.broadcast_to(cotangent, (schedule.microbatches,))
        carry = rank.run(local_rows(rows), rank.start(), vary(cotangents))
        trained = only_trained(params, options.trained)
        blocks = jax.tree.map(lambda a, like: a.reshape(like.shape), carry.block_gradients, trained["blocks"])
        blocks = clear_empty_slots(blocks, options.block_counts, schedule)
        gradients = {"blocks": blocks, "shared": carry.shared_gradients}
        records = jax.tree.map(lambda a: a.reshape(-1, 1, rank.blocks.per_chunk, *a.shape[1:]), carry.records)
        losses, outputs = carry.output if options.has_aux else (carry.output, None)
        losses = sum_over(losses, axes)
        output = (losses, sum_over(outputs, ("pipe",))) if options.has_aux else losses
        return output, reduce_gradients(gradients, specs), records

    axes, options = manual_axes_of(mesh), on_devices(options, mesh)
    specs = options.specs.of_trained(options.trained)
    runs = merged_schedule(schedule) if options.merged else schedule
    table = slot_tables(runs, share_ends=options.share_ends)
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(options.specs.manual.weights, batch_spec(mesh), P(), P(None, "pipe")),
        out_specs=((P(), batch_spec(mesh)) if options.has_aux else P(), specs.manual.gradients, records_spec(mesh)),
        axis_names=set(axes),
    )
    return lambda params, batch, cotangent, after=(): mapped(
        params, batch, cotangent, rows_after(after, table.rows, options)
    )


def forward_function(
    functions, collect: Callable, schedule: Schedule, mesh: Mesh, options: ExecutorOptions = DEFAULT_OPTIONS
) -> Callable:
    """A function that runs the model forward, by a schedule without backwards.

    Ranks without work run their blocks too and discard the results, so every trip count is known at compile time.

    Args:
      functions: as for `gradient_function`; head_loss is not called.
      collect: `collect(shared, y, microbatch) -> pytree of [n, ...]`, called on the last block's output y. With
        `options.share_ends` all ranks run it together and the last stage's result counts.
      schedule: a schedule without backwards.
      mesh: as for `gradient_function`.
      options: constrain, specs, share_ends, block_counts and stage_kinds apply.

    Returns:
      `f(params, batch, after=()) -> outputs`, with outputs a pytree of [microbatches, data * n, ...]; `after` as above.
    """

    def run(params: Tree, batch: Tree, rows: TickRow):
        rank = Rank(functions, table, options, params, batch, collect=collect)
        return sum_over(rank.run(local_rows(rows), rank.start()).output, ("pipe",))

    options = dataclasses.replace(on_devices(options, mesh), offload=False)
    table = slot_tables(schedule, share_ends=options.share_ends)
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(options.specs.manual.weights, batch_spec(mesh), P(None, "pipe")),
        out_specs=batch_spec(mesh),
        axis_names=set(manual_axes_of(mesh)),
    )
    return lambda params, batch, after=(): mapped(params, batch, rows_after(after, table.rows, options))
