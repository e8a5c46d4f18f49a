"""Which devices share embedding and head, where the run leaves it to the time model (`--vocab-parallel auto`).

Split over `pipe`, every stage has the same part of the tables, in memory and in work, and each microbatch costs five sums
over `pipe`. Split over `tensor` alone, the last stage computes all logits while the others wait.
"""

import dataclasses

from megajax.config import RunConfig
from megajax.estimate import model_costs
from megajax.estimate.gpus import Gpu, with_attention
from megajax.estimate.memory import USABLE_SHARE, bytes_per_device
from megajax.estimate.step_time import step_time

__all__ = ["placements", "with_vocabulary"]


def with_vocabulary(run: RunConfig, gpu: Gpu) -> RunConfig:
    """The run with `vocab_parallel` resolved to "pipe" or "tensor" for a cluster of this GPU.

    It is what the time model says is faster, of those that fit by the memory model; if neither fits, the smaller one. Losses
    do not depend on it, and a checkpoint can be loaded with either.
    """
    choices = placements(run)
    if len(choices) == 1:
        return choices[0]
    known = {one: with_attention(one, gpu) for one in choices}
    peaks = {one: sum(bytes_per_device(known[one]).values()) for one in choices}
    fitting = [one for one in choices if peaks[one] <= USABLE_SHARE * gpu.memory]
    if not fitting:
        return min(choices, key=peaks.__getitem__)
    return min(fitting, key=lambda one: step_time(known[one], gpu).total)


def placements(run: RunConfig) -> list[RunConfig]:
    """The runs that `vocab_parallel` may resolve to, least memory first: one if it is not auto, or if all are the same."""
    if run.parallel.vocab_parallel != "auto":
        return [run]
    costs = model_costs(run.model)
    differ = run.parallel.pipe > 1 and costs.vocabulary_width
    return [
        dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, vocab_parallel=placement))
        for placement in (("pipe", "tensor") if differ else ("pipe",))
    ]
