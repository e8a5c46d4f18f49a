"""How far the time model is off, from the published rows that no constant was fitted to (`validate.py`), by kind of run."""

import dataclasses

from megajax.config import ParallelConfig

__all__ = ["ERROR_BARS", "ErrorBar", "bar_of", "kind_of"]

KINDS = MEGATRON, FSDP, CONTEXT, EXPERTS = "Megatron-style", "FSDP/ZeRO-3", "context", "experts"


@dataclasses.dataclass(frozen=True)
class ErrorBar:
    """Relative errors of predicted step times.

    Attributes:
      total: root mean square; what a prediction may be off by.
      within: standard deviation within a source, around its mean error; what a comparison of two layouts of the same program
        on the same cluster may be off by.
    """

    total: float
    within: float


# The last lines of `python -m megajax.estimate.validate`, without those of experts; a test compares them.
ERROR_BARS = {MEGATRON: ErrorBar(0.085, 0.030), FSDP: ErrorBar(0.119, 0.089), CONTEXT: ErrorBar(0.012, 0.011)}


def kind_of(context: int, zero: int, experts: bool = False) -> str:
    """The kind of run that its error bar depends on."""
    if experts:
        return EXPERTS
    return CONTEXT if context > 1 else FSDP if zero == 3 else MEGATRON


def bar_of(parallel: ParallelConfig) -> ErrorBar:
    """The error bar of a layout's predicted time; with experts, of which two runs are published, that without them."""
    return ERROR_BARS[kind_of(parallel.context, parallel.zero)]
