"""The planner's answer as plain data, for programs: `python -m megajax.plan --json`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megajax.estimate import model_costs
from megajax.estimate.error_bars import bar_of, comparison_bar
from megajax.plan.cluster import Cluster
from megajax.plan.search import Candidate, Question, usable_bytes
from megajax.plan.ties import is_tie

__all__ = ["answer", "layout"]

LAYOUT = (
    *("data", "context", "pipe", "tensor", "chunks", "schedule", "microbatch_size", "recompute", "zero"),
    *("vocab_parallel", "attention", "sequence_parallel", "expert", "expert_dispatch"),
)


def layout(one: Candidate, fastest: Candidate, cluster: Cluster, tokens: float) -> dict[str, Any]:
    """A timed layout: what to pass, its time, memory and cost."""
    cost = cluster.cost(one.question.gpus, one.days(tokens))
    return {
        "parallel": {name: getattr(one.run.parallel, name) for name in LAYOUT},
        "microbatches": one.run.microbatches,
        "step_seconds": one.time.total,
        "seconds_by_part": dataclasses.asdict(one.time),
        "error_bar": {"total": bar_of(one.run.parallel).total, "comparison": comparison_bar(one.run.parallel)},
        "tie_of_fastest": is_tie(one, fastest),
        "teraflops_per_gpu": one.teraflops,
        "mfu": one.utilisation,
        "days": one.days(tokens),
        "memory_bytes": one.peak,
        "memory_bytes_by_part": one.memory,
        "memory_is_tight": one.is_tight,
        "cost": {**dataclasses.asdict(cost), "currency": cluster.currency},
    }


def answer(
    question: Question,
    cluster: Cluster,
    tokens: float,
    legal: int,
    shown: Sequence[Candidate],
    fastest: Candidate | None,
    remedy: str = "",
) -> dict[str, Any]:
    """The question, the size of the search, and the layouts that are shown.

    Args:
      question: the search.
      cluster: on which it was.
      tokens: that are trained on.
      legal: number of legal layouts.
      shown: layouts to list, the chosen one first; none if nothing fits.
      fastest: the fastest layout, by which ties are marked; None if nothing fits.
      remedy: if nothing fits, what to pass.
    """
    gpu, costs = question.gpu, model_costs(question.model)
    return {
        "model": question.model.name,
        "parameters": costs.parameters,
        "cluster": cluster.name,
        "gpu": gpu.name,
        "gpus": question.gpus,
        "usable_bytes": usable_bytes(gpu),
        "memory_margin": question.memory_margin,
        "global_batch": question.global_batch,
        "sequence_length": costs.sequence_length,
        "precision": question.precision,
        "tokens": tokens,
        "software": question.software.name,
        "predicted": True,
        "legal_layouts": legal,
        "layouts": [layout(one, fastest, cluster, tokens) for one in shown],
    } | ({"remedy": remedy} if remedy else {})
