"""The numbers of GPUs near the one asked for that have good layouts."""

import dataclasses

from megajax.plan.search import Candidate, Question, layouts_that_fit

__all__ = ["better_counts", "good_counts", "nearest_counts"]

STEPS = 12  # counts that are tried below and above, of those up to a third larger: hosts, or GPUs for few of them
GOOD = 0.9  # of the best throughput per GPU among them
FEW = ("1f1b", "interleaved_1f1b")  # schedules that tell a good number of GPUs from a bad one, as a search of all does


def good_counts(question: Question) -> list[Candidate]:
    """The fastest layouts on the nearest smaller and larger numbers of GPUs that have good ones, of those that have any."""
    host = question.gpu.host_size
    step = host if question.gpus > 4 * host else 1
    start = question.gpus // step * step
    schedules = tuple(name for name in question.schedules if name in FEW) or question.schedules
    lean = dataclasses.replace(question, schedules=schedules, microbatches=tuple(question.microbatches)[:3])
    below = [start - step * away for away in range(0 if start < question.gpus else 1, STEPS)]
    above = [start + step * away for away in range(1, STEPS + 1)]
    near = range(question.gpus * 3 // 4, question.gpus * 4 // 3 + 1)
    sides = [[_fastest(lean, count) for count in counts if count in near] for counts in (below, above)]
    best = max((one.teraflops for side in sides for one in side if one), default=0.0)
    good = [next((one for one in side if one and one.teraflops >= GOOD * best), None) for side in sides]
    return [one for one in good if one]


def _fastest(question: Question, gpus: int) -> Candidate | None:
    """The fastest layout that fits, if there is one."""
    return next(iter(layouts_that_fit(dataclasses.replace(question, gpus=gpus))), None)


def nearest_counts(question: Question) -> str:
    """What `good_counts` found as part of a message; "" if it found nothing."""
    found = good_counts(question)
    if not found:
        return ""
    shown = " or ".join(f"--gpus {one.question.gpus} ({_mesh(one)}, {one.utilisation:.0%} MFU)" for one in found)
    return f"the nearest with good layouts: pass {shown}, or a --global-batch-size with more divisors in common."


def better_counts(best: Candidate) -> str:
    """For a number of GPUs that divides badly: a line with those nearby on which each GPU computes more; otherwise "".

    Asked only where the best layout has stages of unequal size, or hosts are not full, since it searches again.
    """
    question, parallel = best.question, best.run.parallel
    idle = parallel.stage_layers(best.run.model.layers).idle
    if not (idle or (question.gpus % question.gpu.host_size and question.gpus > question.gpu.host_size)):
        return ""
    found = [one for one in good_counts(question) if best.teraflops < GOOD * one.teraflops]
    shown = " or ".join(f"--gpus {one.question.gpus} ({_mesh(one)}, {one.utilisation:.0%} MFU)" for one in found)
    return f"{question.gpus} GPUs divide badly; better near it: {shown}" if found else ""


def _mesh(one: Candidate) -> str:
    tensor, pipe, data = one.mesh
    return f"tensor {tensor}, pipe {pipe}, data {data}"
