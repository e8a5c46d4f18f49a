"""Time of a block's experts beyond their FLOPs: their weights and gradients, the rows' traffic, and what replicas send.

`step_time.py` counts the k rows of a token as one matmul, k times as wide, with the weights of k experts. A program reads
the weights of all experts that a device has, for each microbatch and pass, and adds to as many gradients. megajax's also
has room for all rows that can be there (`Experts.rows`), which elementwise kernels read and write.

Tokens get to their experts by all-gather or by all-to-all (`--expert-dispatch`), and `auto` is the faster one.
"""

import dataclasses
import math
from typing import NamedTuple

from megajax.config import ParallelConfig, RunConfig
from megajax.estimate import model_costs
from megajax.estimate.gpus import Gpu
from megajax.estimate.memory import rows_of
from megajax.estimate.op_costs import FITTED, MEGAJAX, OpCosts, spread
from megajax.models.costs import Experts, ModelCosts

__all__ = ["ExpertTime", "dispatch_times", "expert_times", "sent_share", "with_expert_dispatch"]


class ExpertTime(NamedTuple):
    """Seconds of one block's forward or backward, for one microbatch on one device: memory traffic and collectives."""

    traffic: float = 0.0
    communication: float = 0.0


def expert_times(model: ModelCosts, parallel: ParallelConfig, ops: OpCosts) -> tuple[ExpertTime, ExpertTime]:
    """(forward, backward) of what `step_time.layer_times` does not count; the backward without a forward that it repeats."""
    experts, tensor, degree, software = model.experts, parallel.tensor, parallel.expert, ops.software
    if experts is None:
        return ExpertTime(), ExpertTime()
    held, counted = experts.on_device(tensor, degree), experts.on_device(tensor, 1) * experts.chosen / experts.count
    weights = ops.traffic((held - counted) * ops.itemsize)
    gradients = ops.traffic(held * software.expert_gradient_bytes - counted * ops.itemsize)

    tokens = rows_of(model, parallel)
    routed = [one for one in model.matmuls if one.name.startswith("experts")]
    widths = sum(max(one.inputs, one.outputs) for one in routed)  # before and after the activation
    more = 0.0 if software.routed_dispatch else experts.rows(degree) - 1
    elements = more * tokens * (4 * experts.chosen * model.hidden + widths / tensor)
    rows = ops.traffic(elements * ops.itemsize)

    # Tokens one way and results back, in each direction. All-gathered tokens are gathered again for the weights' gradients,
    # or with the forward that full recomputation repeats, which sends no results.
    if software.routed_dispatch:
        one = ops.collective(_tokens(model, parallel, ops) * experts.chosen, degree, spread(parallel, "data"))
        there, back, again = one, one, 0.0
    else:
        there, back = dispatch_times(model, parallel, ops)
        again = there
    backward = {"none": there + back, "selective": there + back + again, "full": there}[parallel.recompute]
    return ExpertTime(weights + rows, there + back), ExpertTime(weights + gradients + 1.5 * rows, backward)


def _tokens(model: ModelCosts, parallel: ParallelConfig, ops: OpCosts) -> float:
    """Bytes of the tokens that a device sends, for one microbatch."""
    split = parallel.tensor if parallel.sequence_parallel else 1
    return rows_of(model, parallel) * model.hidden * ops.itemsize / split


def dispatch_times(model: ModelCosts, parallel: ParallelConfig, ops: OpCosts) -> tuple[float, float]:
    """Seconds of sending tokens to the replicas of their experts, and results back (`ops/expert_dispatch.py`)."""
    degree, part, distance = parallel.expert, _tokens(model, parallel, ops), spread(parallel, "data")
    if degree == 1:
        return 0.0, 0.0
    if parallel.expert_dispatch == "all_to_all":
        share, ragged = sent_share(model.experts, parallel)
        one = ops.all_to_all(share * part, degree, distance, ragged)
        return one, one
    # A reduce-scatter is an all-to-all, with the sum where the parts arrive.
    return ops.collective(degree * part, degree, distance), ops.all_to_all(part, degree, distance)


def sent_share(experts: Experts, parallel: ParallelConfig) -> tuple[float, bool]:
    """(the part of its tokens that a replica sends to another one by all-to-all, whether only routed tokens are sent).

    With capacity all places are sent. Without, of balanced routing, those tokens that chose any of the replica's experts.
    """
    here = experts.count // parallel.expert
    shards = parallel.tensor if parallel.sequence_parallel else 1
    places = here * experts.share * shards
    if places < 1:
        return places, False
    return 1 - math.comb(experts.count - here, experts.chosen) / math.comb(experts.count, experts.chosen), True


def with_expert_dispatch(run: RunConfig, gpu: Gpu) -> RunConfig:
    """The run with `expert_dispatch` resolved to "gather" or "all_to_all", what is faster on a cluster of this GPU.

    Memory and results do not depend on it. Of equal ones it is gather.
    """
    if run.parallel.expert_dispatch != "auto":
        return run
    names = ("gather", "all_to_all") if run.parallel.expert > 1 else ("gather",)
    choices = [
        dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, expert_dispatch=name)) for name in names
    ]
    if len(choices) == 1:
        return choices[0]
    ops = OpCosts(gpu, run.train.precision, MEGAJAX, FITTED)
    return min(choices, key=lambda one: sum(dispatch_times(model_costs(one.model), one.parallel, ops)))
