"""How far the time model is off: a prediction, from published runs, and a comparison of two, from compiled programs."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from megajax.config import ParallelConfig
from megajax.schedules.registry import SPECS

FAMILIES = {"a100": "A100s", "h100": "H100s", "h200": "H200s", "blackwell": "Blackwell"}
KINDS = MEGATRON, FSDP, CONTEXT, EXPERTS = "Megatron-style", "FSDP/ZeRO-3", "context", "experts"


@dataclasses.dataclass(frozen=True)
class ErrorBar:
    """By how much published steps that no constant was fitted to took longer, or shorter, than predicted; relative.

    Attributes:
      rows, sources: how many.
      bias: their mean; above 0 they took longer.
      faster, slower: one standard deviation to each side, the root mean square of those that took shorter, and longer.
    """

    rows: int
    sources: int
    bias: float
    faster: float
    slower: float


# Of held-out sources, by family of GPU and kind, "" all families: `python -m benchmarks.published` prints them, and a test
# compares. At least FLOOR each.
FLOOR = 0.02
ERROR_BARS = {
    ("", MEGATRON): ErrorBar(16, 3, 0.036, 0.048, 0.079),
    ("", FSDP): ErrorBar(29, 3, 0.060, 0.030, 0.155),
    ("", CONTEXT): ErrorBar(4, 1, -0.005, 0.020, 0.020),
    ("", EXPERTS): ErrorBar(2, 2, -0.009, 0.103, 0.085),
    ("a100", MEGATRON): ErrorBar(5, 1, -0.042, 0.048, 0.020),
    ("a100", FSDP): ErrorBar(19, 1, 0.042, 0.036, 0.127),
    ("h100", MEGATRON): ErrorBar(11, 2, 0.072, 0.020, 0.079),
    ("h100", FSDP): ErrorBar(10, 2, 0.094, 0.020, 0.200),
    ("h100", CONTEXT): ErrorBar(1, 1, 0.020, 0.020, 0.020),
    ("h100", EXPERTS): ErrorBar(2, 2, -0.009, 0.103, 0.085),
    ("blackwell", CONTEXT): ErrorBar(3, 1, -0.014, 0.020, 0.020),
}
MOST_ROWS = 10  # of a family, for a bar of its own
# The error of the predicted ratio of two layouts' times, from compiled programs of megajax: the last line of
# `python -m benchmarks.rankings --show`, which a test compares. One standard deviation, as `total` is.
COMPARISON = 0.013
# The same where two layouts differ in these: all pairs of programs compiled for one model that do, near or not.
ZERO, RING, SPLIT, GROUPS = "ZeRO", "context", "split backwards", "groups of experts"
PAIRS = {ZERO: 0.024, RING: 0.018, SPLIT: 0.027, GROUPS: 0.020}


def kind_of(context: int, zero: int, experts: bool = False) -> str:
    """The kind of run that its error bar depends on."""
    if experts:
        return EXPERTS
    return CONTEXT if context > 1 else FSDP if zero == 3 else MEGATRON


def bar_of(family: str, parallel: ParallelConfig, experts: bool = False) -> tuple[str, ErrorBar]:
    """(whose it is, the error bar) of a layout's predicted time on GPUs of a family (`Gpu.family`).

    Of the same kind on the same family if there are enough rows, otherwise on all.
    """
    kind = kind_of(parallel.context, parallel.zero, experts)
    own = ERROR_BARS.get((family, kind))
    if own and own.rows >= MOST_ROWS:
        return f"{kind} on {FAMILIES[family]}", own
    return kind, ERROR_BARS["", kind]


def error_bar(errors: Sequence[float], sources: int) -> ErrorBar:
    """Of the errors of some rows, predicted relative to published throughput: how much longer their steps took."""
    sides = {}
    for name, some in (("faster", [e for e in errors if e < 0]), ("slower", [e for e in errors if e >= 0])):
        spread = math.sqrt(sum(e**2 for e in some) / len(some)) if some else 0.0
        sides[name] = max(FLOOR, spread)
    return ErrorBar(len(errors), sources, sum(errors) / len(errors), **sides)


def pair_kinds(one: ParallelConfig, other: ParallelConfig) -> list[str]:
    """The kinds of `PAIRS` that two layouts differ in."""
    splits = lambda layout: layout.pipe > 1 and layout.schedule in SPECS and SPECS[layout.schedule].split is not False  # noqa: E731
    features = {
        ZERO: lambda layout: layout.zero,
        RING: lambda layout: layout.context,
        SPLIT: splits,
        GROUPS: lambda layout: (layout.expert, layout.experts_over_tensor, layout.expert_dispatch),
    }
    return [kind for kind, of in features.items() if of(one) != of(other)]


def comparison_bar(*layouts: ParallelConfig) -> float:
    """The error of comparing these layouts, which answer one question: one standard deviation.

    That of the kinds of `PAIRS` in which they differ, the largest; otherwise COMPARISON.
    """
    kinds = {kind for pair in itertools.combinations(layouts, 2) for kind in pair_kinds(*pair)}
    return max([COMPARISON, *(PAIRS[kind] for kind in kinds)])
