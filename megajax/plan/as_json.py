"""The planner's answer as plain data, for programs: `python -m megajax.plan --json`."""

import dataclasses
from typing import Any

from megajax.estimate import model_costs
from megajax.estimate.error_bars import bar_of, comparison_bar
from megajax.plan.report import Answer, remedy
from megajax.plan.search import Candidate, is_tie, usable_bytes

LAYOUT = (
    *("data", "context", "pipe", "tensor", "chunks", "schedule", "microbatch_size", "recompute", "zero"),
    *("vocab_parallel", "attention", "sequence_parallel", "expert", "expert_dispatch"),
)


def answer(found: Answer) -> dict[str, Any]:
    """The question, the size of the search, and the layouts that are shown; if nothing fits, what to pass."""
    question, gpu, costs = found.question, found.question.gpu, model_costs(found.question.model)
    return {
        "model": question.model.name,
        "parameters": costs.parameters,
        "cluster": found.cluster.name,
        "gpu": gpu.name,
        "gpus": question.gpus,
        "usable_bytes": usable_bytes(gpu),
        "memory_margin": question.memory_margin,
        "global_batch": question.global_batch,
        "sequence_length": costs.sequence_length,
        "precision": question.precision,
        "tokens": found.tokens,
        "software": "megajax",
        "predicted": True,
        "legal_layouts": len(found.candidates),
        "layouts": [_layout(one, found) for one in found.shown],
    } | ({} if found.fitting else {"remedy": remedy(found.candidates[0])})


def _layout(one: Candidate, found: Answer) -> dict[str, Any]:
    """A timed layout: what to pass, its time, memory and cost."""
    cost = found.cluster.cost(one.question.gpus, one.days(found.tokens))
    return {
        "parallel": {name: getattr(one.run.parallel, name) for name in (*LAYOUT, *one.question.also)},
        "microbatches": one.run.microbatches,
        "step_seconds": one.time.total,
        "seconds_by_part": dataclasses.asdict(one.time),
        "error_bar": {"total": bar_of(one.run.parallel).total, "comparison": comparison_bar(one.run.parallel)},
        "tie_of_fastest": is_tie(one, found.fastest),
        "teraflops_per_gpu": one.teraflops,
        "mfu": one.utilisation,
        "days": one.days(found.tokens),
        "memory_bytes": one.peak,
        "memory_bytes_by_part": one.memory,
        "memory_is_tight": one.is_tight,
        "cost": {**dataclasses.asdict(cost), "currency": found.cluster.currency},
    }
