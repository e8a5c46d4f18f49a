"""How far the time model is off: a prediction, from published runs, and a comparison of two, from compiled programs."""

import dataclasses
import itertools

from megajax.config import ParallelConfig
from megajax.schedules.registry import SPECS

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
# The same where two layouts differ in these: all pairs of programs compiled for one model that do, near or not.
ZERO, RING, SPLIT, GROUPS = "ZeRO", "context", "split backwards", "groups of experts"
PAIRS = {ZERO: 0.018, RING: 0.018, SPLIT: 0.019, GROUPS: 0.024}


def kind_of(context: int, zero: int, experts: bool = False) -> str:
    """The kind of run that its error bar depends on."""
    if experts:
        return EXPERTS
    return CONTEXT if context > 1 else FSDP if zero == 3 else MEGATRON


def bar_of(parallel: ParallelConfig) -> ErrorBar:
    """The error bar of a layout's predicted time; with experts, of which two runs are published, that without them."""
    return ERROR_BARS[kind_of(parallel.context, parallel.zero)]


def pair_kinds(one: ParallelConfig, other: ParallelConfig) -> list[str]:
    """The kinds of `PAIRS` that two layouts differ in."""
    splits = lambda layout: layout.pipe > 1 and layout.schedule in SPECS and SPECS[layout.schedule].split is not False  # noqa: E731
    features = {
        ZERO: lambda layout: layout.zero,
        RING: lambda layout: layout.context,
        SPLIT: splits,
        GROUPS: lambda layout: (layout.expert, layout.expert_dispatch),
    }
    return [kind for kind, of in features.items() if of(one) != of(other)]


def comparison_bar(*layouts: ParallelConfig) -> float:
    """The error of comparing these layouts, which answer one question: one standard deviation.

    That of the kinds of `PAIRS` in which they differ, the largest; otherwise COMPARISON.
    """
    kinds = {kind for pair in itertools.combinations(layouts, 2) for kind in pair_kinds(*pair)}
    return max([COMPARISON, *(PAIRS[kind] for kind in kinds)])
