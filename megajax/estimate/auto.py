"""What `auto` resolves to, of the options that a run may leave to the estimates: one order, and one place for it.

`--expert-dispatch auto` is what `expert_dispatch.py` says is faster, `--context-exchange auto` what `context_exchange.py`
says. `--vocab-parallel auto` depends on both, and is decided here. Split over `pipe`, every stage has the same part of
embedding and head, in memory and in work, and each microbatch costs five sums over `pipe`. Split over `tensor` alone, the
last stage computes all logits while the others wait. `--attention auto` is what the GPU supports
(`ops/attention_choice.py`).
"""

from megajax.config import RunConfig
from megajax.estimate import model_costs
from megajax.estimate.context_exchange import with_context_exchange
from megajax.estimate.expert_dispatch import with_expert_dispatch
from megajax.estimate.gpus import Gpu, with_attention
from megajax.estimate.memory import USABLE_SHARE, bytes_per_device
from megajax.estimate.step_time import step_time

__all__ = ["placements", "resolved", "resolved_layout", "with_vocabulary"]


def resolved(run: RunConfig, gpu: Gpu) -> RunConfig:
    """The run without any `auto`, as it trains on a cluster of this GPU with cuDNN.

    Raises:
      ConfigError: a fused kernel of attention is requested, which is not supported there.
    """
    return with_attention(resolved_layout(run, gpu), gpu)


def resolved_layout(run: RunConfig, gpu: Gpu) -> RunConfig:
    """`resolved` but for the attention, which a run that trains chooses on its devices (`models.context`)."""
    return with_vocabulary(with_context_exchange(with_expert_dispatch(run, gpu), gpu), gpu)


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
    costs, parallel = model_costs(run.model), run.parallel
    differ = parallel.pipe > 1 and costs.vocabulary_width
    differ = differ and not (costs.further and parallel.rings)  # whose modules all ranks reach together
    return [run.with_layout(vocab_parallel=one) for one in (("pipe", "tensor") if differ else ("pipe",))]
