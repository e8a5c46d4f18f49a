"""What `--context-exchange auto` resolves to: keys and values round a ring, or the sequence exchanged for heads."""

from megajax.config import RunConfig
from megajax.config.model_split import can_exchange, heads_of_device
from megajax.estimate import model_costs
from megajax.estimate.gpus import Gpu, with_attention
from megajax.estimate.memory import USABLE_SHARE, bytes_per_device
from megajax.estimate.step_time import step_time
from megajax.pipeline.program import StepProgram

__all__ = ["exchanges", "with_context_exchange"]


def with_context_exchange(run: RunConfig, gpu: Gpu) -> RunConfig:
    """The run with `context_exchange` resolved to "ring" or "all_to_all", what is faster on a cluster of this GPU.

    Of those that the heads of a device, and the schedule, allow, and that fit by the memory model: on one stage a ring, with
    which no ticks merge, has a chunk less in flight. If neither fits the smaller one; ring if neither is allowed, whose
    error says what to pass. Losses do not depend on it, and a checkpoint can be loaded with either.
    """
    if run.parallel.context_exchange != "auto":
        return run
    ring = run.with_layout(context_exchange="ring")
    if run.parallel.context == 1 or not exchanges(run):
        return ring
    exchanged = run.with_layout(context_exchange="all_to_all")
    if not StepProgram.of(ring).paired:
        return exchanged
    known = {one: with_attention(one, gpu) for one in (exchanged, ring)}
    peaks = {one: sum(bytes_per_device(known[one]).values()) for one in known}
    fitting = [one for one in known if peaks[one] <= USABLE_SHARE * gpu.memory]
    if not fitting:
        return min(known, key=peaks.__getitem__)
    return min(fitting, key=lambda one: step_time(known[one], gpu).total)


def exchanges(run: RunConfig) -> bool:
    """Whether the heads of a device can be split over the ranks of a sample."""
    attention, parallel = model_costs(run.model).attention, run.parallel
    if attention is None:
        return False
    here = heads_of_device(attention.heads, attention.groups, parallel.tensor)
    return attention.heads % parallel.tensor == 0 and can_exchange(*here, parallel.context)
