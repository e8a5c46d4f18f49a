"""Time of a block's experts beyond their FLOPs: their weights and gradients, the rows' traffic, and what replicas send.

`step_time.py` counts the k rows of a token as one matmul, k times as wide, with the weights of k experts. A program reads
the weights of all experts that a device has, for each microbatch and pass, and adds to as many gradients. With all-gathers
it also has room for all rows that can be there (`Experts.rows`), which elementwise kernels read and write.
"""

from typing import NamedTuple

from megajax.config import ParallelConfig
from megajax.estimate.memory import rows_of
from megajax.estimate.op_costs import OpCosts, spread
from megajax.models.costs import ModelCosts

__all__ = ["ExpertTime", "expert_times"]


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

    # Two collectives each way. All-gathered tokens are gathered again for the weights' gradients, or with the forward that
    # full recomputation repeats, which sends no results.
    part = tokens * model.hidden * ops.itemsize / (tensor if parallel.sequence_parallel else 1)
    one = ops.collective(
        part * (experts.chosen if software.routed_dispatch else degree), degree, spread(parallel, "data")
    )
    count = {"none": 2, "selective": 2 if software.routed_dispatch else 3, "full": 1}[parallel.recompute]
    return ExpertTime(weights + rows, 2 * one), ExpertTime(weights + gradients + 1.5 * rows, count * one)
