"""Numbers of GPUs near a given one on which each GPU computes more, for numbers that divide badly."""

import dataclasses
import math
from collections.abc import Iterable

from megajax.estimate.flops import flops_per_step
from megajax.plan.best import fastest
from megajax.plan.search import DIVISORS, Candidate, Question

__all__ = ["better_counts", "good_counts", "nearest_counts"]

COUNTS_TRIED = 12  # below and above, of those up to a third larger: hosts, or GPUs for few of them
GOOD = 0.9  # of the best throughput per GPU among them
FEW = ("1f1b", "interleaved_1f1b")  # schedules that tell a good number of GPUs from a bad one, as a search of all does


def good_counts(question: Question, least: float = 0.0) -> list[Candidate]:
    """The fastest layouts on the nearest smaller and larger numbers of GPUs that have good ones, of those that have any.

    Args:
      least: model TFLOP/s of a GPU that a good one has at least. Most numbers of GPUs that have none are searched quickly.
    """
    gpus, host = question.gpus, question.gpu.host_size
    step = host if gpus > 4 * host else 1
    start = gpus // step * step
    schedules = tuple(name for name in question.schedules if name in FEW) or question.schedules
    lean = dataclasses.replace(question, schedules=schedules, microbatches=tuple(question.microbatches)[:3])
    most = flops_per_step(question.base) / (least * 1e12) if least else math.inf  # seconds of all GPUs
    sides = []
    for counts in (range(start, 0, -step)[start == gpus :], range(start + step, 2 * gpus, step)):
        near = [count for count in counts[:COUNTS_TRIED] if gpus * 3 // 4 <= count <= gpus * 4 // 3]
        found = (fastest(dataclasses.replace(lean, gpus=count), most / count) for count in near)
        sides.append([one for one in found if one])
    best = max((one.teraflops for side in sides for one in side), default=0.0)
    return [good[0] for side in sides if (good := [one for one in side if one.teraflops >= GOOD * best])]


def nearest_counts(question: Question) -> str:
    """What `good_counts` found as part of a message; "" if it found nothing."""
    found = good_counts(question)
    return f"the nearest with good layouts: pass {_counts(found)}, or {DIVISORS}." if found else ""


def better_counts(best: Candidate) -> str:
    """For a number of GPUs that divides badly: a line with those nearby on which each GPU computes more; otherwise "".

    Asked only where the best layout has stages of unequal size, or hosts are not full, since it searches again.
    """
    question, host = best.question, best.question.gpu.host_size
    idle = best.run.parallel.stage_layers(best.run.model.layers).idle
    if not idle and (question.gpus % host == 0 or question.gpus < host):
        return ""
    found = good_counts(question, best.teraflops / GOOD)
    return f"{question.gpus} GPUs divide badly; better near it: {_counts(found)}" if found else ""


def _counts(found: Iterable[Candidate]) -> str:
    """The numbers of GPUs, each with its mesh and MFU."""
    meshes = ((one, "tensor {}, pipe {}, data {}".format(*one.mesh)) for one in found)
    return " or ".join(f"--gpus {one.question.gpus} ({mesh}, {one.utilisation:.0%} MFU)" for one, mesh in meshes)
