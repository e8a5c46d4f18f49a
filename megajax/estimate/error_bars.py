"""How far the time model is off: a prediction, from published runs, and a comparison of two, from compiled programs."""

import dataclasses
import math

from megajax.config import ParallelConfig

KINDS = MEGATRON, FSDP, CONTEXT, EXPERTS = "Megatron-style", "FSDP/ZeRO-3", "context", "experts"


@dataclasses.dataclass(frozen=True)
class ErrorBar:
    """Relative errors of predicted step times of published runs, of other programs by the same rates.

    Attributes:
      total: root mean square; what a prediction may be off by.
      within: standard deviation within a source, around its mean error.
    """

    total: float
    within: float


# The last lines of `python -m benchmarks.published`, without those of experts; a test compares them.
ERROR_BARS = {MEGATRON: ErrorBar(0.071, 0.028), FSDP: ErrorBar(0.097, 0.087), CONTEXT: ErrorBar(0.010, 0.010)}
# The error of the predicted ratio of two layouts' times, from compiled programs of megajax: the last line of
# `python -m benchmarks.compiled questions --show`, which a test compares. One standard deviation, as `total` is.
COMPARISON = 0.007


def kind_of(context: int, zero: int, experts: bool = False) -> str:
    """The kind of run that its error bar depends on."""
    if experts:
        return EXPERTS
    return CONTEXT if context > 1 else FSDP if zero == 3 else MEGATRON


def bar_of(parallel: ParallelConfig) -> ErrorBar:
    """The error bar of a layout's predicted time; with experts, of which two runs are published, that without them."""
    return ERROR_BARS[kind_of(parallel.context, parallel.zero)]


def comparison_bar(*layouts: ParallelConfig) -> float:
    """The error of comparing these layouts, which answer one question: one standard deviation.

    Compiled programs give it for Megatron-style runs. Of other kinds no pairs of layouts were compiled: two independent
    predictions of published runs, each off by `within`, are off by the square root of two times that.
    """
    kinds = {kind_of(one.context, one.zero) for one in layouts} - {MEGATRON}
    return max([COMPARISON, *(math.sqrt(2) * ERROR_BARS[kind].within for kind in kinds)])
