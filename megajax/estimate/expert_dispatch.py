"""Seconds of sending tokens to the replicas of their experts, by all-gather or all-to-all (`ops/expert_dispatch.py`).

`--expert-dispatch auto` is the faster of the two by these.
"""

import math

from megajax.config import ParallelConfig, RunConfig
from megajax.estimate import model_costs
from megajax.estimate.gpus import Gpu
from megajax.estimate.memory import ITEMSIZE, rows_of
from megajax.estimate.rates import Rates, devices_here, rates_of
from megajax.models.costs import Experts, ModelCosts

__all__ = ["dispatch_times", "sent_share", "with_expert_dispatch"]


def dispatch_times(model: ModelCosts, parallel: ParallelConfig, rates: Rates, item: int) -> tuple[float, float]:
    """(seconds of sending a microbatch's tokens to their experts, seconds of sending results back), of one block.

    `item`: bytes of an activation.
    """
    degree = parallel.expert
    if degree == 1 or model.experts is None:
        return 0.0, 0.0
    # bytes of the tokens that a device has
    part = rows_of(model, parallel) * model.hidden * item / parallel.sequence_shares
    here = devices_here(parallel, rates.host_size, degree, "data")
    if parallel.expert_dispatch == "all_to_all":
        share, ragged = sent_share(model.experts, parallel)
        one = rates.all_to_all(share * part, degree, here, ragged)
        return one, one
    # Results come back by an all-to-all, with the sum where the parts arrive.
    return rates.collective("all-gather", (degree - 1) * part, degree, here), rates.all_to_all(part, degree, here)


def sent_share(experts: Experts, parallel: ParallelConfig) -> tuple[float, bool]:
    """(the part of its tokens that a replica sends to another one by all-to-all, whether only routed tokens are sent).

    With capacity all places are sent. Without, of balanced routing, those tokens that chose any of the replica's experts.
    """
    here = experts.count // parallel.expert
    places = here * experts.share * parallel.sequence_shares
    if places < 1:
        return places, False
    return 1 - math.comb(experts.count - here, experts.chosen) / math.comb(experts.count, experts.chosen), True


def with_expert_dispatch(run: RunConfig, gpu: Gpu) -> RunConfig:
    """The run with `expert_dispatch` resolved to "gather" or "all_to_all", what is faster on a cluster of this GPU.

    Memory and results do not depend on it. Of equal ones it is gather.
    """
    if run.parallel.expert_dispatch != "auto":
        return run
    if run.parallel.expert == 1:
        return run.with_layout(expert_dispatch="gather")
    choices = [run.with_layout(expert_dispatch=name) for name in ("gather", "all_to_all")]
    rates, item = rates_of(gpu, run.train.precision), ITEMSIZE[run.train.precision]
    return min(choices, key=lambda one: sum(dispatch_times(model_costs(one.model), one.parallel, rates, item)))
