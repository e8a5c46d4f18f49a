"""The time model prices the collectives of the program's description: numbers and bytes by axis, on random legal runs.

On a GPU that computes in no time nothing hides a collective, and links that take a second for each byte, or for each
collective, make a step's exposed seconds their sum. What XLA hides whatever the times is set to nothing; the rest that
differs is named in `priced`.
"""

import math
from collections import Counter

import pytest

from megajax.config import RunConfig
from megajax.estimate import model_costs, program_blocks, program_kernels
from megajax.estimate.communication import BLOCKS, ENDS, PERMUTE, STEP, TICKS, Sent, collectives
from megajax.estimate.expert_dispatch import LOGITS, SUMS, TOKENS
from megajax.estimate.gpus import find_gpu
from megajax.estimate.program_time import Program
from megajax.estimate.rates import Rates
from megajax.pipeline.program import StepProgram
from tests.pipeline.test_program import COUNT, random_runs


def over_tensor(run: RunConfig) -> list[RunConfig]:
    """The run with experts over tensor ranks too, of one replica or of several, where they can be."""
    parallel, experts = run.parallel, model_costs(run.model).experts
    if not experts or parallel.tensor == 1 or "tensor_overlap" in parallel.rings:
        return []
    changed = run.with_layout(expert_tensor=1, expert=parallel.tensor * parallel.expert)
    changed.validate()
    return [changed]


RANDOM = random_runs(COUNT)
RUNS = RANDOM + sum(map(over_tensor, RANDOM), [])
AXES = ("tensor", "context", "expert", "pipe", "data")


class Bytes(Rates):
    """A second for each byte."""

    def collective(self, kind, sent, group, here):
        return sent

    def all_to_all(self, part, group, here, ragged=False):
        return (group - 1) * part


class Times(Rates):
    """A second for each collective."""

    def collective(self, kind, sent, group, here):
        return 1

    def all_to_all(self, part, group, here, ragged=False):
        return 1


def time_model(run: RunConfig, rates: type[Rates], monkeypatch) -> Program:
    """The time model with these links, of a GPU that computes in no time."""
    infinite = dict.fromkeys(("matmul", "attention", "memory", "pcie"), math.inf)
    made = rates(**infinite, host=1, network=1, host_size=8, gap=0.0, synchronisation=0.0)
    monkeypatch.setattr(program_kernels, "rates_of", lambda gpu, precision: made)
    # Those that overlap other kernels in a merged tick, and with latencies that XLA is told.
    for name, value in {"TENSOR_HIDDEN": 0, "CROWDED": 0, "RING_EXPOSED": 1}.items():
        monkeypatch.setattr(program_blocks, name, value)
    monkeypatch.setattr(program_blocks, "has_latencies", lambda *args: False)
    return Program(run, find_gpu("h100-80gb"))


def described(program: StepProgram, value) -> Counter:
    """By (axis, part of the step) the sum of `value(Sent)`; sends between ticks are apart."""
    found: Counter = Counter()
    for one in collectives(program):
        axis = "context" if (one.axis, one.kind) == ("data", PERMUTE) else one.axis.split()[0]
        axis = "expert" if one.what in (TOKENS, LOGITS, SUMS) else axis  # in some runs over tensor
        if one.part != TICKS:
            found[axis, one.part] += value(one)
    return found


def priced(model: Program, statistics: float, head: int) -> Counter:
    """Likewise of the time model, but for three differences; `statistics` is the sum of one of softmax's.

    The description leaves out softmax's three sums of a number for each token, which count as of `pipe`. The sum of the
    head's input gradient over `pipe` is an all-to-all and an all-gather (`head`: of one, one more). And XLA starts all
    sends of keys and values round a ring of C before the first product: exposed are those but for the last of a forward,
    and but for the 2 C of a backward's gradients.
    """
    parts, ranks, m = (
        {BLOCKS: model.blocks, ENDS: model.ends, STEP: model.once},
        model.parallel.context,
        model.run.microbatches,
    )
    found = Counter({(axis, part): getattr(work, axis) for part, work in parts.items() for axis in AXES})
    found["pipe", ENDS] -= m * (3 * statistics + head * model.sharding.vocabulary_over_pipe)
    found["context", BLOCKS] *= (6 * ranks - 4) / (4 * ranks - 5) if ranks > 1 else 1
    return found


@pytest.mark.parametrize("number", range(len(RUNS)))
@pytest.mark.parametrize("rates", [Bytes, Times])
def test_the_time_model_prices_what_the_description_says(number, rates, monkeypatch):
    """Of schedules in which some backwards are whole (dualpipe_v) the time model prices all as split."""
    run, value = RUNS[number], (lambda one: one.bytes) if rates is Bytes else (lambda one: one.times)
    program, model = StepProgram.of(run), time_model(run, rates, monkeypatch)
    vars(program)["split_backwards"] = float(program.splits)
    shares = run.parallel.vocabulary_shares
    statistics = 2 * (shares - 1) / shares * 4 * model.rows if rates is Bytes else shares > 1
    want, found = described(program, value), priced(model, statistics, head=rates is Times)
    for key in want | found:
        assert found[key] == pytest.approx(want[key], abs=1e-6), key


@pytest.mark.parametrize("number", range(COUNT))
def test_a_send_between_stages_has_the_bytes_of_the_description(number):
    """How many are exposed is the time model's: of a rank that always has work; the others are in the bubble's time."""
    sends = [one for one in collectives(StepProgram.of(RUNS[number])) if one.part == TICKS]
    assert {one.each for one in sends} <= {Program(RUNS[number], find_gpu("h100-80gb")).residual}


def test_the_random_runs_have_all_kinds_of_collectives():
    found = {(axis, part) for run in RUNS for axis, part in described(StepProgram.of(run), Sent.bytes.fget)}
    assert found == {(axis, BLOCKS) for axis in AXES if axis != "pipe"} | {
        ("tensor", ENDS),
        ("pipe", ENDS),
        ("pipe", STEP),
        ("data", STEP),
    }
    folded = [run.parallel.expert_replicas for run in RUNS if run.parallel.experts_over_tensor]
    assert set(folded) == {1, 2}
    assert any(model_costs(run.model).experts and run.parallel.expert > 1 and run.parallel.tensor > 1 for run in RUNS)
